"""Remove the computation of tokens that no operation reads.

A classifier that reads the class token needs one row of everything after the keys and values of the last attention. No
runtime detects this. Each remaining row is computed as before: the outputs are the same up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class Rows:
    """The first `count` entries along `axis`."""

    axis: int
    count: int


UNARY = ("Gelu", "Erf", "Tanh", "Relu", "Sigmoid")
BINARY = ("Add", "Sub", "Mul", "Div")
Demand = Rows | None  # None: all of it
Slices = dict[tuple[ir.Value, Rows], ir.Value]
Demands = dict[tuple[ir.Node, int], Rows]  # (node, number of an input) -> what the node needs of it, if not all


def drop_unread_tokens(graph: ir.Graph) -> None:
    """Shorten every tensor of which only the first rows are read."""
    demands, shorter = _find_demands(graph)
    slices: Slices = {}
    for value, rows in shorter.items():
        node: Any = value.producer()
        for index, source in enumerate(node.inputs):
            need = demands.get((node, index))
            if source is not None and need is not None and source not in shorter:
                node.replace_input_with(index, _first_rows(graph, source, need, slices))
        if node.op_type == "Reshape":
            target: Any = node.inputs[1]
            sizes = target.const_value.numpy().copy()
            sizes[rows.axis] = rows.count
            node.replace_input_with(1, constant(graph, sizes, f"{target.name}.first{rows.count}"))
        value.shape = _with_dim(value, rows)


def _find_demands(graph: ir.Graph) -> tuple[Demands, dict[ir.Value, Rows]]:
    """Backwards through the graph: what each node needs of its inputs, and the values that can be shorter."""
    demands: Demands = {}
    shorter: dict[ir.Value, Rows] = {}
    for node in reversed(list(graph)):
        needs: Sequence[Demand] | None = None
        if node.op_type == "Gather":
            needs = _gather(node)
        elif len(node.outputs) == 1 and (rows := _joint_demand(node.outputs[0], demands)) and node.op_type in RULES:
            needs = RULES[node.op_type](node, rows)
            if needs is not None:
                shorter[node.outputs[0]] = rows
        demands |= {(node, index): need for index, need in enumerate(needs or ()) if need is not None}
    return demands, shorter


def _joint_demand(value: ir.Value, demands: Demands) -> Demand:
    """What all readers of `value` need of it together."""
    needs = [demands.get((use.node, use.idx)) for use in value.uses()]
    rows = [need for need in needs if need is not None]
    axes = {need.axis for need in rows}
    if value.is_graph_output() or value.shape is None or len(rows) != len(needs) or len(axes) != 1:
        return None
    joint = Rows(axes.pop(), max(need.count for need in rows))
    size = value.shape[joint.axis]
    return joint if isinstance(size, int) and joint.count < size else None


def _gather(node: ir.Node) -> Sequence[Demand] | None:
    """A Gather of one entry needs all entries up to it; the first axis is the batch."""
    data, index = node.inputs
    axis = _axis(node, data, default=0)
    position = None if index is None or index.const_value is None else index.const_value.numpy()
    if axis is None or axis < 1 or position is None or position.size != 1 or int(position.item()) < 0:
        return None
    return [Rows(axis, int(position.item()) + 1)]


# ----------------------------------------- rules: rows of an output that are read -> rows of the inputs that are needed


def _broadcast(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    needs: list[Demand] = []
    for value in node.inputs:
        if value is None or value.shape is None:
            return None
        axis = rows.axis - (_rank(node.outputs[0]) - len(value.shape))
        needs.append(Rows(axis, rows.count) if axis >= 0 and value.shape[axis] != 1 else None)
    return needs


def _along_last_axes(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """Softmax and LayerNormalization reduce along the last axes, each row separately."""
    axis = _axis(node, node.inputs[0], default=-1)
    return _broadcast(node, rows) if axis is not None and rows.axis < axis else None


def _matmul(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    rank = _rank(node.outputs[0])
    return [rows, None] if rows.axis == rank - 2 and _rank(node.inputs[0]) == rank else None


def _transpose(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    perm = node.attributes.get_ints("perm", ())
    return [Rows(perm[rows.axis], rows.count)] if perm else None


def _reshape(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """Only if all axes up to the shortened one keep their sizes."""
    before, after, target = node.inputs[0], node.outputs[0], node.inputs[1]
    if before is None or before.shape is None or after.shape is None or target is None or target.const_value is None:
        return None
    end = rows.axis + 1
    same = list(before.shape)[:end] == list(after.shape)[:end]
    return [rows, None] if same and int(target.const_value.numpy()[rows.axis]) == after.shape[rows.axis] else None


def _attention(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """The Attention operator on (batch, heads, tokens, channels), without a mask: one row per query."""
    masked = node.attributes.get_int("is_causal", 0) or any(value is not None for value in node.inputs[3:])
    return [rows, None, None] if not masked and _rank(node.inputs[0]) == 4 and rows.axis == 2 else None


RULES: dict[str, Callable[[ir.Node, Rows], Sequence[Demand] | None]] = {
    **dict.fromkeys((*UNARY, "Cast", *BINARY), _broadcast),
    **dict.fromkeys(("LayerNormalization", "Softmax"), _along_last_axes),
    "MatMul": _matmul,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Attention": _attention,
}


def _axis(node: ir.Node, value: ir.Value | None, default: int) -> int | None:
    """A node's `axis` as a non-negative number; None if the rank is unknown."""
    if value is None or value.shape is None:
        return None
    return node.attributes.get_int("axis", default) % len(value.shape)


def _rank(value: ir.Value | None) -> int:
    return -1 if value is None or value.shape is None else len(value.shape)


def _first_rows(graph: ir.Graph, value: ir.Value, rows: Rows, slices: Slices) -> ir.Value:
    """The first rows of a value that others read whole: a Slice, or for constants another constant."""
    if (value, rows) not in slices:
        name = f"{value.name}.first{rows.count}"
        if value.const_value is not None:
            whole = value.const_value.numpy()
            slices[value, rows] = constant(graph, np.take(whole, np.arange(rows.count), rows.axis), name)
        else:
            bounds = [constant(graph, np.array([n]), f"{name}.{k}") for k, n in enumerate((0, rows.count, rows.axis))]
            node = create_node("Slice", [value, *bounds], name, value, _with_dim(value, rows))
            producer = value.producer()
            assert producer is not None
            graph.insert_after(producer, node)
            slices[value, rows] = node.outputs[0]
    return slices[value, rows]


def constant(graph: ir.Graph, values: np.ndarray, name: str) -> ir.Value:
    """A new initializer with a unique name that starts with `name`."""
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(values, name=name)
    value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def create_node(
    kind: str, inputs: Sequence[ir.Value | None], name: str, like: ir.Value, shape: ir.Shape, **attributes: Any
) -> ir.Node:
    """A node with one output `name`, which has the type of `like` and `shape`."""
    return ir.node(kind, inputs, attributes, name=name, outputs=[ir.Value(name=name, type=like.type, shape=shape)])


def _with_dim(value: ir.Value, rows: Rows) -> ir.Shape:
    assert value.shape is not None
    return ir.Shape([rows.count if axis == rows.axis else size for axis, size in enumerate(value.shape)])
