"""The process that runs one engine: `python -m vitcompress.exporters.tensorrt.worker`, started by `process`.

Deserialising an engine is running native code that the file brings along. So it is done here, apart from the process
that asked for it, with the library's permissions for code and temporary files off. Timing loops run here as well: what
is reported holds no time for talking across the process boundary.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from vitcompress.errors import DeviceError
from vitcompress.exporters.runner import Queued
from vitcompress.exporters.tensorrt.flavours import FLAVOURS, RTX, log_of
from vitcompress.exporters.tensorrt.messages import receive, send

# What is said of a GPU without enough memory, of one that another process has for itself alone, and of its driver.
OF_THE_MACHINE = re.compile(
    "out of memory|could not be allocated|enough (?:free )?memory|busy or unavailable|driver version", re.IGNORECASE
)
TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "UINT8": torch.uint8}


class RefusedError(Exception):
    """The engine cannot be run; the message says why."""


@dataclass(frozen=True)
class Binding:
    """Input and outputs on the GPU, the context that runs them, and the call that does."""

    images: Tensor
    outputs: dict[str, Tensor]
    context: Any
    queued: Queued

    @property
    def logits(self) -> Tensor:
        return next(iter(self.outputs.values()))


class Engine:
    """A deserialised engine with its bindings.

    All of them share one context, unless CUDA graphs are recorded: a graph replays what its context held when it was
    recorded, so each one has a context that nothing else sets shapes in.

    transfers: a run begins with the images, and ends with the logits, in page-locked memory of the host.
    """

    def __init__(
        self, path: str, sha256: str, flavour: str, index: int, cuda_graph: bool, transfers: bool, host_code: bool
    ) -> None:
        data = Path(path).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise RefusedError("the file was changed meanwhile")
        self._flavour, self._graph, self._transfers = FLAVOURS[flavour], cuda_graph, transfers
        self._library = self._flavour.load()
        torch.cuda.set_device(index)
        self._engine = self._deserialized(data, host_code)
        stream: Any = torch.cuda.Stream
        self._stream = stream()  # not the default one, which would synchronise each run
        self._input, self._outputs = self._ends()
        self._records = cuda_graph and self._flavour is not RTX  # RTX records by itself
        self._shared = None if self._records else self._new_context()
        self._prepared: Binding | None = None  # the one whose shape and addresses the shared context holds
        self._bound: dict[int, Binding] = {}

    def _deserialized(self, data: bytes, host_code: bool) -> Any:
        self._log = log_of(self._library)
        self._runtime = self._flavour.made("Runtime", self._log)
        self._runtime.engine_host_code_allowed = host_code
        if not host_code:  # code that an engine brings along is loaded from a temporary file, on disk or in memory
            self._runtime.tempfile_control_flags = 0
        engine = self._runtime.deserialize_cuda_engine(data)
        self._done(engine is not None, "it cannot be opened")
        return engine

    def _done(self, success: object, what: str) -> None:
        """Raise RefusedError, with what the library says, where a call of it returned no success."""
        if not success:
            raise RefusedError(f"{what}: {self._log.last_error()}")

    def _new_context(self) -> Any:
        context = self._engine.create_execution_context(*self._runtime_config())
        self._done(context is not None, "no memory or no context for it")
        # The engine holds the details of its layers for the inspector; telling profilers, too, would slow each run.
        context.nvtx_verbosity = self._library.ProfilingVerbosity.NONE
        if context.active_optimization_profile < 0:  # only the first context is given the profile by itself
            chosen = context.set_optimization_profile_async(0, self._stream.cuda_stream)
            self._done(chosen, "its profile cannot be chosen")
            self._stream.synchronize()
        return context

    def _runtime_config(self) -> tuple[Any, ...]:
        """What TensorRT for RTX is told of kernels and CUDA graphs; TensorRT has nothing to be told."""
        if self._flavour is not RTX:
            return ()
        config, library = self._engine.create_runtime_config(), self._library
        # LAZY would measure fallback kernels while the right ones are still being compiled.
        config.dynamic_shapes_kernel_specialization_strategy = library.DynamicShapesKernelSpecializationStrategy.EAGER
        strategy = library.CudaGraphStrategy
        config.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if self._graph else strategy.DISABLED
        return (config,)

    def _ends(self) -> tuple[str, list[str]]:
        """Names of the one input and of all outputs; the first one is the logits."""
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name).name for name in names}
        inputs, outputs = ([n for n in names if modes[n] == mode] for mode in ("INPUT", "OUTPUT"))
        if len(inputs) != 1 or not outputs or len(self._engine.get_tensor_shape(inputs[0])) != 4:
            raise RefusedError(f"it does not take one tensor of images; it has {modes}")
        kinds = {name: self._engine.get_tensor_dtype(name).name for name in names}
        if unknown := {name: kind for name, kind in kinds.items() if kind not in TYPES}:
            raise RefusedError(f"it has tensors of types that are not offered: {unknown}; they are {', '.join(TYPES)}")
        return inputs[0], outputs

    def facts(self) -> dict[str, Any]:
        """What the parent must know: shapes, types, range of batches, where it runs."""
        profile = [list(shape) for shape in self._engine.get_tensor_profile_shape(self._input, 0)]
        return {
            "input_shape": list(self._engine.get_tensor_shape(self._input)),
            "input_type": self._engine.get_tensor_dtype(self._input).name,
            "batch": [shape[0] for shape in profile],
            "runtime_version": self._library.__version__,
            "device_name": torch.cuda.get_device_name(),
        }

    def bind(self, slot: int, shape: list[int], data: bytearray) -> None:
        """Put images on the GPU and make them ready to run."""
        wanted = TYPES[self._engine.get_tensor_dtype(self._input).name]
        given = torch.frombuffer(data, dtype=torch.uint8 if wanted is torch.uint8 else torch.float32)
        images = given.reshape(shape).to("cuda", wanted)
        context = self._shared or self._new_context()
        self._prepared = None
        self._done(context.set_input_shape(self._input, tuple(shape)), f"it does not take images of the shape {shape}")
        outputs = {name: self._room(context, name) for name in self._outputs}
        torch.cuda.synchronize()  # the images are there before another stream reads them
        bound = Binding(images, outputs, context, Queued(partial(self._enqueue, context), self._stream))
        self._prepare(bound)
        bound.queued()
        self._stream.synchronize()
        run: Callable[[], object] = self._recorded(context) if self._records else bound.queued.step
        if self._transfers:
            run = self._with_transfers(images, bound.logits, run)
        self._bound[slot] = self._prepared = replace(bound, queued=Queued(run, self._stream))

    def _room(self, context: Any, name: str) -> Tensor:
        """Memory on the GPU for an output, in the shape that it has for the input's."""
        kind = TYPES[self._engine.get_tensor_dtype(name).name]
        return torch.empty(tuple(context.get_tensor_shape(name)), dtype=kind, device="cuda")

    def _with_transfers(self, images: Tensor, out: Tensor, run: Callable[[], object]) -> Callable[[], None]:
        """`run` with the images copied to the GPU before it and the logits back after it, queued on the same stream."""
        given, taken = (torch.empty_like(one, device="cpu", pin_memory=True) for one in (images, out))
        given.copy_(images)

        def step() -> None:
            images.copy_(given, non_blocking=True)
            run()
            taken.copy_(out, non_blocking=True)

        return step

    def _recorded(self, context: Any) -> Callable[[], None]:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._enqueue(context)
        replay: Callable[[], None] = graph.replay
        return replay

    def _prepare(self, bound: Binding) -> None:
        """Set a binding's shape and tensors in its context."""
        context, images = bound.context, bound.images
        self._done(context.set_input_shape(self._input, tuple(images.shape)), "its shape cannot be set")
        for name, tensor in {self._input: images, **bound.outputs}.items():
            self._done(context.set_tensor_address(name, tensor.data_ptr()), f"{name} cannot be given memory")

    def _enqueue(self, context: Any) -> None:
        self._done(context.execute_async_v3(self._stream.cuda_stream), "the library could not run it")

    def run(self, slot: int) -> Tensor:
        """One pass: logits, (batch, classes), float32, on the CPU."""
        self.timed(slot, 1)
        return self._bound[slot].logits.float().cpu()

    def timed(self, slot: int, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each run, by CUDA events with no waiting between runs, and of all by the wall clock."""
        bound = self._bound[slot]
        if not self._records and self._prepared is not bound:  # another binding has run in the shared context
            self._prepare(bound)
            self._prepared = bound
        return bound.queued.timed(runs)

    def layers(self) -> str:
        """The engine's layers as the inspector's JSON."""
        found: str = self._engine.create_engine_inspector().get_engine_information(
            self._library.LayerInformationFormat.JSON
        )
        return found


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
                _answer(engine, request, data, answers)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is told to the process that asked
            send(answers, {"error": str(error) or type(error).__name__, "kind": _kind(error)})


def _kind(error: Exception) -> str:
    """Whose fault it is: the engine's (`refused`), that of the `machine`, or neither's."""
    if isinstance(error, DeviceError) or OF_THE_MACHINE.search(str(error)):
        return "machine"
    return "refused" if isinstance(error, RefusedError) else ""


def _answer(engine: Engine, request: dict[str, Any], data: bytearray, answers: IO[bytes]) -> None:
    what, slot = request["do"], request.get("slot", 0)
    if what == "bind":
        engine.bind(slot, request["shape"], data)
        send(answers, {})
    elif what == "run":
        logits = engine.run(slot)
        send(answers, {"shape": list(logits.shape)}, logits.numpy().tobytes())
    elif what == "time":
        times, wall = engine.timed(slot, request["runs"])
        send(answers, {"times_ms": times, "wall_ms": wall})
    elif what == "layers":
        send(answers, {}, engine.layers().encode())


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what libraries print must not end up among the answers
        serve(sys.stdin.buffer, pipe)
