"""What SERo deploys: zeros for kernels of one head width, and nothing of a branch that lost every channel."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contracts import assert_moved, assert_same, build, contract, images, logits
from torch import nn

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.methods.sero import method as sero
from vitcompress.methods.sero.layout import Live, keep_live, padding, project, unit_spaces
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.cost import count_cost
from vitcompress.plan import Plan
from vitcompress.surgery.masks import mask_channels
from vitcompress.verify.slice import slice_check

OPTIONS = sero.Options(sparsity=0.4, layout="ragged", epochs=2)


def masked(model: nn.Module, live: Live, x: torch.Tensor) -> torch.Tensor:
    spaces = {space.name: space for space in family_of(model).spaces(model)}
    gates = {spaces[name]: torch.tensor(channels, dtype=torch.float64) for name, channels in live.items()}
    with mask_channels(model, gates):
        return logits(model, x)


def random_live(model: nn.Module, layout: Any, seed: int = 4) -> tuple[Any, Live]:
    """Random scores that favor v, as SERo measures them."""
    spaces, draw = unit_spaces(family_of(model).spaces(model)), np.random.default_rng(seed)
    scores = {space.name: draw.random(space.size) + (space.kind == "v") for space in spaces}
    return spaces, project(spaces, scores, scores, 0.4, sero.Options(layout=layout, round_to=1))


# -------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("variant", ["plain", "attention_pool", "swin", "pvt"])
@pytest.mark.parametrize("wider", ["v", "qk"])
def test_padded_attention_computes_the_same_at_one_width(variant: str, wider: str) -> None:
    model = build(variant)
    spaces, x = unit_spaces(family_of(model).spaces(model)), images(variant)
    live = {s.name: np.arange(s.size) % (s.size // s.heads) < (2 if s.kind == wider else 1) for s in spaces}
    uniform, plan = (keep_live(Plan("any"), spaces, live, pad=pad) for pad in (False, True))
    assert len(plan.padded) == len({s.attention for s in spaces if s.attention}) and padding(live, plan.kept) == {}
    assert_same(logits(surgery.apply_to_copy(model, plan), x), masked(model, live, x))
    assert_moved(logits(model, x), masked(model, live, x))
    size = tuple(x.shape[1:])
    work = [count_cost(surgery.apply_to_copy(model, p), size).macs for p in (uniform, plan)]
    assert work[1] > work[0]  # the zeros are multiplied


def test_widths_that_the_kernel_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = build("plain"), list[tuple[int, ...]]()
    spaces, live = random_live(model, "uniform")
    attend = F.scaled_dot_product_attention

    def spy(*parts: Any, **how: Any) -> Any:
        seen.append(tuple(part.shape[-1] for part in parts))
        assert how["scale"] == model.blocks[0].attn.scale
        return attend(*parts, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for pad in (False, True):
        logits(surgery.apply_to_copy(model, keep_live(Plan("any"), spaces, live, pad=pad)), images("plain"))
    unequal, equal = seen[:2], seen[2:]
    assert any(len(set(widths)) > 1 for widths in unequal)
    assert equal == [(max(widths),) * 3 for widths in unequal]


@pytest.mark.parametrize(
    ("narrow", "kept"),
    [
        ({"kept": {"blocks.0.qk": (0, 4, 8, 12)}}, {"blocks.0.v": tuple(c for c in range(16) if c % 4 < 3)}),
        # the first plan leaves q, k and v equally wide, in timm's own attention
        (
            {"kept": {"blocks.0.qk": tuple(range(8)), "blocks.0.v": tuple(range(8))}, "heads": {"blocks.0.attn": 2}},
            {"blocks.0.qk": (0, 1, 4, 5)},
        ),
    ],
)
def test_padding_survives_the_next_slice_and_the_disk(narrow: Any, kept: Any, tmp_path: Any) -> None:
    base = contract("plain").plan
    model = build("plain")
    first, later = base.delta(**narrow, padded=("blocks.0.attn",)), base.delta(kept=kept)
    both = first.then(later)
    pruned = surgery.apply_to_copy(surgery.apply_to_copy(model, first), later)
    assert pruned.blocks[0].attn.padded and both.padded == ("blocks.0.attn",)
    assert Plan.from_json(both.to_json()) == both
    assert_same(logits(surgery.apply_to_copy(model, both), images("plain")), logits(pruned, images("plain")))
    write_model(tmp_path, pruned, both)
    loaded = load_model(tmp_path).double()
    assert loaded.blocks[0].attn.padded
    dropped = both.then(Plan(base.arch, base.arch_args, removed={"blocks.0.attn": "drop"}))
    assert dropped.padded == ()


def test_padding_of_an_unknown_attention_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"padded\.blocks\.7\.attn: the model has no such attention"):
        surgery.apply_to_copy(build("plain"), Plan("any", padded=("blocks.7.attn",)))


# ------------------------------------------------------------------------------------------------------- empty branches


def emptied(live: Live, *names: str) -> Live:
    return {name: np.zeros_like(channels) if name in names else channels for name, channels in live.items()}


def deployment(model: nn.Module, live: Live) -> tuple[nn.Module, Plan]:
    """The weights that are handed over, and the plan for them."""
    copy = deepcopy(model)
    return copy, sero._deploy(copy, family_of(copy), Plan("any"), live, OPTIONS)


@pytest.mark.parametrize(
    "variant", ["plain", "distilled", "registers", "layer_scale", "no_class_token", "no_position", "deit3", "dinov3"]
)
@pytest.mark.parametrize(
    "names",
    [
        ("blocks.0.v",),
        ("blocks.1.v",),
        ("blocks.0.mlp",),
        ("blocks.1.mlp",),
        ("blocks.0.mlp", "blocks.1.v"),
        ("blocks.0.v", "blocks.0.mlp"),
        ("blocks.0.v", "blocks.0.mlp", "blocks.1.v", "blocks.1.mlp"),
    ],
)
def test_an_empty_branch_goes_and_its_bias_stays(variant: str, names: tuple[str, ...]) -> None:
    model, x = build(variant), images(variant)
    live = emptied(random_live(model, "ragged")[1], *names)
    weights, delta = deployment(model, live)
    sliced = surgery.apply_to_copy(weights, delta)
    assert set(delta.removed) == {name.replace(".v", ".attn") for name in names}
    wanted = masked(model, live, x)
    assert_same(logits(sliced, x), wanted)
    lost = surgery.apply_to_copy(model, delta)  # without moving the biases the logits differ
    assert_moved(logits(lost, x), wanted)
    gone = [name for name, _ in sliced.named_modules() if any(name.startswith(site) for site in delta.removed)]
    assert not gone
    if len(names) == 4:
        assert not family_of(sliced).blocks(sliced)
    assert slice_check(weights, delta, x).verdict == "passed"


def test_a_bias_does_not_cross_an_activation_or_a_bypass() -> None:
    """There the branch stays, one zero channel wide."""
    for plan in (
        Plan("any", appended={"blocks.0": "gelu"}),
        Plan("any", removed={"blocks.1.attn": "norm_identity"}),
        Plan("any", removed={"blocks.1.attn": "double"}),
    ):
        model, x = surgery.apply_to_copy(build("plain"), plan), images("plain")
        name = "blocks.1.v" if plan.appended else "blocks.1.mlp"
        live = emptied(random_live(model, "ragged")[1], name)
        weights, delta = deployment(model, live)
        assert delta.removed == {} and name in delta.kept
        assert_same(logits(surgery.apply_to_copy(weights, delta), x), masked(model, live, x))


def test_an_empty_branch_without_a_bias_goes_and_leaves_nothing() -> None:
    model, x = build("no_proj_bias"), images("no_proj_bias")
    live = emptied(random_live(model, "ragged")[1], "blocks.1.v")
    weights, delta = deployment(model, live)
    assert set(delta.removed) == {"blocks.1.attn"}
    changed = {n for n, tensor in weights.named_parameters() if not torch.equal(tensor, model.get_parameter(n))}
    assert all(name.startswith("blocks.1.attn.") for name in changed)
    assert_same(logits(surgery.apply_to_copy(weights, delta), x), masked(model, live, x))
    assert_moved(logits(model, x), masked(model, live, x))


@pytest.mark.parametrize("zeros", [slice(2, 3), slice(None)])
def test_a_bias_does_not_go_where_a_layer_scale_of_zero_would_swallow_it(zeros: slice) -> None:
    """Behind the FFN before it, in whatever channel."""
    model, x = build("layer_scale"), images("layer_scale")
    with torch.no_grad():
        model.get_parameter("blocks.0.ls2.gamma")[zeros] = 0.0
    live = emptied(random_live(model, "ragged")[1], "blocks.1.v")
    weights, delta = deployment(model, live)
    assert delta.removed == {} and "blocks.1.v" in delta.kept
    channels = logits(surgery.apply_to_copy(weights, delta), x)
    assert torch.isfinite(channels).all()
    assert_same(channels, masked(model, live, x))


@pytest.mark.parametrize(
    ("variant", "name"),
    [("swin", "layers.0.blocks.0.v"), ("attention_pool", "attn_pool.v"), ("attention_pool", "attn_pool.mlp")],
)
def test_swin_and_pools_keep_the_branch(variant: str, name: str) -> None:
    model, x = build(variant), images(variant)
    live = emptied(random_live(model, "ragged")[1], name)
    weights, delta = deployment(model, live)
    assert delta.removed == {} and name in delta.kept
    assert name.endswith(".mlp") or delta.heads
    assert_same(logits(surgery.apply_to_copy(weights, delta), x), masked(model, live, x))
