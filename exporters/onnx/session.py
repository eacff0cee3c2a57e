"""One ONNX file in ONNX Runtime, without its silent fallbacks."""

from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.onnx import file, libraries, providers
from vitcompress.exporters.onnx.providers import CPU, ProviderSettings
from vitcompress.exporters.options import DEFAULTS
from vitcompress.exporters.runner import Bindings, Bound, Queued, RunnerOptions, check_batch
from vitcompress.exporters.sidecar import checked_sha256
from vitcompress.io.files import decoded
from vitcompress.io.hardware import versions

LOG_WARNINGS, LOG_ERRORS, LOG_NOTHING = 2, 3, 4  # the first is ONNX Runtime's own default
OUTPUT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
INPUT_TYPES = {**OUTPUT_TYPES, "tensor(uint8)": np.uint8}
BEFORE_RECORDING = 3  # passes before a CUDA graph is replayed: the first ones take memory and record it
NO_GRAPH = "-1"  # graph number of a pass that is neither recorded nor replayed


class Session:
    """A session on exactly one execution provider (the CPU may keep the arithmetic of shapes).

    Raises:
        ArtifactError: not ONNX, unsafe external data, not the file its sidecar describes, or not one image tensor in
            and one out.
        DeviceError: a provider that is not there or did not take the work, or a precision the file does not have.
        InputError: settings that the provider does not have.
        OutputError: a folder for what the provider builds that cannot be used.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        model = file.read(path)
        self.metadata = decoded(file.metadata(model))
        self.sha256 = checked_sha256(path)
        self._provider, self._device = providers.chosen(options.device, options.provider)
        self.provider, self._threads = self._provider.name, options.threads
        self._taken: int | None = None
        self.precision = providers.precision_of(path, self.metadata.get("precision"), options.precision, self._provider)
        providers.check_settings(self._provider, options)
        self.cuda_graph, self._graphs = options.cuda_graph, count(1)
        self._stream, self._bindings = _stream(self._device), Bindings()
        self.batch_range, settings = self._settings(model, options)
        self.provider_options = self._provider.options(settings)
        self.session = self._open(path, settings)
        self.elsewhere = self._check_place()
        self._name, (self._input, self._output) = path.name, _ends(path, self.session)
        if isinstance(fixed := self._input.shape[0], int):
            self.batch_range = (fixed, fixed, fixed)

    def _settings(self, model: Any, options: RunnerOptions) -> tuple[tuple[int, int, int] | None, ProviderSettings]:
        """The range of batches that is built for, None where nothing is built, and what is asked of the provider."""
        cache = None if options.engine_cache is None else libraries.prepared_cache(options.engine_cache)
        name, sizes = _image_input(model)
        dynamic = self._provider.builds and sizes and not sizes[0]
        batches = (options.batch or DEFAULTS["batch"]) if dynamic else None
        profile = tuple(f"{name}:{'x'.join(map(str, (batch, *sizes[1:])))}" for batch in batches or ())
        stream = 0 if self._stream is None else int(self._stream.cuda_stream)
        index = providers.index_of(self._device)
        return batches, ProviderSettings(index, self.precision == "tf32", options.cuda_graph, stream, profile, cache)

    def _open(self, path: Path, settings: ProviderSettings) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = LOG_NOTHING  # what goes wrong is raised, not logged
        if self._threads is not None:
            if self._threads < 1:
                raise InputError(f"threads must be 1 or more, got {self._threads}")
            options.intra_op_num_threads = self._threads
        if self.provider == CPU:
            before = _own_threads()
            session = self._made(path, options, [(CPU, {})])
            # The caller's own thread works with those that were started.
            self._taken = None if before is None else 1 + (_own_threads() or before) - before
            return session
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        with libraries.native_errors():
            given = providers.attach(self._provider, options, settings)
        try:
            with libraries.native_errors() as said:
                session = self._made(path, options, given)
        except DeviceError as error:
            raise self._broken(libraries.missing(said)) if libraries.missing(said) else error from None
        taken = session.get_providers()[0]
        if taken != self.provider:
            raise self._broken(libraries.missing(said) or f"ONNX Runtime took {taken} instead")
        return session

    def _broken(self, why: str | None) -> DeviceError:
        return DeviceError(
            f"{self.provider} of ONNX Runtime does not work here: {why}",
            hint=f"{self._provider.remedy}; `vitcompress doctor` shows what this machine has",
        )

    def _made(self, path: Path, options: Any, given: Any) -> Any:
        ort.set_default_logger_severity(LOG_NOTHING if self.provider == CPU else LOG_ERRORS)
        try:
            return ort.InferenceSession(str(path), options, providers=given, enable_fallback=0)
        except Exception as error:  # noqa: BLE001 - its own exception classes share no base but this one
            what = f"{self.provider} of ONNX Runtime cannot run {path}: {libraries.said_by(error)}"
            raise (ArtifactError if self.provider == CPU else DeviceError)(what) from None
        finally:
            ort.set_default_logger_severity(LOG_WARNINGS)

    def _check_place(self) -> list[str]:
        """Kinds of nodes that were left to the CPU. Raises DeviceError for more than the arithmetic of shapes."""
        if self.provider == CPU:
            return []
        places = providers.assignment(self.session)
        if heavy := providers.heavy_elsewhere(places, self.provider):
            raise DeviceError(
                f"{self.provider} left the work to others: {', '.join(heavy)}",
                hint="it does not take these nodes as they are in the file; try another --opset, or another provider",
            )
        if not places.get(self.provider):
            raise DeviceError(f"{self.provider} took no part of the file", hint="use another provider")
        return sorted({kind for name, kinds in places.items() if name != self.provider for kind in kinds})

    @property
    def on_device(self) -> bool:
        """Whether the session computes on a GPU, to and from which images and logits must be copied."""
        return self._stream is not None

    @property
    def input_size(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        first, second, third = map(int, self._input.shape[1:])
        return (third, first, second) if self.takes_bytes else (first, second, third)

    @property
    def takes_bytes(self) -> bool:
        """Whether images are given as (batch, height, width, channels), 0 to 255."""
        return bool(self._input.type == "tensor(uint8)")

    def run(self, images: np.ndarray) -> np.ndarray:
        """images: (batch, channels, height, width), or bytes as `takes_bytes` says -> (batch, classes), float32."""
        feed = {self._input.name: self._fed(images)}
        out: np.ndarray = self.session.run([self._output.name], feed, self._run_options(NO_GRAPH))[0]
        return out.astype(np.float32, copy=False)

    def _fed(self, images: np.ndarray) -> np.ndarray:
        if self.batch_range is not None:
            check_batch(self._name, self.batch_range, len(images))
        return np.ascontiguousarray(images, dtype=INPUT_TYPES[self._input.type])

    def bind(self, images: np.ndarray) -> Bound:
        """One pass over `images` as a call: inputs and outputs stay where the provider computes."""
        if self._stream is not None:
            return self._bindings.add(self._queued(self._fed(images)))
        given = ort.OrtValue.ortvalue_from_numpy(self._fed(images))
        taken = ort.OrtValue.ortvalue_from_numpy(np.empty(self._answer_shape(images), OUTPUT_TYPES[self._output.type]))
        binding = self.session.io_binding()
        binding.bind_ortvalue_input(self._input.name, given)
        binding.bind_ortvalue_output(self._output.name, taken)
        return self._bindings.add(Bound(partial(_run_bound, self.session, binding, (given, taken))))

    def bind_from_host(self, images: np.ndarray) -> Bound:
        """One pass over `images` as a call, from the host and back to it."""
        return self._bindings.add(Bound(partial(self.run, images)))

    def _queued(self, images: np.ndarray) -> Queued:
        """One pass on the session's stream. Tensors are torch's; each binding has a CUDA graph of its own."""
        index = providers.index_of(self._device)
        given = torch.from_numpy(images).to(f"cuda:{index}")
        kind = OUTPUT_TYPES[self._output.type]
        taken = torch.from_numpy(np.empty(self._answer_shape(images), kind)).to(given.device)
        torch.cuda.synchronize(given.device)
        binding = self.session.io_binding()
        binding.bind_input(self._input.name, "cuda", index, images.dtype.type, given.shape, given.data_ptr())
        binding.bind_output(self._output.name, "cuda", index, kind, taken.shape, taken.data_ptr())
        options = self._run_options(str(next(self._graphs)) if self.cuda_graph else NO_GRAPH, wait=False)
        queued = Queued(partial(self.session.run_with_iobinding, binding, options), self._stream, (given, taken))
        for _ in range(BEFORE_RECORDING if self.cuda_graph else 0):
            queued()
        self.synchronize()
        return queued

    def _answer_shape(self, images: np.ndarray) -> tuple[int, ...]:
        """(batch, classes), asked of a pass only where the file leaves it open."""
        sizes = self._output.shape[1:]
        known = len(sizes) == 1 and all(isinstance(size, int) for size in sizes)
        return (len(images), *sizes) if known else self.run(images).shape

    def _run_options(self, graph: str, *, wait: bool = True) -> Any:
        """How one pass is made. graph: number of the CUDA graph that it is recorded in and replayed from."""
        options = ort.RunOptions()
        if self._provider.graph_number:
            options.add_run_config_entry(self._provider.graph_number, graph)
        options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not wait)))
        return options

    def synchronize(self) -> None:
        """Wait for what is queued."""
        if self._stream is not None:
            self._stream.synchronize()

    def describe(self) -> dict[str, Any]:
        """The part of the runner's description that the session knows."""
        shown = {key: value for key, value in self.provider_options.items() if not key.endswith("user_compute_stream")}
        return {
            "sha256": self.sha256,
            "runtime": "onnxruntime",
            "runtime_version": ort.__version__,
            "device": self._device,
            "device_name": None if self._stream is None else torch.cuda.get_device_name(self._stream.device),
            "provider": self.provider,
            "provider_versions": versions(self._provider.packages),
            "provider_options": shown,
            "nodes_on_cpu": self.elsewhere,
            "batch_range": None if self.batch_range is None else list(self.batch_range),
            "precision": self.precision,
            "tf32": self.precision == "tf32" or self._provider.tf32 == "always",
            "threads": self._threads or self._taken or "runtime default",
            "cuda_graph": self.cuda_graph,
            "graph_optimization": "ORT_ENABLE_ALL",
            "classes": next((size for size in self._output.shape[1:2] if isinstance(size, int)), None),
        }

    def close(self) -> None:
        self._bindings.release()
        self.session = None


