"""SERo's exploration on a tiny model: the schedule, what scores, what returns, what is kept where."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_world import context, model
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.nn import functional
from whole_runs import RecordedProgress

from vitcompress import surgery
from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import family_of
from vitcompress.io.files import read_json, write_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import load_tensors
from vitcompress.io.training_state import load_state
from vitcompress.methods.base import LEFT_WEIGHTS, StepReport
from vitcompress.methods.sero import method as sero
from vitcompress.methods.sero.exploration import Exploration, sparsity_at
from vitcompress.methods.table import METHODS

SMALL = sero.Options(sparsity=0.5, epochs=4, refresh=2, lr=1e-3, round_to=2)


def with_layout(layout: Any) -> sero.Options:
    return replace(SMALL, layout=layout, round_to=8 if layout == "ragged" else SMALL.round_to)


def explore(folder: Path, options: sero.Options = SMALL, **changes: Any) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """The plan, the weights handed over, and what was recorded."""
    dense = model()
    delta = sero.plan(dense, context(folder, dense, **changes), options)
    return delta, load_tensors(folder / LEFT_WEIGHTS), read_json(folder / "exploration.json")


def exploration(dense: nn.Module, **changes: Any) -> Exploration:
    """Ready to choose half of all units at its first step."""
    plain = sero.Options(sparsity=0.5, epochs=1, refresh=1, weight_scale="none", layout="ragged", round_to=1)
    return Exploration(dense, family_of(dense), replace(plain, **changes), seed=0)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_schedule_is_cubic_after_the_warm_up_and_ends_flat() -> None:
    at = partial(sparsity_at, sero.Options(sparsity=0.7, epochs=50))
    assert [at(0, step, 100) for step in (0, 99)] == [0.0, 0.0] and at(1, 0, 100) == 0.0
    assert at(26, 0, 100) == pytest.approx(0.7 * (1 - 0.5**3))
    assert at(48, 99, 100) == pytest.approx(0.7 * (1 - (1 - 4799 / 5000) ** 3))
    assert [at(49, step, 100) for step in (0, 50, 99)] == [0.7] * 3


@pytest.mark.parametrize("layout", ["ragged", "uniform"])
@pytest.mark.parametrize("criterion", ["gradient", "gradient_times_weight", "weight", "random"])
def test_plan(criterion: Any, layout: Any, tmp_path: Path) -> None:
    """The budget is met, the model unchanged, no mask is in the weights, and a second call returns the kept plan."""
    dense = model()
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    options = replace(with_layout(layout), criterion=criterion, epochs=2)
    delta = sero.plan(dense, context(tmp_path, dense), options)
    assert same(dict(dense.state_dict()), before) and not any(m._forward_hooks for m in dense.modules())
    left, record = load_tensors(tmp_path / LEFT_WEIGHTS), read_json(tmp_path / "exploration.json")
    assert {name: t.shape for name, t in left.items()} == {name: t.shape for name, t in before.items()}
    assert not same(left, before)
    live, units = (sum(pair[i] for pair in record["counts"].values()) for i in (0, 1))
    assert 0.5 * units - 2 <= live <= 0.5 * units
    assert record["trace"][-1]["wanted"] == 0.5 and record["skipped"] == 0
    widths = {row["space"]: row["kept"] for row in record["spaces"]}
    assert all(len(delta.kept[name]) == widths[name] for name in delta.kept)
    by_layer, by_epoch, by_score = METHODS["sero"].report(tmp_path).charts
    assert sum(sum(line.gone) for line in by_score.lines) == units - live
    assert (by_score.level is not None) == (layout == "ragged") and len(by_epoch.lines[0].x) == 2
    assert [len(line.x) for line in by_layer.lines] == [3, 3, 3]
    if by_score.level is not None:  # one number parts what lives from what does not
        shown = [(y, out) for line in by_score.lines for y, out in zip(line.y, line.gone, strict=True)]
        assert max(y for y, out in shown if out) <= by_score.level == min(y for y, out in shown if not out)
    dense.load_state_dict(left)
    surgery.apply_to_copy(dense, delta)(torch.zeros(1, 1, 8, 8))
    assert sero.plan(model(), context(tmp_path, model()), options) == delta


def test_masks_are_plan_data_in_the_state_and_nowhere_else(tmp_path: Path) -> None:
    _, left, record = explore(tmp_path)
    state = load_state(tmp_path / "exploration")
    assert state is not None
    kept = state.data["hooks"]["kept"]
    assert {name: len(channels) for name, channels in kept.items()} == {
        row["space"]: row["live"] for row in record["spaces"] if row["live"] < row["size"]
    }
    names = {name.removeprefix("module.") for name in state.tensors}
    assert names == set(left)


class Stopping(Progress):
    """Ctrl-C while the third epoch is under way."""

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        if label == "exploration" and text.startswith("epoch 3/"):
            raise KeyboardInterrupt


@pytest.mark.parametrize("criterion_pass", ["dense", "masked"])
def test_stopped_and_resumed_is_never_stopped(criterion_pass: Any, tmp_path: Path) -> None:
    options = replace(SMALL, criterion_pass=criterion_pass)
    whole = explore(tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        explore(tmp_path / "stopped", options, progress=Stopping())
    state = load_state(tmp_path / "stopped" / "exploration")
    assert state is not None and len(state.data["history"]) == 2 and state.data["hooks"]["kept"]
    resumed = explore(tmp_path / "stopped", options)
    assert resumed[0] == whole[0] and same(resumed[1], whole[1]) and resumed[2] == whole[2]


def test_units_return_only_where_masked_ones_are_scored(tmp_path: Path) -> None:
    """In the masked pass a pruned unit's gradient is exactly zero, so what the released code prunes never returns."""
    options = replace(with_layout("ragged"), refresh=1, lr=1e-2)
    dense = explore(tmp_path / "dense", options)[2]["revived"]
    masked = explore(tmp_path / "masked", replace(options, criterion_pass="masked"))[2]["revived"]
    assert sum(dense.values()) > 0 and sum(masked.values()) == 0


