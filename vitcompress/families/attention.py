"""Attention modules with any widths of q/k and v, shared by the families.

A sliced attention runs over the layers of the timm attention that it replaces and keeps its softmax scale, so it
computes what the masked dense attention computes. q/k and v may have different widths; all heads have equal widths.
"""

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn


class AnyWidthAttention(nn.Module):
    """Base of all sliced attentions; subclasses define `forward`.

    Args:
        dense: the attention to replace, of timm or sliced. Its attributes in `PARTS` are reused.
        qk_dim, v_dim: channels of q and of v, over all heads.
        num_heads: number of heads.

    WIDTHS: attributes in which timm's own attention stores its width; None if only the sliced one is used.
    replaces: the class of timm's attention, which computes the same if later steps give it widths that it supports.
    With `padded`, q, k and v are zero-padded to one width, for kernels that support only one head width.
    """

    PARTS: tuple[str, ...] = ("qkv", "attn_drop", "proj", "proj_drop")
    WIDTHS: tuple[str, ...] | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """One of `PARTS`."""

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__()
        self.training = dense.training  # its dropout must not act in an evaluated model
        self.replaces: type = getattr(dense, "replaces", type(dense))
        for name in self.PARTS:
            setattr(self, name, getattr(dense, name))
        self.scale, self.padded = dense.scale, getattr(dense, "padded", False)
        self.resize(qk_dim, v_dim, num_heads)

    @classmethod
    def of(cls, attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
        """`attn` itself after slicing, if it supports these widths, else a sliced attention over its parameters."""
        if isinstance(attn, cls):
            attn.resize(qk_dim, v_dim, num_heads)
            return cast(nn.Module, attn)
        # timm's attention has one width, of q, k, v and with a `kv` layer of its tokens, and `scale` is that of a head.
        widths = {qk_dim, v_dim, *((attn.kv.in_features, attn.proj.out_features) if hasattr(attn, "kv") else ())}
        if cls.WIDTHS is None or len(widths) > 1 or not math.isclose(v_dim, num_heads / attn.scale**2):
            return cls(attn, qk_dim, v_dim, num_heads)
        vars(attn).update(dict.fromkeys(cls.WIDTHS, v_dim), num_heads=num_heads)
        return cast(nn.Module, attn)

    def resize(self, qk_dim: int, v_dim: int, num_heads: int) -> None:
        """Store the widths of the parameters after slicing."""
        self.qk_dim, self.v_dim, self.num_heads = qk_dim, v_dim, num_heads

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the tokens x, each (batch, heads, tokens, channels of a head)."""
        q, k, v = self.qkv(x).split((self.qk_dim, self.qk_dim, self.v_dim), dim=-1)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)

    def split_heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, channels) -> (batch, heads, tokens, channels of a head)."""
        batch, tokens, channels = x.shape  # without `*`, so that torch.fx can trace it
        return x.reshape(batch, tokens, self.num_heads, channels // self.num_heads).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The output, (batch, tokens, channels). options: further arguments of `scaled_dot_product_attention`."""
        width, qk_width = self.v_dim // self.num_heads, self.qk_dim // self.num_heads
        if self.padded:  # zeros change no product of q and k; in v they give channels that are cut off again
            more = (0, abs(qk_width - width))
            q, k = (F.pad(x, more) if qk_width < width else x for x in (q, k))
            v = F.pad(v, more) if width < qk_width else v
        if self.training and hasattr(self, "attn_drop"):
            options["dropout_p"] = self.attn_drop.p
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **options)
        x = x[..., :width] if self.padded else x
        return cast(Tensor, self.proj_drop(self.proj(self.normalize(x.transpose(1, 2).flatten(2)))))

    def normalize(self, x: Tensor) -> Tensor:
        """The input of `proj`, (batch, tokens, channels of v)."""
        return x


class SlicedAttention(AnyWidthAttention):
    """Self-attention (VisionTransformer)."""

    PARTS: tuple[str, ...] = (*AnyWidthAttention.PARTS, "norm")
    WIDTHS: tuple[str, ...] | None = ("attn_dim",)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x: normalized tokens, (batch, tokens, channels) -> same shape."""
        return self.attend(*self.project(x), attn_mask=attn_mask, is_causal=is_causal)

    def normalize(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x))


class SlicedRotaryAttention(SlicedAttention):
    """Attention that rotates q and k by the position of their patch (Eva). Prefix tokens have no position."""

    PARTS = (*SlicedAttention.PARTS, "num_prefix_tokens", "rotate_half")
    WIDTHS = None

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """x: normalized tokens, (batch, tokens, channels) -> same shape. rope: sines and cosines of each patch."""
        q, k, v = self.project(x)
        if rope is not None:
            q, k = (self._rotate(part, rope).type_as(v) for part in (q, k))
        return self.attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

    def _rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)], dim=2)


class SlicedPositionAttention(AnyWidthAttention):
    """Attention over all tokens (BEiT), with a table of score biases by relative position, for one window size."""

    PARTS = ("relative_position_bias_table", *AnyWidthAttention.PARTS)
    relative_position_bias_table: nn.Parameter | None
    relative_position_index: Tensor

    def __init__(self, dense: Any, qk_dim: int, v_dim: int, num_heads: int) -> None:
        super().__init__(dense, qk_dim, v_dim, num_heads)
        self.register_buffer("relative_position_index", dense.relative_position_index, persistent=False)

    def position_bias(self) -> Tensor | None:
        """What is added to the scores, (1, heads, tokens, tokens)."""
        if self.relative_position_bias_table is None:
            return None
        biases = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return biases.view(*self.relative_position_index.shape, -1).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """x: normalized tokens, (batch, tokens, channels) -> same shape. The bias shared by all blocks is None."""
        return self.attend(*self.project(x), attn_mask=self.position_bias())


class SlicedWindowAttention(SlicedPositionAttention):
    """Attention within windows (Swin)."""

    PARTS = (*SlicedPositionAttention.PARTS, "window_size", "window_area")
    WIDTHS = ()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: windows, (batch x windows, tokens, channels) -> same shape.

        mask: added to the scores of shifted windows, (windows, tokens, tokens).
        """
        bias = self.position_bias()
        if mask is not None and bias is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        return self.attend(*self.project(x), attn_mask=bias)


class SlicedReductionAttention(AnyWidthAttention):
    """Attention with spatially reduced keys and values (PVTv2)."""

    PARTS = ("q", "kv", "attn_drop", "proj", "proj_drop", "pool", "sr", "norm", "act")
    WIDTHS = ("dim",)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """x: normalized tokens, (batch, height x width, channels) -> same shape. feat_size: height, width."""
        tokens = x  # from which keys and values are computed
        if self.sr is not None:
            image = x.transpose(1, 2).reshape(x.shape[0], -1, *feat_size)
            tokens = self.norm(self.sr(image if self.pool is None else self.pool(image)).flatten(2).transpose(1, 2))
            tokens = tokens if self.act is None else self.act(tokens)
        k, v = self.kv(tokens).split((self.qk_dim, self.v_dim), dim=-1)
        return self.attend(self.split_heads(self.q(x)), self.split_heads(k), self.split_heads(v))


class SlicedPool(AnyWidthAttention):
    """timm's AttentionPoolLatent (SigLIP) with any widths: a latent attends to all tokens, then passes an MLP."""

    PARTS = ("latent", "q", "kv", "proj", "proj_drop", "norm", "mlp")
    WIDTHS = ("latent_dim", "out_features")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """x: tokens, (batch, tokens, channels) -> (batch, channels)."""
        q = self.q(self.latent.expand(x.shape[0], -1, -1))  # per image, as in timm: their masks may differ
        k, v = self.kv(x).split((self.qk_dim, self.v_dim), dim=-1)
        x = self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v), attn_mask=attn_mask)
        out: Tensor = x + self.mlp(self.norm(x))
        return out[:, 0]
