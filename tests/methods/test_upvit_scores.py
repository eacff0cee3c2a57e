"""UP-ViT's scores are those of truly deleted channels and blocks, computed once."""

from functools import partial
from pathlib import Path

import pytest
import torch
from contracts import CONTRACTS, build, contract, logits
from contracts import images as pictures
from method_world import context, images, model
from torch import Tensor, nn
from torch.nn import functional

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.methods.upvit.importance import Component, Importance, components, divergence, estimates
from vitcompress.methods.upvit.ranking import block_scores, candidates
from vitcompress.methods.upvit.target import standard_blocks
from vitcompress.plan import Plan
from vitcompress.surgery.masks import delete_channels
from vitcompress.training.distributed import Runtime

VARIANTS = [variant for family, variant in CONTRACTS if family in ("vit", "pvt")]


class Batches(list):
    """Two batches of ready images, as an evaluation loader gives them."""

    @classmethod
    def of(cls, x: Tensor) -> "Batches":
        return cls((part, torch.zeros(len(part))) for part in x.split(2))


def normalize_others(kept: Tensor, norm: nn.LayerNorm, args: tuple[Tensor], out: Tensor) -> Tensor:
    """The output of a LayerNorm whose statistics are those of the channels `kept`."""
    own = functional.layer_norm(args[0][..., kept], (len(kept),), norm.weight[kept], norm.bias[kept], norm.eps)
    return out.index_copy(-1, kept, own)


