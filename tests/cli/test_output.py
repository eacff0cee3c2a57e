"""The terminal: results on standard output, everything else on standard error, no markup in texts."""

import io
import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from vitcompress.cli.output import tables, terminal
from vitcompress.cli.output.terminal import ConsoleProgress, error_as_data, print_error, print_json, print_table
from vitcompress.errors import CheckFailedError, InputError, RecipeError, VitcompressError
from vitcompress.io.text import Table
from vitcompress.models.cost import Cost
from vitcompress.pipeline.dry_run import DryRun, Work


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def panels(text: str) -> int:
    return text.count("╭")


def test_an_error_is_one_panel_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(InputError("step[0].lr [bold]is[/bold] wrong: [/]", hint="try [0.1, 0.2]"))
    out, err = capsys.readouterr()
    assert out == "" and panels(err) == 1
    assert "step[0].lr [bold]is[/bold] wrong: [/]" in err and "try [0.1, 0.2]" in err and "invalid input" in err


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (InputError("x"), "invalid input"),
        (CheckFailedError("x"), "check failed"),
        (VitcompressError("x"), "failed"),
    ],
)
def test_the_panel_has_the_kind_of_error(
    error: VitcompressError, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(error)
    assert title in capsys.readouterr().err


def test_an_error_as_data_keeps_the_problems_apart() -> None:
    data = error_as_data(RecipeError("my.toml", ["a   unknown key", "b   is missing"], hint="look"))
    assert data["problems"] == ["a   unknown key", "b   is missing"] and data["hint"] == "look"
    assert "2 problems" in data["error"] and data["kind"] == "RecipeError"


@pytest.mark.parametrize(("columns", "rendered"), [(80, False), (160, True)])
def test_tables_of_a_document_are_not_cut(columns: int, rendered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a long name of column {number}" for number in range(5)]
    text = f"| {' | '.join(names)} |\n|{' --- |' * 5}\n| {' | '.join(names)} |\n"
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.print_document(text, "markdown")
    assert all(shown.getvalue().count(name) == 2 for name in names)
    assert ("---" in shown.getvalue()) is not rendered


def test_standard_output_has_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, 2.5], "b": None})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": [1, 2.5], "b": None} and err == ""


def test_a_table_keeps_brackets_and_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table("before and after", ("figure", "dense"), (("top-1 [%]", "97.5"), ("file", ""))))
    out, err = capsys.readouterr()
    assert "top-1 [%]" in out and "97.5" in out and "before and after" in out and err == ""


def test_checks_have_a_verdict_a_value_and_the_command_for_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_checks(
        [
            {"name": "fold", "verdict": "passed", "value": 1.23456e-7, "tolerance": 1e-5, "detail": ""},
            {"name": "trt", "verdict": "not_run", "value": None, "tolerance": None, "command": "vitcompress verify X"},
        ]
    )
    out = capsys.readouterr().out
    assert "1.23e-07" in out and "passed" in out and "not run" in out and "vitcompress verify X" in out


def test_progress_in_a_pipe_is_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress() as progress:
        progress.stage("Train [dense]")
        progress.update("epochs", 1, 2, "loss 1.0")
        progress.update("epochs", 2, 2, "loss 0.5")
        progress.note("kept [3, 4]")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  (")[0].rstrip() for line in err.splitlines()] == [
        "Train [dense]",
        "  epochs  2/2  loss 0.5",
        "  kept [3, 4]",
    ]


def test_progress_in_a_terminal_draws_a_bar_and_leaves_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ConsoleProgress() as progress:
        progress.stage("Train")
        progress.update("epochs", 1, 2, "loss [1.0]")
        progress.update("epochs", 2, 2, "loss [0.5]")
    assert "1/2" in terminal.getvalue() and "loss [1.0]" in terminal.getvalue()
    assert "epochs  2/2  loss [0.5]" in terminal.getvalue()


def test_a_new_stage_removes_unfinished_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ConsoleProgress() as progress:
        progress.update("first", 1, 9)
        progress.stage("Next")
        progress.update("second", 1, 9)
        before = len(terminal.getvalue())
    assert "first" not in terminal.getvalue()[before:]


