"""What a family describes of a model: which channels are coupled, and which modules can be removed.

A **space** is a group of coupled channels (DepGraph's group), with every tensor axis that they index. A **site** is a
module that can be removed. Both are plain data: slicing, masking and counting follow one rule each, and no method
distinguishes architectures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

SpaceKind = Literal["qk", "v", "mlp", "residual", "sr"]
SiteKind = Literal["attention", "activation", "ffn", "block"]


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer that a space indexes.

    Channel c of the space has the index `offset + copy * size + c` for each of `copies` (a layer that reads the space
    several times). With `per_head` the dimension has one entry per head instead of one per channel.
    """

    tensor: str
    dim: int
    offset: int = 0
    copies: int = 1
    per_head: bool = False

    @property
    def owner(self) -> str:
        """Path of the module that holds the tensor."""
        return self.tensor.rpartition(".")[0]


@dataclass(frozen=True)
class Space:
    """Channels that are kept or removed together, in `heads` equal groups of `size / heads`.

    kind: q and k of an attention, its v, the hidden channels of an FFN, a residual stream (one per stage), or the
        channels after a spatial reduction, before k and v (`sr`, PVTv2).
    attention: path of the attention with these heads; empty for other spaces.
    whole_heads: only whole heads can be removed, because a rotary position embedding rotates q and k in pairs of
        channels, each with a frequency that depends on its place in the head.
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
    """A module that can be removed.

    name: its path in the dense model; block numbers never change. block, index: path and dense number of its block.
    branch_end: the last module of its residual branch, just before the sum. gates: for an activation that gates another
    branch (SwiGLU), the path of its FFN; else empty.
    """

    name: str
    kind: SiteKind
    block: str
    index: int
    branch_end: str = ""
    gates: str = ""


@dataclass(frozen=True)
class LinearPair:
    """Paths of the two linear layers of an FFN, in order of use."""

    first: str
    second: str


Part = nn.Module | nn.Parameter | None  # of a block: a module, a parameter that multiplies, or nothing


def children(block: nn.Module) -> dict[str, nn.Module]:
    """The child modules of `block` by name."""
    return dict(block.named_children())


@dataclass(frozen=True)
class Wiring:
    """The residual branches of a block, in order.

    branches: each a chain of names of child modules, and of parameters that multiply (a LayerScale that is no module).
    attention, ffn: the names of these children.
    takes_arguments: children that receive the extra arguments of the block, for example an attention mask.
    parts(block): the children by name. A family replaces a child here if the block itself does a part of the child's
        work (shift and window partition in Swin).
    """

    branches: tuple[tuple[str, ...], ...]
    attention: str
    ffn: str
    takes_arguments: frozenset[str] = frozenset()
    parts: Callable[[nn.Module], Mapping[str, Part]] = children


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a group of timm models. Only families know the modules of a model.

    All functions read the model in its current state, after `prepare`.

    problem(model): None, or why the family does not support the model (completes "cannot prune this model: ").
    blocks(model): the remaining blocks by path, in forward order.
    sites(model), spaces(model): the remaining sites and spaces.
    slice_attention(module, qk_dim, v_dim, heads): the attention to use after slicing, over the same parameters.
    set_width(model, space, width): store the new width of a residual space in the attributes that timm reads.
    prepare(model): rewrite the model in place into an equal one that `spaces` describes, for example with the biases of
        q, k and v in their layer. Called for every model before anything else, possibly more than once.
    timm_state(model): the state dict of a dense model with the names that timm's unprepared model has.
    linear_pair(model, ffn): the layers that `surgery.fold` multiplies; None if the FFN does not consist of two.
    scales(model): path of each LayerScale (module or parameter) -> path of the linear layer just before it.
    entry(model): parameters of which every token receives exactly one before the first block, with only sums after
        them; empty if the model has none. None for families that merge tokens.
    at_size(model, height, width): a model over the same parameters for images of this size, with everything that
        depends only on the size precomputed.
    stem: path of the convolution that reads the images.
    not_foldable: why an FFN without its activation is not linear, as a sentence; empty if it is.
    """

    name: str
    supported: str
    wiring: Wiring
    problem: Callable[[nn.Module], str | None]
    blocks: Callable[[nn.Module], dict[str, nn.Module]]
    sites: Callable[[nn.Module], tuple[Site, ...]]
    spaces: Callable[[nn.Module], tuple[Space, ...]]
    slice_attention: Callable[[nn.Module, int, int, int], nn.Module]
    set_width: Callable[[nn.Module, str, int], None]
    prepare: Callable[[nn.Module], None] = lambda model: None
    timm_state: Callable[[nn.Module], dict[str, Tensor]] = lambda model: model.state_dict()
    linear_pair: Callable[[nn.Module, str], LinearPair | None] = lambda model, ffn: None
    scales: Callable[[nn.Module], dict[str, str]] = lambda model: {}
    not_foldable: str = ""
    entry: Callable[[nn.Module], tuple[str, ...]] | None = None
    at_size: Callable[[nn.Module, int, int], nn.Module] = lambda model, height, width: model
    stem: str = "patch_embed.proj"


def linear_axes(model: nn.Module, name: str, *, offset: int = 0, copies: int = 1) -> tuple[Axis, ...]:
    """The output axes of a linear or convolution layer: of its weight, and of its bias if it has one."""
    layer = model.get_submodule(name)
    tensors = [f"{name}.weight"] + ([f"{name}.bias"] if getattr(layer, "bias", None) is not None else [])
    return tuple(Axis(tensor, 0, offset, copies) for tensor in tensors)


def norm_axes(model: nn.Module, name: str) -> tuple[Axis, ...]:
    """The axes of all parameters of a LayerNorm or LayerScale."""
    return tuple(Axis(f"{name}.{leaf}", 0) for leaf, _ in model.get_submodule(name).named_parameters(recurse=False))


def scale_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The multipliers of the LayerScale `name` of `Family.scales`, (channels,)."""
    owner, _, leaf = name.rpartition(".")
    scale = getattr(model.get_submodule(owner), leaf)
    return scale if isinstance(scale, nn.Parameter) else next(iter(scale.parameters()))


def input_axis(name: str) -> Axis:
    """The input axis of a linear layer."""
    return Axis(f"{name}.weight", 1)
