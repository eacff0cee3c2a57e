"""Run OpenVINO models on the CPU, in exactly the requested precision."""

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError
from vitcompress.exporters.openvino.library import core, error_text, load, read_ir, read_metadata
from vitcompress.exporters.runner import (
    BoundCall,
    Runner,
    RunnerOptions,
    check_threads,
    fill_description,
    reject_foreign_settings,
)
from vitcompress.exporters.sidecar import check_sha256, read_input
from vitcompress.io.files import decode_json_values

HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


class OpenVinoRunner(Runner):
    """An OpenVINO model, one batch at a time (`LATENCY`, one stream).

    OpenVINO treats a precision as a hint and computes in another one if the processor lacks it (for example bf16
    instead of fp16). Here that is an error.

    Raises:
        MissingExtraError: OpenVINO is not installed.
        ArtifactError: not an OpenVINO model, not the file that its sidecar describes, or not one image input.
        DeviceError: a device other than the CPU, or a precision that the processor does not have.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        reject_foreign_settings(options, "OpenVINO", path.name)
        super().__init__(str(path))
        self._threads = check_threads(options)
        if (options.device or "cpu") != "cpu":
            raise DeviceError(
                f"OpenVINO models run on the CPU, but the device is {options.device}", hint="use --device cpu"
            )
        model = read_ir(path)
        self._sha256 = check_sha256(path)
        labels = decode_json_values(read_metadata(model))
        self.precision = options.precision or str(labels.get("precision", "fp32"))
        shape, element = _image_shape(path, model)
        self.takes_bytes = element == "u8"
        self._set_size(shape)
        self.input = read_input(self.name, labels, self.input_size)
        self._compiled: Any = self._compile(path, model)
        self._request: Any = self._compiled.create_infer_request()

    def _compile(self, path: Path, model: Any) -> Any:
        if self.precision not in HINTS:
            raise DeviceError(f"OpenVINO has no precision {self.precision!r}", hint=f"use {', '.join(HINTS)}")
        config = {"INFERENCE_PRECISION_HINT": HINTS[self.precision], "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        if self._threads is not None:
            config["INFERENCE_NUM_THREADS"] = str(self._threads)
        try:
            compiled = core().compile_model(model, "CPU", config)
        except RuntimeError as error:
            raise ArtifactError(f"OpenVINO cannot run {path}: {error_text(error)}") from None
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        actual = next((name for name, own in HINTS.items() if own == hint), hint)
        if actual != self.precision:
            raise DeviceError(
                f"the precision is {self.precision}, but OpenVINO computes in {actual} on this processor",
                hint=f"use --precision {actual} or fp32",
            )
        return compiled

    def __call__(self, images: Tensor) -> Tensor:
        outputs = self._request.infer([self._prepare(images)], share_inputs=True)
        return torch.from_numpy(np.array(outputs[0], dtype=np.float32))

    def _bind(self, images: Tensor) -> BoundCall:
        request = self._compiled.create_infer_request()
        data = self._prepare(images)
        request.set_input_tensor(0, load().Tensor(data, shared_memory=True))

        def step(keep: np.ndarray = data) -> None:
            request.infer()

        return BoundCall(step)

    def describe(self) -> dict[str, Any]:
        get = self._compiled.get_property
        classes = self._compiled.outputs[0].get_partial_shape()
        return fill_description(
            artifact=self.name,
            sha256=self._sha256,
            runtime="openvino",
            runtime_version=metadata.version("openvino"),
            device="cpu",
            device_name=str(get("FULL_DEVICE_NAME")) if "FULL_DEVICE_NAME" in get("SUPPORTED_PROPERTIES") else None,
            precision=self.precision,
            threads=int(get("INFERENCE_NUM_THREADS")),
            streams=int(get("NUM_STREAMS")),
            input_type="uint8" if self.takes_bytes else "float32",
            graph_optimization="LATENCY",
            classes=int(classes[1].get_length()) if len(classes) == 2 and classes[1].is_static else None,
        )

    def close(self) -> None:
        super().close()
        self._request = self._compiled = None


def _image_shape(path: Path, model: Any) -> tuple[list[int], str]:
    """Shape and element type of one image of the one input."""
    inputs = model.inputs
    shape = inputs[0].get_partial_shape() if len(inputs) == 1 else None
    if shape is None or shape.rank.is_dynamic or len(shape) != 4 or any(side.is_dynamic for side in list(shape)[1:]):
        raise ArtifactError(f"{path} does not take one image tensor of fixed size", hint="export it with vitcompress")
    return [side.get_length() for side in list(shape)[1:]], inputs[0].get_element_type().get_type_name()