def loss_of(dense: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return functional.cross_entropy(dense(x), torch.tensor([0, 1, 2, 0]))


def test_scores_are_the_mean_gradients_of_the_writers() -> None:
    """Eq. 1 to 3 written out for timm's fused layout: q and k averaged; v and fc1 alone, proj and fc2 not counted."""
    dense = model()
    explored = exploration(dense)
    scores = explored._scores(lambda: loss_of(dense).backward())
    qkv, fc1 = dense.blocks[1].attn.qkv.weight.grad.abs().mean(1), dense.blocks[1].mlp.fc1.weight.grad.abs().mean(1)
    want = {"blocks.1.qk": (qkv[:16] + qkv[16:32]) / 2, "blocks.1.v": qkv[32:], "blocks.1.mlp": fc1}
    for name, value in want.items():
        assert np.allclose(scores[name], value.numpy(), rtol=1e-6, atol=0)
    explored.close()


def test_masked_units_receive_no_gradient_and_the_dense_pass_scores_them() -> None:
    dense = model()
    explored = exploration(dense)
    explored.before_step(0, 0, 10, lambda: loss_of(dense).backward())
    dead = ~torch.as_tensor(explored.live["blocks.0.mlp"])
    assert dead.any() and not dead.all()
    scored = explored._scores(lambda: loss_of(dense).backward())["blocks.0.mlp"]
    assert (scored[dead.numpy()] > 0).all()
    dense.zero_grad()
    loss_of(dense).backward()
    mlp = dense.blocks[0].mlp
    assert (mlp.fc1.weight.grad[dead] == 0).all() and (mlp.fc2.weight.grad[:, dead] == 0).all()
    assert (mlp.fc1.weight.grad[~dead] != 0).any()
    explored.close()
    assert not any(module._forward_hooks for module in dense.modules())


def test_a_gradient_that_is_not_finite_skips_the_refresh() -> None:
    dense = model()
    explored = exploration(dense)

    def overflow() -> None:
        loss_of(dense).backward()
        dense.blocks[0].mlp.fc1.weight.grad[0, 0] = float("nan")

    explored.before_step(0, 0, 10, overflow)
    assert explored.skipped == 1 and all(live.all() for live in explored.live.values()) and explored.sparsity == 0
    dense.zero_grad()  # as the training does before every step
    explored.before_step(0, 1, 10, lambda: loss_of(dense).backward())
    kept = {name: live.copy() for name, live in explored.live.items()}
    assert not all(live.all() for live in kept.values())
    dense.zero_grad()
    explored.before_step(0, 2, 10, overflow)
    assert explored.skipped == 2 and all((explored.live[name] == kept[name]).all() for name in kept)
    explored.close()


def test_an_exploration_without_finite_gradients_does_not_end_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Exploration._gradient
    monkeypatch.setattr(Exploration, "_gradient", lambda self, weight: real(self, weight) * float("inf"))
    with pytest.raises(VitcompressError, match="finite gradients"):
        explore(tmp_path, replace(SMALL, epochs=2))


def test_weight_scale_on_the_gradient() -> None:
    dense = model()
    loss_of(dense).backward()
    plain = {name: parameter.grad.clone() for name, parameter in dense.named_parameters()}
    exploration(dense, weight_scale="gradient").before_update()
    for name, parameter in dense.named_parameters():
        linear = isinstance(dense.get_submodule(name.rpartition(".")[0]), nn.Linear) and name.endswith("weight")
        assert torch.equal(parameter.grad, plain[name] * parameter.abs() if linear else plain[name]), name
    assert not torch.equal(dense.head.weight.grad, plain["head.weight"])  # the classifier too


def test_weight_scale_on_the_update() -> None:
    dense = model()
    explored = exploration(dense, weight_scale="update")
    before = dense.head.weight.detach().clone()
    explored.before_update()
    with torch.no_grad():
        dense.head.weight.add_(0.5)
    explored.after_update()
    step = (dense.head.weight - before).detach()
    assert torch.allclose(step, 0.5 * before.abs() / before.abs().mean(), rtol=1e-5, atol=1e-6)
    assert float(step.mean()) == pytest.approx(0.5, rel=1e-4)  # the learning rate means what it meant


def test_the_way_of_scoring_and_scaling_matters(tmp_path: Path) -> None:
    ways = {
        "plain": SMALL,
        "weight": replace(SMALL, criterion="weight"),
        "random": replace(SMALL, criterion="random"),
        "each": replace(SMALL, threshold="per_layer"),
        "masked": replace(SMALL, criterion_pass="masked"),
        "unscaled": replace(SMALL, weight_scale="none"),
    }
    results = {name: explore(tmp_path / name, options) for name, options in ways.items()}
    assert not same(results["plain"][1], results["unscaled"][1])
    assert len({results[name][0].digest for name in ways if name != "unscaled"}) == 5
    each = {row["space"]: row["live"] / row["size"] for row in results["each"][2]["spaces"]}
    assert set(each.values()) == {0.5}


def test_tables_tell_what_was_achieved(tmp_path: Path) -> None:
    _, _, record = explore(tmp_path)
    kinds, widths, trace = METHODS["sero"].report(tmp_path).tables
    rows = {row[0]: row for row in kinds.rows}
    assert list(rows) == ["qk", "v", "mlp", "all"]
    for kind, (live, total) in record["counts"].items():
        assert rows[kind][1:4] == (str(total), str(live), f"{100 * (1 - live / total):.2f} %")
    assert len(widths.rows) == 9 and [row[0] for row in trace.rows] == ["1", "2", "3", "4"]
    assert METHODS["sero"].report(tmp_path / "nowhere") == StepReport()
    assert METHODS["sero"].report(tmp_path).remarks == []
    write_json(tmp_path / "exploration.json", record | {"skipped": 3})
    assert "skipped 3 refreshes" in METHODS["sero"].report(tmp_path).remarks[0]


def test_layers_that_cannot_lose_their_share_are_reported(tmp_path: Path) -> None:
    """Heads of 8 channels in multiples of 8: only FFNs lose units."""
    progress = RecordedProgress()
    explore(tmp_path, replace(SMALL, round_to=8, threshold="per_layer"), progress=progress)
    (remark,) = METHODS["sero"].report(tmp_path).remarks
    assert remark.startswith("SERo removed 33.33 % of the units, 50 % were requested") and "round_to" in remark
    assert remark in progress.notes


@pytest.mark.parametrize(
    ("change", "sentence"), [({"sparsity": 0.999}, "at most"), ({"epochs": 1}, "nothing would be explored")]
)
def test_impossible_options_are_rejected_before_training(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    dense = model()
    for ask in (
        lambda options: sero.structure(dense, family_of(dense), context(tmp_path, dense).plan, options),
        lambda options: sero.plan(dense, context(tmp_path, dense), options),
    ):
        with pytest.raises(PlanError, match=sentence):
            ask(replace(SMALL, **change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"sparsity": 0}, {"sparsity": 1}, {"sparsity": 0.5, "layout": "x"}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    check = TypeAdapter(sero.Options)
    with pytest.raises(ValidationError):
        check.validate_json(json.dumps(wrong))
    assert check.validate_json(check.dump_json(SMALL)) == SMALL
    assert sero.SERO.estimate(model(), family_of(model()), SMALL)[0].epochs == 4


def test_structure_is_a_plan_of_the_same_size(tmp_path: Path) -> None:
    dense = model()
    guess = sero.structure(dense, family_of(dense), context(tmp_path, dense).plan, SMALL)
    delta = explore(tmp_path)[0]
    units = [sum(map(len, plan.kept.values())) for plan in (guess, delta)]
    spaces = [sum(s.size for s in family_of(dense).spaces(dense) if s.name in plan.kept) for plan in (guess, delta)]
    assert abs((spaces[0] - units[0]) - (spaces[1] - units[1])) <= 2  # one FFN block


def test_a_masked_pass_scores_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    """The first step of the next epoch refreshes, also if an epoch has fewer steps than `refresh`."""
    vit = model()
    options = sero.Options(criterion_pass="masked", refresh=100, round_to=1, sparsity=0.2, epochs=1, warmup_epochs=0)
    exploration = Exploration(vit, context(tmp_path, vit).family, options, 0)
    for step in range(3):
        exploration.before_step(0, step, 3, lambda: None)
        vit(torch.randn(4, 1, 8, 8)).square().sum().backward()
        exploration.before_update()
    exploration.before_step(1, 0, 3, lambda: None)
    assert (exploration.skipped, exploration.sparsity) == (1, 0.2)  # the very first step has no scores yet
