"""Gated FFNs, y = W2 (act(Wg x + bg) * (Wv x + bv)) + b2: timm's GluMlp (SwiGLU in DINOv2-g), and its
SwiGLU (DINOv3 S+, H+ and 7B), which `pack` rewrites as a GluMlp.

Without its activation the gate still multiplies, so the FFN cannot be folded. With a constant gate g it can:
y = W2 (diag(g) Wv x + g bv) + b2 is an FFN of two linear layers. `drop_gate` uses g = 1, `mean_gate` uses
g = act(bg); `freeze_gates` rewrites the weights so that act(bg) is a measured mean.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from vitcompress.families.base import join_layers
from vitcompress.families.edited_block import move_hooks


def pack(mlp: SwiGLU) -> GluMlp:
    """The equal FFN that computes gate and values in one layer, over the other modules of `mlp`."""
    packed = GluMlp(1, 2, gate_last=False, device="meta")
    packed.fc1 = join_layers(mlp.fc1_g, mlp.fc1_x)
    packed.act, packed.drop1, packed.norm, packed.fc2, packed.drop2 = mlp.act, mlp.drop1, mlp.norm, mlp.fc2, mlp.drop2
    return cast(GluMlp, move_hooks(mlp, packed.train(mlp.training)))


def _rows(mlp: Any) -> tuple[slice, slice]:
    """The rows of `fc1` that compute the gate, and those that compute the values."""
    hidden = mlp.fc2.in_features
    halves = slice(0, hidden), slice(hidden, 2 * hidden)
    return (halves[1], halves[0]) if mlp.gate_last else halves


def gate_at_bias(mlp: Any) -> Tensor:
    """The gate at zero input, act(bg), (hidden,)."""
    return cast(Tensor, mlp.act.forward(mlp.fc1.bias[_rows(mlp)[0]]))  # not through hooks, which may call this


def ungate(mlp: Any, replacement: str) -> nn.Module:
    """The two linear layers that equal `mlp` with a constant gate; the second is the one of `mlp`.

    replacement: `mean_gate` or `drop_gate`.
    """
    weight, bias = mlp.fc1.weight, mlp.fc1.bias
    rows = _rows(mlp)[1]
    gate = gate_at_bias(mlp) if replacement == "mean_gate" else torch.ones_like(bias[rows])
    plain = Mlp(mlp.fc1.in_features, mlp.fc2.in_features, 1, act_layer=nn.Identity, device="meta")
    plain.fc1.weight = nn.Parameter((gate[:, None] * weight[rows]).detach(), weight.requires_grad)
    plain.fc1.bias = nn.Parameter((gate * bias[rows]).detach(), bias.requires_grad)
    plain.fc2, plain.drop1, plain.drop2 = mlp.fc2, mlp.drop1, mlp.drop2
    return cast(nn.Module, plain.train(mlp.training))


@torch.no_grad()
def freeze_gates(model: nn.Module, means: Mapping[str, Tensor]) -> nn.Module:
    """Change the weights of FFNs in place so that their gates are constant. means: FFN -> its gate, (hidden,).

    The gate's layer then computes act(1) everywhere, and the columns of the second layer contain the remaining factor.
    """
    for ffn, gate in means.items():
        mlp: Any = model.get_submodule(ffn)
        rows = _rows(mlp)[0]
        mlp.fc1.weight[rows] = 0.0
        mlp.fc1.bias[rows] = 1.0
        mlp.fc2.weight *= (gate.to(mlp.fc2.weight) / gate_at_bias(mlp))[None, :]
    return model
