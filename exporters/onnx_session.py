"""One ONNX file in ONNX Runtime, without its silent fallbacks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from vitcompress import onnx_file
from vitcompress.errors import ArtifactError, DeviceError, InputError
from vitcompress.exporters.artifact import checked_sha256, decoded

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "mps": "CoreMLExecutionProvider"}
# A graph with a dynamic batch rightly keeps its shape arithmetic on the CPU; these must be where they were asked for.
HEAVY = frozenset({"MatMul", "Gemm", "Conv", "Attention", "LayerNormalization", "Softmax", "Gelu", "FusedMatMul"})
LOG_WARNINGS = 2  # ONNX Runtime's own default
OUTPUT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
INPUT_TYPES = {**OUTPUT_TYPES, "tensor(uint8)": np.uint8}


class Session:
    """A session on exactly one execution provider (the CPU may keep the arithmetic of shapes).

    Raises:
        ArtifactError: not ONNX, unsafe external data, not the file its sidecar describes, or not one image tensor in
            and one out.
        DeviceError: a provider that is not there or did not take the work, or a precision the file does not have.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        provider: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.metadata = decoded(onnx_file.metadata(onnx_file.read(path)))
        self.sha256 = checked_sha256(path)
        self._threads, self._device = threads, device
        self.provider = _provider(device, provider)
        self.precision = _precision(path, self.metadata.get("precision"), precision, self.provider)
        self.session = self._open(path)
        self._input, self._output = _ends(path, self.session)

    def _open(self, path: Path) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised, not logged
        if self._threads is not None:
            if self._threads < 1:
                raise InputError(f"threads must be 1 or more, got {self._threads}")
            options.intra_op_num_threads = self._threads
        if self.provider != CPU:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        chosen = [(self.provider, self._provider_options())]
        ort.set_default_logger_severity(4)
        try:
            session = ort.InferenceSession(str(path), options, providers=chosen, enable_fallback=0)
        except Exception as error:  # noqa: BLE001 - its own exception classes share no base but this one
            what = f"{self.provider} of ONNX Runtime cannot run {path}: {str(error).splitlines()[0]}"
            raise (ArtifactError if self.provider == CPU else DeviceError)(what) from None
        finally:
            ort.set_default_logger_severity(LOG_WARNINGS)
        if session.get_providers()[0] != self.provider:
            raise DeviceError(
                f"{self.provider} was asked for, ONNX Runtime fell back to {session.get_providers()[0]}",
                hint="`vitcompress doctor` shows what is missing; use --device cpu to measure the CPU",
            )
        if self.provider != CPU and (elsewhere := heavy_elsewhere(session, self.provider)):
            raise DeviceError(f"{self.provider} left the work to others: {', '.join(elsewhere)}")
        return session

    def _provider_options(self) -> dict[str, str]:
        if self.provider != CUDA:
            return {}
        index = self._device.partition(":")[2] or "0"
        return {"device_id": index, "use_tf32": str(int(self.precision == "tf32"))}

    @property
    def on_device(self) -> bool:
        """Whether images and logits have a way to go."""
        return self.provider != CPU

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
        out: np.ndarray = self.session.run([self._output.name], {self._input.name: self._fed(images)})[0]
        return out.astype(np.float32, copy=False)

    def _fed(self, images: np.ndarray) -> np.ndarray:
        fixed = self._input.shape[0]
        if isinstance(fixed, int) and len(images) != fixed:
            raise InputError(f"this file takes batches of {fixed} only, got {len(images)}", hint=f"use --batch {fixed}")
        return np.ascontiguousarray(images, dtype=INPUT_TYPES[self._input.type])

    def bind(self, images: np.ndarray) -> Callable[[], None]:
        """One pass over `images` as a call: inputs and outputs stay where the provider computes."""
        kind, _, index = self._device.partition(":")
        place = (kind if self.provider != CPU else "cpu", int(index or 0))
        given = ort.OrtValue.ortvalue_from_numpy(self._fed(images), *place)
        shape = self.run(images).shape
        dtype = OUTPUT_TYPES[self._output.type]
        taken = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, *place)
        binding = self.session.io_binding()
        binding.bind_ortvalue_input(self._input.name, given)
        binding.bind_ortvalue_output(self._output.name, taken)
        session = self.session
        return lambda: session.run_with_iobinding(binding)

    def describe(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "runtime": "onnxruntime",
            "runtime_version": ort.__version__,
            "device": self._device,
            "device_name": None,
            "provider": self.provider,
            "precision": self.precision,
            "tf32": self.precision == "tf32",
            "threads": self._threads or "runtime default",
            "sdpa": None,
            "compile": False,
            "channels_last": False,
            "cuda_graph": False,
            "graph_optimization": "ORT_ENABLE_ALL",
            "weights": None,
        }

    def close(self) -> None:
        del self.session


def _provider(device: str, provider: str | None) -> str:
    kind = device.partition(":")[0]
    if kind not in PROVIDERS:
        raise DeviceError(f"device {device!r} is not known", hint=f"use one of {', '.join(PROVIDERS)}")
    wanted = provider or PROVIDERS[kind]
    if (wanted == CPU) != (kind == "cpu"):
        raise DeviceError(f"{wanted} does not compute on {device}", hint="give --device and --provider that agree")
    if wanted not in ort.get_available_providers():
        raise DeviceError(
            f"{wanted} was asked for, this ONNX Runtime has {', '.join(ort.get_available_providers())}",
            hint="`vitcompress doctor` shows what is missing",
        )
    return wanted


def _precision(path: Path, stored: Any, wanted: str | None, provider: str) -> str:
    """The precision that the file computes in; it cannot be chosen, but TF32 products on CUDA can."""
    own = str(stored or "as stored")
    if own == "bf16" and provider == CPU:
        raise DeviceError(
            f"{path} computes in bf16, for which {CPU} has no convolution and no matrix product",
            hint="run it on a GPU with --device cuda, or use OpenVINO with --precision bf16 on the CPU",
        )
    if wanted in (None, stored) or (wanted == "fp32" and stored is None):
        return own if wanted is None else str(wanted)
    if wanted == "tf32" and provider == CUDA and own != "fp16":
        return "tf32"
    raise DeviceError(f"{path} computes in {own}, {wanted} was asked for", hint=f"export it with --precision {wanted}")


def _ends(path: Path, session: Any) -> tuple[Any, Any]:
    """The one image input and the first output."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    image = len(inputs) == 1 and len(inputs[0].shape) == 4 and inputs[0].type in INPUT_TYPES
    if not image or not all(isinstance(size, int) for size in inputs[0].shape[1:]):
        shapes = ", ".join(f"{i.name} {i.type} {i.shape}" for i in inputs)
        raise ArtifactError(f"{path} does not take one image tensor of fixed size; it takes {shapes}")
    if outputs[0].type not in OUTPUT_TYPES:
        raise ArtifactError(f"{path} gives {outputs[0].type}, expected floating-point logits")
    return inputs[0], outputs[0]


def heavy_elsewhere(session: Any, provider: str) -> list[str]:
    """Kinds of heavy nodes that run on another provider than `provider`; needs recorded assignment info."""
    found: Iterable[Any] = session.get_provider_graph_assignment_info()
    return sorted({n.op_type for part in found if part.ep_name != provider for n in part.get_nodes()} & HEAVY)
