"""What a family describes of a model: which channels are coupled, and which modules can be removed.

A **space** is a group of coupled channels (DepGraph's group), with every tensor axis that they index. A **site** is a
module that can be removed. Both are plain data: slicing, masking and counting follow one rule each, and no method
distinguishes architectures.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from timm.layers import AttentionPoolLatent, GluMlp, LayerNorm2d, LayerScale, Mlp, PatchEmbed, SwiGLU
from torch import Tensor, nn

from vitcompress.families.attention import AnyWidthAttention, SlicedPool
from vitcompress.families.edited_block import SITE_PARTS, EditedBlock, Wiring, branches_of

SiteKind = Literal["attention", "activation", "ffn", "block"]
GATED: tuple[SiteKind, ...] = ("attention", "activation")  # of the layers that depth pruning gates and removes
LAYERS = (nn.Linear, nn.Conv2d)  # subclasses may compute something else, which slicing and folding would lose
COMPUTED = "computes its weight; make it permanent, as with torch.nn.utils.prune.remove"
COMPUTING = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")  # methods of models
LINEAR = {"qkv", "q", "kv", "q_proj", "k_proj", "v_proj", "proj", "sr", "fc1", "fc1_g", "fc1_x", "fc2", "reduction"}


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer that a space indexes.

    Channel c of the space has the index `offset + copy * size + c` for each of `copies` (a layer that reads the space
    several times). With `per_head` it has one entry per head, not per channel, as in a table or a layer over heads.
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
    kind: Literal["qk", "v", "mlp", "residual", "sr"]
    size: int
    axes: tuple[Axis, ...]
    heads: int = 1
    attention: str = ""
    whole_heads: bool = False


@dataclass(frozen=True)
class Site:
    """A module that can be removed.

    name: its path in the dense model; block numbers never change. block, index: path and dense number of its block.
    gates: for an activation that gates another branch (SwiGLU), the path of its FFN; else empty.
    """

    name: str
    kind: SiteKind
    block: str
    index: int
    gates: str = ""


# The spaces inside of a module, and the residual axes that it reads and writes.
Described = tuple[list[Space], list[Axis]]


class Family(ABC):
    """Describes a group of timm models. Only families know the modules of a model.

    All methods read the model in its current state, after `prepare`. The defaults suit models whose pre-norm blocks
    consist of `attn` and `mlp`.

    supported: the models, for the error that lists all families.
    model_type, stem_type, block_type, ffn_types: classes of supported models and their parts.
    sliced: class of a supported attention -> the `AnyWidthAttention` that replaces it at widths that it lacks.
    wiring: the residual branches of a block.
    stages: path of the list of stages; empty for models without stages.
    stem: path of the convolution that reads the images.
    fixed_size: whether a model with changed attentions runs at its own input size only.
    """

    name: str
    supported: str
    model_type: type
    stem_type: type = PatchEmbed
    block_type: type
    sliced: ClassVar[Mapping[type, type[AnyWidthAttention]]]
    ffn_types: tuple[type, ...] = (Mlp,)
    wiring: Wiring
    stages: str = ""
    stem: str = "patch_embed.proj"
    fixed_size: bool = False

    def problem(self, model: Any) -> str | None:
        """None, or why the family does not support the model (completes "this model is not supported: ")."""
        stem, supported = getattr(model, "patch_embed", None), isinstance(model, self.model_type)
        if not supported:
            return f"it is of type {type(model).__name__}"
        for name in COMPUTING:  # a subclass of timm's class may have methods of its own
            method: Any = getattr(type(model), name, None)
            if method is not getattr(self.model_type, name, None) and not method.__module__.startswith("timm."):
                return f"{method.__qualname__} is not timm's"
        named = dict(model.named_modules())
        replaced = [f"{name}.forward".lstrip(".") for name, part in named.items() if "forward" in vars(part)]
        if replaced := [*replaced, *(name for name in COMPUTING if name in vars(model))]:
            return f"its {replaced[0]} was replaced; remove this attribute of the object with `del`"
        if not isinstance(stem, self.stem_type):
            return f"its stem is of type {type(stem).__name__}"
        if len([*model.parameters()]) < len([*model.named_parameters(remove_duplicate=False)]):
            return "some of its modules share parameters"  # a plan names each of them
        norms = (module for name, module in named.items() if "norm" in name.rpartition(".")[2])
        linear = {name: m for name, m in named.items() if isinstance(m, LAYERS) or name.rpartition(".")[2] in LINEAR}
        layers = (f"its {name} {text}" for name, module in linear.items() if (text := layer_problem(module)))
        problems = (*map(self.block_problem, self.blocks(model).values()), *map(norm_problem, norms), *layers)
        return next((problem for problem in problems if problem), None)

    def block_problem(self, block: Any) -> str | None:
        """None, or why the family does not support the block: a type of its parts, or an option of its FFN."""
        attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
        sliced = (type(attn),) if isinstance(attn, AnyWidthAttention) else ()
        for what, part, types in (
            ("blocks are of type", block, (self.block_type, EditedBlock)),
            ("attention is of type", attn, (*self.sliced, *sliced)),
            ("FFN is of type", mlp, (*self.ffn_types, nn.Linear)),  # a folded FFN is a linear layer
        ):
            if part is not None and type(part) not in types:
                return f"its {what} {type(part).__name__}"
        if isinstance(mlp, Mlp | GluMlp | SwiGLU) and not isinstance(mlp.fc2, nn.Linear):
            return "its FFN is convolutional"
        first = mlp.fc1 if isinstance(mlp, GluMlp) else mlp.fc1_g if isinstance(mlp, SwiGLU) else None
        return "its gated FFN has no biases" if first is not None and first.bias is None else None

    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The remaining blocks by path, in forward order."""
        stages = [f"{stage}." for stage in self.stage_paths(model)] if self.stages else [""]
        lists = {f"{stage}blocks": model.get_submodule(f"{stage}blocks") for stage in stages}
        return {f"{path}.{name}": block for path, blocks in lists.items() for name, block in blocks.named_children()}

    def stage_paths(self, model: nn.Module) -> list[str]:
        """Paths of the stages, in forward order."""
        return [f"{self.stages}.{name}" for name, _ in model.get_submodule(self.stages).named_children()]

    def depths(self, model: Any) -> list[int]:
        """Number of blocks of each stage of the dense model; numbers of blocks count through all stages."""
        return []

    def not_foldable(self, model: nn.Module) -> str:
        """Why an FFN without its activation is not linear, as a sentence; empty if it is."""
        ffns = (getattr(block, "mlp", None) for block in self.blocks(model).values())
        normalized = not is_empty(*(getattr(ffn, "norm", None) for ffn in ffns))
        return "the FFNs normalize their hidden channels and cannot be folded" if normalized else ""

    def sites(self, model: nn.Module) -> tuple[Site, ...]:
        """Attention, activation (unless the FFN is not linear without it), FFN and block of every remaining block."""
        depths, foldable, sites = self.depths(model), not self.not_foldable(model), list[Site]()
        for path, block in self.blocks(model).items():
            numbers = [int(part) for part in path.split(".") if part.isdigit()]
            mlp, place = getattr(block, "mlp", None), (path, sum(depths[: numbers[0]]) + numbers[-1])
            if hasattr(block, "attn"):
                sites.append(Site(f"{path}.attn", "attention", *place))
            gates = f"{path}.mlp" if isinstance(mlp, GluMlp) else ""
            if foldable and (gates or not is_empty(getattr(mlp, "act", None))):
                sites.append(Site(f"{path}.mlp.act", "activation", *place, gates))
            if mlp is not None:
                sites.append(Site(f"{path}.mlp", "ffn", *place))
            sites.append(Site(path, "block", *place))
        return tuple(sites)

    def spaces(self, model: nn.Module) -> tuple[Space, ...]:
        """The remaining spaces: those inside of every block, then the residual streams."""
        spaces: list[Space] = []
        streams: dict[str, list[Axis]] = {}
        norms = [name for branch in self.wiring.branches for name in branch if name not in SITE_PARTS.values()]
        for path, block in self.blocks(model).items():
            streams[path] = [axis for name in norms for axis in norm_axes(model, f"{path}.{name}")]
            for name, describe in (("attn", self.describe_attention), ("mlp", describe_ffn)):
                if hasattr(block, name):
                    own, axes = describe(model, path, getattr(block, name))
                    spaces += own
                    streams[path] += axes
        return (*spaces, *self.streams(model, streams))

    def describe_attention(self, model: nn.Module, path: str, attn: Any) -> Described:
        """Spaces inside of the attention of the block at `path`, and residual axes; here with one `qkv` layer."""
        name = f"{path}.attn"
        return describe_heads(model, path, name, attn), [input_axis(f"{name}.qkv"), *linear_axes(model, f"{name}.proj")]

    @abstractmethod
    def streams(self, model: Any, axes: Mapping[str, Iterable[Axis]]) -> Iterator[Space]:
        """The residual streams. axes: those inside of each block."""

    def slice_attention(self, attn: Any, qk_dim: int, v_dim: int, num_heads: int) -> nn.Module:
        """The attention to use after slicing, over the same parameters: timm's own if it supports these widths."""
        kind = next((sliced for dense, sliced in self.sliced.items() if isinstance(attn, dense)), type(attn))
        return kind.of(attn, qk_dim, v_dim, num_heads)

    @abstractmethod
    def set_width(self, model: Any, space: str, width: int) -> None:
        """Store the new width of a residual space in the attributes that timm reads."""

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 (most models need none)
        """Rewrite the model in place into an equal one that `spaces` describes, for example with the biases of q, k and
        v in their layer. Called for every model before anything else, possibly more than once."""

    def linear_pair(self, model: nn.Module, ffn: str) -> tuple[str, str] | None:
        """Paths of the layers that `surgery.fold` multiplies, in order of use; None if there are not two."""
        mlp: Any = model.get_submodule(ffn)
        return (f"{ffn}.fc1", f"{ffn}.fc2") if isinstance(mlp, Mlp | GluMlp) and is_empty(mlp.norm) else None

    def normalized(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Path of each LayerNorm of a block whose output only linear layers read -> paths of these layers."""
        readers, describe = {}, {"attn": self.describe_attention, "mlp": describe_ffn}
        for path, block in self.blocks(model).items():
            for norm, child, *_ in (chain for chain in branches_of(block, self.wiring) if len(chain) > 1):
                if isinstance(getattr(block, norm), nn.LayerNorm) and child in describe:
                    axes = describe[child](model, path, getattr(block, child))[1]
                    layers = tuple(axis.owner for axis in axes if axis.dim == 1)
                    if all(isinstance(model.get_submodule(layer), nn.Linear) for layer in layers):
                        readers[f"{path}.{norm}"] = layers
        return readers

    def scales(self, model: nn.Module) -> dict[str, str]:
        """Path of each LayerScale (module or parameter) -> path of the linear layer just before it.

        Without its attention, a LayerScale follows a norm and is left out.
        """
        return {
            f"{path}.{scale}": _last_linear(f"{path}.{part}", getattr(block, part))
            for path, block in self.blocks(model).items()
            for branch in branches_of(block, self.wiring)
            for part, scale in pairwise(branch)
            if isinstance(getattr(block, scale, None), LayerScale | nn.Parameter) and part in SITE_PARTS.values()
        }

    def entry(self, model: Any) -> tuple[str, ...] | None:
        """Parameters before the first block: a constant that is added to all of them is added once to every token.

        Empty if the model has none, None for families that merge tokens.
        """
        return None

    def at_size(self, model: nn.Module, height: int, width: int) -> nn.Module:
        """A model over the same parameters for images of this size, with all that depends only on it precomputed."""
        return model


class StagedFamily(Family):
    """A family whose models have stages, each with a residual stream of its own width."""

    def streams(self, model: Any, axes: Mapping[str, Iterable[Axis]]) -> Iterator[Space]:
        """One residual stream per stage."""
        for number, stage in enumerate(self.stage_paths(model)):
            first, last = self.stage_axes(model, number)
            own = [axis for path in axes if path.startswith(f"{stage}.") for axis in axes[path]]
            width = len(model.get_parameter(first[0].tensor))
            yield Space(f"{stage}.residual", "residual", width, (*first, *own, *last))

    @abstractmethod
    def stage_axes(self, model: Any, number: int) -> tuple[list[Axis], list[Axis]]:
        """Axes of what writes the stream of a stage first, beginning with a weight, and of what reads it last."""


def is_empty(*parts: nn.Module | None) -> bool:
    """Whether none of these modules computes anything."""
    return all(part is None or isinstance(part, nn.Identity) for part in parts)


def layer_problem(layer: nn.Module) -> str | None:
    """Why `layer` is no plain layer: a wrapper, as of LoRA, another class, or computed weights."""
    if type(layer) not in LAYERS:
        return None if is_empty(layer) else f"is of type {type(layer).__name__}; use a plain layer"
    return None if "weight" in dict(layer.named_parameters()) else COMPUTED


def norm_problem(norm: nn.Module) -> str | None:
    """Why `norm` is not a LayerNorm over the last dimension that can be sliced."""
    if is_empty(norm):
        return None
    if not isinstance(norm, nn.LayerNorm) or isinstance(norm, LayerNorm2d):  # LayerNorm2d normalizes dimension 1
        return f"its norm is of type {type(norm).__name__}"
    if not norm.elementwise_affine:
        return "its LayerNorm has no weights"
    return None if {"weight", "bias"} <= norm._parameters.keys() else f"its norm {COMPUTED}"


def pool_problem(pool: Any, width: int) -> str | None:
    """Why this pool of a stream of `width` channels is not supported, or None."""
    if pool is None or isinstance(pool, SlicedPool):
        return None
    if not isinstance(pool, AttentionPoolLatent):
        return f"its attention pool is of type {type(pool).__name__}"
    if pool.latent_len != 1 or pool.pool != "token":
        return "its attention pool has more than one latent or output token"
    if pool.pos_embed is not None or not is_empty(pool.q_norm, pool.k_norm):
        return "its attention pool adds positions or normalizes q or k"
    if not isinstance(pool.q, nn.Linear) or type(pool.mlp) is not Mlp or not is_empty(pool.mlp.norm):
        return "its attention pool has no layer for q, or no MLP of two linear layers"
    widths = {pool.latent_dim, pool.kv.in_features, pool.proj.in_features, pool.out_features}
    return None if widths == {width} else "its attention pool and its residual stream have different widths"


def describe_heads(model: nn.Module, path: str, name: str, attn: Any) -> list[Space]:
    """q/k and v of the attention `name` with one `qkv` layer, or with a `q` and a `kv` layer."""
    v_dim, output = attn.proj.in_features, input_axis(f"{name}.proj")
    if hasattr(attn, "qkv"):
        qk_dim = (attn.qkv.out_features - v_dim) // 2
        qk = linear_axes(model, f"{name}.qkv", copies=2)
        v = (*linear_axes(model, f"{name}.qkv", offset=2 * qk_dim), *norm_axes(model, f"{name}.norm"))
    else:
        qk_dim = attn.q.out_features
        qk = (*linear_axes(model, f"{name}.q"), *linear_axes(model, f"{name}.kv"))
        v = linear_axes(model, f"{name}.kv", offset=qk_dim)
    if getattr(attn, "relative_position_bias_table", None) is not None:  # one column per head
        qk += (Axis(f"{name}.relative_position_bias_table", 1, per_head=True),)
    return [
        Space(f"{path}.qk", "qk", qk_dim, qk, attn.num_heads, name),
        Space(f"{path}.v", "v", v_dim, (*v, output), attn.num_heads, name),
    ]


def describe_ffn(model: nn.Module, path: str, mlp: Any) -> Described:
    """The hidden space and the residual axes of the FFN of the block at `path`; a folded one has no hidden space."""
    name = f"{path}.mlp"
    if isinstance(mlp, nn.Linear):  # folded
        return [], [input_axis(name), *linear_axes(model, name)]
    hidden, first = mlp.fc2.in_features, f"{name}.fc1"
    axes = linear_axes(model, first, copies=mlp.fc1.out_features // hidden)
    if hasattr(mlp, "dwconv"):
        axes += linear_axes(model, f"{name}.dwconv")
    space = Space(name, "mlp", hidden, (*axes, *norm_axes(model, f"{name}.norm"), input_axis(f"{name}.fc2")))
    return [space], [input_axis(first), *linear_axes(model, f"{name}.fc2")]


def describe_pool(model: nn.Module, name: str, pool: Any) -> Described:
    """The attention pool `name`. It is no site: without it the model has no output.

    Its latent, its output and the classifier belong to the residual stream.
    """
    mlp, stream = describe_ffn(model, name, pool.mlp)
    reads = [Axis(f"{name}.latent", 2), input_axis(f"{name}.q"), input_axis(f"{name}.kv")]
    writes = [*linear_axes(model, f"{name}.proj"), *norm_axes(model, f"{name}.norm")]
    return [*describe_heads(model, name, name, pool), *mlp], [*reads, *writes, *stream]


def _last_linear(path: str, part: nn.Module) -> str:
    if isinstance(part, nn.Linear):  # folded
        return path
    return f"{path}.proj" if hasattr(part, "proj") else f"{path}.fc2"


def join_parameters(*parts: Tensor) -> nn.Parameter:
    """`parts` as the rows of one parameter, which is trained if any of them is."""
    return nn.Parameter(torch.cat(parts).detach(), any(part.requires_grad for part in parts))


def join_layers(*layers: Any) -> nn.Linear:
    """The layer that computes the outputs of `layers` side by side. Missing biases are zero if the first has one."""
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    joined = nn.Linear(first.in_features, rows, bias=first.bias is not None, device="meta")
    for name, own in first.named_parameters():
        parts = (getattr(layer, name) for layer in layers)
        setattr(joined, name, join_parameters(*(own.new_zeros(len(own)) if part is None else part for part in parts)))
    return joined.train(first.training)


def linear_axes(model: nn.Module, name: str, *, offset: int = 0, copies: int = 1) -> tuple[Axis, ...]:
    """The output axes of a linear or convolution layer: of its weight, and of its bias if it has one."""
    layer = model.get_submodule(name)
    tensors = [f"{name}.weight"] + ([f"{name}.bias"] if getattr(layer, "bias", None) is not None else [])
    return tuple(Axis(tensor, 0, offset, copies) for tensor in tensors)


def norm_axes(model: nn.Module, name: str) -> tuple[Axis, ...]:
    """The axes of all parameters of a LayerNorm or LayerScale, which may be a parameter; none if there is none."""
    owner, _, leaf = name.rpartition(".")
    norm = getattr(model.get_submodule(owner), leaf, None)
    if isinstance(norm, nn.Parameter):
        return (Axis(name, 0),)
    parameters = norm.named_parameters(recurse=False) if norm is not None else ()
    return tuple(Axis(f"{name}.{own}", 0) for own, _ in parameters)


def scale_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The multipliers of the LayerScale `name` of `Family.scales`, (channels,)."""
    scale = attrgetter(name)(model)
    return scale if isinstance(scale, nn.Parameter) else next(iter(scale.parameters()))


def input_axis(name: str) -> Axis:
    """The input axis of a linear layer."""
    return Axis(f"{name}.weight", 1)
