"""A shorter last block for models whose classifier reads only the first tokens."""

from typing import Any, cast

import torch.nn.functional as F
from timm.layers import Attention, LayerScale, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitcompress.families.base import Family


class FirstTokensBlock(nn.Module):
    """A last block that computes only the first `tokens` of its output, over the modules of `block`.

    Keys and values still come from all tokens, so the logits of the model are equal up to rounding.
    """

    def __init__(self, block: Any, tokens: int) -> None:
        super().__init__()
        self.block, self.tokens = block, tokens

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x: (batch, all tokens, channels) -> (batch, first tokens, channels)."""
        block, attn, (batch, tokens, _) = self.block, self.block.attn, x.shape
        packed = attn.qkv(block.norm1(x)).reshape(batch, tokens, 3, attn.num_heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q[:, :, : self.tokens], k, v, scale=attn.scale)
        y = attn.proj(y.transpose(1, 2).reshape(batch, self.tokens, -1))
        x = x[:, : self.tokens] + block.ls1(y)
        return cast(Tensor, x + block.ls2(block.mlp(block.norm2(x))))


def shorten_last_block(model: nn.Module, family: Family) -> dict[str, FirstTokensBlock]:
    """Path of the last block -> its replacement; empty if the classifier reads all tokens."""
    blocks = family.blocks(model)
    if not isinstance(model, VisionTransformer) or model.global_pool != "token" or model.attn_pool or not blocks:
        return {}
    path = list(blocks)[-1]
    block: Any = blocks[path]
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return {}
    scales = all(isinstance(scale, nn.Identity | LayerScale) for scale in (block.ls1, block.ls2))
    if not scales or block.attn.qkv.out_features % 3:
        return {}
    return {path: FirstTokensBlock(block, int(model.num_prefix_tokens))}
