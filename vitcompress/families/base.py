"""What a family says about a model: which channels go together, and which modules can go.

A **space** is a set of channels that are kept or dropped together, with every tensor axis that runs over it.
A **site** is a module that can be removed whole. Both are plain data: slicing, masking and counting are one rule each,
and no method knows one architecture from another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

SpaceKind = Literal["qk", "v", "mlp", "residual", "sr"]
SiteKind = Literal["attention", "activation", "ffn", "block"]


@dataclass(frozen=True)
class Axis:
    """One dimension of one tensor that runs over a space.

    The space's channel c lies at `offset + copy * size + c` for each of `copies` (a layer that reads the space several
    times over). With `per_head` the dimension counts heads instead of channels.
    """

    tensor: str
    dim: int
    offset: int = 0
    copies: int = 1
    per_head: bool = False


@dataclass(frozen=True)
class Space:
    """Channels that are kept or dropped together, in `heads` equal groups of `size / heads`.

    kind: q and k of an attention, its v, an FFN's hidden channels, a residual stream (one per stage), or the channels
    that a spatial reduction leaves for k and v (`sr`, PVTv2).
    attention: the attention whose heads those are; empty where the space is not one of an attention.
    whole_heads: channels go only together with all others of their head, as those do that a rotary position embedding
        turns in pairs, each by a frequency of its place.
    """

    name: str
    kind: SpaceKind
    size: int
    axes: tuple[Axis, ...]
    heads: int = 1
    attention: str = ""
    whole_heads: bool = False


@dataclass(frozen=True)
class Site:
    """A module that can be removed whole.

    name: its path in the dense model; numbers of blocks never change. block, index: the block it lies in, and that
    block's dense number. branch_end: the last module of its residual branch, just before the sum. gates: the FFN in
    which this activation gates another branch (SwiGLU); empty for an activation between two layers.
    """

    name: str
    kind: SiteKind
    block: str
    index: int
    branch_end: str = ""
    gates: str = ""


@dataclass(frozen=True)
class LinearPair:
    """The two linear layers of an FFN by path, in order of use."""

    first: str
    second: str


Part = nn.Module | nn.Parameter | None  # of a block's chain: a parameter multiplies, None does nothing


def children(block: nn.Module) -> dict[str, nn.Module]:
    """The child modules of `block` by name."""
    return dict(block.named_children())


@dataclass(frozen=True)
class Wiring:
    """How a family wires a block: its residual branches in order, each a chain of names: of its modules, and of
    parameters that it multiplies by (a LayerScale that is no module).

    `takes_arguments` names the children that receive the block's extra arguments (an attention mask, say). `parts`
    gives the children by name such that the chains compute what the block does; a family replaces a child there whose
    work the block itself does in part (Swin's shift and partition).
    """

    branches: tuple[tuple[str, ...], ...]
    attention: str
    ffn: str
    takes_arguments: frozenset[str] = frozenset()
    parts: Callable[[nn.Module], Mapping[str, Part]] = children


@dataclass(frozen=True, kw_only=True)
class Family:
    """The only place that knows a timm model's modules. Every function reads the model as it is now.

    refuses(model): None, or why this family does not cover the model, as the end of a sentence.
    blocks(model): the blocks that are left, by path, in forward order.
    slice_attention(module, qk, v, heads): the attention to run after slicing, over the same parameters.
    resized(model, space, width): store a new width of a residual space wherever timm reads it.
    linear_pair(model, ffn): the layers that `surgery.fold` multiplies, None when the FFN is not two linears; by default
        no FFN is.
    scales(model): LayerScale, by the path of its module or parameter -> path of the linear layer just before it; by
        default there are no LayerScales.
    entry(model): the parameters of which every token receives exactly one before the first block, with nothing but sums
        behind them; none where there are no such, and None in families whose tokens are merged on the way.
    at_size(model, height, width): a model over the same parameters that does the same for images of this size, with
        tables for what it computes of the size alone; by default there is no such thing.
    stem: path of the convolution that is given the images.
    not_foldable: why an FFN without its activation is not linear, as a sentence; empty where it is.
    """

    name: str
    supported: str
    wiring: Wiring
    refuses: Callable[[nn.Module], str | None]
    blocks: Callable[[nn.Module], dict[str, nn.Module]]
    sites: Callable[[nn.Module], tuple[Site, ...]]
    spaces: Callable[[nn.Module], tuple[Space, ...]]
    slice_attention: Callable[[nn.Module, int, int, int], nn.Module]
    resized: Callable[[nn.Module, str, int], None]
    linear_pair: Callable[[nn.Module, str], LinearPair | None] = lambda model, ffn: None
    scales: Callable[[nn.Module], dict[str, str]] = lambda model: {}
    not_foldable: str = ""
    entry: Callable[[nn.Module], tuple[str, ...]] | None = None
    at_size: Callable[[nn.Module, int, int], nn.Module] = lambda model, height, width: model
    stem: str = "patch_embed.proj"


def linear_axes(model: nn.Module, name: str, *, offset: int = 0, copies: int = 1) -> tuple[Axis, ...]:
    """The output axes of a linear or convolution layer: weight rows, and the bias where there is one."""
    layer = model.get_submodule(name)
    tensors = [f"{name}.weight"] + ([f"{name}.bias"] if getattr(layer, "bias", None) is not None else [])
    return tuple(Axis(tensor, 0, offset, copies) for tensor in tensors)


def norm_axes(model: nn.Module, name: str) -> tuple[Axis, ...]:
    """The axes of a LayerNorm or LayerScale: every parameter that it owns."""
    return tuple(Axis(f"{name}.{leaf}", 0) for leaf, _ in model.get_submodule(name).named_parameters(recurse=False))


def scale_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """What the LayerScale `name` of `Family.scales` multiplies by, (channels,)."""
    owner, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(owner), leaf)
    return found if isinstance(found, nn.Parameter) else next(iter(found.parameters()))


def input_axis(name: str) -> Axis:
    """The input axis of a linear layer: weight columns."""
    return Axis(f"{name}.weight", 1)