def test_a_dry_run_lists_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    cost = Cost(params=87338192, macs=17656811520, macs_linear=16934203392)
    plan = DryRun(
        "r",
        "runs/r",
        [Work("fine-tune", 1, 400)],
        "published",
        {"dense": cost, "compressed": cost},
        missing=["data: no folder [x]"],
        notes=["weights [hub]: fetched"],
        settings=[],
    )
    tables.print_dry_run(plan)
    out = capsys.readouterr().out
    assert (
        "87,338,192" in out
        and "fine-tune" in out
        and "400" in out
        and "published" in out
        and "?" in out
        and "data: no folder [x]" in out
        and "Note: weights [hub]: fetched" in out
    )
    tables.print_dry_run(replace(plan, missing=[], layers=""))  # of steps that choose nothing
    out = capsys.readouterr().out
    assert "Nothing is missing" in out and "Cost" in out and "layers or channels" not in out


@pytest.mark.parametrize("width", [60, 200])
def test_columns_with_one_value_move_below_a_table_that_is_too_wide(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("artifact", "runtime", "precision", "protocol", "images/s")
    same = ("onnxruntime cpu", "fp32", "robust-10/100/256")
    print_table(Table("", columns, (("dense.onnx", *same, "1,084"), ("model.onnx", *same, "2,211"))))
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    line = "all: runtime onnxruntime cpu, precision fp32, protocol robust-10/100/256"
    assert (line in drawn) == (width == 60)
    assert all(text in drawn for text in ("artifact", "images/s", "dense.onnx", "2,211", "onnxruntime cpu"))
    assert all(len(line) <= width for line in drawn.splitlines() if not line.startswith("all:"))


@pytest.mark.parametrize("others", [1, 2])
def test_the_number_of_hidden_warnings_is_printed(others: int, capsys: pytest.CaptureFixture[str]) -> None:
    bench: Any = {"rows": [], "disturbed": [], "warnings": ["noisy"] * 5, "notes": ["shared"] * others}
    tables.print_bench(bench, Table("Speed", ("artifact",), ()), notes=False)
    assert f"warnings and notes not shown: {others} (--notes prints them)\n" in capsys.readouterr().err
    tables.print_bench(bench, Table("Speed", ("artifact",), ()), notes=True)
    assert "not shown" not in capsys.readouterr().err


@pytest.mark.parametrize(("width", "listed"), [(40, True), (66, False), (80, False), (200, False)])
@pytest.mark.parametrize("wrap", [False, True])
def test_no_word_is_split(width: int, listed: bool, wrap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("artifact", "top-1", "images/s", "sha256", "95 % interval")
    rows = (
        ("dense.onnx", "38.52 % (208/540)", "2,162", "10f4a845f758", "34.51 to 42.69 %"),
        ("model.onnx", "39.26 % (212/540)", "12,229", "3e855d9ccf2c", "35.23 to 43.44 %"),
    )
    print_table(Table("Speed", columns, rows), wrap=wrap)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", stdout.getvalue())
    words = {word for row in rows for cell in row for word in cell.split()}
    assert words <= set(drawn.split()) and all(len(line) <= width for line in drawn.splitlines())
    assert ("┃" not in drawn) == listed and drawn.count("Speed") == 1


def test_no_column_of_a_narrow_table_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the stages of a dry run: the names in the first column are words, the other titles are long."""
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", "40")
    rows = (("isomorphic", "3", "96"), ("finetune", "1", "32"))
    print_table(Table("Stages", ("stage", "epochs per round", "images per epoch"), rows))
    assert {"isomorphic", "finetune", "96", "32"} <= set(stdout.getvalue().split())


EXPORT: dict[str, Any] = {
    "folder": "run",
    "path": "model.onnx",
    "format": "onnx",
    "precision": "fp32",
    "bytes": 656432,
    "opset": 20,
    "opset_reason": "runs everywhere",
    "metadata": {"size": "[3, 224, 160]", "input": '"float32"', "layout": '"NCHW"'},
    "build": {},
    "islands_search": {},
    "checks": [],
    "candidates": [],
    "verdict": "passed",
}


def test_an_export_describes_its_input_and_target(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_export(EXPORT)
    assert "takes float32 images, NCHW: batch x 3 x 224 x 160\n" in capsys.readouterr().out
    bytes_in = {**EXPORT["metadata"], "input": '"uint8"', "layout": '"NHWC"'}
    tables.print_export({**EXPORT, "metadata": bytes_in, "build": {"batch": [1, 8, 64], "sm": [89, 120]}})
    line = "takes uint8 images, NHWC: 1 to 64 (best 8) x 224 x 160 x 3; for compute capability 8.9, 12.0"
    assert line in capsys.readouterr().out
    assert "opset 20 (reason)" in line_of({"opset": 20, "opset_reason": "reason"}, capsys)
    assert "bytes" in (plain := line_of({"opset": 0, "opset_reason": ""}, capsys)) and "opset" not in plain


def line_of(opset: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    tables.print_export({**EXPORT, **opset})
    return capsys.readouterr().out.partition("\n")[0]


def test_warnings_of_a_build_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_export({**EXPORT, "build": {"warnings": ["2 attentions are not fused"]}})
    assert "note: 2 attentions are not fused\n" in capsys.readouterr().err


def test_checks_of_the_layers_of_an_engine_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    truth = {"name": "engine.precision", "verdict": "passed", "value": 1.0, "tolerance": 0.9, "detail": "12 of 12"}
    tables.print_export({**EXPORT, "build": {"truth": [truth]}})
    assert "engine.precision: 12 of 12\n1 of 1 checks passed" in capsys.readouterr().out


def test_an_export_states_its_agreement_and_only_the_checks_that_did_not_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, about = "agreement.model.onnx", {"verdict": "passed", "value": 0.0, "tolerance": 0.1}
    flips = {**about, "name": f"{name}.flips", "detail": "agrees with the model: 1,000 of 1,000 images; fp32 in torch"}
    others = [{**about, "name": f"{name}.{kind}", "detail": "small"} for kind in ("kl", "cosine", "error")]
    tables.print_export({**EXPORT, "checks": [flips, *others]})
    printed = capsys.readouterr().out
    assert "model.onnx agrees with the model: 1,000 of 1,000 images; fp32 in torch\n" in printed
    assert "4 of 4 checks passed; values and limits: run/model.onnx.json" in printed and "cosine" not in printed
    tables.print_export({**EXPORT, "checks": [flips, *others[:2], {**others[2], "verdict": "failed"}]})
    printed = capsys.readouterr().out
    assert "3 of 4 checks passed" in printed and "cosine" not in printed and f"{name}.error" in printed


def test_a_command_for_the_target_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    check = {"name": "agreement", "verdict": "not_run", "value": None, "tolerance": None, "command": "verify x"}
    check["detail"] = "no GPU; run it on the target"
    tables.print_checks([check, {**check, "detail": "of another version"}])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "run it on the target: verify x" in text and "of another version; on the target: verify x" in text


def test_ends_of_an_interval_are_rounded_outwards(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"only_a": 3, "only_b": 2, "p_value": 1.0, "difference": -0.001, "difference_ci95": [-0.012411, 0.010321]}
    row = {"correct": 9, "total": 10, "top1": 0.9, "top1_ci95": [0.8, 1.0], "top5": 1.0, "speed": None, "sha256": None}
    rows: Any = [{**row, "artifact": name} for name in "ab"]
    test: Any = {"a": "a", "b": "b", **counts}
    tables.print_accuracy({"images": 10, "classes": 2, "rows": rows, "mcnemar": [test]})
    assert "loses at most 1.25 points (95 %)\n  -1.25 to +1.04 points (95 %" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_names_of_checks_break_at_dots_only(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PIPE_WIDTH", width)
    name = "agreement.model-fp16.rtx.engine.onnx.flips.of.all"
    check = {"name": name, "verdict": "passed", "value": 0.0, "tolerance": 0.001, "detail": "word " * 40}
    tables.print_checks([check])
    lines = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    lines = [line for line in lines if line]
    assert "".join(lines) == name and len(lines) > 1 and all(line.endswith(".") for line in lines[:-1])


def test_long_words_in_checks_are_folded_and_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/runs/" + "x" * 200 + "/model.engine"
    check = {"name": "agreement", "verdict": "not_run", "value": None, "tolerance": None, "detail": path}
    tables.print_checks([check])
    out = capsys.readouterr().out
    assert "…" not in out and out.count("x") == 200
