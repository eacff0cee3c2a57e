"""Latencies are measured on the requested runtime, and reach the step that prunes to one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitcompress.bench import machine, suite
from vitcompress.errors import DeviceError, InputError, PlanError
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.methods import METHODS, isomorphic
from vitcompress.models.create import create_model
from vitcompress.pipeline import dry_run, latency
from vitcompress.pipeline.job import Job, RunOptions, create_job
from vitcompress.pipeline.latency import check_latency, clock
from vitcompress.pipeline.run import run_recipe
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Step
from vitcompress.training.distributed import Runtime


def job(folder: Path, *sets: str, device: str = "cpu") -> Job:
    small = ["model.args.depth=1", "bench.batch=2", "model.classes=10", "step.0.target=ratios", "step.0.amount="]
    recipe = load_recipe("digits_isomorphic", [*small, *sets])
    options = RunOptions(out=folder, structure_only=True)
    return create_job(recipe, options, Runtime(torch.device(device)), Progress())


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_model_is_measured_on_the_requested_runtime_and_not_changed(runtime: str, tmp_path: Path) -> None:
    about = job(tmp_path)
    model = create_model(about.recipe.model.name, about.base.arch_args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert clock(about).median(model, runtime) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_the_longer_measurement_takes_the_round_in_which_nothing_else_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real calls; most rounds are disturbed by another program."""
    about, rounds, measured = job(tmp_path), list[list[float]](), list[dict[str, Any]]()
    monkeypatch.setattr(latency, "LONG", suite.BenchOptions("paper", warmup=1, runs=40))
    real = suite.compare

    def compare(*arguments: Any) -> Any:
        result = real(*arguments)
        rounds[:] = [list(times) for times in result.rows[0]["samples_ms"]]
        for number, times in enumerate(result.rows[0]["samples_ms"]):
            times[:] = times if number == 7 else [1000 + time for time in times]
        measured.extend(result.rows)
        return result

    monkeypatch.setattr(suite, "compare", compare)
    median = clock(about).undisturbed(create_model(about.recipe.model.name, about.base.arch_args), "torch")
    assert len(rounds) == 20 and median == np.median(rounds[7]) < 1000
    assert measured[0]["batch"] == 2, "that of the recipe's [bench]"


def test_weights_outside_the_range_of_half_precision_do_not_stop_the_measurement(tmp_path: Path) -> None:
    """The export at the end of the run rejects such a model."""
    about = job(tmp_path, "export.precision=fp16")
    model = create_model(about.recipe.model.name, about.base.arch_args)
    with torch.no_grad():
        model.get_submodule("head").bias.add_(1e5)
    assert clock(about).median(model, "onnxruntime") > 0


def test_an_unknown_runtime_is_rejected(tmp_path: Path) -> None:
    about = job(tmp_path)
    with pytest.raises(InputError, match="no runtime 'tflite'"):
        clock(about).median(about.blank, "tflite")


@pytest.mark.parametrize("device", ["mps", "cuda:77"])
def test_onnx_files_run_on_the_cpu_if_onnx_runtime_does_not_support_the_device(device: str, tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]', device=device)
    assert about.onnx_device == "cpu"
    (line,) = about.onnx_notes()
    assert device in line and "on the CPU" in line
    assert list(dry_run._notes(about)).count(line) == 1


def test_on_the_cpu_there_is_no_note(tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]')
    assert about.onnx_device == "cpu" and not list(about.onnx_notes())


def test_a_latency_target_is_not_measured_on_another_device(tmp_path: Path) -> None:
    sets = ("step.0.target=latency", "step.0.amount=1.0")
    with pytest.raises(DeviceError, match=r"the latency target is for cuda:77") as caught:
        check_latency(job(tmp_path, *sets, device="cuda:77"))
    assert "latency_on=torch" in str(caught.value.hint)
    problems = dry_run._list_problems(dry_run._checks(job(tmp_path, *sets, device="cuda:77"), done=False))
    assert any("the latency target is for cuda:77" in problem for problem in problems)


def test_without_a_clock_the_structure_is_that_of_the_shares(tmp_path: Path) -> None:
    """--structure-only and dry runs ignore a target in milliseconds."""
    options: Any = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0").recipe.steps[0].options
    assert isinstance(options, isomorphic.Options) and METHODS["isomorphic"].options is isomorphic.Options
    timed = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0")
    assert timed.structure == job(tmp_path).structure


PER_MS = 1000  # parameters per millisecond of the simulated clock
WHOLE = ["step.0.target=latency", "step.0.latency_on=torch", "bench.runtimes=['torch']", "bench.protocol=paper"]
QUICK = ["bench.warmup=0", "bench.runs=1", "export.formats=[]", "model.args.depth=2", "model.classes=10"]