def naive(dense: nn.Module, plan: Plan, component: Component, channel: int, x: Tensor) -> float:
    """S by cutting the channel out for real and running the whole model."""
    kept = tuple(c for c in range(component.size) if c != channel)
    family, heads = family_of(dense), component.spaces[0].heads
    if component.kind == "attention":  # a head cannot lose one channel alone: what it writes is taken away instead
        copy = surgery.apply_to_copy(dense, Plan(plan.arch, plan.arch_args))
        with torch.no_grad():
            for space in component.spaces:
                for axis in space.axes:
                    if axis.dim == 0:
                        for n in range(axis.copies):
                            copy.get_parameter(axis.tensor)[axis.offset + n * space.size + channel] = 0.0
        for owner in {axis.owner for space in component.spaces for axis in space.axes}:
            if isinstance(norm := copy.get_submodule(owner), nn.LayerNorm):
                norm.register_forward_hook(partial(normalize_others, torch.tensor(kept)))
        assert heads and family
    else:
        one = Plan(plan.arch, plan.arch_args, kept={space.name: kept for space in component.spaces})
        copy = surgery.apply_to_copy(dense, one)
    return float(divergence(logits(dense, x), logits(copy, x)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_those_of_models_without_the_channel(variant: str) -> None:
    """Cached prefixes and rank-one corrections change nothing."""
    dense, x = build(variant), pictures(variant, count=3)
    family, plan = family_of(dense), contract(variant).plan
    importance = Importance(dense, family, images_at_once=8)
    state = {name: value.clone() for name, value in dense.state_dict().items()}
    for component in components(family.spaces(dense)):
        channels = [0, component.size // 2, component.size - 1]
        scores = importance.scores(component, Batches.of(x), channels)
        for channel in channels:
            expected = naive(dense, plan, component, channel, x)
            assert float(scores[channel]) == pytest.approx(expected, rel=1e-9, abs=1e-13), (component.name, channel)
        assert float(scores.sum()) > 1e-7
    assert all(torch.equal(value, state[name]) for name, value in dense.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in dense.modules())


def test_every_channel_is_scored_whatever_the_batch() -> None:
    dense, x = build("plain"), pictures("plain", count=4)
    family = family_of(dense)
    for component in components(family.spaces(dense)):
        scores = [Importance(dense, family, images_at_once=n).scores(component, Batches.of(x)) for n in (2, 6, 4096)]
        assert all(torch.allclose(one, scores[0], rtol=1e-9, atol=1e-14) for one in scores)
        assert int((scores[0] > 0).sum()) >= component.size - 1


def test_masking_the_residual_stream_is_not_deleting() -> None:
    """A LayerNorm that still counts the zeroed channel gives other scores: the difference that deletion makes."""
    dense, x = build("plain"), pictures("plain")
    component = next(c for c in components(family_of(dense).spaces(dense)) if c.kind == "residual")
    deleted = Importance(dense, family_of(dense), images_at_once=8).scores(component, Batches.of(x), [3])[3]
    hooks = [
        m.register_forward_pre_hook(lambda m, a: (a[0] * (torch.arange(16) != 3),))
        for m in dense.modules()
        if isinstance(m, nn.LayerNorm)
    ]
    zeroed = logits(dense, x)
    for hook in hooks:
        hook.remove()
    assert abs(float(divergence(logits(dense, x), zeroed)) - float(deleted)) > 1e-3 * float(deleted)


def test_divergence_is_summed_over_images() -> None:
    z, changed = torch.randn(3, 5), torch.randn(6, 5)
    q = torch.softmax(z.double(), 1)
    expected = [float((q * (q / torch.softmax(c.double(), 1)).log()).sum()) for c in changed.split(3)]
    assert divergence(z, changed).tolist() == pytest.approx(expected)
    assert divergence(z, z).tolist() == [0.0]


def curvature(dense: nn.Module, component: Component, channel: int, x: Tensor) -> float:
    """1/2 j^T F j, with j from finite differences; q and k lose what the channel adds to their product."""

    @torch.no_grad()
    def answer(value: float) -> Tensor:
        gates = {}
        for space in component.spaces:
            gates[space] = torch.ones(1, component.size, dtype=torch.float64)
            gates[space][0, channel] = value**0.5 if space.kind == "qk" else value
        with delete_channels(dense, gates):
            return dense(x)

    step = 1e-5
    j = (answer(1 + step) - answer(1 - step)) / (2 * step)
    q = torch.softmax(logits(dense, x), 1)
    return 0.5 * float(((q * j**2).sum(1) - (q * j).sum(1) ** 2).sum())


@pytest.mark.parametrize("variant", ["plain", "attention_pool", "pvt"])
def test_the_estimate_with_all_directions_is_the_curvature(variant: str) -> None:
    dense, x = build(variant), pictures(variant, count=3)
    own = components(family_of(dense).spaces(dense))
    scores = estimates(dense, own, Batches.of(x), directions=4)
    for component in own:
        for channel in (0, component.size - 1):
            expected = curvature(dense, component, channel, x)
            assert expected > 0  # finite differences: an error of the order of step^2 and of roundoff / step
            assert float(scores[component.name][channel]) == pytest.approx(expected, rel=1e-6)


def test_more_directions_tell_more_and_there_are_one_less_than_classes() -> None:
    dense, x = build("plain"), pictures("plain")
    own = components(family_of(dense).spaces(dense))
    scores = [torch.cat(list(estimates(dense, own, Batches.of(x), directions=n).values())) for n in (1, 2, 4, 5, 99)]
    assert (scores[0] < scores[1]).all() and (scores[1] < scores[2]).all()
    assert torch.equal(scores[2], scores[3]) and torch.equal(scores[2], scores[4])
    assert float(scores[0].sum() / scores[2].sum()) > 1 / 4  # the largest of four shares


def test_the_estimate_of_an_attention_is_near_its_deletion() -> None:
    """Deleting a small channel changes the logits linearly: the estimate then equals S(c), and counts q k once."""
    dense, x = build("plain"), pictures("plain", count=2)
    with torch.no_grad():
        for block in dense.blocks:
            block.attn.qkv.weight[32:].mul_(0.0)  # no values: only q and k act, through the attention that others have
            block.attn.qkv.weight.mul_(0.05)
            block.attn.qkv.bias.mul_(0.05)
            block.attn.qkv.bias[32:] = torch.linspace(-1, 1, 16)
            block.attn.qkv.weight[32:] = torch.eye(16)
    component = next(c for c in components(family_of(dense).spaces(dense)) if c.kind == "attention")
    qk_only = Component(component.name, component.kind, tuple(s for s in component.spaces if s.kind == "qk"))
    estimate = estimates(dense, [qk_only], Batches.of(x), directions=4)[component.name]
    exact = Importance(dense, family_of(dense), images_at_once=8).scores(qk_only, Batches.of(x))
    assert torch.allclose(estimate, exact, rtol=0.1, atol=0) and float(exact.min()) > 0


def test_block_scores_are_those_of_the_models_without_them() -> None:
    dense, x, base = build("plain", depth=3), pictures("plain"), contract("plain", depth=3).plan
    ways = candidates("blocks", standard_blocks(dense, family_of(dense))["blocks"])
    plans = [base.delta(removed=dict.fromkeys(way.removed, "drop")) for way in ways]
    scores = block_scores(dense, plans, base.delta(), Batches.of(x))
    expected = [float(divergence(logits(dense, x), logits(surgery.apply_to_copy(dense, plan), x))) for plan in plans]
    assert scores.tolist() == pytest.approx(expected, rel=1e-9)
    current = block_scores(dense, plans, plans[0], Batches.of(x))
    assert float(current[0]) == 0.0 and float(current[1]) > 0


def test_two_processes_see_all_images(tmp_path: Path) -> None:
    """Each process scores its share; together they are the scores of one."""
    dense = model()
    family = family_of(dense)
    component = components(family.spaces(dense))[0]
    from vitcompress.training.loaders import EvalLoader

    where = context(tmp_path, dense)
    shares = [
        Importance(dense, family, images_at_once=64).scores(
            component, EvalLoader(images(4, 3), where.input, 4, Runtime(torch.device("cpu"), rank=r, world_size=n))
        )
        for n, ranks in ((1, (0,)), (2, (0, 1)))
        for r in ranks
    ]
    assert torch.allclose(shares[1] + shares[2], shares[0], rtol=1e-4)


def test_exact_scores_cost_less_than_half_of_a_pass_per_candidate() -> None:
    """Blocks evaluated for 12 blocks of DeiT's proportions."""
    row = contract("plain", depth=12, mlp_ratio=4.0)
    dense, x = build("plain", depth=12, mlp_ratio=4.0), pictures("plain", count=2)
    family = family_of(dense)
    importance = Importance(dense, family, images_at_once=64)
    counted: list[int] = []
    blocks = family.blocks(dense).values()
    handles = [block.register_forward_hook(lambda m, a, out: counted.append(len(out))) for block in blocks]
    own = components(family.spaces(dense))
    for component in own:
        importance.scores(component, Batches.of(x))
    for handle in handles:
        handle.remove()
    each_alone = sum(c.size for c in own) * row.arch_args["depth"] * len(x)
    # Besides the one plain pass of each component: all blocks for the stream, those from its own on for an attention,
    # and those after its own for an FFN.
    width, ffn, d = 16, 64, 12
    rest = [d - k for k in range(d)]
    assert sum(counted) == 2 * (width * d + width * sum(rest) + ffn * sum(r - 1 for r in rest) + d * len(own))
    assert each_alone / (sum(counted) - 2 * d * len(own)) > 2.06
