"""Write your own family: timm's CaiT. Its attentions mix their heads, its last blocks update the class token only.

    python my_family.py

To use it in recipes and on the command line, declare it in your package's pyproject.toml:

    [project.entry-points."vitcompress.families"]
    cait = "my_package.my_family:CAIT"
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

from timm.models.cait import Cait, ClassAttn, LayerScaleBlock, TalkingHeadAttn
from torch import Tensor, nn

import vitcompress as vc
from vitcompress.families import FAMILIES, Axis, Family, Space
from vitcompress.families.attention import AnyWidthAttention
from vitcompress.families.base import Described, describe_ffn, input_axis, linear_axes, norm_axes
from vitcompress.families.edited_block import EditedBlock, Part, Wiring


class SlicedTalkingHeads(AnyWidthAttention):
    """timm's TalkingHeadAttn with any widths of q/k and v. `project` splits the output of `qkv` into heads."""

    PARTS = (*AnyWidthAttention.PARTS, "proj_l", "proj_w")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = self.proj_l((self.scale * q @ k.transpose(-2, -1)).permute(0, 2, 3, 1))
        weights = self.proj_w(scores.softmax(dim=2)).permute(0, 3, 1, 2)
        return self.proj_drop(self.proj((self.attn_drop(weights) @ v).transpose(1, 2).flatten(2)))


class SlicedClassAttention(AnyWidthAttention):
    """timm's ClassAttn with any widths. `attend` multiplies by `scale` and applies softmax, dropout and `proj`."""

    PARTS = ("q", "k", "v", "attn_drop", "proj", "proj_drop")

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*map(self.split_heads, (self.q(x[:, :1]), self.k(x), self.v(x))))


def parts(block: nn.Module) -> dict[str, Part]:
    """The only DropPath of a block of timm, which both branches share, becomes one for each branch."""
    return {"drop_path1": block.drop_path, "drop_path2": deepcopy(block.drop_path)}


class CaitFamily(Family):
    """`blocks` can be removed. The blocks of the class token stay, with fewer channels and heads."""

    name = "cait"
    supported = "timm Cait models with LayerNorm and two-layer MLPs"
    model_type = Cait
    block_type = LayerScaleBlock
    sliced: ClassVar = {TalkingHeadAttn: SlicedTalkingHeads, ClassAttn: SlicedClassAttention}
    wiring = Wiring(
        branches=(("norm1", "attn", "gamma_1", "drop_path1"), ("norm2", "mlp", "gamma_2", "drop_path2")), parts=parts
    )

    def prepare(self, model: Any) -> None:
        """The branches end at `drop_path1` and `drop_path2`, which blocks of timm's Cait lack."""
        for name, block in model.blocks.named_children():
            setattr(model.blocks, name, EditedBlock.of(block, self.wiring))

    def describe_attention(self, model: nn.Module, path: str, attn: Any) -> Described:
        """`proj_l` and `proj_w` have one input and one output for each head."""
        (qk, v), stream = super().describe_attention(model, path, attn)
        places = (("weight", 0), ("weight", 1), ("bias", 0))
        layers = (f"{path}.attn.proj_l", f"{path}.attn.proj_w")
        mixed = [Axis(f"{layer}.{leaf}", dim, per_head=True) for layer in layers for leaf, dim in places]
        return [replace(qk, axes=(*qk.axes, *mixed)), v], stream

    def streams(self, model: Any, axes: Mapping[str, Iterable[Axis]]) -> Iterator[Space]:
        residual = [Axis("cls_token", 2), Axis("pos_embed", 2), *linear_axes(model, "patch_embed.proj")]
        residual += [axis for own in axes.values() for axis in own]
        for number, block in enumerate(model.blocks_token_only):
            spaces, stream = self._class_block(model, f"blocks_token_only.{number}", block)
            yield from spaces
            residual += stream
        head = () if isinstance(model.head, nn.Identity) else (input_axis("head"),)
        width = model.patch_embed.proj.out_channels
        yield Space("residual", "residual", width, (*residual, *norm_axes(model, "norm"), *head))

    def _class_block(self, model: nn.Module, path: str, block: Any) -> Described:
        """Spaces inside of a block of the class token, and the residual axes that it reads and writes."""
        name, heads = f"{path}.attn", block.attn.num_heads
        qk = (*linear_axes(model, f"{name}.q"), *linear_axes(model, f"{name}.k"))
        v = (*linear_axes(model, f"{name}.v"), input_axis(f"{name}.proj"))
        spaces, stream = describe_ffn(model, path, block.mlp)
        spaces += [Space(f"{path}.qk", "qk", block.attn.q.out_features, qk, heads, name)]
        spaces += [Space(f"{path}.v", "v", block.attn.v.out_features, v, heads, name)]
        scales = ("norm1", "gamma_1", "norm2", "gamma_2")
        stream += [axis for scale in scales for axis in norm_axes(model, f"{path}.{scale}")]
        stream += [*(input_axis(f"{name}.{layer}") for layer in "qkv"), *linear_axes(model, f"{name}.proj")]
        return spaces, stream

    def set_width(self, model: Any, space: str, width: int) -> None:
        model.embed_dim = model.num_features = model.head_hidden_size = width
        for entry in model.feature_info:
            entry["num_chs"] = width


CAIT = CaitFamily()

if __name__ == "__main__":
    FAMILIES[CAIT.name] = CAIT  # for this process; an installed package needs its entry point only
    dense = vc.create_model("cait_xxs24_224", img_size=32, depth=3, num_classes=10)
    small = vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5))
    print(vc.count_cost(dense), "->", vc.count_cost(small), sep="\n")
