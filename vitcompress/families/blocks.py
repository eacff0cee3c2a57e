"""What the families share: blocks with two residual branches, attention with packed q, k and v, and FFNs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from timm.layers import GluMlp, LayerNorm2d, LayerScale, Mlp
from torch import Tensor, nn

from vitcompress.families.base import Axis, LinearPair, Site, Space, input_axis, linear_axes, norm_axes
from vitcompress.families.edited_block import EditedBlock

NORMED_ATTENTION = "its attention normalizes q, k or its output, or has a gate"  # a reason, see `Family.problem`
SCALES = {"ls1": "attn", "ls2": "mlp", "gamma_1": "attn", "gamma_2": "mlp"}  # LayerScale -> the child that it follows
NORMS = ("norm1", "ls1", "gamma_1", "norm2", "ls2", "gamma_2")
Blocks = Callable[[nn.Module], dict[str, nn.Module]]
Describe = Callable[[nn.Module, str, Any], tuple[list[Space], list[Axis]]]  # a child of the block at a path
Stream = Callable[[nn.Module, str, list[Axis]], Space]  # of the stage at a path, from the axes inside its blocks


def is_empty(*parts: nn.Module | None) -> bool:
    """Whether none of these modules computes anything."""
    return all(part is None or isinstance(part, nn.Identity) for part in parts)


def model_problem(
    model: Any, kind: type, stem: type, blocks: Blocks, block_problem: Callable[[Any], str | None]
) -> str | None:
    """The first problem of a model: of its type, its stem, a block or a norm."""
    stem_type = type(getattr(model, "patch_embed", None))
    if not issubclass(type(model), kind):
        return f"it is a {type(model).__name__}"
    if not issubclass(stem_type, stem):
        return f"its stem is a {stem_type.__name__}"
    norms = (module for name, module in model.named_modules() if "norm" in name.rpartition(".")[2])
    problems = (*map(block_problem, blocks(model).values()), *map(norm_problem, norms))
    return next((problem for problem in problems if problem), None)


def norm_problem(norm: nn.Module) -> str | None:
    """Why `norm` is not a LayerNorm over the last dimension that can be sliced."""
    if is_empty(norm):
        return None
    if not isinstance(norm, nn.LayerNorm) or isinstance(norm, LayerNorm2d):  # LayerNorm2d normalizes dimension 1
        return f"its norm is a {type(norm).__name__}"
    return None if norm.elementwise_affine else "its LayerNorm has no weights"


def part_problem(block: nn.Module, blocks: type, attentions: tuple[type, ...], ffns: tuple[type, ...]) -> str | None:
    """Names the first of block, attention and FFN that has none of these types."""
    for what, part, kinds in (
        ("blocks are", block, (blocks, EditedBlock)),
        ("attention is a", getattr(block, "attn", None), attentions),
        ("FFN is a", getattr(block, "mlp", None), (*ffns, nn.Linear)),  # a folded FFN is a linear layer
    ):
        if part is not None and type(part) not in kinds:
            return f"its {what} {type(part).__name__}"
    mlp: Any = getattr(block, "mlp", None)
    if isinstance(mlp, Mlp | GluMlp) and not (is_empty(mlp.norm) and isinstance(mlp.fc1, nn.Linear)):
        return "its FFN normalizes its hidden channels or is convolutional"
    return "its gated FFN has no biases" if isinstance(mlp, GluMlp) and mlp.fc1.bias is None else None


def pack_biases(model: nn.Module) -> None:
    """Move separate biases of q, k and v into the `qkv` layer, which timm then calls as a module.

    With separate biases timm uses only the weight of the layer, so no hook on the layer would run.
    """
    for module in model.modules():
        attn: Any = module
        if getattr(attn, "q_bias", None) is not None and isinstance(attn.qkv, nn.Linear):
            packed = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias]).detach()
            attn.qkv.bias = nn.Parameter(packed, requires_grad=attn.q_bias.requires_grad)
            attn.q_bias = attn.k_bias = attn.v_bias = None


def unpack_biases(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with separate biases again, without that of k.

    Exact without a rotary embedding: the bias of k then shifts all scores of a query equally.
    """
    state = model.state_dict()
    for name, module in model.named_modules():
        if hasattr(module, "q_bias") and f"{name}.qkv.bias" in state:
            q, _, v = state.pop(f"{name}.qkv.bias").chunk(3)
            state |= {f"{name}.q_bias": q, f"{name}.v_bias": v}
    return state


def staged_blocks(model: nn.Module, stages: str) -> dict[str, nn.Module]:
    """The remaining blocks of a model with stages, by path."""
    return {
        f"{stages}.{stage}.blocks.{name}": block
        for stage, module in model.get_submodule(stages).named_children()
        for name, block in module.get_submodule("blocks").named_children()
    }


def list_sites(
    blocks: Mapping[str, nn.Module], depths: Sequence[int] = (), *, linear_without_act: bool = True
) -> tuple[Site, ...]:
    """Attention, activation, FFN and block of each of `blocks` that still has them.

    depths: number of blocks of each stage of the dense model, for models with stages; numbers count through all stages.
    linear_without_act: whether an FFN is linear without its activation; else the activation is no site.
    """
    sites: list[Site] = []
    for path, block in blocks.items():
        numbers = [int(part) for part in path.split(".") if part.isdigit()]
        sites += _block_sites(path, block, sum(depths[: numbers[0]]) + numbers[-1], linear_without_act)
    return tuple(sites)


