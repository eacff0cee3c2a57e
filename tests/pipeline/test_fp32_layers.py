"""The search finds exactly the islands that are needed, where one part of a model is made to need one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from contracts import build, contract, images
from too_large import large_ffn, large_residual, large_scores
from torch import nn

from vitcompress.cli import main
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import convert_precision
from vitcompress.exporters.ranges import Ranges, scan_ranges
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.io.checks import Check
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config
from vitcompress.pipeline import fp32_layers
from vitcompress.pipeline.fp32_layers import SCAN, Judge, Search, judge_of, narrowed, search
from vitcompress.verify.outputs import SHARES, compare, judged

X = images("plain", dtype=torch.float32)
FORMATS = [name for name in ("onnx", "trt-rtx") if EXPORTERS[name].unavailable() is None]


def plain() -> nn.Module:
    """Logits far enough apart for answers to be told from each other."""
    model = build("plain", dtype=torch.float32)
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(30)
    return model


def with_small_ffn() -> nn.Module:
    """Hidden channels of a few units of the smallest number that fp16 has, made large again behind the FFN.

    Nothing overflows, and yet a good part of each is lost.
    """
    model = build("layer_scale", dtype=torch.float32)
    with torch.no_grad():
        fc1, fc2 = (model.get_submodule(f"blocks.1.mlp.{name}") for name in ("fc1", "fc2"))
        fc1.weight.mul_(2e-7)
        fc1.bias.mul_(2e-7)
        fc2.weight.mul_(6e4)
        fc2.bias.zero_()
        model.get_submodule("blocks.1.ls2").gamma.mul_(500)
    return model


def torch_judge(model: nn.Module) -> Judge:
    """The module that is exported, in torch, which has kernels for fp16."""

    @torch.no_grad()
    def ask(islands: tuple[str, ...]) -> list[Check]:
        got = convert_precision(model, "fp16", islands)(X)
        return judged(compare(model(X), got, SHARES["fp16"]), SHARES["fp16"], "torch", "torch on the CPU")

    return Judge("torch", True, ask)


def found(model: nn.Module, fixed: Sequence[str] = ()) -> Search:
    return search(model, torch_judge(model), scan_ranges(model, X), X, fixed=fixed)


@pytest.mark.parametrize(
    ("made", "chosen", "first"),
    [
        (plain, (), None),
        (lambda: large_ffn(plain()), ("blocks.0.mlp",), SCAN),
        (lambda: large_scores(plain()), ("blocks.1.attn.softmax",), SCAN),
        (with_small_ffn, ("blocks.1.mlp",), "torch"),
    ],
)
def test_exactly_the_needed_islands_are_found(
    made: Callable[[], nn.Module], chosen: tuple[str, ...], first: str | None
) -> None:
    result = found(made())
    assert result.chosen == chosen and result.smallest and len(result.tries) <= 20
    verdicts = {tried.islands: tried for tried in result.tries}
    assert verdicts[chosen].verdict == "passed" and set(verdicts[chosen].figures) == {"flips", "kl", "cosine", "error"}
    assert (None if first is None else verdicts[()].by) == first
    assert first is None or verdicts[()].verdict == "failed"
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["chosen"] == list(chosen)


def test_only_a_search_that_ran_out_of_tries_is_not_known_to_be_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(with_small_ffn())
    for tries, proven in ((len(whole.tries), True), (len(whole.tries) - 1, False)):
        monkeypatch.setattr(fp32_layers, "LIMIT", tries)
        result = found(with_small_ffn())
        assert result.smallest is proven and len(result.tries) == tries
    assert not found(large_residual(plain())).smallest


def test_no_island_helps_a_residual_stream_that_is_too_large() -> None:
    result = found(large_residual(plain()))
    assert result.chosen is None and {tried.verdict for tried in result.tries} == {"failed"}
    assert result.tries[-1].islands == ("norm", "softmax", "head", "ffn")


def test_bf16_needs_none() -> None:
    model, options = plain(), ExportOptions(precision="bf16")
    judge = judge_of(EXPORTERS["onnx"], model, X, options, input_config(model))
    result = search(model, judge, Ranges({}, {}), X)
    assert result.chosen == () and len(result.tries) == 1 and "bf16" in result.judge
    assert result.proxy or torch.cuda.is_available()


def test_a_weight_that_no_scan_saw_fails_the_set_and_not_the_search() -> None:
    """Ranges that know nothing of it: the export itself refuses the weight, until it lies in an island."""
    model = plain()
    with torch.no_grad():
        model.get_submodule("head").weight[0, 0] = 1e6
    result = search(model, torch_judge(model), Ranges({}, {}), X)
    assert result.chosen == ("head",)
    assert "head.weight" in result.tries[0].reason and result.tries[0].verdict == "failed"


def test_what_is_named_stays_and_is_not_tried_without() -> None:
    result = found(large_ffn(plain()), fixed=("head",))
    assert result.chosen == ("head", "blocks.0.mlp")
    assert all("head" in tried.islands for tried in result.tries)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 4, 6}, set(range(9))])
def test_narrowing_leaves_what_is_needed(needed: set[int]) -> None:
    asked: list[Sequence[int]] = []

    def passes(items: Sequence[int]) -> bool:
        asked.append(items)
        return needed <= set(items)

    assert set(narrowed(range(9), passes)) == needed
    assert len(asked) < 3 * 9 * len(needed)


# ----------------------------------------------------------------------------------------------------- from the outside


def run_folder(folder: Path, model: nn.Module) -> Path:
    write_model(folder, model, contract("plain").plan)
    return folder


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    with pytest.raises(SystemExit) as ended:
        main(["export", *words, "--json"])
    return int(str(ended.value.code)), json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", FORMATS)
def test_the_command_line_chooses_and_records(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", large_ffn(plain()))
    code, told = called(capsys, str(folder), "--format", format, "--precision", "fp16", "--islands", "auto")
    assert code == 0
    path = folder / f"model-fp16{EXPORTERS[format].suffix}"
    sidecar = read_sidecar(path) or {}
    assert sidecar["islands_search"] == told["islands_search"]
    record = sidecar["islands_search"]
    assert record["chosen"] == ["blocks.0.mlp"] and json.loads(sidecar["metadata"]["islands"]) == record["chosen"]
    assert [tried["verdict"] for tried in record["tries"]] == ["failed", "passed"]
    ledger = {check["name"]: check for check in json.loads((folder / "verify.json").read_text())["checks"]}
    beneath = path.name if format == "onnx" else f"{path.name}.onnx"
    check = ledger[f"agreement.{beneath}.rounded.error"]
    assert check["verdict"] == "passed" and "a proxy" in check["detail"]


def test_where_no_set_will_do_nothing_is_left_that_looks_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run", large_residual(plain(), 5e4))
    code, told = called(capsys, str(folder), "--precision", "fp16", "--islands", "auto")
    assert code == 1 and "any set of fp32 islands" in json.dumps(told)
    assert [path.name for path in (folder / "failed").iterdir()] == ["model-fp16.onnx.islands.json"]
    assert not list(folder.glob("model-fp16*"))
