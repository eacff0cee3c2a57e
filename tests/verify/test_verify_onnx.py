"""Each thing that can be wrong with an ONNX file fails the check that is made for it, and no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from contracts import build, images
from onnx import helper, numpy_helper
from torch import Tensor

from vitcompress.exporters.onnx.export import export
from vitcompress.io.checks import Check
from vitcompress.models.create import input_config
from vitcompress.verify import onnx as verify_onnx
from vitcompress.verify import outputs
from vitcompress.verify.onnx import _logits, file_checks, onnx_checks, structure_checks
from vitcompress.verify.tolerance import reference

MODEL = build("plain", dtype=torch.float32)
X = images("plain", count=20, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(MODEL, tmp_path_factory.mktemp("made") / "model.onnx", input=input_config(MODEL)).path


def edited(made: Path, folder: Path, edit: Callable[[Any], object]) -> Path:
    model = onnx.load(str(made))
    edit(model.graph)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def wrong(checks: list[Check]) -> dict[str, str]:
    return {check.name.removeprefix("onnx."): check.detail for check in checks if check.verdict != "passed"}


def weight_of(graph: Any, sizes: set[int], number: int = 0) -> Any:
    return [tensor for tensor in graph.initializer if len(tensor.dims) == 2 and set(tensor.dims) == sizes][number]


def times_zero(graph: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(np.zeros((1, 5), np.float32), "nothing"))
    graph.node.append(helper.make_node("Mul", [graph.output[0].name, "nothing"], ["product"], name="masked"))


def passed_on(graph: Any) -> None:
    graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["same"], name="idle"))


def once_more(graph: Any) -> None:
    node = next(node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in names(graph))
    graph.node.append(helper.make_node("MatMul", [node.input[0], node.input[1]], ["again"]))


def one_less(graph: Any) -> None:
    graph.node.remove(
        next(node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in names(graph))
    )


def names(graph: Any) -> set[str]:
    return {tensor.name for tensor in graph.initializer}


def other_operator(old: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        next(node for node in graph.node if node.op_type == old).op_type = "Other"

    return change


@pytest.mark.parametrize(
    ("edit", "check", "says"),
    [
        (times_zero, "idle", "1 wrong: masked (times zero)"),
        (passed_on, "idle", "1 wrong: idle"),
        (once_more, "shapes", "in the file, "),
        (one_less, "shapes", "in the file, "),
        (other_operator("Softmax"), "layers", "1 wrong: attentions: 1 in the file, 2 in torch"),
        (other_operator("Gelu"), "layers", "1 wrong: GELUs: 1 in the file, 2 in torch"),
        (other_operator("LayerNormalization"), "layers", "1 wrong: LayerNorms: 4 in the file, 5 in torch"),
    ],
)
def test_what_is_wrong_with_the_graph(
    edit: Callable[[Any], None], check: str, says: str, made: Path, tmp_path: Path
) -> None:
    assert wrong(structure_checks(MODEL, made)) == {}
    ((name, detail),) = wrong(structure_checks(MODEL, edited(made, tmp_path, edit))).items()
    assert name == check and says in detail


def test_a_file_that_is_not_well_formed_or_was_replaced(made: Path, tmp_path: Path) -> None:
    assert wrong(file_checks(made)) == {}
    unknown = edited(made, tmp_path, other_operator("Softmax"))
    assert set(wrong(file_checks(unknown))) == {"checker"}  # no sidecar lies beside it

    def of_another_size(graph: Any) -> None:
        graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7

    assert set(wrong(file_checks(edited(made, tmp_path, of_another_size)))) == {"checker"}
    sidecar = made.with_name("model.onnx.json")
    (tmp_path / sidecar.name).write_bytes(sidecar.read_bytes())
    (tmp_path / made.name).write_bytes(made.read_bytes())
    assert wrong(file_checks(tmp_path / made.name)) == {}
    assert set(wrong(file_checks(edited(made, tmp_path, passed_on)))) == {"file"}


def test_it_is_asked_at_batches_of_one_two_and_five_and_then_for_every_image(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = list[int](), _logits

    def counted(session: Any, given: Tensor) -> Tensor:
        asked.append(len(given))
        return answer(session, given)

    monkeypatch.setattr(verify_onnx, "_logits", counted)
    allowed, agree = list[float](), outputs.agreement_check

    def limited(name: str, expected: Tensor, got: Tensor, tolerance: float) -> Check:
        allowed.append(tolerance)
        return agree(name, expected, got, tolerance)

    monkeypatch.setattr(verify_onnx, "agreement_check", limited)
    checks = {check.name: check for check in onnx_checks(MODEL, made, X)}
    assert allowed == [reference(MODEL, X[:5]).between]
    assert asked == [1, 1, 2, 5, 16, 4]  # the first time to see the shape of an answer
    assert {check.verdict for check in checks.values()} == {"passed"}
    assert checks["onnx.agreement"].detail.startswith("0 of 20 ")
    asked.clear()
    assert wrong(onnx_checks(MODEL, made, X[:2])) == {}
    assert asked == [1, 1, 2, 5, 6]  # three times the two


def test_answers_are_held_against_their_rounding_and_those_of_other_weights_fail(made: Path, tmp_path: Path) -> None:
    truth = reference(MODEL, X[:5])
    checks = {check.name: check for check in onnx_checks(MODEL, made, X)}
    batches = [checks[f"onnx.batch{size}"] for size in (1, 2, 5)]
    assert {check.tolerance for check in batches} == {truth.tolerance}
    assert all(check.value and 0 < check.value <= truth.tolerance for check in batches)

    def negated(graph: Any) -> None:
        head = weight_of(graph, {16, 5})
        head.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(head), head.name))

    found = wrong(onnx_checks(MODEL, edited(made, tmp_path, negated), X))
    assert set(found) == {"batch1", "batch2", "batch5", "agreement"}


def test_bf16_is_not_asked_on_the_cpu(made: Path, tmp_path: Path) -> None:
    model = onnx.load(str(made))
    told = {entry.key: entry for entry in model.metadata_props}
    told["precision"].value = '"bf16"'
    onnx.save(model, str(tmp_path / "model.onnx"))
    (check,) = (check for check in onnx_checks(MODEL, tmp_path / "model.onnx", X) if check.name == "onnx.batch1")
    assert (check.verdict, check.command) == ("not_run", f"vitcompress verify {tmp_path}")
    assert wrong(onnx_checks(MODEL, tmp_path / "model.onnx", X)).keys() == {"batch1"}
