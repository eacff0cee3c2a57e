"""timm's AttentionPoolLatent: a learned latent attends to all tokens, then passes an MLP of its own (SigLIP).

What it answers is as wide as the residual stream, which is the width that timm gives its latent and a new classifier,
too: so they all are one space. q/k, v and the MLP's hidden channels are spaces as in a block. The pool is no site: a
model without one would have no answer.
"""

from typing import Any

from timm.layers import AttentionPoolLatent, Mlp
from torch import Tensor, nn

from vitcompress.families import blocks
from vitcompress.families.base import Axis, Space, input_axis, linear_axes, norm_axes


class SlicedPool(nn.Module):
    """AttentionPoolLatent with any widths of q/k, v and stream, over timm's parameters and dense softmax scale.

    Keeping the scale of the dense model is what makes a sliced pool equal to the masked one.
    """

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__()
        self.latent, self.q, self.kv = dense.latent, dense.q, dense.kv
        self.proj, self.proj_drop = dense.proj, dense.proj_drop
        self.norm, self.mlp, self.scale = dense.norm, dense.mlp, dense.scale
        self.qk_dim, self.v_dim, self.num_heads = qk_dim, v_dim, num_heads
        self.padded = getattr(dense, "padded", False)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """x: tokens, (batch, tokens, channels) -> (batch, channels)."""
        k, v = self.kv(x).split((self.qk_dim, self.v_dim), dim=-1)
        q = self.q(self.latent.expand(x.shape[0], -1, -1))  # of each image, as in timm: their gates may differ
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        x = blocks.attended(self, q, k, v, attn_mask=attn_mask)
        out: Tensor = x + self.mlp(self.norm(x))
        return out[:, 0]


def refusal(pool: Any, width: int) -> str | None:
    """Why this pool of a stream of `width` channels is not covered, as the end of a sentence; None where it is."""
    if pool is None or isinstance(pool, SlicedPool):
        return None
    if not isinstance(pool, AttentionPoolLatent):
        return f"its attention pool is a {type(pool).__name__}"
    if pool.latent_len != 1 or pool.pool != "token":
        return "its attention pool has more than one latent, or gives more than one token"
    if pool.pos_embed is not None or not blocks.plain(pool.q_norm, pool.k_norm):
        return "its attention pool adds positions, or normalises q or k"
    if not isinstance(pool.q, nn.Linear) or type(pool.mlp) is not Mlp or not blocks.plain(pool.mlp.norm):
        return "its attention pool has no layer for q, or no MLP of two linear layers"
    widths = {pool.latent_dim, pool.kv.in_features, pool.proj.in_features, pool.out_features}
    return None if widths == {width} else "its attention pool has another width than its residual stream"


def describe(model: nn.Module, name: str, pool: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of the pool `name`, and the residual axes that it reads and writes."""
    heads, qk_dim, v_dim = pool.num_heads, pool.q.out_features, pool.proj.in_features
    qk = (*linear_axes(model, f"{name}.q"), *linear_axes(model, f"{name}.kv"))
    v = (*linear_axes(model, f"{name}.kv", offset=qk_dim), input_axis(f"{name}.proj"))
    mlp, stream = blocks.ffn(model, name, pool.mlp)
    spaces = [Space(f"{name}.qk", "qk", qk_dim, qk, heads, name), Space(f"{name}.v", "v", v_dim, v, heads, name)]
    reads = [Axis(f"{name}.latent", 2), input_axis(f"{name}.q"), input_axis(f"{name}.kv")]
    writes = [*linear_axes(model, f"{name}.proj"), *norm_axes(model, f"{name}.norm")]
    return [*spaces, *mlp], [*reads, *writes, *stream]


def slice_pool(pool: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
    """timm's own pool while heads keep their width and fill the stream, else SlicedPool."""
    widths = {qk_dim, v_dim, pool.kv.in_features}
    if type(pool) is not AttentionPoolLatent or widths != {num_heads * pool.head_dim}:
        return SlicedPool(pool, qk_dim, v_dim, num_heads)
    pool.num_heads, pool.latent_dim, pool.out_features = num_heads, v_dim, v_dim
    own: nn.Module = pool
    return own
