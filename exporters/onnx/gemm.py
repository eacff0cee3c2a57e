"""Join every linear layer into one Gemm, on tokens in rows.

torch exports a linear layer on (batch, tokens, channels) as MatMul and Add, which ONNX Runtime joins for matrices only.
Operations on each channel stay in rows, (batch x tokens, channels), with reshapes only around attentions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir

from vitcompress.exporters.onnx.tokens import BINARY, UNARY, constant, create_node


def join_linear_layers(graph: ir.Graph) -> None:
    """Write every linear layer as a Gemm. The caller removes unread nodes."""
    layers = {node: layer for node in graph if (layer := _linear(node))}
    products = {product for product, _ in layers.values()}
    rows = _Rows(graph)
    for node in list(graph):
        if node in layers:
            product, bias = layers[node]
            rows.replace(node, "Gemm", [rows.of(product.inputs[0], node), product.inputs[1], bias], {})
        elif _is_per_channel(node, rows):
            inputs = [v if v is None or _is_vector(v) else rows.of(v, node) for v in node.inputs]
            rows.replace(node, node.op_type, inputs, node.attributes)
        elif node not in products:  # it needs inputs with all axes; for a Reshape rows have the same order
            for index, value in enumerate(node.inputs):
                if value is not None and value in rows.replaced:
                    as_rows = index == 0 and _keeps_order(node)
                    node.replace_input_with(index, rows.of(value, node) if as_rows else rows.whole(value, node))


def multiply_patches(graph: ir.Graph) -> None:
    """Write convolutions of separate patches as a Gemm, if tensor cores do not support them.

    On an H100 ONNX Runtime is 1.05 to 1.09 times as fast with it (DeiT-S in fp16, dense and pruned, 256 images). The
    weight keeps its shape: runtimes fold the Reshape of a constant.
    """
    for node in [node for node in graph if node.op_type == "Conv" and _needs_product(node)]:
        _replace_convolution(graph, node)


def _needs_product(node: ir.Node) -> bool:
    """Whether a convolution reads every place of its images once, with too few channels for tensor cores."""
    images, weight = node.inputs[:2]
    if images is None or images.shape is None or weight is None or weight.shape is None or len(weight.shape) != 4:
        return False
    channels, *patch = weight.shape.numpy()[1:]
    strides, pads = (node.attributes.get_ints(name, ()) for name in ("strides", "pads"))
    whole = all(isinstance(side, int) and side % step == 0 for side, step in zip(images.shape[2:], patch, strict=True))
    return whole and channels < 8 and [*strides] == patch and not any(pads) and channels == images.shape[1]


def _replace_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """By a Gemm on the patches in rows: cut the images, bring each patch together, multiply, and restore the maps."""
    (images, weight, *bias), (maps,) = node.inputs, node.outputs
    assert weight is not None and weight.shape is not None and maps.shape is not None
    (width, channels, high, wide), (rows, columns) = weight.shape.numpy(), maps.shape[2:]

    def add(kind: str, inputs: Sequence[ir.Value | None], suffix: str, shape: Sequence[Any], **more: Any) -> ir.Value:
        new = create_node(kind, inputs, f"{maps.name}.{suffix}", maps, ir.Shape(shape), **more)
        graph.insert_before(node, new)
        return new.outputs[0]

    cut = _reshape(graph, images, maps, [None, channels, rows, high, columns, wide], "cut", node)
    patches = add("Transpose", [cut], "patches", [None, rows, columns, channels, high, wide], perm=[0, 2, 4, 1, 3, 5])
    length = channels * high * wide
    in_rows = _reshape(graph, patches, maps, [None, length], "rows", node)
    matrix = _reshape(graph, weight, maps, [width, length], "matrix", node)
    product = add("Gemm", [in_rows, matrix, *bias], "product", [None, width], transB=1)
    whole = _reshape(graph, product, maps, [None, rows, columns, width], "whole", node)
    ir.convenience.replace_all_uses_with(maps, add("Transpose", [whole], "maps", list(maps.shape), perm=[0, 3, 1, 2]))
    graph.remove(node, safe=True)


class _Rows:
    """Values as (all tokens, channels). `replaced`: values that are no longer computed with all their axes."""

    def __init__(self, graph: ir.Graph) -> None:
        self.replaced = set[ir.Value]()
        self._graph, self._rows, self._whole = graph, dict[ir.Value, ir.Value](), dict[ir.Value, ir.Value]()

    def __contains__(self, value: ir.Value | None) -> bool:
        return value in self._rows

    def of(self, value: ir.Value | None, before: ir.Node) -> ir.Value:
        """`value` in rows, with a Reshape inserted before the node that needs it, unless it is in rows already."""
        assert value is not None and value.shape is not None
        if value not in self._rows:
            producer = value.producer()
            source = producer.inputs[0] if producer is not None and _keeps_order(producer) else value
            self._rows[value] = _reshape(self._graph, source, value, [None, value.shape[-1]], "rows", before)
        return self._rows[value]

    def whole(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """A replaced value with all its axes, for a node that needs them."""
        if value not in self._whole:
            assert value.shape is not None
            self._whole[value] = _reshape(self._graph, self._rows[value], value, list(value.shape), "whole", before)
        return self._whole[value]

    def replace(
        self, node: ir.Node, kind: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]
    ) -> None:
        """Insert a node that works on rows before `node`, which it replaces."""
        (value,) = node.outputs
        assert value.shape is not None
        new = create_node(kind, inputs, f"{value.name}.rows", value, ir.Shape([None, value.shape[-1]]), **attributes)
        new.name = f"{node.name}.rows"
        self._graph.insert_before(node, new)
        self._rows[value] = new.outputs[0]
        self.replaced.add(value)


def _reshape(
    graph: ir.Graph, source: ir.Value | None, like: ir.Value, shape: Sequence[Any], suffix: str, before: ir.Node
) -> ir.Value:
    """`source` in a `shape` whose first size follows from the others, with the type of `like`."""
    name = f"{like.name}.{suffix}"
    sizes = constant(graph, np.array([-1, *shape[1:]], dtype=np.int64), f"{name}.sizes")
    node = create_node("Reshape", [source, sizes], name, like, ir.Shape(shape))
    graph.insert_before(before, node)
    return node.outputs[0]


def _linear(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The product and the bias of the linear layer that ends with this node, or None."""
    if node.op_type != "Add" or not _can_be_rows(node.outputs[0]):
        return None
    for value, bias in (node.inputs, node.inputs[::-1]):
        product = value.producer() if value is not None else None
        if product is None or product.op_type != "MatMul" or not _is_constant(bias, rank=1):
            continue
        only_use = len(list(product.outputs[0].uses())) == 1 and not product.outputs[0].is_graph_output()
        if only_use and _is_constant(product.inputs[1], rank=2) and _can_be_rows(product.inputs[0]):
            return product, bias
    return None


