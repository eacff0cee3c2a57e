"""Measured speed-up on ONNX Runtime (CPU) over the ratio of MACs (attention products counted)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite
from vitcompress.bench.self.parts import Line, Options, create_dense, prune_recipe, speed_ratios
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.families import family_of
from vitcompress.methods.depth import plan_layers
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe

DEPTH_AIM, WIDTH_AIM = 0.97, 0.9  # published widths reached 0.74 (SERo), 0.63 (isomorphic pruning) and 0.77 (HetDPT+)
# NOSE's recipes choose their layers themselves; these are the attentions that its authors' search removed from DeiT-S.
NOSE, GREEDY = "nose_deit_s_4", (0, 2, 4, 6)
# Widths of one head's q/k and v, and of an FFN, 30 % in all: SERo's table 3 prunes q/k most and v least.
SERO = {"unaligned": (7, 49, 724), "uniform": (8, 48, 720), "tied": (32, 32, 576), "padded": (8, 48, 720)}
RELEASED = {"deit_iso_2_6g": 0, "hetdpt_plus_2_4g": 3}  # recipe -> its step that prunes widths


def run_depth(options: Options) -> Iterator[Line]:
    """Speed-up of HetDPT and NOSE models on ONNX Runtime (CPU) over the ratio of their MACs."""
    for name in ("deit_s_hetdpt", "deit_b_hetdpt"):
        dense, model = prune_recipe(name)
        yield from realised(dense, {name: model}, options, DEPTH_AIM)
    dense, model = without_attentions(NOSE, GREEDY)
    yield from realised(dense, {NOSE: model}, options, DEPTH_AIM)


def run_widths(options: Options) -> Iterator[Line]:
    """Speed-up of width-pruned models on ONNX Runtime (CPU) over the ratio of their MACs, by layout of the widths."""
    arch = "deit_base_patch16_224"
    layouts = {f"deit_b_sero {name}": keep_widths(arch, *of, padded=name == "padded") for name, of in SERO.items()}
    yield from realised(create_model(arch), layouts, options, WIDTH_AIM)
    dense, model = prune_recipe("up_deit_s")  # a standard DeiT-S has no unaligned widths
    yield from realised(dense, {"up_deit_s": model}, options, WIDTH_AIM)
    for name, step in RELEASED.items():
        changes = [f"step.{step}.{change}" for change in ("target=ratios", "amount=", "round_to=2")]
        dense, released = prune_recipe(name, changes)
        models = {f"{name} as released": released, f"{name} aligned": prune_recipe(name)[1]}
        yield from realised(dense, models, options, WIDTH_AIM)


def without_attentions(name: str, blocks: Sequence[int]) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe, and a copy without the attentions of these blocks, bypassed as in its first step."""
    recipe = load_recipe(name)
    dense, base = create_dense(recipe)
    return dense, surgery.apply_to_copy(dense, plan_layers(dense, base, {"attention": blocks}, recipe.steps[0].options))


def keep_widths(arch: str, qk: int, v: int, ffn: int, *, padded: bool = False) -> nn.Module:
    """The model with this number of q/k and v channels per head and of FFN channels in every block.

    padded: attention computes with zeros up to the wider of q/k and v.
    """
    model = create_model(arch)
    sizes = {"qk": qk, "v": v, "mlp": ffn}
    kept: dict[str, Any] = {}
    attentions: dict[str, None] = {}
    for space in family_of(model).spaces(model):
        if space.kind in sizes:
            head = space.size // space.heads
            kept[space.name] = tuple(c for c in range(space.size) if c % head < sizes[space.kind])
            attentions |= dict.fromkeys([space.attention] if space.attention and padded else [])
    return surgery.apply_plan(model, Plan(arch, kept=kept, padded=tuple(attentions)))


def realised(dense: nn.Module, smaller: Mapping[str, nn.Module], options: Options, aim: float) -> Iterator[Line]:
    """Speed-up of each model over its ratio of multiply-accumulates, all exported alike and interleaved."""
    size = input_config(dense).size
    macs, paths = {}, {}
    for name, model in {"dense": dense, **smaller}.items():
        macs[name], paths[name] = count_cost(model, size).macs, options.folder / f"{name.replace(' ', '-')}.onnx"
        export(model, paths[name], input=input_config(dense))
    settings = suite.BenchOptions("paper", options.batch, 3, options.runs, RunnerOptions(threads=options.threads))
    bench = suite.run(list(paths.values()), settings)
    for name, line in zip(smaller, speed_ratios(bench, options), strict=True):
        macs_ratio = macs["dense"] / macs[name]
        speedup, ends = line["ratio"], line["ci95"]
        share = {"ratio": speedup / macs_ratio, "ci95": [None if end is None else end / macs_ratio for end in ends]}
        figures = {"aim": [aim, None], "macs_ratio": macs_ratio, "speedup": speedup, "speedup_ci95": ends}
        yield {"what": f"realised {name}", **line, **share, **figures}
    for path in paths.values():
        path.unlink()
