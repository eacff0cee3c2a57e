"""Speed-up of HetDPT and NOSE models on ONNX Runtime (CPU) over the ratio of their MACs, attention products counted."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite
from vitcompress.bench.self.parts import Options, structured
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.methods.depth import plan_layers
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe

AIM = 0.97
RECIPES = ("deit_s_hetdpt", "deit_b_hetdpt")
# NOSE's recipes choose their layers themselves; these are the attentions that its authors' search took from DeiT-S.
NOSE, GREEDY = "nose_deit_s_4", (0, 2, 4, 6)


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per published configuration."""
    for name in RECIPES:
        dense, model = structured(name)
        yield from realised(dense, {name: model}, options, AIM)
    dense, model = without_attentions(NOSE, GREEDY)
    yield from realised(dense, {NOSE: model}, options, AIM)


def without_attentions(name: str, blocks: Sequence[int]) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe, and a copy without the attentions of these blocks, bypassed as its first step does."""
    recipe = load_recipe(name)
    dense = create_model(recipe.model.name, recipe.model.args)
    base = Plan(recipe.model.name, recipe.model.args)
    return dense, surgery.apply_to_copy(dense, plan_layers(dense, base, {"attention": blocks}, recipe.steps[0].options))


def realised(
    dense: nn.Module, smaller: Mapping[str, nn.Module], options: Options, aim: float
) -> Iterator[dict[str, Any]]:
    """Measured speed-up of each over the ratio of multiply-accumulates, all exported alike and taking turns."""
    size = input_config(dense).size
    macs, paths = {}, {}
    for name, model in {"dense": dense, **smaller}.items():
        macs[name], paths[name] = count_cost(model, size).macs, options.folder / f"{name.replace(' ', '-')}.onnx"
        export(model, paths[name], input=input_config(dense))
    settings = suite.BenchOptions("paper", options.batch, 3, options.runs, RunnerOptions(threads=options.threads))
    found = suite.run(list(paths.values()), settings)
    warnings = [text.replace(f"{options.folder}/", "") for text in found.warnings]
    about = {"batch": options.batch, "threads": options.threads, "warnings": warnings}
    for name, row, ratio in zip(smaller, found.rows[1:], found.ratios, strict=True):
        of_macs = macs["dense"] / macs[name]
        interval = [None if end is None else end / of_macs for end in ratio["ci95"]]
        share = {"ratio": ratio["median"] / of_macs, "ci95": interval}
        both = found.rows[0], row
        figures = {
            "macs_ratio": of_macs,
            "speedup": ratio["median"],
            "speedup_ci95": ratio["ci95"],
            "images_per_second": [one["images_per_second"] for one in both],
            "samples_ms": {Path(one["artifact"]).name: one["samples_ms"] for one in both},
        }
        yield {"what": f"realised {name}", **share, "aim": [aim, None], **figures, **about}
    for path in paths.values():
        path.unlink()
