"""timm's AttentionPoolLatent (SigLIP): a learned latent attends to all tokens, then passes an MLP.

Its output has the width of the residual stream, as have its latent and the classifier, so they are one space. q/k, v
and the hidden channels of the MLP are spaces as in a block. The pool is no site: without it the model has no output.
"""

from typing import Any

from timm.layers import AttentionPoolLatent, Mlp
from torch import Tensor, nn

from vitcompress.families.attention import AnyWidthAttention
from vitcompress.families.base import (
    Axis,
    Space,
    describe_ffn,
    describe_heads,
    input_axis,
    is_empty,
    linear_axes,
    norm_axes,
)


class SlicedPool(AnyWidthAttention):
    """AttentionPoolLatent with any widths of q/k, v and stream."""

    PARTS = ("latent", "q", "kv", "proj", "proj_drop", "norm", "mlp")
    WIDTHS = ("latent_dim", "out_features")
    latent: nn.Parameter
    q: Any
    kv: Any
    norm: Any
    mlp: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """x: tokens, (batch, tokens, channels) -> (batch, channels)."""
        q = self.q(self.latent.expand(x.shape[0], -1, -1))  # per image, as in timm: their masks may differ
        k, v = self.kv(x).split((self.qk_dim, self.v_dim), dim=-1)
        x = self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v), attn_mask=attn_mask)
        out: Tensor = x + self.mlp(self.norm(x))
        return out[:, 0]


def pool_problem(pool: Any, width: int) -> str | None:
    """Why this pool of a stream of `width` channels is not supported, or None."""
    if pool is None or isinstance(pool, SlicedPool):
        return None
    if not isinstance(pool, AttentionPoolLatent):
        return f"its attention pool is a {type(pool).__name__}"
    if pool.latent_len != 1 or pool.pool != "token":
        return "its attention pool has more than one latent or output token"
    if pool.pos_embed is not None or not is_empty(pool.q_norm, pool.k_norm):
        return "its attention pool adds positions or normalizes q or k"
    if not isinstance(pool.q, nn.Linear) or type(pool.mlp) is not Mlp or not is_empty(pool.mlp.norm):
        return "its attention pool has no layer for q, or no MLP of two linear layers"
    widths = {pool.latent_dim, pool.kv.in_features, pool.proj.in_features, pool.out_features}
    return None if widths == {width} else "its attention pool and its residual stream have different widths"


def pool_spaces(model: nn.Module, name: str, pool: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of the pool `name`, and the residual axes that it reads and writes."""
    mlp, stream = describe_ffn(model, name, pool.mlp)
    reads = [Axis(f"{name}.latent", 2), input_axis(f"{name}.q"), input_axis(f"{name}.kv")]
    writes = [*linear_axes(model, f"{name}.proj"), *norm_axes(model, f"{name}.norm")]
    return [*describe_heads(model, name, name, pool), *mlp], [*reads, *writes, *stream]