def _is_per_channel(node: ir.Node, rows: _Rows) -> bool:
    """Whether a node works on each channel, or along the channels, of a value that is in rows already."""
    if len(node.outputs) != 1 or not _can_be_rows(node.outputs[0]) or not any(value in rows for value in node.inputs):
        return False
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) == -1  # other numbers differ between rows and all axes
    shape = node.outputs[0].shape
    same_shape = all(value is not None and (_is_vector(value) or value.shape == shape) for value in node.inputs)
    return node.op_type in UNARY or (node.op_type in BINARY and same_shape)


def _keeps_order(node: ir.Node) -> bool:
    """Whether this is a Reshape whose sizes do not depend on those of its input."""
    sizes = node.inputs[1] if node.op_type == "Reshape" else None
    return sizes is not None and sizes.const_value is not None and 0 not in sizes.const_value.numpy()


def _can_be_rows(value: ir.Value | None) -> bool:
    """Whether a value has tokens, and a known size along every axis but the first."""
    if value is None or value.shape is None or len(value.shape) < 3 or value.is_graph_output():
        return False
    return all(isinstance(size, int) for size in list(value.shape)[1:])


def _is_constant(value: ir.Value | None, rank: int) -> TypeGuard[ir.Value]:
    return value is not None and value.const_value is not None and value.shape is not None and len(value.shape) == rank


def _is_vector(value: ir.Value) -> bool:
    """Whether a value has one number per channel, or only one."""
    return value.shape is not None and len(value.shape) <= 1
