"""The importance search: its schedule, its choices, and that it searches the function that is deployed."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from method_world import context, model
from torch import nn

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.methods import depth
from vitcompress.methods.hetdpt.search import alternating, lr_scale, parameter_groups, removal_epochs, search
from vitcompress.methods.options import DepthOptions, DirectOptions, SearchOptions
from vitcompress.training.options import TrainOptions

A, G = frozenset({"attention"}), frozenset({"activation"})
FAST = SearchOptions(factor=0.5, images_per_class=8, lr=5e-3)
TWO = DirectOptions(pruned_layers=2, search=FAST)


def all_sites(vit: nn.Module) -> set[str]:
    return {site.name for site in depth.all_layers(vit, family_of(vit))}


def test_schedule_of_the_paper() -> None:
    assert removal_epochs(8) == [4, 9, 16, 25, 36, 49, 64, 81]
    assert [removal_epochs(n)[-1] for n in (5, 6, 8, 10)] == [36, 49, 81, 121]
    lengths = [3, 5, 7, 9, 11, 13, 15, 17]  # of the stages in the released script, which counts epochs from 0
    assert [sum(lengths[: i + 1]) for i in range(8)] == [epochs - 1 for epochs in removal_epochs(8)]


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.5, 2.0])
def test_stretched_schedule_removes_one_at_a_time(factor: float) -> None:
    epochs = removal_epochs(6, factor)
    assert epochs[0] >= 1
    assert all(a < b for a, b in pairwise(epochs))
    assert removal_epochs(6, 2.0) == [8, 18, 32, 50, 72, 98]


def test_types_alternate_with_the_larger_target_first() -> None:
    assert alternating(4, 4) == [G, A, G, A, G, A, G, A]
    assert alternating(5, 3) == [A, G, A, G, A, G, A, A]
    assert alternating(2, 4) == [G, A, G, A, G, G]
    assert alternating(0, 2) == [G, G]


def test_learning_rate_restarts_at_each_removal() -> None:
    epochs = removal_epochs(3)  # 4, 9, 16
    assert [lr_scale(e, epochs, 0.1) for e in (0, 2, 3.99)] == [0.1] * 3
    assert [lr_scale(e, epochs, 0.1) for e in (4, 9)] == pytest.approx([1, 1])
    assert lr_scale(6.5, epochs, 0.1) == pytest.approx(0.55)
    assert lr_scale(8.999, epochs, 0.1) == pytest.approx(0.1, abs=1e-5)
    assert lr_scale(16, epochs, 0.1) == pytest.approx(1.0)


@pytest.mark.parametrize("bypass", ["drop", "norm_identity", "double"])
@pytest.mark.parametrize("output_act", ["none", "gelu"])
@pytest.mark.parametrize("more", [{}, {"init_values": 0.5}], ids=["plain", "layer_scale"])
def test_searched_model_is_the_deployed_model(tmp_path: Path, bypass: Any, output_act: Any, more: Any) -> None:
    """In float64, where the two may only differ in the order of a few additions."""
    vit = model(**more).double().eval()
    about = context(tmp_path, vit)
    options = DepthOptions(pruned_layers=3, attention_bypass=bypass, both_pruned_output_act=output_act)
    probe = depth.gate_layers(vit, about, depth.all_layers(vit, about.family), options).eval()
    pixels = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dense = vit(pixels)
    torch.testing.assert_close(probe(pixels), dense, rtol=0, atol=0)
    for name in ("blocks.0.attn", "blocks.1.attn", "blocks.1.mlp.act"):
        probe.set_gate(name, 0.0)
    plan = depth.plan_layers(vit, about.plan, {"attention": [0, 1], "activation": [1]}, options)
    deployed = surgery.apply_to_copy(vit, plan).eval()(pixels)
    torch.testing.assert_close(probe(pixels), deployed, rtol=0, atol=1e-12)
    assert (deployed - dense).abs().max() > 1e-3
    assert plan.appended == ({"blocks.1": "gelu"} if output_act == "gelu" else {})


@pytest.mark.parametrize("bypass", ["drop", "norm_identity", "double"])
def test_score_gradient_is_the_derivative_of_the_loss_by_the_gate(tmp_path: Path, bypass: Any) -> None:
    vit = model().double().eval()
    about = context(tmp_path, vit)
    sites = depth.all_layers(vit, about.family)
    probe = depth.gate_layers(vit, about, sites, DepthOptions(pruned_layers=1, attention_bypass=bypass)).eval()
    pixels = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(probe(pixels).square().sum(), list(probe.scores))
    step = 1e-5
    for site, gradient in zip(probe.sites, gradients, strict=True):
        values = []
        for gate in (1.0, 1 - step, 1 - 2 * step):
            probe.set_gate(site.name, gate)
            values.append(float(probe(pixels).detach().square().sum()))
        probe.set_gate(site.name, 1.0)
        # One-sided, as a gate ends at 1: off by step^2 = 1e-10 of the third derivative and 1e-16 / step of the loss.
        # The score itself is float32.
        slope = (3 * values[0] - 4 * values[1] + values[2]) / (2 * step)
        assert float(gradient) == pytest.approx(slope, rel=1e-5, abs=1e-6)
        assert abs(slope) > 1e-3


def test_every_parameter_learns_and_scores_never_decay(tmp_path: Path) -> None:
    vit = model()
    about = context(tmp_path, vit)
    probe = depth.gate_layers(vit, about, depth.layers(vit, about.family)["attention"], TWO)
    decay, bare, scores = parameter_groups(probe, TrainOptions(lr=0.1, weight_decay=0.05), 3.0)
    assert {id(p) for group in (decay, bare, scores) for p in group["params"]} == {id(p) for p in probe.parameters()}
    assert (decay["weight_decay"], bare["weight_decay"], scores["weight_decay"]) == (0.05, 0.0, 0.0)
    assert scores["lr"] == pytest.approx(0.3)
    assert scores["params"] == list(probe.scores)
    assert all(parameter.ndim > 1 for parameter in decay["params"])
    names = {id(p): name for name, p in probe.named_parameters()}
    assert {names[id(p)] for p in bare["params"]} >= {"model.cls_token", "model.pos_embed"}


def run(folder: Path, events: Any, candidates: set[str], **changes: Any) -> tuple[Any, list[Any]]:
    vit = model()
    about = context(folder, vit, **changes)
    result = search(vit, about, TWO, events, candidates)
    return result, read_json(folder / "search_epochs.json")


def test_the_lowest_score_of_the_scheduled_type_goes(tmp_path: Path) -> None:
    candidates = all_sites(model()) - {"blocks.0.mlp.act"}
    result, epochs = run(tmp_path, [G, A], candidates)
    assert result["removal_epochs"] == [2, 4]
    assert [e["epoch"] for e in epochs] == [0, 1, 2, 3]
    assert [e["epoch"] for e in epochs if e["removed"]] == [1, 3]
    for epoch, ending in ((1, ".mlp.act"), (3, ".attn")):
        scores = {name: value for name, value in epochs[epoch]["scores"].items() if name.endswith(ending)}
        assert epochs[epoch]["removed"] == min(scores.keys() & candidates, key=lambda name: scores[name])
        assert len(set(scores.values())) == 3, "scores tell layers apart"
    assert len(result["attention"]) == len(result["activation"]) == 1
    assert result["order"] == [e["removed"] for e in epochs if e["removed"]]
    assert not (tmp_path / "search").exists(), "the search's weights are not kept"


def test_direct_importance_pools_both_types(tmp_path: Path) -> None:
    result, epochs = run(tmp_path, [A | G] * 2, all_sites(model()))
    first, second = epochs[1], epochs[3]
    assert first["removed"] == min(first["scores"], key=first["scores"].get)
    left = {name: value for name, value in second["scores"].items() if name != first["removed"]}
    assert second["removed"] == min(left, key=lambda name: left[name])
    assert len(result["attention"]) + len(result["activation"]) == 2


class Stop(Progress):
    """Breaks off at the n-th sign of life, as a kill would."""

    def __init__(self, after: int) -> None:
        self.left = after

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_killed_search_ends_where_an_unbroken_one_does(tmp_path: Path, after: int) -> None:
    whole = run(tmp_path / "whole", [G, A], all_sites(model()))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", [G, A], all_sites(model()), progress=Stop(after))
    assert run(tmp_path / "killed", [G, A], all_sites(model())) == whole


def test_epochs_that_were_written_down_but_never_saved_are_replaced(tmp_path: Path) -> None:
    """Killed between the record of an epoch and its state, the epoch runs again."""
    whole = run(tmp_path / "whole", [G, A], all_sites(model()))
    (tmp_path / "killed").mkdir()
    ahead = [{**record, "removed": "blocks.0.attn"} for record in whole[1][:2]]
    (tmp_path / "killed" / "search_epochs.json").write_text(json.dumps(ahead))
    assert run(tmp_path / "killed", [G, A], all_sites(model())) == whole
