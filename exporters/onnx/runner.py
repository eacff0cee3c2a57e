"""Run ONNX files in ONNX Runtime, without its silent fallbacks."""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError
from vitcompress.exporters.calls import BoundCall, QueuedCall
from vitcompress.exporters.onnx import file, libraries, providers
from vitcompress.exporters.onnx.providers import CPU
from vitcompress.exporters.options import DEFAULTS
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import check_sha256
from vitcompress.io import hardware
from vitcompress.io.files import decode_json_values
from vitcompress.io.text import format_shape

LOG_WARNINGS, LOG_ERRORS, LOG_NOTHING = 2, 3, 4  # the first is ONNX Runtime's own default
OUTPUT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
INPUT_TYPES = {**OUTPUT_TYPES, "tensor(uint8)": np.uint8}
RUNS_BEFORE_REPLAY = 3  # the first runs of a CUDA graph allocate memory and record it
NO_GRAPH = "-1"  # graph number of a run that is neither recorded nor replayed


class OnnxRunner(Runner):
    """An ONNX file on exactly one execution provider; the CPU may keep the arithmetic of shapes.

    Raises:
        ArtifactError: not ONNX, unsafe external data, another file than its sidecar describes, or other inputs and
            outputs than one image tensor and logits.
        DeviceError: a provider that is not available or does not support the model or its precision.
        InputError, OutputError: settings that the provider does not have, or a cache folder that cannot be used.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        super().__init__(str(path), options, "ONNX Runtime")
        self._ort = libraries.load_onnxruntime()
        model = file.read_onnx(path)
        labels = decode_json_values(file.metadata(model))
        self._file_name, self._sha256 = path.name, check_sha256(path)
        self._provider, self._device = providers.choose_provider(options.device, options.provider)
        self._precision = providers.resolve_precision(path, labels.get("precision"), options.precision, self._provider)
        providers.check_settings(self._provider, options)
        self._graph_numbers = count(1)
        stream: Any = torch.cuda.Stream  # which CUDA events can time
        self._stream = stream(torch.device(self._device)) if self._device.startswith("cuda") else None
        self._provider_options = self._create_options(model)
        eight_bits = labels.get("quantization")
        # What an engine was built from has weights of 8 bits, whose products must not saturate here.
        exact = isinstance(eight_bits, dict) and eight_bits.get("form") == "float_bias"
        self.session = self._open(path, exact=exact)
        self._cpu_operators = self._check_assignment()
        self._input, self._output = _inputs_and_outputs(path, self.session)
        if isinstance(fixed := self._input.shape[0], int):
            self.batch_range = (fixed, fixed, fixed)
        self._set_input(self._input.shape[1:], labels, takes_bytes=self._input.type == "tensor(uint8)")
        self._transfers = options.transfers and self._stream is not None

    def _create_options(self, model: Any) -> dict[str, str]:
        """The provider's options. Sets the range of batches that it builds for, if any."""
        options = replace(self._options, precision=self._precision)
        if options.engine_cache is not None:
            options = replace(options, engine_cache=libraries.prepare_cache(options.engine_cache))
        name, sizes = _image_input(model)
        dynamic = self._provider.builds and sizes and not sizes[0]
        self.batch_range = (options.batch or DEFAULTS["batch"]) if dynamic else None
        profile = tuple(f"{name}:{'x'.join(map(str, (batch, *sizes[1:])))}" for batch in self.batch_range or ())
        own, index = self._provider.options(options, profile), hardware.parse_device(self._device)[1]
        if self._stream is None:
            return own
        return {"device_id": str(index), "user_compute_stream": str(self._stream.cuda_stream), **own}

    def _open(self, path: Path, *, exact: bool) -> Any:
        name, options, process = self._provider.name, self._ort.SessionOptions(), psutil.Process()
        options.log_severity_level = LOG_NOTHING  # errors are raised, not logged
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        if name != CPU:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        before, lines = process.num_threads(), list[str]()
        self._ort.set_default_logger_severity(LOG_NOTHING if name == CPU else LOG_ERRORS)
        try:
            with libraries.capture_stderr() as lines:
                self._provider.load()
                chosen = [(name, self._provider_options)]
                session = self._ort.InferenceSession(str(path), options, providers=chosen, enable_fallback=0)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions have no other common base class
            message = f"{name} of ONNX Runtime cannot run {path}: {libraries.error_text(error)}"
            missing = libraries.missing_library(lines)
            problem = ArtifactError(message) if name == CPU else DeviceError(message)
            raise self._broken(missing) if missing else problem from None
        finally:
            self._ort.set_default_logger_severity(LOG_WARNINGS)
        # ONNX Runtime does not report its threads. The caller's own thread works, too.
        self._started_threads = 1 + process.num_threads() - before if name == CPU else None
        if (actual := session.get_providers()[0]) != name:
            raise self._broken(libraries.missing_library(lines) or f"ONNX Runtime chose {actual} instead")
        return session

    def _broken(self, reason: str) -> DeviceError:
        hint = f"{self._provider.remedy}; `vitcompress doctor` shows what this machine has"
        return DeviceError(f"{self._provider.name} of ONNX Runtime does not work here: {reason}", hint=hint)

    def _check_assignment(self) -> list[str]:
        """Operators that the CPU runs. Raises DeviceError if they are more than the arithmetic of shapes."""
        name = self._provider.name
        if name == CPU:
            return []
        own, others = providers.assigned_operators(self.session, name)
        if heavy := sorted(others & providers.HEAVY):
            assigned = f"ONNX Runtime assigned {'it' if len(heavy) == 1 else 'them'} to the CPU"
            message = f"{name} does not support {', '.join(heavy)} in this model; {assigned}"
            raise DeviceError(message, hint="try another --opset, or another provider")
        if not own:
            raise DeviceError(f"{name} supports no part of this model", hint="use another provider")
        return sorted(others)

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self._run(self._prepare(images)))

    def _prepare(self, images: Tensor) -> np.ndarray:
        return np.ascontiguousarray(super()._prepare(images), dtype=INPUT_TYPES[self._input.type])

    def _run(self, data: np.ndarray) -> np.ndarray:
        """data: from `_prepare` -> (batch, classes), float32."""
        names, options = [self._output.name], self._run_options(NO_GRAPH)
        with libraries.run_errors(f"{self._file_name} at batch {len(data)}"):
            logits = np.asarray(self.session.run(names, {self._input.name: data}, options)[0], dtype=np.float32)
        if logits.shape[:1] != data.shape[:1]:
            problem = f"{self._file_name} has an output of {format_shape(logits.shape)} for {len(data)} images"
            raise ArtifactError(problem, hint="export it with one row of logits for each image")
        return logits

    def _bind(self, images: Tensor) -> BoundCall:
        """Inputs and outputs stay on the provider's device, unless transfers were requested.

        On CUDA a pass is queued on the session's stream. Each binding has its own CUDA graph.
        """
        if self.takes_bytes and self.input is None:
            # Bytes for a file that does not state their normalization, which is enough to time it.
            images = (64 * images.cpu() + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        data = self._prepare(images)
        if self._transfers:
            return BoundCall(partial(self._run, data))
        recorded, output = self._options.cuda_graph, self._run(data).astype(OUTPUT_TYPES[self._output.type])
        place, index = ("cpu", 0) if self._stream is None else ("cuda", hardware.parse_device(self._device)[1])
        source, logits = (torch.from_numpy(array).to(torch.device(place, index)) for array in (data, output))
        binding = self.session.io_binding()
        binding.bind_input(self._input.name, place, index, data.dtype.type, source.shape, source.data_ptr())
        binding.bind_output(self._output.name, place, index, output.dtype.type, logits.shape, logits.data_ptr())
        graph = str(next(self._graph_numbers)) if recorded else NO_GRAPH
        run = partial(self.session.run_with_iobinding, binding, self._run_options(graph, wait=self._stream is None))
        if self._stream is None:
            with libraries.run_errors(f"{self._file_name} at batch {len(data)}"):
                run()  # it fails if the file states other sizes of its output
            return BoundCall(run, source, logits)
        torch.cuda.synchronize(source.device)
        call = QueuedCall(run, self._stream, source, logits)
        for _ in range(RUNS_BEFORE_REPLAY if recorded else 0):
            call()
        return call

    def _run_options(self, graph: str, *, wait: bool = True) -> Any:
        """Options of one run. graph: number of the CUDA graph that it is recorded in and replayed from."""
        options = self._ort.RunOptions()
        if self._provider.graphs:
            options.add_run_config_entry("gpu_graph_id", graph)
        options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not wait)))
        return options

    def _describe(self) -> dict[str, object]:
        shown = {key: value for key, value in self._provider_options.items() if key != "user_compute_stream"}
        return {
            "runtime": "onnxruntime",
            "runtime_version": self._ort.__version__,
            "device": self._device,
            "device_name": None if self._stream is None else torch.cuda.get_device_name(self._stream.device),
            "provider": self._provider.name,
            "provider_versions": hardware.package_versions(self._provider.packages),
            "provider_options": shown,
            "nodes_on_cpu": self._cpu_operators,
            "batch_range": None if self.batch_range is None else list(self.batch_range),
            "precision": self._precision,
            "tf32": self._precision == "tf32" or self._provider.tf32 == "always",
            "threads": self._threads or self._started_threads or "runtime default",
            "cuda_graph": self._options.cuda_graph,
            "graph_optimization": "ORT_ENABLE_ALL",
            "classes": next((size for size in self._output.shape[1:2] if isinstance(size, int)), None),
            "input_type": "uint8" if self.takes_bytes else "float32",
            "transfers": self._transfers,
        }

    def close(self) -> None:
        super().close()
        self.session = None


