"""Latencies are measured on the requested runtime, and reach the step that prunes to one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from method_world import model
from torch import nn
from whole_runs import RecordedProgress

from vitcompress import surgery
from vitcompress.bench import machine, suite
from vitcompress.errors import DeviceError, InputError, PlanError
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.methods import isomorphic
from vitcompress.methods.base import Goal, Measured
from vitcompress.methods.table import METHODS
from vitcompress.models.create import create_model, input_config
from vitcompress.pipeline import dry_run, latency
from vitcompress.pipeline.job import Job, RunOptions, create_job
from vitcompress.pipeline.latency import LatencyClock, check_clock, check_latency, create_clock
from vitcompress.pipeline.preflight import list_checks
from vitcompress.pipeline.run import run_recipe
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Step
from vitcompress.training.distributed import Runtime


def job(folder: Path, *sets: str, device: str = "cpu") -> Job:
    small = ["model.args.depth=1", "bench.batch=2", "model.classes=10", "step.0.target=ratios", "step.0.amount="]
    recipe = load_recipe("digits_isomorphic", [*small, *sets])
    options = RunOptions(out=folder, structure_only=True)
    return create_job(recipe, options, Runtime(torch.device(device)), Progress(), None)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
def test_a_model_is_measured_on_the_requested_runtime_and_not_changed(runtime: str, tmp_path: Path) -> None:
    about = job(tmp_path)
    model = create_model(about.recipe.model.name, about.base.arch_args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = create_clock(about)(model, Goal(1e6, runtime, batch=2, threads=2))
    assert 0 < result.fastest <= result.low <= result.ms <= result.high < 1e6 and result.repeats == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_a_pruned_candidate_is_measured(tmp_path: Path) -> None:
    """It has no plan yet."""
    about = job(tmp_path)
    model = surgery.apply_to_copy(create_model(about.recipe.model.name, about.base.arch_args), about.steps[0].delta)
    assert create_clock(about)(model, Goal(1e6, "onnxruntime")).ms > 0


@pytest.mark.parametrize(
    ("goal", "runs", "repeats"), [(1.0, 1, 1), (9.0, 1, 1), (3.04, 1, 1), (3.5, 3, 3), (3.3, 99, latency.REPEATS)]
)
def test_a_measurement_is_repeated_until_its_interval_is_on_one_side(
    goal: float, runs: int, repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `runs` measurements vary between 2 and 4 ms; the others do not."""
    about, calls = job(tmp_path, "bench.batch=3"), list[Any]()

    def compare(runners: Any, options: Any) -> Any:
        calls.append(options)
        spread = [2.0, 4.0] if runs > 1 and len(calls) < runs else [3.0, 3.08]
        rows = [{"samples_ms": [[spread[n % 2]] for n in range(20 if spread[0] == 2 else 200)]}]
        return suite.Bench(rows, (), {}, ())  # type: ignore[arg-type, typeddict-item]

    monkeypatch.setattr(suite, "compare", compare)
    result = create_clock(about)(create_model(about.recipe.model.name, about.base.arch_args), Goal(goal, "torch"))
    assert len(calls) == repeats and calls[0].batch == 3, "of the recipe's [bench]"
    if repeats > 1:
        assert (result.low <= goal <= result.high) == (repeats == latency.REPEATS)


