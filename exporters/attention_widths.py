"""Attentions whose q/k and v differ in width, of which TensorRT makes less, or nothing."""

from torch import nn

from vitcompress.errors import InputError
from vitcompress.families import Space, family_of
from vitcompress.precision import HALF

DECOMPOSE = "leave the opset out, or give --opset 20 (22 in bf16), which decomposes attention and takes any width"


def apart(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Attention -> channels of each head in q and k, and in v, where those differ and nothing pads them."""
    own: dict[str, list[Space]] = {}
    for space in family_of(model).spaces(model):
        if space.attention and not getattr(model.get_submodule(space.attention), "padded", False):
            own.setdefault(space.attention, []).append(space)
    widths = {name: {space.kind: space.size // space.heads for space in spaces} for name, spaces in own.items()}
    return {name: (of["qk"], of["v"]) for name, of in widths.items() if len(set(of.values())) > 1}


def check_equal(model: nn.Module, name: str) -> None:
    """Raise InputError where `model` has heads that the format `name` does not take as one Attention node."""
    if not (found := apart(model)):
        return
    attention, (qk, v) = next(iter(found.items()))
    more = f" ({len(found)} attentions are of that kind)" if len(found) > 1 else ""
    raise InputError(
        f"the heads of {attention} have {qk} channels in q and k and {v} in v{more}; as one Attention node, which "
        f"opset 23 makes of them, {name} takes equal widths only",
        hint=DECOMPOSE,
    )


def unfused(model: nn.Module, precision: str) -> list[str]:
    """Why attentions of `model` cannot become one fused kernel, as a sentence; none in fp32, where none can."""
    names = list(apart(model)) if precision in HALF else []
    if not names:
        return []
    told = f"{len(names)} attention{'s' * (len(names) > 1)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    return [
        f"{told} with heads whose q and k are of another width than v, which TensorRT for RTX 1.7 does not fuse into "
        "one kernel; for engines prune with layout padded (SERo: --set step.0.layout=padded), or keep the width of "
        "heads (isomorphic, under a rotary embedding: --set step.0.keep_head_dim=1)"
    ]
