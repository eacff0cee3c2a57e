"""Leave out the computation of tokens that nobody reads.

A classifier that reads the class token needs one row of all that follows the last attention's keys and values: of its
scores and its output, of the FFN after it, and of every block behind that has lost its attention. No runtime sees this
by itself. Each row is computed as before, so that the answers are the same up to round-off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class Rows:
    """The first `count` entries along `axis`."""

    axis: int
    count: int


Demand = Rows | None  # None: all of it
Asked = dict[tuple[ir.Node, int], Demand]  # what a node needs of its inputs


def drop_unread_tokens(graph: ir.Graph) -> int:
    """Shorten every tensor of which only the first rows are read; how many became shorter."""
    asked, shorter = _demands(graph)
    cuts: dict[tuple[ir.Value, Rows], ir.Value] = {}
    for value, rows in shorter.items():
        node = value.producer()
        assert node is not None
        for index, given in enumerate(node.inputs):
            need = asked[node, index]
            if given is not None and need is not None and given not in shorter:
                node.replace_input_with(index, _cut(graph, given, need, cuts))
        if node.op_type == "Reshape":
            node.replace_input_with(1, _with_size(graph, node, rows))
        value.shape = _with_dim(value, rows)
    return len(shorter)


def _demands(graph: ir.Graph) -> tuple[Asked, dict[ir.Value, Rows]]:
    """Backwards: what each node needs of its inputs, and the values that can be shorter."""
    asked: Asked = {}
    shorter: dict[ir.Value, Rows] = {}
    for node in reversed(list(graph)):
        needs: Sequence[Demand] | None = None
        if node.op_type == "Gather":
            needs = _read(node)
        elif len(node.outputs) == 1 and (rows := _wanted(node.outputs[0], asked)) and node.op_type in RULES:
            needs = RULES[node.op_type](node, rows)
            if needs is not None:
                shorter[node.outputs[0]] = rows
        for index in range(len(node.inputs)):
            asked[node, index] = needs[index] if needs is not None and index < len(needs) else None
    return asked, shorter


def _wanted(value: ir.Value, asked: Mapping[tuple[ir.Node, int], Demand]) -> Demand:
    """What all that read `value` need of it together."""
    needs = [asked[use.node, use.idx] for use in value.uses()]
    rows = [need for need in needs if need is not None]
    axes = {need.axis for need in rows}
    if value.is_graph_output() or value.shape is None or len(rows) != len(needs) or len(axes) != 1:
        return None
    found = Rows(axes.pop(), max(need.count for need in rows))
    size = value.shape[found.axis]
    return found if isinstance(size, int) and found.count < size else None


def _read(node: ir.Node) -> Sequence[Demand] | None:
    """A Gather of one entry needs all entries up to it; the first axis is the batch."""
    data, index = node.inputs
    axis = _axis(node, data, default=0)
    at = None if index is None or index.const_value is None else index.const_value.numpy()
    if axis is None or axis < 1 or at is None or at.size != 1 or int(at.item()) < 0:
        return None
    return [Rows(axis, int(at.item()) + 1)]


# ---------------------------------------------------------------------------------------------------------------- rules


def _same(node: ir.Node, rows: Rows) -> Sequence[Demand]:
    return [rows]


def _along_others(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """Softmax and LayerNormalization work along the last axes, each row for itself."""
    axis = _axis(node, node.inputs[0], default=-1)
    return [rows] if axis is not None and rows.axis < axis else None


def _broadcast(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    rank = _rank(node.outputs[0])
    needs: list[Demand] = []
    for value in node.inputs:
        if value is None or value.shape is None:
            return None
        axis = rows.axis - (rank - len(value.shape))
        needs.append(Rows(axis, rows.count) if axis >= 0 and value.shape[axis] != 1 else None)
    return needs


def _product(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    rank = _rank(node.outputs[0])
    return [rows, None] if rows.axis == rank - 2 and _rank(node.inputs[0]) == rank else None


def _transposed(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
    return [Rows(perm[rows.axis], rows.count)] if perm else None


def _reshaped(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """Where all axes up to the shortened one stay as they are."""
    before, after, target = node.inputs[0], node.outputs[0], node.inputs[1]
    if before is None or before.shape is None or after.shape is None or target is None or target.const_value is None:
        return None
    kept = rows.axis + 1
    same = list(before.shape)[:kept] == list(after.shape)[:kept]
    return [rows, None] if same and int(target.const_value.numpy()[rows.axis]) == after.shape[rows.axis] else None


def _attended(node: ir.Node, rows: Rows) -> Sequence[Demand] | None:
    """The Attention operator on (batch, heads, tokens, channels), without a mask: a row per query."""
    causal = node.attributes["is_causal"].as_int() if "is_causal" in node.attributes else 0
    masked = any(value is not None for value in node.inputs[3:])
    return [rows, None, None] if not causal and not masked and _rank(node.inputs[0]) == 4 and rows.axis == 2 else None


RULES: dict[str, Callable[[ir.Node, Rows], Sequence[Demand] | None]] = {
    **dict.fromkeys(("Gelu", "Erf", "Tanh", "Relu", "Sigmoid", "Cast"), _same),
    **dict.fromkeys(("LayerNormalization", "Softmax"), _along_others),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _broadcast),
    "MatMul": _product,
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Attention": _attended,
}


def _axis(node: ir.Node, value: ir.Value | None, default: int) -> int | None:
    """A node's `axis`, counted from the front; None where the rank is not known."""
    if value is None or value.shape is None:
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else default
    return axis % len(value.shape)


def _rank(value: ir.Value | None) -> int:
    return -1 if value is None or value.shape is None else len(value.shape)


# ---------------------------------------------------------------------------------------------------------------- edits


def _cut(graph: ir.Graph, value: ir.Value, rows: Rows, known: dict[tuple[ir.Value, Rows], ir.Value]) -> ir.Value:
    """The first rows of a value that others read whole; of a constant as a constant."""
    if (value, rows) not in known:
        name = f"{value.name}.first{rows.count}"
        if value.const_value is not None:
            whole = value.const_value.numpy()
            known[value, rows] = constant(graph, np.take(whole, np.arange(rows.count), rows.axis), name)
        else:
            bounds = [constant(graph, np.array([n]), f"{name}.{k}") for k, n in enumerate((0, rows.count, rows.axis))]
            node = ir.node("Slice", [value, *bounds], name=name)
            node.outputs[0].name, node.outputs[0].type = name, value.type
            node.outputs[0].shape = _with_dim(value, rows)
            before = value.producer()
            assert before is not None
            graph.insert_after(before, node)
            known[value, rows] = node.outputs[0]
    return known[value, rows]


def constant(graph: ir.Graph, values: np.ndarray, name: str) -> ir.Value:
    """A new initialiser, named `name` and made unique."""
    while name in graph.initializers:
        name += "_"
    value = ir.Value(name=name, const_value=ir.tensor(values, name=name))
    value.shape, value.type = ir.Shape(values.shape), ir.TensorType(ir.DataType.from_numpy(values.dtype))
    graph.register_initializer(value)
    return value


def _with_size(graph: ir.Graph, node: ir.Node, rows: Rows) -> ir.Value:
    """The target of a Reshape with the shorter size."""
    target: Any = node.inputs[1]
    sizes = target.const_value.numpy().copy()
    sizes[rows.axis] = rows.count
    return constant(graph, sizes, f"{target.name}.first{rows.count}")


def _with_dim(value: ir.Value, rows: Rows) -> ir.Shape:
    assert value.shape is not None
    return ir.Shape([rows.count if axis == rows.axis else size for axis, size in enumerate(value.shape)])
