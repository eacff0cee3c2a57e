"""Join every linear layer into one Gemm, on tokens in rows.

torch exports a linear layer on (batch, tokens, channels) as MatMul and Add, which ONNX Runtime joins for matrices only.
Operations on each channel stay in rows, (batch x tokens, channels), with reshapes only around attentions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from vitcompress.exporters.onnx.tokens import BINARY, UNARY, constant, create_node


def join_linear_layers(graph: ir.Graph) -> int:
    """Write every linear layer as a Gemm, and return their number. The caller removes unread nodes."""
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
    return len(layers)


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
            self._rows[value] = self._reshape(source, value, [None, value.shape[-1]], "rows", before)
        return self._rows[value]

    def whole(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """A replaced value with all its axes, for a node that needs them."""
        if value not in self._whole:
            assert value.shape is not None
            self._whole[value] = self._reshape(self._rows[value], value, list(value.shape), "whole", before)
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
        self, source: ir.Value | None, value: ir.Value, shape: Sequence[Any], suffix: str, before: ir.Node
    ) -> ir.Value:
        """`value`, from `source` with the same order, in a shape whose first size depends on the batch."""
        name = f"{value.name}.{suffix}"
        sizes = constant(self._graph, np.array([-1, *shape[1:]], dtype=np.int64), f"{name}.sizes")
        node = create_node("Reshape", [source, sizes], name, value, ir.Shape(shape))
        self._graph.insert_before(before, node)
        return node.outputs[0]


def _linear(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The product and the bias of the linear layer that ends with this node, or None."""
    if node.op_type != "Add" or not _can_be_rows(node.outputs[0]):
        return None
    for value, bias in (node.inputs, node.inputs[::-1]):
        product = value.producer() if value is not None else None
        if product is None or product.op_type != "MatMul" or not _is_constant(bias, rank=1):
            continue
        assert bias is not None
        only_use = len(list(product.outputs[0].uses())) == 1 and not product.outputs[0].is_graph_output()
        if only_use and _is_constant(product.inputs[1], rank=2) and _can_be_rows(product.inputs[0]):
            return product, bias
    return None


def _is_per_channel(node: ir.Node, rows: _Rows) -> bool:
    """Whether a node works on each channel, or along the channels, of a value that is in rows already."""
    if len(node.outputs) != 1 or not _can_be_rows(node.outputs[0]) or not any(value in rows for value in node.inputs):
        return False
    shape = node.outputs[0].shape
    assert shape is not None
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) in (-1, len(shape) - 1)
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


def _is_constant(value: ir.Value | None, rank: int) -> bool:
    return value is not None and value.const_value is not None and value.shape is not None and len(value.shape) == rank


def _is_vector(value: ir.Value) -> bool:
    """Whether a value has one number per channel, or only one."""
    return value.shape is not None and len(value.shape) <= 1