def _own_threads() -> int | None:
    """Threads of this process now; None where the system does not tell. ONNX Runtime does not say how many it takes."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None


def _run_bound(session: Any, binding: Any, held: tuple[Any, ...]) -> None:
    """One pass over what is bound. held: the values of `binding`, which it keeps alive itself in some versions only."""
    session.run_with_iobinding(binding)


def _stream(device: str) -> Any:
    """A CUDA stream of the session's own, on which CUDA events can time it; None on other devices."""
    if not device.startswith("cuda"):
        return None
    stream: Any = torch.cuda.Stream
    return stream(torch.device("cuda", providers.index_of(device)))


def _image_input(model: Any) -> tuple[str, tuple[int, ...]]:
    """Name and sizes of the one image input, 0 for sizes that are not fixed; ("", ()) where there is no such input."""
    constants = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in constants]
    sizes = tuple(dim.dim_value for dim in given[0].type.tensor_type.shape.dim) if len(given) == 1 else ()
    return (given[0].name, sizes) if len(sizes) == 4 and all(sizes[1:]) else ("", ())


def _ends(path: Path, session: Any) -> tuple[Any, Any]:
    """The one image input and the first output."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].type in INPUT_TYPES
    if not image or not all(isinstance(size, int) for size in inputs[0].shape[1:]):
        shapes = ", ".join(f"{i.name} {i.type} {i.shape}" for i in inputs)
        raise ArtifactError(
            f"{path} does not take one image tensor of fixed size; it takes {shapes or 'nothing'}",
            hint=_fixing(path, inputs),
        )
    if outputs[0].type not in OUTPUT_TYPES:
        raise ArtifactError(
            f"{path} gives {outputs[0].type} as {outputs[0].name}, expected floating-point logits",
            hint="export the classifier without what comes after its logits",
        )
    return inputs[0], outputs[0]


def _fixing(path: Path, inputs: Sequence[Any]) -> str:
    """What gives a file of another tool one image input of fixed size."""
    if len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].type in INPUT_TYPES:
        tool = "python -m onnxruntime.tools.make_dynamic_shape_fixed"
        return f"`{tool} --input_name {inputs[0].name} --input_shape 1,3,224,224 {path} fixed.onnx` gives it a size"
    return "export it with one float32, float16 or uint8 input of (batch, channels, height, width)"
