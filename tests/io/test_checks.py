"""Check results: limits are inclusive, NaN fails, checks that did not run do not pass."""

import json
from pathlib import Path

import pytest
import torch

from vitcompress.io.checks import (
    Check,
    Verification,
    largest_difference,
    limit_check,
    problem_check,
    update_verification,
)
from vitcompress.io.files import write_json


def test_nan_never_passes_and_is_written_as_json() -> None:
    check = limit_check("x", float("nan"), 1.0)
    assert check.verdict == "failed"
    assert json.loads(json.dumps(check.to_dict(), allow_nan=False))["value"] is None


def test_checks_that_did_not_run_do_not_pass() -> None:
    not_run = Check("a", "not_run", command="there")
    assert not Verification((not_run,)).passed
    assert not Verification(()).passed
    assert Verification((not_run, limit_check("b", 0.0, 0.0))).passed
    assert [bool(Verification((check,))) for check in (not_run, limit_check("b", 0.0, 0.0))] == [False, True]
    assert not_run.to_dict()["passed"] is False


@pytest.mark.parametrize(("value", "verdict"), [(0.0, "passed"), (1.0, "passed"), (1.0 + 2**-52, "failed")])
def test_a_value_passes_up_to_its_tolerance(value: float, verdict: str) -> None:
    assert limit_check("x", value, 1.0, "what") == Check("x", verdict, value, 1.0, "what")  # type: ignore[arg-type]


def test_a_verification_as_json() -> None:
    known = {"name": "x", "value": 1.5, "tolerance": 2.0, "detail": "what", "command": None, "applies": True}
    right, wrong = Check("x", "passed", 1.5, 2.0, "what"), Check("x", "failed", 1.5, 2.0, "what")
    records = [{**known, "verdict": "passed", "passed": True}, {**known, "verdict": "failed", "passed": False}]
    assert [right.to_dict(), wrong.to_dict()] == records
    assert Verification((right,)).to_dict() == {"passed": True, "checks": records[:1]}
    weights = {"tensors": []}
    assert Verification((right, wrong), weights).to_dict() == {"passed": False, "checks": records, "weights": weights}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_json_lacks_are_written_in_the_detail(value: float) -> None:
    data = json.loads(json.dumps(Check("x", "failed", value, 1.0, "what").to_dict(), allow_nan=False))
    assert (data["value"], data["tolerance"], data["detail"]) == (None, 1.0, f"what (value: {value})")


def test_an_empty_list_passes_and_a_failure_names_the_first_five() -> None:
    assert problem_check("x", (), "all right") == Check("x", "passed", 0.0, 0.0, "all right")
    assert problem_check("x", iter("ab"), "all right") == Check("x", "failed", 2.0, 0.0, "2 wrong: a, b")
    assert problem_check("x", "abcde", "").detail == "5 wrong: a, b, c, d, e"
    assert problem_check("x", "abcdef", "").detail == "6 wrong: a, b, c, d, e and 1 more"


def test_the_largest_difference_is_absolute_and_in_float64() -> None:
    half = torch.tensor([60000.0, 0.0], dtype=torch.float16)  # twice that overflows float16
    assert largest_difference(half, -half) == largest_difference(-half, half) == 120000.0
    assert largest_difference(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 5.0])) == 2.0
    assert largest_difference(torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)) == 2.0**-40
    assert not largest_difference(torch.tensor([0.0, torch.nan]), torch.zeros(2)) <= float("inf")


def test_an_update_replaces_only_the_selected_checks(tmp_path: Path) -> None:
    weights = {"tensors": [], "files": []}
    first = Verification((Check("a", "passed"), Check("b.1", "failed"), Check("c", "not_run")), weights)
    write_json(tmp_path / "verify.json", first.to_dict())
    update_verification(tmp_path, Verification((Check("b.2", "passed"),)), lambda name: name.startswith("b."))
    known = json.loads((tmp_path / "verify.json").read_text())
    assert [check["name"] for check in known["checks"]] == ["a", "c", "b.2"]
    assert known["passed"] is True and known["weights"] == weights
    update_verification(tmp_path, Verification((Check("d", "not_run"),)), lambda name: name == "b.2")
    assert json.loads((tmp_path / "verify.json").read_text())["passed"] is True
    update_verification(tmp_path, Verification((Check("e", "failed"),)), lambda name: False)
    assert json.loads((tmp_path / "verify.json").read_text())["passed"] is False
    update_verification(tmp_path, Verification((Check("f", "not_run"),)), lambda name: True)
    assert json.loads((tmp_path / "verify.json").read_text())["passed"] is False


def test_a_relative_folder_is_not_named_in_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check = Check("onnx", "not_run", command=f"vitcompress export {tmp_path / 'run'} --format onnx")
    assert check.to_dict(Path("run"))["command"] == "vitcompress export DIR --format onnx"


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        ("/a/run", "there is no /a/run2/x", "there is no /a/run2/x"),
        ("/a/run", "/a/run-2, /a/run.old/x, /b/a/run/x", "/a/run-2, /a/run.old/x, /b/a/run/x"),
        ("/a/run", "see /a/run/x: '/a/run' is not /a/run.", "see DIR/x: 'DIR' is not DIR."),
        ("/a/run", "verify --out=/a/run /a/run", "verify --out=DIR DIR"),
        ("/a/my run", "verify '/a/my run'; no /a/my run/x, no /a/my run2", "verify DIR; no DIR/x, no /a/my run2"),
        ("/a/run+1 (b)", "verify '/a/run+1 (b)', /a/run+1 (b)/x", "verify DIR, DIR/x"),
    ],
)
def test_only_the_folder_itself_is_called_dir(folder: str, text: str, expected: str) -> None:
    data = Check("x", "not_run", detail=text, command=text).to_dict(Path(folder))
    assert (data["detail"], data["command"]) == (expected, expected)


def test_a_verification_prints_one_line_per_check() -> None:
    checks = limit_check("agreement.kl", 1.23e-7, 1e-5, "nats"), problem_check("onnx.idle", ["blocks.0"], "")
    assert str(Verification((*checks, Check("fold", "not_run", tolerance=1e-5)))).splitlines() == [
        "passed: agreement.kl, 1.2e-07 of at most 1e-05: nats",
        "failed: onnx.idle: 1 wrong: blocks.0",
        "not run: fold",
    ]
