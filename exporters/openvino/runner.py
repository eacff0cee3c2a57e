"""The OpenVINO library, loaded without its telemetry, and models run with it on the CPU in the requested precision."""

import sys
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError, MissingExtraError, lines_of
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import check_sha256
from vitcompress.io.files import decode_json_values

TELEMETRY = "openvino_telemetry"
INFO = "vitcompress"  # key of our metadata in a model's rt_info
HINT = "INFERENCE_PRECISION_HINT"
# Precision -> value of `HINT`. In int8 the file states the precision of linear layers, and the hint that of the others.
HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32", "int8+bf16": "bf16"}
JOINED = 256  # rows and columns of a weight, up to which OpenVINO joins two products of an FFN
ELEMENTWISE = ("Add", "Multiply", "Gelu", "Relu", "Sigmoid", "Tanh")  # operations between the two
DEFAULT = "default"  # precision that OpenVINO chooses without the hint: bf16 on processors with bf16, even for fp32


def unavailable() -> str | None:
    """Why OpenVINO cannot be used here, or None."""
    return None if util.find_spec("openvino") else "openvino is not installed; pip install 'vitcompress[openvino]'"


@cache
def load() -> Any:
    """The package, imported as if its telemetry package were not installed.

    That package writes an identifier to the home folder and reports each import and each conversion over the network.
    Without it OpenVINO uses a stub of its own.
    """
    hide = TELEMETRY not in sys.modules  # code that has already imported it is not affected
    if hide:
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino  # noqa: TID251 - the only place that imports it
    finally:
        if hide:
            del sys.modules[TELEMETRY]
    return openvino


@cache
def core() -> Any:
    """The only `Core` of this process, which exists until the process ends.

    A core restores the thread's previous signal stack when it is destroyed. With two cores, the second restores that of
    the first, whose memory is freed by then, and the next signal kills the process.
    """
    return load().Core()


def read_ir(path: Path) -> Any:
    """The model in `path`. Raises MissingExtraError, or ArtifactError for another file, or one without its weights."""
    if unavailable():
        raise MissingExtraError("openvino", "openvino", need=path.name)
    if not path.with_suffix(".bin").is_file():
        raise ArtifactError(f"{path} needs {path.stem}.bin beside it, which is missing", hint="copy both files")
    try:
        return core().read_model(str(path))
    except RuntimeError as error:
        message = f"{path} is not an OpenVINO model: {lines_of(error)[-1]}"  # others name places in its source
        raise ArtifactError(message, hint="copy or export it again") from None


def read_metadata(model: Any) -> dict[str, str]:
    """The metadata that our exporter wrote into a model, each value as JSON text; empty for other models."""
    if not model.has_rt_info([INFO]):
        return {}
    return {key: str(value) for key, value in model.get_rt_info([INFO]).value.items()}


def _is_small(node: Any) -> bool:
    """Whether `node` is a product by a constant weight with at most `JOINED` rows and columns."""
    weight = node.input_value(1) if node.get_type_name() == "MatMul" else None
    return weight is not None and "Constant" in weight.get_node().get_type_name() and max(weight.get_shape()) <= JOINED


def needs_variable_batch(model: Any) -> bool:
    """Whether OpenVINO would join two small products, and crash at a fixed batch; see `OpenVinoRunner`."""
    for node in filter(_is_small, model.get_ops()):
        source = node.input_value(0).get_node()
        while source.get_type_name() in ELEMENTWISE:
            source = source.input_value(0).get_node()
        if _is_small(source):
            return True
    return False


