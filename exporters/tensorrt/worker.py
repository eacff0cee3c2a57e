"""The process that runs one engine: `python -m vitcompress.exporters.tensorrt.worker`, started by `process`.

Deserializing an engine runs native code from the file: it happens here, with the library's permissions for code and
temporary files off. So do timing loops: times do not include the communication between processes.
"""

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from vitcompress.errors import OUT_OF_MEMORY, DeviceError
from vitcompress.exporters.calls import QueuedCall, add_transfers, record_graph
from vitcompress.exporters.tensorrt.flavours import FLAVOURS, RTX, create_log
from vitcompress.exporters.tensorrt.process import receive, send

UNUSABLE_GPU = re.compile("busy or unavailable|driver version", re.IGNORECASE)  # in exclusive use, or its driver
TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "UINT8": torch.uint8}

Answer = tuple[dict[str, object], bytes]  # a message and its data, see `process.send`


class EngineError(Exception):
    """The engine cannot be run; the message is the reason."""


class Engine:
    """A deserialized engine with its bindings. `serve` calls its public methods.

    All bindings share one context, except that each recorded CUDA graph has its own: a graph uses the memory of its
    context, so two graphs must not share one.

    transfers: a run includes the copies of the images from, and of the logits to, page-locked memory of the host.
    """

    def __init__(
        self, path: str, sha256: str, flavour: str, index: int, cuda_graph: bool, transfers: bool, host_code: bool
    ) -> None:
        data = Path(path).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise EngineError("the file has changed")
        self._flavour, self._graph, self._transfers = FLAVOURS[flavour], cuda_graph, transfers
        self._library = self._flavour.load()
        torch.cuda.set_device(index)
        self._log = create_log(self._library)
        self._runtime = self._flavour.create("Runtime", self._log)
        self._runtime.engine_host_code_allowed = host_code
        if not host_code:  # code inside an engine is loaded from a temporary file, on disk or in memory
            self._runtime.tempfile_control_flags = 0
        self._engine = self._runtime.deserialize_cuda_engine(data)
        self._check(self._engine is not None, "it cannot be opened")
        stream: Any = torch.cuda.Stream
        self._stream = stream()  # not the default stream, which would synchronise each run
        self._input, self._outputs = self._input_and_outputs()
        self._records = cuda_graph and self._flavour is not RTX  # RTX records by itself
        self._shared: Any = None if self._records else self._create_context()
        # By slot: input and outputs on the GPU by name, and the call that computes them.
        self._bindings: dict[int, tuple[dict[str, Tensor], QueuedCall]] = {}
        self._prepared: int | None = None  # slot whose shape and addresses are set in the shared context

    def _check(self, success: object, problem: str) -> None:
        """Raise EngineError with the library's last error unless a call succeeded."""
        if not success:
            raise EngineError(f"{problem}: {self._log.last_error()}")

    def _create_context(self) -> Any:
        settings, library = list[Any](), self._library
        if self._flavour is RTX:  # TensorRT has no settings for kernels and CUDA graphs
            strategies, graphs = library.DynamicShapesKernelSpecializationStrategy, library.CudaGraphStrategy
            config = self._engine.create_runtime_config()
            # LAZY would measure fallback kernels while the final ones are still being compiled.
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if self._graph else graphs.DISABLED
            settings.append(config)
        context = self._engine.create_execution_context(*settings)
        self._check(context is not None, "no memory or no context for it")
        # The engine contains the details of its layers for the inspector; reporting them to profilers slows each run.
        context.nvtx_verbosity = library.ProfilingVerbosity.NONE
        if context.active_optimization_profile < 0:  # only the first context gets the profile automatically
            selected = context.set_optimization_profile_async(0, self._stream.cuda_stream)
            self._check(selected, "its profile cannot be selected")
            self._stream.synchronize()
        return context

    def _input_and_outputs(self) -> tuple[str, list[str]]:
        """Names of the one input and of all outputs, of which the first is the logits."""
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name).name for name in names}
        inputs, outputs = ([n for n in names if modes[n] == mode] for mode in ("INPUT", "OUTPUT"))
        if len(inputs) != 1 or not outputs or len(self._engine.get_tensor_shape(inputs[0])) != 4:
            raise EngineError(f"it does not take one tensor of images; it has {modes}")
        types = {name: self._engine.get_tensor_dtype(name).name for name in names}
        if unknown := {name: kind for name, kind in types.items() if kind not in TYPES}:
            raise EngineError(f"it has tensors of unsupported types: {unknown}; supported are {', '.join(TYPES)}")
        self._types = {name: TYPES[kind] for name, kind in types.items()}
        return inputs[0], outputs

    def facts(self) -> dict[str, object]:
        """What the parent process needs: shapes, types, batch range, version and GPU."""
        return {
            "input_shape": list(self._engine.get_tensor_shape(self._input)),
            "input_type": self._engine.get_tensor_dtype(self._input).name,
            "batch": [shape[0] for shape in self._engine.get_tensor_profile_shape(self._input, 0)],
            "runtime_version": self._library.__version__,
            "device_name": torch.cuda.get_device_name(),
        }

    def bind(self, slot: int, shape: list[int], data: bytearray) -> Answer:
        """Copy images to the GPU and prepare them to run."""
        dtype = self._types[self._input]
        host = torch.frombuffer(data, dtype=torch.uint8 if dtype is torch.uint8 else torch.float32)
        images = host.reshape(shape).to("cuda", dtype)
        context = self._shared or self._create_context()
        self._prepared = None
        self._check(context.set_input_shape(self._input, tuple(shape)), f"it does not take images of the shape {shape}")
        sizes = {name: tuple(context.get_tensor_shape(name)) for name in self._outputs}
        outputs = [torch.empty(size, dtype=self._types[name], device="cuda") for name, size in sizes.items()]
        torch.cuda.synchronize()  # the copy must be complete before another stream reads the images
        tensors = {self._input: images, **dict(zip(sizes, outputs, strict=True))}
        self._set_addresses(context, tensors)

        def enqueue() -> Tensor:
            self._check(context.execute_async_v3(self._stream.cuda_stream), "the library could not run it")
            return outputs[0]

        enqueue()
        self._stream.synchronize()
        run = record_graph(enqueue, self._stream) if self._records else enqueue
        step = add_transfers(run, images, outputs[0]) if self._transfers else run
        self._bindings[slot] = tensors, QueuedCall(step, self._stream, context)  # a graph does not keep the context
        self._prepared = slot
        return {}, b""

    def _set_addresses(self, context: Any, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._check(context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name} cannot be set")

    def run(self, slot: int) -> Answer:
        """One pass: logits, (batch, classes), float32."""
        self.timed(slot, 1)
        tensors, _ = self._bindings[slot]
        logits = tensors[self._outputs[0]].float().cpu()
        return {"shape": list(logits.shape)}, logits.numpy().tobytes()

    def timed(self, slot: int, runs: int) -> Answer:
        """Milliseconds of each run, by CUDA events without waiting between runs, and of all by the wall clock."""
        tensors, call = self._bindings[slot]
        if not self._records and self._prepared != slot:  # another binding has run in the shared context
            shape = tuple(tensors[self._input].shape)
            self._check(self._shared.set_input_shape(self._input, shape), "its shape cannot be set")
            self._set_addresses(self._shared, tensors)
            self._prepared = slot
        times, wall = call.timed(runs)
        return {"times_ms": times, "wall_ms": wall}, b""

    def layers(self) -> Answer:
        """The output of the engine inspector, as JSON."""
        inspector, form = self._engine.create_engine_inspector(), self._library.LayerInformationFormat.JSON
        return {}, str(inspector.get_engine_information(form)).encode()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    engine: Engine | None = None
    while True:
        try:
            request, data = receive(requests)
        except EOFError:
            return
        try:
            if engine is None:
                engine = Engine(**request)
                send(answers, engine.facts())
            else:
                method = getattr(engine, request.pop("do"))
                send(answers, *method(**request, **({"data": data} if data else {})))
        except Exception as error:  # noqa: BLE001 - every error is reported to the parent process
            send(answers, {"error": str(error) or type(error).__name__, "kind": _kind(error)})


def _kind(error: Exception) -> str:
    """The cause of an error: the `engine`, the `machine`, or "" for others."""
    if isinstance(error, DeviceError) or OUT_OF_MEMORY.search(str(error)) or UNUSABLE_GPU.search(str(error)):
        return "machine"
    return "engine" if isinstance(error, EngineError) else ""


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what libraries print must not mix with messages
        serve(sys.stdin.buffer, pipe)
