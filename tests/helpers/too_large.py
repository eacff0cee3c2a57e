"""Change models so that fp16 cannot represent one part of them."""

import torch
from torch import nn


@torch.no_grad()
def large_ffn(model: nn.Module) -> nn.Module:
    """Inside the first FFN only: its outputs stay as large as before."""
    fc1, fc2 = (model.get_submodule(f"blocks.0.mlp.{name}") for name in ("fc1", "fc2"))
    fc1.weight.mul_(3e4)
    fc1.bias.add_(6e4)
    fc2.weight.mul_(1e-5)
    return model


@torch.no_grad()
def large_norm(model: nn.Module) -> nn.Module:
    """In the outputs of the norm in front of the first FFN: those of the FFN stay as large as before."""
    model.get_submodule("blocks.0.norm2").weight.mul_(3e4)
    model.get_submodule("blocks.0.mlp.fc1").weight.mul_(3e-5)
    return model


@torch.no_grad()
def large_scores(model: nn.Module) -> nn.Module:
    """In the second attention: the products of q and k (16 channels each) overflow, q and k themselves do not."""
    model.get_submodule("blocks.1.attn.qkv").weight[:32].mul_(3e3)
    return model


@torch.no_grad()
def large_pool_scores(model: nn.Module) -> nn.Module:
    """The same in an attention pool."""
    for name in ("attn_pool.q", "attn_pool.kv"):
        model.get_submodule(name).weight[:16].mul_(3e3)
    return model


@torch.no_grad()
def large_residual(model: nn.Module, size: float = 1e5) -> nn.Module:
    """In the residual stream. 5e4 fits, but numbers of this size are 32 apart in fp16, more than the blocks add."""
    model.get_submodule("patch_embed.proj").bias.add_(size)
    return model
