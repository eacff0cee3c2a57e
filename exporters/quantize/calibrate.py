"""Measure the ranges of the inputs of products on images, with ONNX Runtime."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from onnx import helper
from torch import Tensor

from vitcompress.errors import InputError, PrecisionError
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.rounded import open_changed
from vitcompress.exporters.options import Calibration, EightBits
from vitcompress.exporters.quantize.emulate import round_values
from vitcompress.exporters.quantize.graph import LARGEST, find_products
from vitcompress.exporters.sidecar import read_input
from vitcompress.io.files import decode_json_values
from vitcompress.io.text import format_shape

CHUNK = 2  # images at a time: the inputs of all layers of DeiT-B take 100 MB
BINS, ENTROPY_BINS, QUANTIZED_BINS, PERCENTILE = 4097, 513, 128, 99.99  # two bins per step of int8 would hide its error
CLIPS = 64  # ranges that the least squared error is searched in


def calibrate(source: Path, images: Tensor, precision: EightBits, method: Calibration = "minmax") -> dict[str, float]:
    """The ranges for `quantize` of the ONNX file `source`, in fp32, on normalized `images`, (count, C, H, W).

    method: `minmax`, the largest magnitude; `percentile`, the 99.99 % quantile of the magnitudes; `entropy`, the
    least KL divergence of the quantized values (Migacz, 8-bit inference with TensorRT, GTC 2017); `mse`, their least
    squared error. Raises InputError for no images, images of another size, or images of a single color, which show
    nothing, and PrecisionError if a value inside the model is not finite.
    """
    from onnxruntime.quantization.calibrate import HistogramCollector

    model, hint = file.read_onnx(source), "use images of the training data"
    config = read_input(str(source), decode_json_values(file.metadata(model)))
    if config is None or not len(images) or tuple(images.shape[1:]) != config.size:
        size = format_shape(config.size) if config else "unknown size"
        raise InputError(f"calibration needs images of {size}, got {format_shape(images.shape)}", hint=hint)
    if (images.flatten(2).amax(2) == images.flatten(2).amin(2)).all():
        raise InputError("every calibration image has a single color", hint=hint)
    tensors = {key: tensor for _, inputs in find_products(model, precision) for key, tensor in inputs.items()}
    names = sorted(set(tensors.values()))
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    content = model.SerializeToString()
    del model  # each is as large as the weights
    call = open_changed(source, content, optimize=True)
    del content
    largest = dict.fromkeys(names, 0.0)
    kind, bins = ("entropy", ENTROPY_BINS) if method == "entropy" else ("percentile", BINS)
    collector = HistogramCollector(kind, method == "percentile", bins, QUANTIZED_BINS, PERCENTILE, None)
    with contextlib.redirect_stdout(io.StringIO()):
        for chunk in torch.split(images, CHUNK):
            _, *inputs = call(chunk)  # after the logits
            values = dict(zip(names, (tensor.numpy() for tensor in inputs), strict=True))
            for name, array in values.items():
                largest[name] = float(np.maximum(largest[name], np.abs(array).max()))
                if not np.isfinite(largest[name]):
                    key = next(key for key, tensor in tensors.items() if tensor == name)
                    message = f"the input of {key} is {largest[name]} on the calibration images"
                    raise PrecisionError(message, hint="use --precision fp32")
            if method != "minmax":
                # Bins begin at the smallest magnitude, without a zero: those of nearly equal ones would have no width.
                zero = np.zeros(int(method == "percentile"), np.float32)
                collector.collect({name: np.append(array, zero) for name, array in values.items()})
        if method == "minmax":
            ranges = largest
        elif method == "mse":
            ranges = {n: _least_error(bins[0], bins[1], precision) for n, bins in collector.histogram_dict.items()}
        else:
            ends = collector.compute_collection_result()
            ranges = {name: float(np.abs(ends[name][:2]).max()) for name in names}
    return {key: min(ranges[name], largest[name]) for key, name in tensors.items()}


def _least_error(counts: np.ndarray, edges: np.ndarray, precision: EightBits) -> float:
    """The range in which the values of a histogram have the least squared error."""
    values, weights = torch.tensor((edges[1:] + edges[:-1]) / 2), torch.tensor(counts)
    ranges = float(edges[-1]) * torch.arange(1, CLIPS + 1) / CLIPS
    rounded = round_values(values, ranges[:, None] / LARGEST[precision], precision)
    return float(ranges[(weights * (rounded - values).square()).sum(1).argmin()])