def _image_input(model: Any) -> tuple[str, tuple[int, ...]]:
    """Name and sizes of the one image input, 0 for dynamic sizes; ("", ()) if there is no such input."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    sizes = tuple(dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim) if len(inputs) == 1 else ()
    return (inputs[0].name, sizes) if len(sizes) == 4 and all(sizes[1:]) else ("", ())


def _inputs_and_outputs(path: Path, session: Any) -> tuple[Any, Any]:
    """The one image input and the first output."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].type in INPUT_TYPES
    if not image or not all(isinstance(size, int) for size in inputs[0].shape[1:]):
        shapes = ", ".join(f"{i.name} {i.type} {i.shape}" for i in inputs)
        hint = "export it with one float32, float16 or uint8 input of (batch, channels, height, width)"
        if image:
            tool = f"python -m onnxruntime.tools.make_dynamic_shape_fixed --input_name {inputs[0].name}"
            hint = f"`{tool} --input_shape 1,3,224,224 {path} fixed.onnx` fixes its size"
        message = f"{path} does not take one image tensor of fixed size; its inputs are {shapes or 'none'}"
        raise ArtifactError(message, hint=hint)
    if outputs[0].type not in OUTPUT_TYPES:
        message = f"the output {outputs[0].name} of {path} has the type {outputs[0].type}, not floating-point logits"
        raise ArtifactError(message, hint="export the classifier without the operations after its logits")
    return inputs[0], outputs[0]
