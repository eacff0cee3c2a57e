"""A latency is measured on the runtime that was named, and reaches the step that aims at it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitcompress.bench import machine, suite
from vitcompress.errors import DeviceError, InputError, PlanError
from vitcompress.io.progress import Progress
from vitcompress.methods import METHODS, isomorphic
from vitcompress.models.create import create_model
from vitcompress.pipeline import dry_run, latency
from vitcompress.pipeline.job import Job, RunOptions, job_for
from vitcompress.pipeline.latency import check_latency, latency_ms
from vitcompress.pipeline.run import run_recipe
from vitcompress.recipe.load import load_recipe
from vitcompress.training.distributed import Runtime


def job(folder: Path, *sets: str, device: str = "cpu") -> Job:
    recipe = load_recipe("digits_isomorphic", ["model.args.depth=1", "bench.batch=2", "model.classes=10", *sets])
    return job_for(recipe, folder, Runtime(torch.device(device)), Progress(), None, structure_only=True)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_model_is_timed_where_it_was_asked_for_and_left_as_it_is(runtime: str, tmp_path: Path) -> None:
    about = job(tmp_path)
    model = create_model(about.recipe.model.name, about.arch_args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert latency_ms(about, model, runtime) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_a_closer_look_takes_the_round_in_which_nothing_else_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real calls, of which most rounds have another program beside them."""
    about, rounds, told = job(tmp_path), list[list[float]](), list[dict[str, Any]]()
    monkeypatch.setattr(latency, "LONG", suite.BenchOptions("paper", warmup=1, runs=40))
    real = suite.compare

    def compare(*given: Any) -> Any:
        found = real(*given)
        rounds[:] = [list(times) for times in found.rows[0]["samples_ms"]]
        for number, times in enumerate(found.rows[0]["samples_ms"]):
            times[:] = times if number == 7 else [1000 + time for time in times]
        told.extend(found.rows)
        return found

    monkeypatch.setattr(suite, "compare", compare)
    found = latency.undisturbed_ms(about, create_model(about.recipe.model.name, about.arch_args), "torch")
    assert len(rounds) == 20 and found == np.median(rounds[7]) < 1000
    assert told[0]["batch"] == 2, "that of the recipe's [bench]"


def test_weights_that_half_precision_cannot_hold_are_timed_all_the_same(tmp_path: Path) -> None:
    """In the middle of a run: what cannot be shipped in fp16 is told by its export, when all else is done."""
    about = job(tmp_path, "export.precision=fp16")
    model = create_model(about.recipe.model.name, about.arch_args)
    with torch.no_grad():
        model.get_submodule("head").bias.add_(1e5)
    assert latency_ms(about, model, "onnxruntime") > 0


def test_an_unknown_runtime_is_refused(tmp_path: Path) -> None:
    about = job(tmp_path)
    with pytest.raises(InputError, match="no runtime 'tflite'"):
        latency_ms(about, about.blank, "tflite")


@pytest.mark.parametrize("device", ["mps", "cuda:77"])
def test_where_onnx_runtime_cannot_work_the_cpu_takes_its_files_and_says_so(device: str, tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]', device=device)
    assert about.onnx_device == "cpu"
    (line,) = about.onnx_elsewhere()
    assert device in line and "on the CPU" in line
    assert list(dry_run._notes(about, RunOptions())).count(line) == 1


def test_on_the_cpu_there_is_nothing_to_say(tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]')
    assert about.onnx_device == "cpu" and not list(about.onnx_elsewhere())


def test_a_latency_is_not_aimed_at_with_the_times_of_another_device(tmp_path: Path) -> None:
    sets = ("step.0.target=latency", "step.0.amount=1.0")
    with pytest.raises(DeviceError, match=r"cuda:77 is aimed at") as caught:
        check_latency(job(tmp_path, *sets, device="cuda:77"), fresh=True)
    assert "latency_on=torch" in str(caught.value.hint)
    missing = dry_run._missing(job(tmp_path, *sets, device="cuda:77"), RunOptions())
    assert any("cuda:77 is aimed at" in line for line in missing)


