"""Speed-up of width-pruned DeiT-B on ONNX Runtime (CPU) over the ratio of its MACs, for each layout of the widths."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.bench.self.parts import Options, structured
from vitcompress.bench.self.realised import realised
from vitcompress.families import family_of
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

AIM = 0.9  # published hardware reached 0.74 (SERo), 0.63 (isomorphic pruning) and 0.77 (HetDPT+)
# Widths of one head's q/k and v, and of an FFN, 30 % in all: SERo's table 3 loses most of q/k and least of v.
SERO = {
    "unaligned": (7, 49, 724),
    "uniform": (8, 48, 720),
    "tied": (32, 32, 576),
    "padded": (8, 48, 720),
}
UP_VIT = "up_deit_s"  # a standard DeiT-S: no width of it can be unaligned
ISOMORPHIC = {
    "deit_iso_2_6g": {"as released": ["step.0.target=ratios", "step.0.round_to=2"], "aligned": []},
    "hetdpt_plus_2_4g": {"as released": ["step.3.target=ratios", "step.3.round_to=2"], "aligned": []},
}


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per layout; dense and all layouts of one source take turns."""
    arch = "deit_base_patch16_224"
    made = {f"deit_b_sero {name}": _sero(arch, *of, padded=name == "padded") for name, of in SERO.items()}
    yield from realised(create_model(arch), made, options, AIM)
    dense, smaller = structured(UP_VIT)
    yield from realised(dense, {UP_VIT: smaller}, options, AIM)
    for name, layouts in ISOMORPHIC.items():
        pairs = {layout: structured(name, changes) for layout, changes in layouts.items()}
        made = {f"{name} {layout}": model for layout, (_, model) in pairs.items()}
        yield from realised(next(iter(pairs.values()))[0], made, options, AIM)


def _sero(arch: str, qk: int, v: int, ffn: int, *, padded: bool = False) -> nn.Module:
    """The model with so many of each head's q/k and v channels and of each FFN's in every block.

    padded: whether attention computes with zeros up to the wider of q/k and v.
    """
    model = create_model(arch)
    wanted = {"qk": qk, "v": v, "mlp": ffn}
    kept, attentions = {}, dict[str, None]()
    for space in family_of(model).spaces(model):
        if space.kind in wanted:
            head = space.size // space.heads
            kept[space.name] = tuple(c for c in range(space.size) if c % head < wanted[space.kind])
            attentions |= dict.fromkeys([space.attention] if space.attention and padded else [])
    return surgery.apply_plan(model, Plan(arch, kept=kept, padded=tuple(attentions)))