def _block_sites(path: str, block: Any, index: int, linear_without_act: bool) -> Iterator[Site]:
    if hasattr(block, "attn"):
        yield Site(f"{path}.attn", "attention", path, index, f"{path}.drop_path1")
    act = getattr(getattr(block, "mlp", None), "act", None)
    if linear_without_act and not is_empty(act):
        gates = f"{path}.mlp" if isinstance(block.mlp, GluMlp) else ""
        yield Site(f"{path}.mlp.act", "activation", path, index, f"{path}.drop_path2", gates)
    if hasattr(block, "mlp"):
        yield Site(f"{path}.mlp", "ffn", path, index, f"{path}.drop_path2")
    yield Site(path, "block", path, index)


def block_spaces(
    model: nn.Module, blocks: Mapping[str, nn.Module], attention: Describe
) -> tuple[list[Space], dict[str, list[Axis]]]:
    """Spaces inside of `blocks`, and per block the residual axes of its parts. attention: as `packed_attention`."""
    spaces: list[Space] = []
    stream: dict[str, list[Axis]] = {}
    for path, block in blocks.items():
        stream[path] = [axis for name in NORMS for axis in _child_axes(model, path, block, name)]
        for name, describe in (("attn", attention), ("mlp", ffn)):
            if hasattr(block, name):
                own, axes = describe(model, path, getattr(block, name))
                spaces += own
                stream[path] += axes
    return spaces, stream


def _child_axes(model: nn.Module, path: str, block: nn.Module, name: str) -> tuple[Axis, ...]:
    """The axes of a norm or LayerScale of a block; a LayerScale may be a parameter."""
    child = getattr(block, name, None)
    if isinstance(child, nn.Parameter):
        return (Axis(f"{path}.{name}", 0),)
    return () if child is None else norm_axes(model, f"{path}.{name}")


def staged_spaces(model: nn.Module, stages: str, attention: Describe, stream: Stream) -> tuple[Space, ...]:
    """The spaces inside the blocks of a model with stages, then one residual stream per stage."""
    inner, axes = block_spaces(model, staged_blocks(model, stages), attention)
    names = [f"{stages}.{name}" for name, _ in model.get_submodule(stages).named_children()]
    streams = [[axis for path in axes if path.startswith(f"{name}.") for axis in axes[path]] for name in names]
    return (*inner, *(stream(model, name, own) for name, own in zip(names, streams, strict=True)))


def packed_attention(model: nn.Module, path: str, attn: Any) -> tuple[list[Space], list[Axis]]:
    """Spaces of an attention with one `qkv` layer, and the residual axes that it reads and writes."""
    name, v_dim = f"{path}.attn", attn.proj.in_features
    qk_dim = (attn.qkv.out_features - v_dim) // 2
    qk = linear_axes(model, f"{name}.qkv", copies=2)
    v = (*linear_axes(model, f"{name}.qkv", offset=2 * qk_dim), input_axis(f"{name}.proj"))
    if getattr(attn, "relative_position_bias_table", None) is not None:  # one column per head
        qk += (Axis(f"{name}.relative_position_bias_table", 1, per_head=True),)
    spaces = [
        Space(f"{path}.qk", "qk", qk_dim, qk, attn.num_heads, name),
        Space(f"{path}.v", "v", v_dim, v, attn.num_heads, name),
    ]
    return spaces, [input_axis(f"{name}.qkv"), *linear_axes(model, f"{name}.proj")]


def cross_attention(model: nn.Module, path: str, name: str, attn: Any) -> list[Space]:
    """Spaces of the attention `name` with a `q` and a `kv` layer."""
    qk_dim, v_dim = attn.q.out_features, attn.proj.in_features
    qk = (*linear_axes(model, f"{name}.q"), *linear_axes(model, f"{name}.kv"))
    v = (*linear_axes(model, f"{name}.kv", offset=qk_dim), input_axis(f"{name}.proj"))
    return [
        Space(f"{path}.qk", "qk", qk_dim, qk, attn.num_heads, name),
        Space(f"{path}.v", "v", v_dim, v, attn.num_heads, name),
    ]


def ffn(model: nn.Module, path: str, mlp: Any) -> tuple[list[Space], list[Axis]]:
    """The hidden space of an FFN (none if it is folded), and the residual axes that the FFN reads and writes."""
    name = f"{path}.mlp"
    if isinstance(mlp, nn.Linear):  # folded
        return [], [input_axis(name), *linear_axes(model, name)]
    hidden = mlp.fc2.in_features
    axes = linear_axes(model, f"{name}.fc1", copies=mlp.fc1.out_features // hidden)
    if hasattr(mlp, "dwconv"):
        axes += linear_axes(model, f"{name}.dwconv")
    space = Space(name, "mlp", hidden, (*axes, input_axis(f"{name}.fc2")))
    return [space], [input_axis(f"{name}.fc1"), *linear_axes(model, f"{name}.fc2")]


def list_scales(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """LayerScale -> linear layer just before it. Without its attention, a LayerScale follows a norm and is left out."""
    return {
        f"{path}.{name}": _last_linear(f"{path}.{child}", getattr(block, child))
        for path, block in blocks.items()
        for name, child in SCALES.items()
        if isinstance(getattr(block, name, None), LayerScale | nn.Parameter) and hasattr(block, child)
    }


def _last_linear(path: str, part: nn.Module) -> str:
    if isinstance(part, nn.Linear):  # folded
        return path
    return f"{path}.proj" if hasattr(part, "proj") else f"{path}.fc2"


def linear_pair(model: nn.Module, ffn: str) -> LinearPair | None:
    """fc1 and fc2 of a timm Mlp or GluMlp; None if it is folded."""
    is_pair = isinstance(model.get_submodule(ffn), Mlp | GluMlp)
    return LinearPair(f"{ffn}.fc1", f"{ffn}.fc2") if is_pair else None