def test_without_a_clock_the_structure_is_that_of_the_shares(tmp_path: Path) -> None:
    """What --structure-only and the checks before a run can know of a target in milliseconds."""
    options: Any = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0").recipe.steps[0].options
    assert isinstance(options, isomorphic.Options) and METHODS["isomorphic"].options is isomorphic.Options
    plans = [
        job(tmp_path, f"step.0.target={target}", "step.0.amount=1.0").structure for target in ("latency", "ratios")
    ]
    assert plans[0] == plans[1]


PER_MS = 1000  # parameters that stand for a millisecond where no real clock is wanted
WHOLE = ["step.0.target=latency", "step.0.latency_on=torch", "bench.runtimes=['torch']", "bench.protocol=paper"]
QUICK = ["bench.warmup=0", "bench.runs=1", "export.formats=[]", "model.args.depth=2", "model.classes=10"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real latencies of models this small scatter; their parameters do not."""

    def row(job: Job, model: nn.Module, runtime: str, how: Any) -> dict[str, Any]:
        count = sum(p.numel() for p in model.parameters()) / PER_MS
        return {"latency_ms": {"p50": count}, "samples_ms": [[count]]}

    monkeypatch.setattr(latency, "_measured", row)


def whole(folder: Path, *sets: str) -> dict[str, Any]:
    """The report of a structure-only run that solves for a latency."""
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, *sets])
    return run_recipe(recipe, RunOptions(out=folder, structure_only=True)).report


@pytest.mark.usefixtures("clock")
def test_a_whole_run_meets_the_latency_and_says_what_came_out(tmp_path: Path) -> None:
    report = whole(tmp_path / "run", "step.0.amount=40")
    assert report["cost"]["compressed"]["params"] == pytest.approx(40 * PER_MS, rel=0.05)
    target, widths = report["tables"]
    assert target["rows"][0][0] == "40 ms on torch" and len(target["rows"][0]) == len(target["columns"])
    assert {row[0] for row in widths["rows"]} >= {"residual", "blocks.0.mlp"}
    (said,) = (note for note in report["notes"] if "Latency aimed at: 40 ms on torch; measured at the end: " in note)
    assert "elsewhere" not in said
    assert not any("missed" in note for note in report["notes"])


@pytest.mark.usefixtures("clock")
def test_a_run_that_ends_on_another_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path / "run", "step.0.amount=40")
    (tmp_path / "run" / "report.json").unlink()
    here = machine.facts()
    monkeypatch.setattr(machine, "facts", lambda: {**here, "cpu": "another"})
    notes = whole(tmp_path / "run", "step.0.amount=40")["notes"]
    (said,) = (note for note in notes if "measured at the end: " in note)
    assert f"The widths were chosen by times taken elsewhere (cpu is {here['cpu']!r} there, 'another' here)." in said


@pytest.mark.usefixtures("clock")
def test_a_latency_that_the_steps_of_the_widths_skip_is_told_in_the_report(tmp_path: Path) -> None:
    coarse = ["step.0.align={residual=64, ffn=128, head_dim=16}", "step.0.keep_heads=1.0", "step.0.keep_head_dim=1.0"]
    report = whole(tmp_path / "run", "step.0.amount=77", *coarse)
    (missed,) = (note for note in report["notes"] if "missed" in note)
    reached = report["cost"]["compressed"]["params"] / PER_MS
    assert f"77 ms on torch was asked for, the nearest widths found come to {reached:.4g} ms on torch" in missed
    assert f"({100 * (reached / 77 - 1):+.1f} %)" in missed and abs(reached / 77 - 1) > 0.05
    assert "this structure allows " in missed


@pytest.mark.usefixtures("clock")
def test_all_steps_before_are_taken_when_the_range_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HetDPT+ after its depth step is smaller than the dense model, and what is asked for lies above it."""
    asked: list[Any] = []
    real = latency._measured
    monkeypatch.setattr(latency, "_measured", lambda *about: asked.append(real(*about)) or asked[-1])
    sets = [s.replace("step.0", "step.3") for s in (*WHOLE, "step.0.amount=299")]
    recipe = load_recipe("digits_hetdpt_plus", [*sets, *(s for s in QUICK if "depth" not in s)])
    with pytest.raises(
        PlanError, match=r"299 ms on torch cannot be reached: this structure allows [\d.]+ ms to 2\d\d\.\d ms"
    ):
        run_recipe(recipe, RunOptions(out=tmp_path / "run", structure_only=True))
    assert len(asked) == 2 and not (tmp_path / "run").exists()
