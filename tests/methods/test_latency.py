"""Latencies as a target: they are measured by a clock and kept for the machine that they were measured on."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from method_world import clock, context, model
from whole_runs import RecordedProgress

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families.base import SiteKind
from vitcompress.io.files import read_json
from vitcompress.methods import depth, latency, width
from vitcompress.methods.base import Context, Goal, Measured, read_memo
from vitcompress.methods.options import Alignment, FixedOptions
from vitcompress.methods.options import IsomorphicOptions as Options
from vitcompress.methods.table import METHODS
from vitcompress.plan import Plan

HALF: dict[str, Any] = {
    "keep_ratio": 0.5,
    "keep_heads": 0.5,
    "keep_head_dim": 0.5,
    "align": Alignment(residual=1, ffn=1, head_dim=1),
    "images": 24,
}


def reached(folder: Path, name: str = "latency.json") -> float:
    """The milliseconds of the recorded result."""
    return float(read_json(folder / name)[0].split("the plan takes ")[1].split()[0])


def plan(vit: Any, around: Context, options: Any, method: str = "isomorphic") -> Plan:
    return latency.plan_step(METHODS[method], vit, around, options)


def test_a_latency_is_aimed_at_with_the_clock_of_the_context(tmp_path: Path) -> None:
    """A clock that counts parameters replaces a machine; it receives the name of the runtime."""
    vit, runtimes = model(4, 32), set()

    def tell(candidate: Any, runtime: str) -> float:
        runtimes.add(runtime)
        return sum(p.numel() for p in candidate.parameters()) / 1000

    whole = tell(vit, "torch")
    options = Options(**HALF, target="latency", amount=0.5 * whole, latency_on="torch")
    data = plan(vit, context(tmp_path, vit, latency=clock(tell)), options)
    assert runtimes == {"torch"}
    known = len(list(tmp_path.glob("latency-torch-*.json")))
    (tmp_path / "widths.json").unlink()  # killed before it was done: what was measured is not measured again
    never = context(tmp_path, vit, latency=clock(lambda *about: pytest.fail("measured again")))
    assert plan(vit, never, options) == data and known >= 5
    assert abs(tell(surgery.apply_to_copy(vit, data), "torch") / whole - 0.5) < 0.03
    with pytest.raises(PlanError, match="latencies cannot be measured"):
        plan(vit, context(tmp_path / "none", vit), options)
    beyond = Options(**HALF, target="latency", amount=1e-6)
    with pytest.raises(
        PlanError, match=r"1e-06 ms on onnxruntime cannot be reached: this structure allows [\d.]+ ms to [\d.]+ ms"
    ):
        plan(vit, context(tmp_path / "beyond", vit, latency=clock(tell)), beyond)


def test_a_target_out_of_reach_while_something_else_ran_is_measured_anew(tmp_path: Path) -> None:
    """Kept times would reject it forever."""
    vit, slower, notes = model(4, 32), [1e4], RecordedProgress()
    tell = lambda candidate, _: slower[0] * sum(p.numel() for p in candidate.parameters()) / 1000  # noqa: E731
    half = sum(p.numel() for p in vit.parameters()) / 2000
    options = Options(**HALF, target="latency", amount=half, latency_on="torch")
    with pytest.raises(PlanError, match="cannot be reached") as caught:
        plan(vit, context(tmp_path, vit, latency=clock(tell)), options)
    assert "measures anew" in str(caught.value.hint) and not list(tmp_path.glob("latency-torch-*"))
    slower[0] = 1.0
    plan(vit, context(tmp_path, vit, latency=clock(tell), progress=notes), options)
    assert reached(tmp_path) == pytest.approx(half, rel=0.02)
    measured = [note for note in notes.notes if note.startswith("candidate ")]
    assert len(measured) == len(list(tmp_path.glob("latency-torch-*"))) >= 5
    assert measured[0].startswith(f"candidate 1 of at most 35 takes {2 * half:.4g} ms (95 %: "), "the whole model"


def test_other_load_on_the_machine_rejects_no_target(tmp_path: Path) -> None:
    """Every median is 1.5 times the undisturbed time: the target is below the smallest median, and above the time of
    the smallest model. The result says that there was no quiet machine, and what that means.
    """
    vit, load = model(4, 32), "other processes used 1.0 of 2 cores"
    size = lambda candidate: 1e-3 * sum(p.numel() for p in candidate.parameters())  # noqa: E731

    def disturbed(candidate: Any, goal: Any) -> Measured:
        return Measured(1.5 * size(candidate), 1.4 * size(candidate), 1.6 * size(candidate), size(candidate), 5, load)

    least = {"amount": 1e-6, "target": "latency", "latency_on": "torch"}
    with pytest.raises(PlanError, match=r"allows [\d.]+ ms to") as caught:
        plan(vit, context(tmp_path, vit, latency=disturbed), Options(**HALF, **least))
    shortest = float(str(caught.value).split("allows ")[1].split(" ms")[0])
    plan(vit, context(tmp_path, vit, latency=disturbed), Options(**HALF, **{**least, "amount": 1.2 * shortest}))
    result, missed, machine = read_memo(tmp_path, latency.RECORD)
    assert (
        f"takes {1.5 * shortest:.4g} ms" in result and "missed by +25.0 %: the times of the machine vary more" in missed
    )
    assert load in machine and "no quiet machine in" in machine and "may be smaller than necessary" in machine


def test_a_noisy_machine_is_named_with_the_interval(tmp_path: Path) -> None:
    vit = model(4, 32)
    size = lambda candidate: 1e-3 * sum(p.numel() for p in candidate.parameters())  # noqa: E731
    noisy = lambda candidate, goal: Measured(  # noqa: E731
        goal.ms * (1.1 if 0.3 < size(candidate) / size(vit) < 0.9 else size(candidate) / goal.ms), 1, 99, 1, 5
    )
    options = Options(**HALF, target="latency", amount=0.5 * size(vit), latency_on="torch")
    plan(vit, context(tmp_path, vit, latency=noisy), options)
    result, missed = read_memo(tmp_path, latency.RECORD)
    assert "(95 %: 1 to 99)" in result and "missed by +10.0 %: the times of the machine vary more" in missed


SIZED: dict[str, Any] = {
    "sero": METHODS["sero"].options(sparsity=0.5, epochs=2, refresh=2, lr=1e-3, round_to=1, layout="padded"),
    "magnitude": METHODS["magnitude"].options(),
    "nose": METHODS["nose"].options(),
    "hetdpt": METHODS["hetdpt"].options(example_attention=(0, 1), example_activation=(1, 2)),
    "random": METHODS["random"].options(),
    "upvit": METHODS["upvit"].options(target_args={"depth": 1, "embed_dim": 8}),
    "isomorphic": Options(**HALF),
}


def size(candidate: Any, _: str = "") -> float:
    """Parameters replace milliseconds."""
    return sum(p.numel() for p in candidate.parameters()) / 1000


@cache
def times_of(method: str) -> list[float]:
    """The latencies of all sizes that the method has for the model of the next test."""
    vit = model(8, 32, num_heads=4)
    around = context(Path(), vit)
    sizes = latency.list_sizes(METHODS[method], vit, around.family, around.plan, SIZED[method])
    return [size(width.deploy(vit, around.plan, delta)) for _, delta in sizes]


def test_the_global_scope_has_sizes_down_to_a_fifth_of_the_model() -> None:
    vit = model(4, 32)
    around = context(Path(), vit)
    options = Options(scope="global", keep_ratio=0.9, align=HALF["align"], images=24)
    sizes = latency.list_sizes(METHODS["isomorphic"], vit, around.family, around.plan, options)
    smallest = width.deploy(vit, around.plan, sizes[-1][1])
    assert len(sizes) > 10 and size(smallest) < 0.2 * size(vit)


@pytest.mark.parametrize(
    ("kind", "words"), [("attention", "in blocks do not alternate"), ("activation", "was replaced by an earlier step")]
)
def test_a_model_without_attentions_or_ffns_has_no_sizes_of_a_standard_model(
    kind: SiteKind, words: str, tmp_path: Path
) -> None:
    vit = model()
    removed: depth.Blocks = {kind: (0, 1, 2)}
    plan = depth.plan_layers(vit, context(tmp_path, vit).plan, removed, FixedOptions())
    vit = surgery.apply_plan(vit, plan)
    plan = surgery.fold_linears(vit, plan)[0]
    options = replace(SIZED["upvit"], target="latency", amount=1.0)
    with pytest.raises(PlanError, match=words):
        latency.plan_step(METHODS["upvit"], vit, context(tmp_path, vit, plan=plan, latency=clock(size)), options)


@pytest.mark.parametrize("method", SIZED)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_every_method_with_sizes_meets_a_latency(method: str, share: float, tmp_path: Path) -> None:
    """The structure is the nearest of all sizes that the method has."""
    vit, times = model(8, 32, num_heads=4), times_of(method)
    around = context(tmp_path, vit)
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times) >= 3
    amount = times[-1] + share * (times[0] - times[-1])
    options = replace(SIZED[method], target="latency", amount=amount, latency_on="torch")
    chosen = latency.plan_step(METHODS[method], vit, replace(around, latency=clock(size)), options, scored=False)
    off = abs(size(width.deploy(vit, around.plan, chosen)) - amount)
    assert off <= max(0.02 * amount, min(abs(time - amount) for time in times[1:]) + 1e-9)
    notes = read_memo(tmp_path, latency.RECORD)
    assert (len(notes) > 1) == (off > 0.02 * amount)


def test_kept_latencies_belong_to_the_machine_that_they_were_taken_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two machines is twice as fast: its times are not mixed with the other's. Where a time is kept, no model is
    sliced for it.
    """
    vit, notes, sliced = model(4, 32), RecordedProgress(), list[str]()
    real = width.deploy
    monkeypatch.setattr(
        latency,
        "deploy",
        lambda model, *about: (sliced.append(next(model.parameters()).device.type), real(model, *about))[1],
    )

    def kept(cpu: str, factor: float) -> float:
        (tmp_path / "widths.json").unlink(missing_ok=True)  # killed while it planned
        options = Options(**HALF, target="latency", amount=0.5 * factor * whole, latency_on="torch")
        around = context(
            tmp_path,
            vit,
            latency=clock(lambda m, _: factor * sum(p.numel() for p in m.parameters()) / 1000),
            measured_on={"cpu": cpu, "versions": {"torch": "2"}},
            progress=notes,
        )
        plan(vit, around, options)
        (tmp_path / "latency.json").rename(tmp_path / "result")
        return reached(tmp_path, "result")

    whole = sum(p.numel() for p in vit.parameters()) / 1000
    slow = kept("slow", 1.0)
    assert slow == pytest.approx(whole / 2, rel=0.02) and not any("measured again" in note for note in notes.notes)
    fast = kept("fast", 0.5)
    assert fast == pytest.approx(slow / 2, rel=1e-3)
    (line,) = (note for note in notes.notes if "measured again" in note)
    assert line == "latencies on torch are measured again, the known ones differ: cpu is 'slow' there, 'fast' here"
    assert sliced.count("cpu") >= 5
    sliced.clear()
    assert kept("slow", 1.0) == slow and not sliced


def test_a_measurement_belongs_to_its_goal(tmp_path: Path) -> None:
    """Another batch, or other threads, in the same folder."""
    vit, calls = model(), list[str]()
    count = clock(lambda candidate, runtime: calls.append(runtime) or 1.0)  # type: ignore[func-returns-value]
    for goal in (Goal(1.0, "torch", 1, None), Goal(1.0, "torch", 64, None), Goal(1.0, "torch", 64, None)):
        about = context(tmp_path, vit, latency=count)
        latency.LatencySearch(about, goal, vit, 2).measure(about.plan.delta())
    assert len(calls) == 2
