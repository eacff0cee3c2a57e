"""Write an ONNX file whose linear layers compute in int8 or fp8, from one in fp32, with ONNX Runtime's quantizer.

Weights are symmetric, per channel in int8. In fp8 they are per tensor: the relative precision of floating-point numbers
does not depend on their scale. Inputs are symmetric, per tensor. LayerNorm, softmax, GELU, residual additions, the
patch embedding and the classifier are computed in fp32.

There are three forms. `float_bias` is for TensorRT, which rejects int32 biases. `unsigned_input` is for ONNX Runtime,
which is slower than in fp32 without int32 biases, and on x86 converts signed inputs, unless several products read them
(PVTv2). `int32_bias`, with signed inputs, is for OpenVINO, which is slower with unsigned ones.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir
from onnx import numpy_helper

from vitcompress.errors import ArtifactError, PrecisionError
from vitcompress.exporters.onnx import file
from vitcompress.exporters.options import EIGHT_BITS, EightBits
from vitcompress.io.validation import options_of

Form = Literal["int32_bias", "unsigned_input", "float_bias"]  # the second has int32 biases, too
HALF_RANGE = float(np.finfo(np.float16).max)  # a larger value would be stored as infinity
LARGEST = {"int8": 127.0, "fp8": 448.0}  # the largest number of each type, in int8 the largest symmetric one
SMALLEST = float(np.finfo(np.float32).tiny)  # step: ONNX Runtime's quantizer sets smaller ones to 1
INT32_STEP = 1.0001 / (2**31 - 1)  # of a bias, over its magnitude, at least; ONNX Runtime's quantizer enlarges others
WEIGHT, CORE = ".weight", ".softmax."  # in the names that `onnx.export` gives to weights and to products of attentions


@dataclass(frozen=True, eq=False)
class Quantization:
    """What a file computes in eight bits.

    ranges: layer -> largest magnitude of its input, for each layer in eight bits (`blocks.0.mlp.fc1`, and for both
        inputs of both products of an attention `blocks.0.attn.softmax.0.0` to `.1.1`); from `calibrate`, or from a
        training.
    weight_bits: 7 leave a bit to processors that add 8-bit products in 16 bits.
    factors: of `quantize.smooth`, which the tensors of the file have.
    half: tensors that are stored in fp16 and computed with in fp32, which makes files smaller.
    """

    precision: EightBits
    ranges: Mapping[str, float]
    form: Form = "int32_bias"
    weight_bits: int = 8
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    half: tuple[str, ...] = ()


def step_size(largest: Any, precision: str) -> Any:
    """The step, a number or a tensor, of inputs whose largest magnitude this is; 1 if it is nearly zero."""
    step = largest / LARGEST[precision]
    return step if step >= SMALLEST else 1.0


def read_quantization(labels: Mapping[str, Any]) -> Quantization | None:
    """The record `quantization` in the decoded metadata of a file; None for other files. Raises InputError."""
    record, stated = labels.get("quantization"), str(labels.get("precision")).partition("+")[0]
    settings = options_of(Quantization, record, "the quantization") if isinstance(record, dict) else None
    actual = settings.precision if settings else "no"
    if actual != (stated if stated in EIGHT_BITS else "no"):
        message = f"the metadata state the precision {stated}, but {actual} quantization"
        raise ArtifactError(message, hint="export it again")
    return settings


def find_products(model: Any, precision: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """The matrix products that `precision` can have in an ONNX protobuf that `onnx.export` wrote, each with its inputs.

    These are linear layers, and in fp8 those of attentions. inputs: key of a range -> name of the tensor.
    """
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    for node in model.graph.node:
        if node.op_type in ("Gemm", "MatMul") and node.input[1] in weights and node.input[1].endswith(WEIGHT):
            yield node, {node.input[1].removesuffix(WEIGHT): node.input[0]}
        elif node.op_type == "MatMul" and CORE in node.name and precision == "fp8":
            yield node, {f"{node.name}.{number}": value for number, value in enumerate(node.input)}


def find_wrong_steps(path: Path, settings: Quantization) -> list[str]:
    """Keys of the inputs that the ONNX file `path` does not round to the steps of their ranges, up to float32."""
    readers = defaultdict[Any, list[str]](list)  # inputs of the two nodes that round -> keys of the products
    for node in onnx_ir.load(path).graph:
        if node.op_type in ("Gemm", "MatMul") and len(node.inputs) > 1:
            layer = str(getattr(node.inputs[1], "name", "")).partition(WEIGHT)[0]
            for number, value in enumerate(node.inputs[:2]):
                read = value.producer() if value else None
                write = read.inputs[0].producer() if read and read.inputs and read.inputs[0] else None
                if read and write and read.op_type == "DequantizeLinear":
                    key = f"{node.name}.{number}" if CORE in str(node.name) else layer
                    readers[write.inputs, read.inputs[1:]].append(key)
    zero = 128 if settings.form == "unsigned_input" and settings.precision == "int8" else 0
    wrong = list[str]()
    for (written, steps), keys in readers.items():
        step = np.float32(step_size(max(settings.ranges.get(key, np.inf) for key in keys), settings.precision))
        stored = [value.const_value.numpy().astype(float) for value in steps if value and value.const_value is not None]
        same = len(stored) == 2 and np.allclose(stored[0], step, rtol=1e-6, atol=0) and np.all(stored[1] == zero)
        wrong += [] if same and steps == written[1:] else keys
    return [*wrong, *set(settings.ranges).difference(*readers.values())]


def quantize(source: Path, target: Path, settings: Quantization, metadata: Mapping[str, str] | None = None) -> None:
    """Write `source`, a file that `onnx.export` wrote in fp32, to `target` with these `settings`.

    metadata: entries that change. Raises PrecisionError if no layer has a range, or for a range or a weight that is not
    finite.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    model, ranges, fp8 = onnx.load(str(source)), settings.ranges, settings.precision == "fp8"
    metadata = {**file.metadata(model), **(metadata or {})}  # the quantizer adds an entry that is no JSON
    products = [(n, inputs) for n, inputs in find_products(model, settings.precision) if set(inputs) <= set(ranges)]
    if not products:
        message = f"no linear layer is left to compute in {settings.precision}"
        raise PrecisionError(message, hint="use fewer --islands, or fp32")
    largest = dict[str, float]()
    for key, tensor in chain.from_iterable(inputs.items() for _, inputs in products):
        largest[tensor] = max(largest.get(tensor, 0.0), _finite(ranges[key], f"the range of the input of {key}"))
    names = {node.input[1] for node, _ in products}
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in names}
    sizes = {n: _finite(float(np.abs(numpy_helper.to_array(weight)).max()), n) for n, weight in weights.items()}
    if settings.form != "float_bias":
        _fill_empty_rows([node for node, _ in products], model, largest)
    kind = QuantType.QFLOAT8E4M3FN if fp8 else QuantType.QInt8
    data = {name: TensorData(lowest=np.float32(-size), highest=np.float32(size)) for name, size in largest.items()}
    quantizer = QDQQuantizer(
        model,
        per_channel=not fp8,
        reduce_range=settings.weight_bits == 7,
        weight_qType=kind,
        activation_qType=kind,
        tensors_range=TensorsData(CalibrationMethod.MinMax, data),
        nodes_to_quantize=[node.name for node, _ in products],
        nodes_to_exclude=[],
        op_types_to_quantize=["Gemm", "MatMul"],
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": settings.form != "float_bias",
            "OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"],
            # Its own scales in fp8 suit Gaussian values, and would cut off weights beyond 4.5 standard deviations.
            "TensorQuantOverrides": _fp8_scales({**largest, **sizes}) if fp8 else {},
        },
    )
    quantizer.quantize_model()
    quantizer.model.topological_sort()
    result = quantizer.model.model
    _read_exact_values(result, quantizer.nodes_to_quantize)
    _store_in_half(result, settings.half)
    if settings.form == "unsigned_input" and not fp8:
        _use_unsigned_inputs(result)
    onnx.helper.set_model_props(result, metadata)
    onnx.save(result, str(target))