@pytest.fixture
def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real latencies of models this small vary; their parameters do not."""

    def row(job: Job, model: nn.Module, runtime: str, how: Any) -> dict[str, Any]:
        count = sum(p.numel() for p in model.parameters()) / PER_MS
        return {"latency_ms": {"p50": count}, "samples_ms": [[count]]}

    monkeypatch.setattr(latency, "measure", row)


def whole(folder: Path, *sets: str) -> dict[str, Any]:
    """The report of a structure-only run with a latency target."""
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, *sets])
    return run_recipe(recipe, RunOptions(out=folder, structure_only=True)).report


@pytest.mark.usefixtures("simulated_clock")
def test_a_whole_run_meets_the_latency_and_reports_the_result(tmp_path: Path) -> None:
    report = whole(tmp_path / "run", "step.0.amount=40")
    assert report["cost"]["compressed"]["params"] == pytest.approx(40 * PER_MS, rel=0.05)
    target, widths = report["tables"]
    assert target["rows"][0][0] == "40 ms on torch" and len(target["rows"][0]) == len(target["columns"])
    assert {row[0] for row in widths["rows"]} >= {"residual", "blocks.0.mlp"}
    (note,) = (note for note in report["notes"] if "Latency target: 40 ms on torch; measured at the end: " in note)
    assert "another machine" not in note
    assert not any("missed" in note for note in report["notes"])


@pytest.mark.usefixtures("simulated_clock")
def test_a_run_that_ends_on_another_machine_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path / "run", "step.0.amount=40")
    (tmp_path / "run" / "report.json").unlink()
    here = machine.facts()
    monkeypatch.setattr(machine, "facts", lambda: {**here, "cpu": "another"})
    notes = whole(tmp_path / "run", "step.0.amount=40")["notes"]
    (note,) = (note for note in notes if "measured at the end: " in note)
    assert f"from another machine or setting (cpu is {here['cpu']!r} there, 'another' here)." in note


@pytest.mark.usefixtures("simulated_clock")
def test_a_latency_that_no_aligned_width_reaches_is_reported(tmp_path: Path) -> None:
    coarse = ["step.0.align={residual=64, ffn=128, head_dim=16}", "step.0.keep_heads=1.0", "step.0.keep_head_dim=1.0"]
    report = whole(tmp_path / "run", "step.0.amount=77", *coarse)
    (missed,) = (note for note in report["notes"] if "missed" in note)
    reached = report["cost"]["compressed"]["params"] / PER_MS
    assert f"77 ms on torch was requested, the nearest widths have {reached:.4g} ms on torch" in missed
    assert f"({100 * (reached / 77 - 1):+.1f} %)" in missed and abs(reached / 77 - 1) > 0.05
    assert "this structure allows " in missed


@pytest.mark.usefixtures("simulated_clock")
def test_the_range_is_measured_after_all_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HetDPT+ after its depth step is smaller than the dense model; the target is larger."""
    calls: list[Any] = []
    real = latency.measure
    monkeypatch.setattr(latency, "measure", lambda *about: calls.append(real(*about)) or calls[-1])
    sets = [s.replace("step.0", "step.3") for s in (*WHOLE, "step.0.amount=299")]
    recipe = load_recipe("digits_hetdpt_plus", [*sets, *(s for s in QUICK if "depth" not in s)])
    with pytest.raises(
        PlanError, match=r"299 ms on torch cannot be reached: this structure allows [\d.]+ ms to 2\d\d\.\d ms"
    ):
        run_recipe(recipe, RunOptions(out=tmp_path / "run", structure_only=True))
    assert len(calls) == 2 and not (tmp_path / "run").exists()


@pytest.mark.usefixtures("simulated_clock")
def test_a_step_after_a_latency_target_is_planned_on_the_measured_widths(tmp_path: Path) -> None:
    """Its structure after the shares of the first step, which were not used, would name other channels."""
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, "step.0.amount=80", "step.0.keep_heads=0.5"])
    magnitude = Step("magnitude", METHODS["magnitude"].options())
    recipe = replace(recipe, steps=(*recipe.steps, magnitude))
    run = run_recipe(recipe, RunOptions(out=tmp_path / "run", structure_only=True))
    first, second = (Plan.from_json((path / "plan.json").read_text()) for path in RunFolder(run.folder).steps())
    heads = first.heads.get("blocks.0.attn", 4)
    assert run.passed and second.heads["blocks.0.attn"] == round(heads / 2)
    assert len(second.kept["blocks.0.v"]) * heads == len(first.kept["blocks.0.v"]) * round(heads / 2)
