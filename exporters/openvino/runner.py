"""OpenVINO models as runners: on exactly the device and in exactly the precision that were asked for."""

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError, InputError, MissingExtraError
from vitcompress.exporters.openvino.export import INFO, unavailable
from vitcompress.exporters.openvino.library import core, load
from vitcompress.exporters.runner import Bindings, Bound, RunnerOptions, as_given, described, refuse_settings_of_others
from vitcompress.exporters.sidecar import checked_sha256, input_of
from vitcompress.io.files import decoded
from vitcompress.models.create import InputConfig

HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
NAMES = {"float": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class OpenVinoRunner:
    """An IR, or any file that OpenVINO reads, one image batch at a time (`LATENCY`, one stream).

    OpenVINO takes a precision as a hint and computes in another one where the processor lacks it (bf16 for fp16, say);
    here that is an error.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        if unavailable():
            raise MissingExtraError("openvino", "openvino", need=path.name)
        refuse_settings_of_others(options, "OpenVINO", path.name)
        self.name, self._device, self._threads = str(path), _device(options), options.threads
        if self._threads is not None and self._threads < 1:
            raise InputError(f"threads must be 1 or more, got {self._threads}")
        model = _read(path)
        self._sha256 = checked_sha256(path)
        self._known = _metadata(model)
        self.precision = options.precision or str(self._known.get("precision", "fp32"))
        self._shape = _image_shape(path, model)
        self._uint8 = self._known.get("input") == "uint8"
        self.input: InputConfig | None = input_of(self.name, self._known, self.input_size)
        self._compiled: Any = self._compile(path, model)
        self._request: Any = self._compiled.create_infer_request()
        self._bindings = Bindings()

    def _compile(self, path: Path, model: Any) -> Any:
        if self.precision not in HINTS:
            raise DeviceError(f"OpenVINO has no precision {self.precision!r}", hint=f"use {', '.join(HINTS)}")
        config = {"INFERENCE_PRECISION_HINT": HINTS[self.precision], "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        if self._threads is not None:
            config["INFERENCE_NUM_THREADS"] = str(self._threads)
        try:
            compiled = core().compile_model(model, self._device, config)
        except RuntimeError as error:
            raise ArtifactError(f"OpenVINO cannot run {path}: {_last_line(error)}") from None
        taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if (got := {"f32": "fp32", "f16": "fp16"}.get(taken, taken)) != self.precision:
            raise DeviceError(
                f"{self.precision} was asked for, OpenVINO computes in {got} on this processor",
                hint=f"use --precision {got} or fp32",
            )
        return compiled

    @property
    def input_size(self) -> tuple[int, int, int]:
        return self._shape

    def __call__(self, images: Tensor) -> Tensor:
        found = self._request.infer([self._fed(images)], share_inputs=True)
        return torch.from_numpy(np.array(found[0], dtype=np.float32))

    def bind(self, images: Tensor) -> Bound:
        request = self._compiled.create_infer_request()
        given = self._fed(images)
        request.set_input_tensor(0, load().Tensor(given, shared_memory=True))

        def step(keep: np.ndarray = given) -> None:
            request.infer()

        return self._bindings.add(Bound(step))

    def _fed(self, images: Tensor) -> np.ndarray:
        return as_given(images, self.input, uint8=self._uint8)

    def synchronize(self) -> None:
        """Nothing: a request returns when its outputs are there."""

    def describe(self) -> dict[str, Any]:
        get = self._compiled.get_property
        return described(
            artifact=self.name,
            sha256=self._sha256,
            runtime="openvino",
            runtime_version=metadata.version("openvino"),
            device=self._device.lower(),
            device_name=str(get("FULL_DEVICE_NAME")) if "FULL_DEVICE_NAME" in get("SUPPORTED_PROPERTIES") else None,
            precision=self.precision,
            threads=int(get("INFERENCE_NUM_THREADS")),
            streams=int(get("NUM_STREAMS")),
            input_type="uint8" if self._uint8 else "float32",
            graph_optimization="LATENCY",
            classes=_classes(self._compiled),
        )

    def close(self) -> None:
        self._bindings.release()
        self._request = self._compiled = None


def _classes(compiled: Any) -> int | None:
    shape = compiled.outputs[0].get_partial_shape()
    return int(shape[1].get_length()) if len(shape) == 2 and shape[1].is_static else None


def _device(options: RunnerOptions) -> str:
    if (options.device or "cpu") != "cpu":
        raise DeviceError(
            f"OpenVINO models run on the CPU here, {options.device} was asked for", hint="use --device cpu"
        )
    return "CPU"


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", hint="`vitcompress export` writes one from a run folder")
    if not path.with_suffix(".bin").is_file():
        raise ArtifactError(f"{path} needs {path.stem}.bin beside it, which is missing", hint="copy both files")
    try:
        return core().read_model(str(path))
    except RuntimeError as error:
        raise ArtifactError(
            f"{path} is not an OpenVINO model: {_last_line(error)}", hint="copy or export it again"
        ) from None


def _metadata(model: Any) -> dict[str, Any]:
    if not model.has_rt_info([INFO]):
        return {}
    return decoded({key: str(value) for key, value in model.get_rt_info([INFO]).value.items()})


def _image_shape(path: Path, model: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the one image input."""
    inputs = model.inputs
    shape = inputs[0].get_partial_shape() if len(inputs) == 1 else None
    if shape is None or shape.rank.is_dynamic or len(shape) != 4 or any(side.is_dynamic for side in list(shape)[1:]):
        raise ArtifactError(f"{path} does not take one image tensor of fixed size", hint="export it with vitcompress")
    first, second, third = (side.get_length() for side in list(shape)[1:])
    is_bytes = inputs[0].get_element_type().get_type_name() == "u8"
    return (third, first, second) if is_bytes else (first, second, third)


def _last_line(error: Exception) -> str:
    """The last line of OpenVINO's message, which says what is wrong; the lines before it name places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
