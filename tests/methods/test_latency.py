"""Latencies as a target: they are measured by a clock and kept for the machine that they were measured on."""

from pathlib import Path
from typing import Any

import pytest
from method_world import clock, context, model
from whole_runs import RecordedProgress

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import isomorphic, width
from vitcompress.methods.base import Clock
from vitcompress.methods.options import Alignment
from vitcompress.methods.options import IsomorphicOptions as Options

HALF: dict[str, Any] = {
    "keep_ratio": 0.5,
    "keep_heads": 0.5,
    "keep_head_dim": 0.5,
    "align": Alignment(residual=1, ffn=1, head_dim=1),
    "images": 24,
}


def test_a_latency_is_aimed_at_with_the_clock_of_the_context(tmp_path: Path) -> None:
    """A clock that counts parameters replaces a machine; it receives the name of the runtime."""
    vit, runtimes = model(4, 32), set()

    def tell(candidate: Any, runtime: str) -> float:
        runtimes.add(runtime)
        return sum(p.numel() for p in candidate.parameters()) / 1000

    whole = tell(vit, "torch")
    options = Options(**HALF, target="latency", amount=0.5 * whole, latency_on="torch")
    data = isomorphic.plan(vit, context(tmp_path, vit, latency=clock(tell)), options)
    assert runtimes == {"torch"}
    known = len(list(tmp_path.glob("latency-torch-*.json")))
    (tmp_path / "widths.json").unlink()  # killed before it was done: what was measured is not measured again
    never = context(tmp_path, vit, latency=clock(lambda *about: pytest.fail("measured again")))
    assert isomorphic.plan(vit, never, options) == data and known >= 5
    assert abs(tell(surgery.apply_to_copy(vit, data), "torch") / whole - 0.5) < 0.03
    with pytest.raises(PlanError, match="latencies cannot be measured"):
        isomorphic.plan(vit, context(tmp_path / "none", vit), options)
    beyond = Options(**HALF, target="latency", amount=1e-6)
    with pytest.raises(
        PlanError, match=r"1e-06 ms on onnxruntime cannot be reached: this structure allows [\d.]+ ms to [\d.]+ ms"
    ):
        isomorphic.plan(vit, context(tmp_path / "beyond", vit, latency=clock(tell)), beyond)


def test_a_target_out_of_reach_while_something_else_ran_is_measured_anew(tmp_path: Path) -> None:
    """Kept times would reject it forever."""
    vit, slower, notes = model(4, 32), [1e4], RecordedProgress()
    tell = lambda candidate, _: slower[0] * sum(p.numel() for p in candidate.parameters()) / 1000  # noqa: E731
    half = sum(p.numel() for p in vit.parameters()) / 2000
    options = Options(**HALF, target="latency", amount=half, latency_on="torch")
    with pytest.raises(PlanError, match="cannot be reached") as caught:
        isomorphic.plan(vit, context(tmp_path, vit, latency=clock(tell)), options)
    assert "measures anew" in str(caught.value.hint) and not list(tmp_path.glob("latency-torch-*"))
    slower[0] = 1.0
    isomorphic.plan(vit, context(tmp_path, vit, latency=clock(tell), progress=notes), options)
    assert read_json(tmp_path / "widths.json")["target"]["reached"] == pytest.approx(half, rel=0.03)
    measured = [note for note in notes.notes if note.startswith("a candidate takes ")]
    assert len(measured) == len(list(tmp_path.glob("latency-torch-*"))) >= 5
    assert f"a candidate takes {2 * half:.4g} ms on torch" in measured, "the whole model is one of them"


def test_other_load_on_the_machine_rejects_no_target(tmp_path: Path) -> None:
    """Every median is 1.5 times the undisturbed time: the target is below the smallest median, and above the time of
    the smallest model. Only this model is measured again for longer, once before the run and once in it.
    """
    vit, closely, notes = model(4, 32), list[int](), RecordedProgress()
    size = lambda candidate, *_: sum(p.numel() for p in candidate.parameters())  # noqa: E731
    disturbed = Clock(
        lambda candidate, _: 1.5e-3 * size(candidate),
        lambda candidate, _: (closely.append(size(candidate)), 1e-3 * size(candidate))[1],
    )
    family, plan = family_of(vit), context(tmp_path, vit).plan
    least = {"amount": 1e-6, "target": "latency", "latency_on": "torch"}
    with pytest.raises(PlanError, match=r"allows [\d.]+ ms to") as caught:
        isomorphic.check_reach(Options(**HALF, **least), vit, family, plan, disturbed)
    shortest = float(str(caught.value).split("allows ")[1].split(" ms")[0])
    assert not closely, "a target far below is rejected without a longer measurement"
    wanted = Options(**HALF, **{**least, "amount": 0.9 * shortest})
    isomorphic.check_reach(wanted, vit, family, plan, disturbed)
    isomorphic.plan(vit, context(tmp_path, vit, latency=disturbed, progress=notes), wanted)
    data = read_json(tmp_path / "widths.json")["target"]
    assert closely[0] == closely[1] == pytest.approx(1000 * shortest / 1.5, rel=1e-3) and len(closely) == 2
    assert data["least"] == pytest.approx(shortest / 1.5, rel=1e-3) and data["least"] < data["amount"]
    beyond = Options(**HALF, **{**least, "amount": 0.6 * shortest})
    with pytest.raises(PlanError, match=f"allows {data['least']:.4g} ms to"):
        isomorphic.plan(vit, context(tmp_path / "beyond", vit, latency=disturbed), beyond)


def test_kept_latencies_belong_to_the_machine_that_they_were_taken_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two machines is twice as fast: its times are not mixed with the other's. Where a time is kept, no model is
    sliced for it.
    """
    vit, notes, sliced = model(4, 32), RecordedProgress(), list[str]()
    real = width._deploy
    monkeypatch.setattr(
        width,
        "_deploy",
        lambda model, *about: (sliced.append(next(model.parameters()).device.type), real(model, *about))[1],
    )

    def kept(cpu: str, factor: float) -> dict[str, Any]:
        (tmp_path / "widths.json").unlink(missing_ok=True)  # killed while it planned
        options = Options(**HALF, target="latency", amount=0.5 * factor * whole, latency_on="torch")
        around = context(
            tmp_path,
            vit,
            latency=clock(lambda m, _: factor * sum(p.numel() for p in m.parameters()) / 1000),
            measured_on=lambda: {"cpu": cpu, "versions": {"torch": "2"}},
            progress=notes,
        )
        isomorphic.plan(vit, around, options)
        data: dict[str, Any] = read_json(tmp_path / "widths.json")["target"]
        return data

    whole = sum(p.numel() for p in vit.parameters()) / 1000
    slow = kept("slow", 1.0)
    assert slow["most"] == pytest.approx(whole) and not any("anew" in note for note in notes.notes)
    fast = kept("fast", 0.5)
    assert (fast["most"], fast["reached"]) == (slow["most"] / 2, slow["reached"] / 2)
    (line,) = (note for note in notes.notes if "anew" in note)
    assert line == (
        "latencies on torch are measured anew: those kept were taken elsewhere (cpu is 'slow' there, 'fast' here)"
    )
    assert sliced.count("cpu") >= 6
    sliced.clear()
    assert kept("slow", 1.0) == slow and not sliced