class OpenVinoRunner(Runner):
    """An OpenVINO model, one batch at a time (`LATENCY`, one stream).

    It is compiled for each batch size, because OpenVINO joins more operations of fixed shapes; the last four are kept.
    Where small products follow each other, the batch stays variable: version 2026.4 joins them, and crashes with 4, 6
    or 8 rows (tokens, or images where only class tokens are left).

    Raises:
        MissingExtraError: OpenVINO is not installed.
        ArtifactError: not an OpenVINO model, not the file that its sidecar describes, or not one image input.
        DeviceError: a device other than the CPU, or a precision that the processor does not have, for which OpenVINO
            would compute in another one.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        super().__init__(str(path), options, "OpenVINO")
        if (options.device or "cpu") != "cpu":
            message = f"OpenVINO models run on the CPU, but the device is {options.device}"
            raise DeviceError(message, hint="use --device cpu")
        model = read_ir(path)
        self._sha256 = check_sha256(path)
        labels = decode_json_values(read_metadata(model))
        self.precision = options.precision or str(labels.get("precision", "fp32"))
        (self._batch, *shape), element = _input_shape(path, model)
        self._set_input(shape, labels, takes_bytes=element == "u8")
        int8 = str(labels.get("precision")).startswith("int8")
        possible = [name for name in HINTS if name.startswith("int8") is int8]
        if self.precision not in (*possible, DEFAULT):
            raise DeviceError(f"{path} cannot run in {self.precision!r}", hint=f"use {', '.join((*possible, DEFAULT))}")
        compiled: Any = lru_cache(4)(partial(self._compile, path, model, shape, possible))
        self._compiled: Any = (lambda batch: compiled(-1)) if needs_variable_batch(model) else compiled
        self._compiled(self._batch)

    def _compile(self, path: Path, model: Any, shape: Sequence[int], possible: Sequence[str], batch: int) -> Any:
        config = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        if self.precision != DEFAULT:
            config[HINT] = HINTS[self.precision]
        if self._threads is not None:
            config["INFERENCE_NUM_THREADS"] = str(self._threads)
        try:
            model.reshape([batch, *shape])
            compiled = core().compile_model(model, "CPU", config)
        except RuntimeError as error:
            raise ArtifactError(f"OpenVINO cannot run {path} at batch {batch}: {lines_of(error)[-1]}") from None
        hint = compiled.get_property(HINT).get_type_name()
        actual = next((name for name in possible if HINTS[name] == hint), hint)
        if self.precision == DEFAULT:
            self.precision = actual
        if actual != self.precision:
            message = f"the precision is {self.precision}, but OpenVINO computes in {actual} on this processor"
            raise DeviceError(message, hint=f"use --precision {actual}")
        return compiled

    def __call__(self, images: Tensor) -> Tensor:
        outputs = self._compiled(len(images))([self._prepare(images)], share_inputs=True)
        return torch.from_numpy(np.array(outputs[0], dtype=np.float32))

    def _bind(self, images: Tensor) -> BoundCall:
        request, data = self._compiled(len(images)).create_infer_request(), self._prepare(images)
        request.set_input_tensor(0, load().Tensor(data, shared_memory=True))
        return BoundCall(request.infer, data)  # the request does not reference its input

    def _describe(self) -> dict[str, object]:
        compiled = self._compiled(self._batch)
        get, classes = compiled.get_property, compiled.outputs[0].get_partial_shape()
        return {
            "runtime": "openvino",
            "runtime_version": metadata.version("openvino"),
            "device": "cpu",
            "device_name": str(get("FULL_DEVICE_NAME")) if "FULL_DEVICE_NAME" in get("SUPPORTED_PROPERTIES") else None,
            "precision": self.precision,
            "threads": int(get("INFERENCE_NUM_THREADS")),
            "streams": int(get("NUM_STREAMS")),
            "input_type": "uint8" if self.takes_bytes else "float32",
            "graph_optimization": "LATENCY",
            "classes": int(classes[1].get_length()) if len(classes) == 2 and classes[1].is_static else None,
        }

    def close(self) -> None:
        super().close()
        self._compiled = None


def _input_shape(path: Path, model: Any) -> tuple[list[int], str]:
    """Shape, at batch 1 if it takes any, and element type of the one input, which is images."""
    inputs = model.inputs
    shape = inputs[0].get_partial_shape() if len(inputs) == 1 else None
    if shape is None or shape.rank.is_dynamic or len(shape) != 4 or any(side.is_dynamic for side in list(shape)[1:]):
        raise ArtifactError(f"{path} does not take one image tensor of fixed size", hint="export it with vitcompress")
    return [1 if side.is_dynamic else side.get_length() for side in shape], inputs[0].get_element_type().get_type_name()