def test_a_quiet_machine_is_waited_for_with_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the test advances with every sleep; another process uses one core until 5 s have passed."""
    now, ends, progress = [0.0], [5.0], RecordedProgress()
    monkeypatch.setattr(latency, "time", SimpleNamespace(sleep=lambda s: now.__setitem__(0, now[0] + s)))
    monkeypatch.setattr(machine, "cpu_seconds", lambda: (now[0], min(now[0], ends[0]), 0.0))
    clock = create_clock(replace(job(tmp_path), progress=progress))
    assert clock.wait_until_quiet() == "" and clock.waited == 5.0
    assert "waiting up to 60 s until they use 0.25 at most" in progress.notes[0]
    ends[0] = 1e6
    load = clock.wait_until_quiet()
    assert clock.waited == latency.PATIENCE and load.startswith("other processes used 1.0 of ")
    before = now[0]
    assert clock.wait_until_quiet() == load and now[0] == before + latency.POLL, "waits once per step"


def test_weights_outside_the_range_of_half_precision_do_not_stop_the_measurement(tmp_path: Path) -> None:
    """The export at the end of the run rejects such a model."""
    about = job(tmp_path, "export.precision=fp16")
    model = create_model(about.recipe.model.name, about.base.arch_args)
    with torch.no_grad():
        model.get_submodule("head").bias.add_(1e5)
    assert create_clock(about)(model, Goal(1e6, "onnxruntime")).ms > 0


@pytest.mark.parametrize("device", ["mps", "cuda:77"])
def test_onnx_files_run_on_the_cpu_if_onnx_runtime_does_not_support_the_device(device: str, tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]', device=device)
    assert about.onnx_device == "cpu"
    (line,) = about.notes()
    assert device in line and "on the CPU" in line
    assert list(dry_run._notes(about)).count(line) == 1


def test_on_the_cpu_there_is_no_note(tmp_path: Path) -> None:
    about = job(tmp_path, 'export.formats=["onnx"]')
    assert about.onnx_device == "cpu" and not list(about.notes())


def test_a_latency_target_is_not_measured_on_another_device(tmp_path: Path) -> None:
    sets = ("step.0.target=latency", "step.0.amount=1.0")
    with pytest.raises(DeviceError, match=r"the latency target is for cuda:77") as caught:
        check_latency(job(tmp_path, *sets, device="cuda:77"))
    assert "--set step.0.latency_on=torch" in str(caught.value.hint)
    about = job(tmp_path, *sets, device="cuda:77")
    with pytest.raises(DeviceError) as caught:
        check_latency(replace(about, steps=(replace(job(tmp_path).steps[0]), replace(about.steps[0], number=1))))
    assert "--set step.1.latency_on=torch" in str(caught.value.hint)
    problems = dry_run._list_problems(list_checks(job(tmp_path, *sets, device="cuda:77"), dry=True))
    assert any("the latency target is for cuda:77" in problem for problem in problems)


@pytest.mark.parametrize(
    ("runtime", "precision", "reason"),
    [
        ("torch", "int8", "torch has no precision 'int8'"),
        ("torch", "tf32", "the precision is tf32, which cpu does not have"),
        ("onnxruntime", "bf16", "the file is in bf16, for which CPUExecutionProvider has no convolution"),
        ("onnxruntime", "int8+bf16", "ONNX precision 'int8\\+bf16' is not supported"),
    ],
)
def test_a_dry_run_rejects_a_runtime_without_the_precision(
    runtime: str, precision: str, reason: str, tmp_path: Path
) -> None:
    """As a run does: both have the same check."""
    sets = (
        "step.0.target=latency",
        "step.0.amount=1.0",
        f"step.0.latency_on={runtime}",
        f"export.precision={precision}",
    )
    with pytest.raises(InputError, match=f"no latency on {runtime} here: {reason}") as caught:
        check_clock(job(tmp_path, *sets))
    assert caught.value.hint == "set latency_on to another runtime"


def test_without_a_clock_the_structure_is_that_of_the_shares(tmp_path: Path) -> None:
    """--structure-only and dry runs ignore a target in milliseconds."""
    options: Any = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0").recipe.steps[0].options
    assert isinstance(options, isomorphic.Options) and METHODS["isomorphic"].options is isomorphic.Options
    timed = job(tmp_path, "step.0.target=latency", "step.0.amount=1.0")
    assert timed.structure == job(tmp_path).structure


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "waited_for" not in request.node.name:
        monkeypatch.setattr(latency, "PATIENCE", 0.0)
        monkeypatch.setattr(latency, "POLL", 0.0)


PER_MS = 1000  # parameters per millisecond of the simulated clock
WHOLE = ["step.0.target=latency", "step.0.latency_on=torch", "bench.runtimes=['torch']", "bench.protocol=paper"]
QUICK = ["bench.warmup=0", "bench.runs=1", "export.formats=[]", "model.args.depth=2", "model.classes=10"]


@pytest.fixture
def simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real latencies of models this small vary; their parameters do not."""

    def measure(clock: LatencyClock, model: nn.Module, goal: Goal) -> Measured:
        return Measured(*4 * [sum(p.numel() for p in model.parameters()) / PER_MS])

    monkeypatch.setattr(LatencyClock, "measure", measure)


def whole(folder: Path, *sets: str) -> dict[str, Any]:
    """The report of a structure-only run with a latency target."""
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, *sets])
    return run_recipe(recipe, RunOptions(out=folder, structure_only=True)).report


@pytest.mark.usefixtures("simulated_clock")
def test_a_whole_run_meets_the_latency_and_reports_the_result(tmp_path: Path) -> None:
    report = whole(tmp_path / "run", "step.0.amount=40")
    assert report["cost"]["compressed"]["params"] == pytest.approx(40 * PER_MS, rel=0.05)
    (widths,) = report["tables"]
    (planned,) = (note for note in report["notes"] if note.startswith("Planned for 40 ms on torch: the plan takes "))
    assert f"takes {report['cost']['compressed']['params'] / PER_MS:.4g} ms (95 %: " in planned
    assert {row[0] for row in widths["rows"]} >= {"residual", "blocks.0.mlp"}
    (note,) = (note for note in report["notes"] if "Latency target: 40 ms on torch; measured at the end: " in note)
    assert "another machine" not in note
    assert not any("missed" in note for note in report["notes"])


@pytest.mark.usefixtures("simulated_clock")
def test_a_latency_of_another_batch_is_not_that_of_the_target(tmp_path: Path) -> None:
    notes = whole(tmp_path / "run", "step.0.amount=40", "step.0.latency_batch=3", "bench.batch=2")["notes"]
    (note,) = (note for note in notes if note.startswith("Latency target: "))
    assert note == "Latency target: 40 ms on torch, batch 3; not measured at the end with batch 3."