def _fill_empty_rows(products: Collection[Any], model: Any, largest: Mapping[str, float]) -> None:
    """Give rows of zeros in a weight a value that rounds to 0 in the smallest steps that their biases allow.

    The quantizer gives them steps of 1, so that their biases would be rounded to whole steps of the input.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in (node for node in products if len(node.input) > 2):  # Gemm
        weight, bias = (numpy_helper.to_array(tensors[name]).copy() for name in node.input[1:])
        rows = weight if any(own.name == "transB" and own.i for own in node.attribute) else weight.T
        empty = np.abs(rows).max(1) < SMALLEST * LARGEST["int8"]
        rows[empty, 0] = bias[empty] * INT32_STEP / step_size(largest[node.input[0]], "int8") / 4
        tensors[node.input[1]].CopyFrom(numpy_helper.from_array(weight, node.input[1]))


def _fp8_scales(largest: Mapping[str, float]) -> dict[str, list[dict[str, np.ndarray]]]:
    """The scales with which these largest values become the largest number of the type."""
    zero = np.zeros((), onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.FLOAT8E4M3FN))
    scales = {name: np.array(step_size(size, "fp8"), np.float32) for name, size in largest.items()}
    return {name: [{"scale": scale, "zero_point": zero}] for name, scale in scales.items()}


def _read_exact_values(model: Any, quantized: Collection[str]) -> None:
    """Let all nodes but the `quantized` ones read their inputs as they were before rounding.

    The quantizer gives the rounded values to all readers of an input, in PVTv2 also to convolutions.
    """
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    sources = {node.output[0]: node.input[0] for node in pairs}
    exact = {name: sources[source] for name, source in sources.items() if source in sources}
    for node in model.graph.node:
        if node.name not in quantized:
            node.input[:] = [exact.get(name, name) for name in node.input]


def _use_unsigned_inputs(model: Any) -> None:
    """Store rounded inputs as unsigned integers: their zero points become 128, their values stay."""
    zeros = {node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    for tensor in (tensor for tensor in model.graph.initializer if tensor.name in zeros):
        tensor.CopyFrom(numpy_helper.from_array(np.array(128, np.uint8), tensor.name))
    del model.graph.value_info[:]  # with the types of signed inputs


def _store_in_half(model: Any, names: Collection[str]) -> None:
    """Store tensors in fp16, from which the graph computes fp32; those beyond its range stay as they are."""
    for tensor in model.graph.initializer:
        if (name := tensor.name) in names and np.abs(values := numpy_helper.to_array(tensor)).max() <= HALF_RANGE:
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}.half"))
            cast = onnx.helper.make_node("Cast", [tensor.name], [name], f"{name}.cast", to=onnx.TensorProto.FLOAT)
            model.graph.node.insert(0, cast)


def _finite(value: float, name: str) -> float:
    if not value < float("inf"):
        raise PrecisionError(f"{name} is {value}, which has no eight bits", hint="use --precision fp32")
    return value
