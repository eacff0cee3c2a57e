"""Models that are made not to fit into fp16, each in one part of it."""

import torch
from torch import nn


@torch.no_grad()
def large_ffn(model: nn.Module) -> nn.Module:
    """Inside the first FFN only: what it gives is as large as before."""
    fc1, fc2 = (model.get_submodule(f"blocks.0.mlp.{name}") for name in ("fc1", "fc2"))
    fc1.weight.mul_(3e4)
    fc1.bias.add_(6e4)
    fc2.weight.mul_(1e-5)
    return model


@torch.no_grad()
def large_scores(model: nn.Module) -> nn.Module:
    """In the second attention: q and k of 16 channels each are so large that their products overflow, not they."""
    model.get_submodule("blocks.1.attn.qkv").weight[:32].mul_(3e3)
    return model


@torch.no_grad()
def large_pool_scores(model: nn.Module) -> nn.Module:
    """The same in a pool by attention."""
    for name in ("attn_pool.q", "attn_pool.kv"):
        model.get_submodule(name).weight[:16].mul_(3e3)
    return model


@torch.no_grad()
def large_residual(model: nn.Module, size: float = 1e5) -> nn.Module:
    """In the residual stream; with 5e4 all fits, but its numbers lie 32 apart there, more than the blocks add."""
    model.get_submodule("patch_embed.proj").bias.add_(size)
    return model
