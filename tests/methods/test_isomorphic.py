"""Isomorphic pruning on tiny models: what is scored, who competes with whom, what is kept, what must be refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import assert_moved, assert_same, build, contract, every_variant, images, logits, spaces_of
from method_world import context, model
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional

from vitcompress import surgery
from vitcompress.errors import PlanError, VitcompressError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import METHODS, isomorphic
from vitcompress.methods.depth import depth_plan
from vitcompress.methods.isomorphic import Alignment, Options
from vitcompress.methods.scores import channel_scores, gradients, random_scores
from vitcompress.methods.width import groups_of
from vitcompress.models.cost import count_cost
from vitcompress.plan import Plan
from vitcompress.training.data import subset
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import evaluate
from vitcompress.verify.slice import slice_check

FINE = Alignment(residual=1, ffn=1, head_dim=1)
HALF: dict[str, Any] = {"keep_ratio": 0.5, "keep_heads": 0.5, "keep_head_dim": 0.5, "align": FINE, "images": 24}


def planned(folder: Path, made: Any, **options: Any) -> Plan:
    return isomorphic.plan(made, context(folder, made), Options(**{**HALF, **options}))


def test_plan(tmp_path: Path) -> None:
    """The shares are kept, the model is untouched, the test split unseen, and what was kept gives the same answer."""
    made = model()
    before = {key: value.clone() for key, value in made.state_dict().items()}
    found = planned(tmp_path, made)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())
    assert len(found.kept["residual"]) == 8
    assert sum(len(found.kept[f"blocks.{b}.mlp"]) for b in range(3)) == 3 * 32
    assert all(found.kept[f"blocks.{b}.qk"] == found.kept[f"blocks.{b}.v"] for b in range(3))
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_moved(surgery.apply_to_copy(made, found)(pixels), made(pixels))
    assert planned(tmp_path, made) == found
    rows = read_json(tmp_path / "widths.json")["rows"]
    assert {row["kind"] for row in rows} == {"residual", "ffn", "head", "head_dim"}
    (table,) = METHODS["isomorphic"].report(tmp_path).tables
    assert ["residual", "residual", "8", "16"] in table["rows"]
    charts = METHODS["isomorphic"].report(tmp_path).charts
    gone = {c.title.split(": ")[1].split(" scores")[0]: [sum(line.gone) for line in c.lines] for c in charts}
    assert gone["residual"] == [8] and sum(gone["ffn"]) == 3 * 32
    assert set(gone) == {"residual", "ffn", "head", "head dim"}
    assert all(sum(line.y) / len(line.y) == pytest.approx(1) for chart in charts for line in chart.lines)


def test_taylor_scores_are_what_they_say(tmp_path: Path) -> None:
    """|w g| by hand: rows of fc1 and columns of fc2, biases left out, gradients summed over batches of any size."""
    made = model()
    about = context(tmp_path, made)
    found = gradients(made, about, 24)
    loader = EvalLoader(subset(about.data.train, 8, 0), about.input, 5, about.runtime)
    for pixels, targets in loader:
        functional.cross_entropy(made(pixels), targets, reduction="sum").backward()
    mlp: Any = made.get_submodule("blocks.1.mlp")
    assert torch.allclose(mlp.fc1.weight.grad.double(), found["blocks.1.mlp.fc1.weight"].double(), rtol=1e-4)
    elements = {name: (p * found[name]).abs().detach() for name, p in made.named_parameters()}
    scores = channel_scores(made, spaces_of(made).values(), lambda name, weight: elements[name])
    mine = elements["blocks.1.mlp.fc1.weight"].sum(1) + elements["blocks.1.mlp.fc2.weight"].sum(0)
    assert torch.allclose(scores["blocks.1.mlp"], mine.double())
    qkv, proj = elements["blocks.0.attn.qkv.weight"].sum(1), elements["blocks.0.attn.proj.weight"].sum(0)
    assert torch.allclose(scores["blocks.0.qk"], (qkv[:16] + qkv[16:32]).double())
    assert torch.allclose(scores["blocks.0.v"], (qkv[32:] + proj).double())


def test_every_group_scores_one_on_average_and_loud_blocks_win_nothing() -> None:
    made = model()
    spaces = list(spaces_of(made).values())
    scores = random_scores(spaces, 0)
    louder = {name: value * (1000 if name == "blocks.1.mlp" else 1) for name, value in scores.items()}
    quiet, loud = groups_of(spaces, scores, "isomorphic"), groups_of(spaces, louder, "isomorphic")
    assert all(float(group.scores.mean()) == pytest.approx(1) for group in quiet)
    assert all(torch.allclose(a.scores, b.scores) for a, b in zip(quiet, loud, strict=True))


def test_scopes(tmp_path: Path) -> None:
    """Own kind: FFNs share their budget, the stream keeps its own. Local: all blocks alike. Global: one threshold."""
    made = model(4)
    plans = {
        scope: planned(tmp_path / scope, made, scope=scope, criterion="random")
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
    made = model()
    found = {
        name: planned(tmp_path / name, made, criterion=name) for name in ("taylor", "gradient", "magnitude", "random")
    }
    assert len({plan.digest for plan in found.values()}) == 4
    magnitude = made.get_submodule("blocks.0.mlp.fc1").weight.square().sum(1)
    magnitude = magnitude + made.get_submodule("blocks.0.mlp.fc2").weight.square().sum(0)
    kept = found["magnitude"].kept["blocks.0.mlp"]
    assert set(magnitude.topk(len(kept)).indices.tolist()) == set(kept)


@every_variant
def test_every_family_is_cut_and_masked_is_sliced(variant: str) -> None:
    """Structure alone, as --structure-only makes it, on every model of the contract table."""
    made = build(variant, dtype=torch.float32)
    found = isomorphic.structure(made, family_of(made), contract(variant).plan, Options(**HALF))
    spaces = spaces_of(made)
    kinds = {spaces[name].kind for name in found.kept}
    assert {"residual", "mlp"} <= kinds
    x = images(variant, dtype=torch.float32)
    assert slice_check(made, found, x).verdict == "passed"
    sliced = surgery.apply_to_copy(made, found)
    assert_moved(logits(sliced, x), logits(made, x))
    size = (3, *x.shape[2:])
    assert count_cost(sliced, size).macs < 0.6 * count_cost(made, size).macs


def test_each_attention_keeps_a_head_whatever_is_asked(tmp_path: Path) -> None:
    found = planned(tmp_path, model(4), keep_heads=0.01, keep_head_dim=0.01, keep_ratio=0.01)
    assert set(found.heads.values()) == {1}
    assert all(len(kept) >= 1 for kept in found.kept.values())


@pytest.mark.parametrize(("target", "key", "scale"), [("macs", "macs", 1e9), ("params", "params", 1e6)])
def test_targets_are_met(target: Any, key: str, scale: float, tmp_path: Path) -> None:
    made = model(4, 32)
    dense = getattr(count_cost(made, (1, 8, 8)), key)
    found = planned(tmp_path, made, target=target, amount=0.4 * dense / scale)
    sliced = count_cost(surgery.apply_to_copy(made, found), (1, 8, 8))
    assert abs(getattr(sliced, key) / (0.4 * dense) - 1) < 0.01
    assert read_json(tmp_path / "widths.json")["cost"] == sliced.to_dict()


def test_widths_are_aligned(tmp_path: Path) -> None:
    made = model(4, 32)
    found = planned(tmp_path, made, align=Alignment(residual=8, ffn=16, head_dim=4))
    assert len(found.kept["residual"]) % 8 == 0
    for b in range(4):
        assert len(found.kept[f"blocks.{b}.mlp"]) % 16 == 0
        heads = found.heads.get(f"blocks.{b}.attn", 2)
        assert len(found.kept[f"blocks.{b}.v"]) // heads % 4 == 0


def test_the_scale_of_the_new_head_width_is_carried_by_q_and_k(tmp_path: Path) -> None:
    """`reset` hands over weights with which the kept scale computes what the released code's new scale does."""
    made = model()
    kept = planned(tmp_path / "keep", made)
    assert not (tmp_path / "keep" / "weights.safetensors").exists()
    assert planned(tmp_path / "reset", made, attention_scale="reset") == kept
    assert (tmp_path / "reset" / "weights.safetensors").exists()
    spaces = list(spaces_of(made).values())
    carried = surgery.apply_to_copy(isomorphic.rescaled(made, spaces, kept), kept).eval()
    expected = surgery.apply_to_copy(made, kept).eval()
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    assert_moved(carried.double()(pixels), expected.double()(pixels))
    for block in expected.get_submodule("blocks").children():
        attn: Any = block.attn
        attn.scale = (attn.qk_dim // attn.num_heads) ** -0.5
    difference = (carried(pixels) - expected(pixels)).abs().max()
    assert difference < 1e-5 * expected(pixels).abs().max()  # q and k were rescaled in float32


def test_a_second_step_counts_in_what_the_first_left(tmp_path: Path) -> None:
    """Depth first, then width: removed attentions and folded FFNs have no widths of their own."""
    made = model(4)
    base = context(tmp_path, made).plan
    first = depth_plan(made, base, [1], [1, 2])
    surgery.apply_plan(made, first)
    plan = base.then(first)
    folded = surgery.fold_linears(made, Plan(base.arch, base.arch_args)).plan
    plan = plan.then(folded)
    found = isomorphic.plan(made, context(tmp_path, made, plan=plan), Options(**HALF))
    assert set(found.kept) == {
        "residual",
        *(f"blocks.{b}.{part}" for b in (0, 2, 3) for part in ("qk", "v")),
        *(f"blocks.{b}.mlp" for b in (0, 3)),
    }
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert slice_check(made, found, pixels).verdict == "passed"
    from_plan = surgery.apply_to_copy(model(4), plan.then(found))
    assert [p.shape for p in from_plan.parameters()] == [
        p.shape for p in surgery.apply_to_copy(made, found).parameters()
    ]


def test_structure_needs_no_weights() -> None:
    made = model()
    with torch.device("meta"):
        empty = made.to("meta")
    found = isomorphic.structure(empty, family_of(empty), context(Path(), made).plan, Options(**HALF))
    assert len(found.kept["residual"]) == 8
    assert isomorphic.estimate(model(), family_of(model()), Options(**HALF))[0].images == 24
    assert isomorphic.estimate(model(), family_of(model()), Options(**HALF, criterion="magnitude")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "macs"}, "no amount"),
        ({"target": "macs", "amount": 1e-7}, r"allows [0-9.e-]+ G MACs to"),
        ({"target": "params", "amount": 100.0}, r"allows .* to [0-9.]+ M parameters"),
        ({"align": Alignment(residual=64, ffn=1, head_dim=1)}, "residual has only 16"),
        ({"round_to": 64}, "multiples of 64"),
        ({"keep_ratio": 1.0, "keep_heads": 1.0, "keep_head_dim": 1.0}, "nothing would go"),
    ],
)
def test_what_cannot_be_met_is_refused_and_nothing_is_left(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    made = model()
    options = Options(**{**HALF, **changes})
    with pytest.raises(PlanError, match=words):
        isomorphic.structure(made, family_of(made), context(tmp_path, made).plan, options)
    with pytest.raises(PlanError, match=words):
        isomorphic.plan(made, context(tmp_path, made), options)
    assert not list(tmp_path.iterdir())


def test_gradients_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    made = model()
    with torch.no_grad():
        made.get_submodule("head").weight.fill_(torch.nan)
    with pytest.raises(VitcompressError, match="not finite"):
        planned(tmp_path, made)


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

    made = model()
    about = context(tmp_path, made)
    options = TrainOptions(epochs=12, batch_size=16, lr=3e-3)
    data = about.data
    at = TrainingContext(about.input, about.runtime, tmp_path / "dense", "dense", 0, about.progress)
    train(made, data.train, data.heldout, options, at)
    made.eval()
    loader = EvalLoader(data.heldout, about.input, 64, about.runtime)
    shares = {"keep_ratio": 0.4, "keep_heads": 1.0, "keep_head_dim": 1.0}
    losses = {}
    for name in ("taylor", "random"):
        runs = [replace(context(tmp_path / f"{name}{seed}", made), seed=seed) for seed in range(3)]
        plans = [isomorphic.plan(made, run, Options(**{**HALF, **shares}, criterion=name)) for run in runs]
        losses[name] = (
            sum(evaluate(surgery.apply_to_copy(made, plan), loader, about.runtime).loss for plan in plans) / 3
        )
    assert losses["taylor"] < losses["random"]


def test_the_sliced_model_is_the_deployed_one(tmp_path: Path) -> None:
    """`applied` and the plan alone, on the same weights, compute the same."""
    made = model().double()
    found = planned(tmp_path, model())
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    again = Plan.from_json(found.to_json())
    assert_same(surgery.apply_to_copy(made, found)(pixels), surgery.apply_to_copy(made, again)(pixels))
