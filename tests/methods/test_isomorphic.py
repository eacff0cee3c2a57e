"""Isomorphic pruning on tiny models: scores, scopes, kept widths, targets and rejected options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import assert_moved, assert_same, build, contract, every_variant, images, logits, spaces_of
from layer_plans import depth_plan
from method_world import context, model
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional

from vitcompress import surgery
from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import isomorphic
from vitcompress.methods.options import Alignment
from vitcompress.methods.options import IsomorphicOptions as Options
from vitcompress.methods.scores import channel_scores, gradients, random_scores
from vitcompress.methods.table import METHODS
from vitcompress.methods.width import groups_of
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_on_meta, input_config
from vitcompress.plan import Plan
from vitcompress.training.data import subset
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import evaluate
from vitcompress.verify.slice import slice_check

FINE = Alignment(residual=1, ffn=1, head_dim=1)
COARSE = Alignment(residual=16, ffn=64, head_dim=4)
HALF: dict[str, Any] = {"keep_ratio": 0.5, "keep_heads": 0.5, "keep_head_dim": 0.5, "align": FINE, "images": 24}


def half(**changes: Any) -> Options:
    """Half of all channels, without options that have no effect."""
    unused = {"images"} if changes.get("criterion") in ("magnitude", "random") else set()
    unused |= {"keep_head_dim"} if changes.get("scope") == "global" else set()
    return Options(**{name: value for name, value in (HALF | changes).items() if name not in unused})


def planned(folder: Path, dense: Any, **changes: Any) -> Plan:
    return isomorphic.plan(dense, context(folder, dense), half(**changes))


def test_plan(tmp_path: Path) -> None:
    """The shares are kept, the model is untouched, the test split unseen, and what was kept gives the same answer."""
    dense = model()
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    plan = planned(tmp_path, dense)
    assert all(torch.equal(value, before[key]) for key, value in dense.state_dict().items())
    assert all(parameter.grad is None for parameter in dense.parameters())
    assert len(plan.kept["residual"]) == 8
    assert sum(len(plan.kept[f"blocks.{b}.mlp"]) for b in range(3)) == 3 * 32
    assert all(plan.kept[f"blocks.{b}.qk"] == plan.kept[f"blocks.{b}.v"] for b in range(3))
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_moved(surgery.apply_to_copy(dense, plan)(pixels), dense(pixels))
    assert planned(tmp_path, dense) == plan
    rows = read_json(tmp_path / "widths.json")["rows"]
    assert {row["kind"] for row in rows} == {"residual", "ffn", "head", "head_dim"}
    (table,) = METHODS["isomorphic"].report(tmp_path).tables
    assert ("residual", "residual", "8", "16") in table.rows
    charts = METHODS["isomorphic"].report(tmp_path).charts
    gone = {c.title.split(": ")[1].split(" scores")[0]: [sum(line.gone) for line in c.lines] for c in charts}
    assert gone["residual"] == [8] and sum(gone["ffn"]) == 3 * 32
    assert set(gone) == {"residual", "ffn", "head", "head dim"}
    assert all(sum(line.y) / len(line.y) == pytest.approx(1) for chart in charts for line in chart.lines)


def test_taylor_scores_are_what_they_say(tmp_path: Path) -> None:
    """|w g| by hand: rows of fc1 and columns of fc2, biases left out, gradients summed over batches of any size."""
    dense = model()
    about = context(tmp_path, dense)
    slopes = gradients(dense, about, 24)
    loader = EvalLoader(subset(about.data.train, 8, 0), about.input, 5, about.runtime)
    for pixels, targets in loader:
        functional.cross_entropy(dense(pixels), targets, reduction="sum").backward()
    mlp: Any = dense.get_submodule("blocks.1.mlp")
    assert torch.allclose(mlp.fc1.weight.grad.double(), slopes["blocks.1.mlp.fc1.weight"].double(), rtol=1e-4)
    elements = {name: (p * slopes[name]).abs().detach() for name, p in dense.named_parameters()}
    scores = channel_scores(dense, spaces_of(dense).values(), lambda name, weight: elements[name])
    mine = elements["blocks.1.mlp.fc1.weight"].sum(1) + elements["blocks.1.mlp.fc2.weight"].sum(0)
    assert torch.allclose(scores["blocks.1.mlp"], mine.double())
    qkv, proj = elements["blocks.0.attn.qkv.weight"].sum(1), elements["blocks.0.attn.proj.weight"].sum(0)
    assert torch.allclose(scores["blocks.0.qk"], (qkv[:16] + qkv[16:32]).double())
    assert torch.allclose(scores["blocks.0.v"], (qkv[32:] + proj).double())


def test_every_group_scores_one_on_average_and_loud_blocks_win_nothing() -> None:
    dense = model()
    spaces = list(spaces_of(dense).values())
    scores = random_scores(spaces, 0)
    louder = {name: value * (1000 if name == "blocks.1.mlp" else 1) for name, value in scores.items()}
    quiet, loud = groups_of(spaces, scores, "isomorphic"), groups_of(spaces, louder, "isomorphic")
    assert all(float(group.scores.mean()) == pytest.approx(1) for group in quiet)
    assert all(torch.allclose(a.scores, b.scores) for a, b in zip(quiet, loud, strict=True))


def test_scopes(tmp_path: Path) -> None:
    """Own kind: FFNs share their budget, the stream keeps its own. Local: all blocks alike. Global: one threshold."""
    dense = model(4)
    plans = {
        scope: planned(tmp_path / scope, dense, scope=scope, criterion="random")
        for scope in ("isomorphic", "global", "local")
    }
    ffn = {scope: [len(plan.kept[f"blocks.{b}.mlp"]) for b in range(4)] for scope, plan in plans.items()}
    assert ffn["local"] == [32] * 4
    assert len(set(ffn["isomorphic"])) > 1 and sum(ffn["isomorphic"]) == 4 * 32
    assert len(plans["isomorphic"].kept["residual"]) == 8
    shared = plans["global"]
    per_head = [len(shared.kept[f"blocks.{b}.v"]) // shared.heads.get(f"blocks.{b}.attn", 2) for b in range(4)]
    assert len(shared.kept["residual"]) + sum(ffn["global"]) + sum(per_head) == (16 + 4 * 64 + 4 * 8) // 2


def test_criteria_choose_differently(tmp_path: Path) -> None:
    dense = model()
    plans = {
        name: planned(tmp_path / name, dense, criterion=name) for name in ("taylor", "gradient", "magnitude", "random")
    }
    assert len({plan.digest for plan in plans.values()}) == 4
    magnitude = dense.get_submodule("blocks.0.mlp.fc1").weight.square().sum(1)
    magnitude = magnitude + dense.get_submodule("blocks.0.mlp.fc2").weight.square().sum(0)
    kept = plans["magnitude"].kept["blocks.0.mlp"]
    assert set(magnitude.topk(len(kept)).indices.tolist()) == set(kept)


@every_variant
def test_every_family_is_cut_and_masked_is_sliced(variant: str) -> None:
    """Structure alone, as --structure-only makes it, on every model of the contract table."""
    dense = build(variant, dtype=torch.float32)
    plan = isomorphic.structure(dense, family_of(dense), contract(variant).plan, Options(**HALF))
    spaces = spaces_of(dense)
    kinds = {spaces[name].kind for name in plan.kept}
    assert {"residual", "mlp"} <= kinds
    x = images(variant, dtype=torch.float32)
    assert slice_check(dense, plan, x).verdict == "passed"
    sliced = surgery.apply_to_copy(dense, plan)
    assert_moved(logits(sliced, x), logits(dense, x))
    size = (3, *x.shape[2:])
    assert count_cost(sliced, size).macs < 0.6 * count_cost(dense, size).macs


def test_each_attention_keeps_a_head_at_any_share(tmp_path: Path) -> None:
    plan = planned(tmp_path, model(4), keep_heads=0.01, keep_head_dim=0.01, keep_ratio=0.01)
    assert set(plan.heads.values()) == {1}
    assert all(len(kept) >= 1 for kept in plan.kept.values())


@pytest.mark.parametrize(("target", "key", "scale"), [("macs", "macs", 1e9), ("params", "params", 1e6)])
def test_targets_are_met(target: Any, key: str, scale: float, tmp_path: Path) -> None:
    dense = model(4, 32)
    whole = getattr(count_cost(dense, (1, 8, 8)), key)
    plan = planned(tmp_path, dense, target=target, amount=0.4 * whole / scale)
    sliced = count_cost(surgery.apply_to_copy(dense, plan), (1, 8, 8))
    assert abs(getattr(sliced, key) / (0.4 * whole) - 1) < 0.01
    assert read_json(tmp_path / "widths.json")["cost"] == vars(sliced)


def test_widths_are_aligned(tmp_path: Path) -> None:
    dense = model(4, 32)
    plan = planned(tmp_path, dense, align=Alignment(residual=8, ffn=16, head_dim=4))
    assert len(plan.kept["residual"]) % 8 == 0
    for b in range(4):
        assert len(plan.kept[f"blocks.{b}.mlp"]) % 16 == 0
        heads = plan.heads.get(f"blocks.{b}.attn", 2)
        assert len(plan.kept[f"blocks.{b}.v"]) // heads % 4 == 0


def test_the_scale_of_the_new_head_width_is_carried_by_q_and_k(tmp_path: Path) -> None:
    """`reset` hands over weights with which the kept scale computes what the released code's new scale does."""
    dense = model()
    kept = planned(tmp_path / "keep", dense)
    assert not (tmp_path / "keep" / "weights.safetensors").exists()
    assert planned(tmp_path / "reset", dense, attention_scale="reset") == kept
    assert (tmp_path / "reset" / "weights.safetensors").exists()
    spaces = list(spaces_of(dense).values())
    carried = surgery.apply_to_copy(isomorphic.reset_attention_scale(dense, spaces, kept), kept).eval()
    expected = surgery.apply_to_copy(dense, kept).eval()
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    assert_moved(carried.double()(pixels), expected.double()(pixels))
    for block in expected.get_submodule("blocks").children():
        attn: Any = block.attn
        attn.scale = (attn.qk_dim // attn.num_heads) ** -0.5
    difference = (carried(pixels) - expected(pixels)).abs().max()
    assert difference < 1e-5 * expected(pixels).abs().max()  # q and k were rescaled in float32


def test_a_second_step_counts_in_what_the_first_left(tmp_path: Path) -> None:
    """Depth first, then width: removed attentions and folded FFNs have no widths of their own."""
    dense = model(4)
    base = context(tmp_path, dense).plan
    first = depth_plan(dense, base, [1], [1, 2])
    surgery.apply_plan(dense, first)
    plan = base.then(first)
    folded = surgery.fold_linears(dense, Plan(base.arch, base.arch_args))[0]
    plan = plan.then(folded)
    second = isomorphic.plan(dense, context(tmp_path, dense, plan=plan), Options(**HALF))
    assert set(second.kept) == {
        "residual",
        *(f"blocks.{b}.{part}" for b in (0, 2, 3) for part in ("qk", "v")),
        *(f"blocks.{b}.mlp" for b in (0, 3)),
    }
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert slice_check(dense, second, pixels).verdict == "passed"
    from_plan = surgery.apply_to_copy(model(4), plan.then(second))
    assert [p.shape for p in from_plan.parameters()] == [
        p.shape for p in surgery.apply_to_copy(dense, second).parameters()
    ]


def test_structure_needs_no_weights() -> None:
    dense = model()
    with torch.device("meta"):
        empty = dense.to("meta")
    plan = isomorphic.structure(empty, family_of(empty), context(Path(), dense).plan, Options(**HALF))
    assert len(plan.kept["residual"]) == 8
    assert isomorphic.estimate(model(), family_of(model()), Options(**HALF))[0].images == 24
    assert isomorphic.estimate(model(), family_of(model()), half(criterion="magnitude")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "macs", "amount": 1e-7}, r"allows [0-9.e-]+ G MACs to"),
        ({"target": "params", "amount": 100.0}, r"allows .* to [0-9.]+ M parameters"),
        ({"align": Alignment(residual=64, ffn=1, head_dim=1)}, "residual has only 16"),
        ({"round_to": 64, "align": Alignment()}, "multiples of 64"),
        ({"keep_ratio": 1.0, "keep_heads": 1.0, "keep_head_dim": 1.0}, "remove no channel"),
        ({"keep_ratio": 0.95, "keep_heads": 1.0, "keep_head_dim": 1.0, "align": COARSE}, "remove no channel"),
        (
            {"keep_ratio": 1.0, "keep_heads": 1.0, "keep_head_dim": Options.keep_head_dim, "scope": "global"},
            "no channel",
        ),
    ],
)
def test_unreachable_targets_are_rejected_and_nothing_is_written(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    dense = model()
    options = half(**changes)
    with pytest.raises(PlanError, match=words):
        isomorphic.structure(dense, family_of(dense), context(tmp_path, dense).plan, options)
    with pytest.raises(PlanError, match=words):
        isomorphic.plan(dense, context(tmp_path, dense), options)
    assert not list(tmp_path.iterdir())


def test_gradients_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    dense = model()
    with torch.no_grad():
        dense.get_submodule("head").weight.fill_(torch.nan)
    with pytest.raises(VitcompressError, match="not finite"):
        planned(tmp_path, dense)


@pytest.mark.parametrize("wrong", [{"keep_ratio": 0}, {"keep_heads": 1.5}, {"criterion": "l3"}, {"round_to": 0}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    check = TypeAdapter(Options)
    with pytest.raises(ValidationError):
        check.validate_json(json.dumps(wrong))
    assert check.validate_json(check.dump_json(Options(**HALF))) == Options(**HALF)


def test_taylor_loses_less_than_random_on_a_trained_model(tmp_path: Path) -> None:
    """What the scores are for: cut to two fifths, the model that kept the important channels is better."""
    from vitcompress.training.loop import train
    from vitcompress.training.options import TrainOptions
    from vitcompress.training.trainer import TrainingContext

    dense = model()
    about = context(tmp_path, dense)
    options = TrainOptions(epochs=12, batch_size=16, lr=3e-3)
    data = about.data
    at = TrainingContext(about.input, about.runtime, tmp_path / "dense", "dense", 0, about.progress)
    train(dense, data.train, data.heldout, options, at)
    dense.eval()
    loader = EvalLoader(data.heldout, about.input, 64, about.runtime)
    shares = {"keep_ratio": 0.4, "keep_heads": 1.0, "keep_head_dim": 1.0}
    losses = {}
    for name in ("taylor", "random"):
        runs = [replace(context(tmp_path / f"{name}{seed}", dense), seed=seed) for seed in range(3)]
        plans = [isomorphic.plan(dense, run, half(**shares, criterion=name)) for run in runs]
        losses[name] = (
            sum(evaluate(surgery.apply_to_copy(dense, plan), loader, about.runtime).loss for plan in plans) / 3
        )
    assert losses["taylor"] < losses["random"]


def test_the_sliced_model_is_the_deployed_one(tmp_path: Path) -> None:
    """`applied` and the plan alone, on the same weights, compute the same."""
    dense = model().double()
    plan = planned(tmp_path, model())
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    again = Plan.from_json(plan.to_json())
    assert_same(surgery.apply_to_copy(dense, plan)(pixels), surgery.apply_to_copy(dense, again)(pixels))


@every_variant
@pytest.mark.parametrize("folds", [False, True], ids=["whole", "folded"])
def test_a_structure_has_the_cost_of_the_target_after_folding(variant: str, folds: bool) -> None:
    """Which FFNs are folded may depend on the widths."""
    base = contract(variant).plan
    dense = create_on_meta(base.arch, base.arch_args)
    if folds:
        acts = [] if family_of(dense).not_foldable(dense) else [1]
        delta = depth_plan(dense, base, [0], acts)
        dense, base = surgery.apply_to_copy(dense, delta), base.then(delta)
    size, whole = input_config(dense).size, surgery.apply_to_copy(dense, base.delta())
    surgery.fold_linears(whole, base)
    aim = 0.7 * count_cost(whole, size).params / 1e6
    options = METHODS["isomorphic"].options(target="params", amount=aim, align=FINE)
    plan = METHODS["isomorphic"].structure(dense, family_of(dense), base, options)
    pruned = surgery.apply_to_copy(dense, plan)
    surgery.fold_linears(pruned, base.then(plan))
    assert abs(count_cost(pruned, size).params / 1e6 / aim - 1) < 0.05
