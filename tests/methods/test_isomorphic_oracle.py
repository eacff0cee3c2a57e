"""The official implementation as oracle: for the same gradients, torch-pruning keeps the same channels and heads."""

from typing import Any

import pytest
import timm
import torch
import torch_pruning
from torch import Tensor, nn
from torch.nn import functional

from vitcompress.families import family_of
from vitcompress.methods import isomorphic
from vitcompress.methods.scores import channel_scores
from vitcompress.methods.width import Candidates
from vitcompress.plan import Plan

ARCH = "deit_tiny_distilled_patch16_224"
ARGS = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
KEPT = {"keep_ratio": 0.5, "keep_heads": 0.5, "keep_head_dim": 0.75}


def traced_attention(attn: Any) -> Any:
    """timm's attention as torch-pruning's own ViT example has it: its tracer follows this form."""

    def forward(x: Tensor, **masks: Any) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = attn.qkv(x).reshape(batch, tokens, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = attn.proj(x.transpose(1, 2).reshape(batch, tokens, -1))
        return out

    return forward


def with_gradients(seed: int) -> nn.Module:
    """A tiny distilled DeiT with weights and gradients drawn at random, heavy-tailed so that blocks end up unequal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(ARCH, **ARGS).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
        rows = torch.randn(len(parameter), *[1] * (parameter.ndim - 1), generator=generator).mul(2).exp()
        parameter.grad = torch.randn(parameter.shape, generator=generator) * rows
    return model


def ours(model: nn.Module, round_to: int) -> Plan:
    spaces = family_of(model).spaces(model)
    options = isomorphic.Options(**KEPT, round_to=round_to)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    scores = channel_scores(model, spaces, lambda name, weight: (weight * gradients[name]).abs())
    ranking = isomorphic._rank(spaces, scores, options)
    return Candidates(model, spaces, ranking.groups, Plan(ARCH, ARGS)).delta(ranking.counts())


def theirs(model: Any, round_to: int) -> dict[str, list[int]]:
    """Removed channels by space: what torch-pruning takes out of the first tensor that each space runs through."""
    for block in model.blocks:
        block.attn.forward = traced_attention(block.attn)
    pruner = torch_pruning.pruner.MetaPruner(
        model,
        torch.randn(1, 3, 16, 16),
        importance=torch_pruning.importance.GroupTaylorImportance(),
        global_pruning=True,
        isomorphic=True,
        pruning_ratio=1 - KEPT["keep_ratio"],
        pruning_ratio_dict={tuple(block.attn.qkv for block in model.blocks): 1 - KEPT["keep_head_dim"]},
        head_pruning_ratio=1 - KEPT["keep_heads"],
        ignored_layers=[model.head, model.head_dist],
        num_heads={block.attn.qkv: 4 for block in model.blocks},
        prune_num_heads=True,
        prune_head_dims=True,
        round_to=round_to,
        in_channel_groups={},
        out_channel_groups={},
    )
    names = {module: name for name, module in model.named_modules()}
    removed: dict[str, list[int]] = {}
    for group in pruner.step(interactive=True):
        for dependency, channels in group:
            layer, way = names.get(dependency.target.module, ""), dependency.handler.__name__
            if layer.endswith("attn.proj") and "in_channels" in way:
                removed[layer.removesuffix("attn.proj") + "v"] = sorted(channels)
            elif layer.endswith("mlp.fc1") and "out_channels" in way:
                removed[layer.removesuffix(".fc1")] = sorted(channels)
            elif layer == "patch_embed.proj":
                removed["residual"] = sorted(channels)
        group.prune()
    return removed


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("round_to", [1, 2])
def test_kept_indices_equal_those_of_torch_pruning(round_to: int, seed: int) -> None:
    model = with_gradients(seed)
    plan, removed = ours(model, round_to), theirs(with_gradients(seed), round_to)
    spaces = {space.name: space for space in family_of(model).spaces(model)}
    assert set(removed) == {name for name in spaces if not name.endswith("qk")}
    for name, gone in removed.items():
        kept = [channel for channel in range(spaces[name].size) if channel not in gone]
        assert list(plan.kept.get(name, range(spaces[name].size))) == kept, name
        if name.endswith(".v"):
            assert plan.kept[name.removesuffix("v") + "qk"] == plan.kept[name]
    # Ragged: the ranking went across blocks, so that agreement says something.
    assert len({len(plan.kept[f"blocks.{block}.mlp"]) for block in range(3)}) > 1
    assert len({plan.heads.get(f"blocks.{block}.attn", 4) for block in range(3)}) > 1