@pytest.mark.usefixtures("simulated_clock")
def test_a_run_that_ends_on_another_machine_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path / "run", "step.0.amount=40", "bench.batch=2")
    (tmp_path / "run" / "report.json").unlink()
    path = tmp_path / "run" / "bench.json"  # in which later commands also put others
    (entry,) = read_json(path)
    dense, compressed = entry["rows"]
    others = [{**row, "batch": 7} for row in (dense, compressed)]
    write_json(path, [{**entry, "rows": rows} for rows in ([compressed, dense], others)])
    here = machine.facts()
    monkeypatch.setattr(machine, "facts", lambda: {**here, "cpu": "another"})
    notes = whole(tmp_path / "run", "step.0.amount=40", "bench.batch=2")["notes"]
    (note,) = (note for note in notes if "measured at the end: " in note)
    assert f"measured at the end: {compressed['latency_ms']['p50']:.4g} ms (median, model.safetensors, " in note
    assert f"from another machine or setting (cpu is {here['cpu']!r} there, 'another' here)." in note


@pytest.mark.usefixtures("simulated_clock")
def test_a_latency_that_no_aligned_width_reaches_is_reported(tmp_path: Path) -> None:
    coarse = ["step.0.align={residual=64, ffn=128, head_dim=16}", "step.0.keep_heads=1.0", "step.0.keep_head_dim=1.0"]
    report = whole(tmp_path / "run", "step.0.amount=77", *coarse)
    (missed,) = (note for note in report["notes"] if "missed" in note)
    reached = report["cost"]["compressed"]["params"] / PER_MS
    assert f"missed by {100 * (reached / 77 - 1):+.1f} %: the nearest sizes take " in missed
    assert f"{reached:.4g} ms" in missed and abs(reached / 77 - 1) > 0.02 and "smaller multiples" in missed


@pytest.mark.usefixtures("simulated_clock")
def test_the_range_is_measured_after_all_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HetDPT+ after its depth step is smaller than the dense model; the target is larger."""
    calls: list[Any] = []
    real = LatencyClock.measure
    monkeypatch.setattr(LatencyClock, "measure", lambda *about: calls.append(real(*about)) or calls[-1])
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
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, "step.0.amount=60", "step.0.keep_heads=0.5"])
    magnitude = Step("magnitude", METHODS["magnitude"].options())
    recipe = replace(recipe, steps=(*recipe.steps, magnitude))
    run = run_recipe(recipe, RunOptions(out=tmp_path / "run", structure_only=True))
    first, second = (Plan.from_json((path / "plan.json").read_text()) for path in RunFolder(run.folder).steps())
    heads = first.heads.get("blocks.0.attn", 4)
    assert run.passed and second.heads["blocks.0.attn"] == round(heads / 2)
    assert len(second.kept["blocks.0.v"]) * heads == len(first.kept["blocks.0.v"]) * round(heads / 2)


@pytest.mark.usefixtures("simulated_clock")
def test_the_range_of_a_second_latency_is_that_after_the_first(tmp_path: Path) -> None:
    """The sizes of the first step, without its latency, leave a structure that is too small for the second."""
    recipe = load_recipe("digits_isomorphic", [*WHOLE, *QUICK, "step.0.amount=60"])
    second = replace(recipe.steps[0], options=replace(recipe.steps[0].options, amount=50))
    recipe = replace(recipe, steps=(*recipe.steps, second))
    run = run_recipe(recipe, RunOptions(out=tmp_path / "run", structure_only=True))
    assert run.report["cost"]["compressed"]["params"] == pytest.approx(50 * PER_MS, rel=0.05)


@pytest.mark.parametrize(
    ("goal", "wanted"), [(Goal(1.0, "torch", 2, 1), [1, 1, 2]), (Goal(1.0, "torch"), [4, None, 8])]
)
def test_a_goal_has_its_own_batch_and_threads(
    goal: Goal, wanted: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are measured with those of the recipe: threads of torch, of the runtime, and images."""
    seen: list[Any] = []

    @contextmanager
    def cpu_threads(count: int | None) -> Iterator[None]:
        seen.append(count)
        yield

    def open_torch(model: Any, options: Any, name: str) -> Any:
        seen.append(options.threads)
        return SimpleNamespace(close=lambda: None)

    def compare(runners: Any, options: Any) -> Any:
        seen.append(options.batch)
        return SimpleNamespace(rows=[{"samples_ms": [[1.0]] * 20}], disturbed=())

    monkeypatch.setattr(latency.distributed, "cpu_threads", cpu_threads)
    monkeypatch.setattr(latency, "TorchRunner", open_torch)
    monkeypatch.setattr(latency.suite, "compare", compare)
    monkeypatch.setattr(LatencyClock, "wait_until_quiet", lambda self: "")
    vit = model()
    clock = LatencyClock(input_config(vit), Runtime(torch.device("cpu")), Progress(), batch=8, threads=4)
    assert clock(vit, goal).ms == 1.0 and seen == wanted
