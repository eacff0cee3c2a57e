"""Measure the real gain of pruning on a processor: dense and pruned models in all runtimes.

    python -m tests.campaigns.speed [dense realised int8] --threads 1 --out bench/results

Compared measurements are interleaved. Weights are random where no time depends on them.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import vitcompress as vc
from vitcompress.bench import artifacts, environment, machine, suite
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.runtimes import RunnerOptions, available_exporter
from vitcompress.families import family_of
from vitcompress.io.files import write_json
from vitcompress.io.hardware import slow_reason
from vitcompress.io.text import format_interval, format_ratio, shorten_names
from vitcompress.methods.table import find_method
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config, plan_of
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe

Line = dict[str, Any]  # one result as plain data: `what`, and a `ratio` with its samples
DENSE = ("deit_tiny_patch16_224", "deit_small_patch16_224")
FILES = {"our ONNX": ("onnx", "fp32"), "OpenVINO fp32": ("openvino", "fp32"), "OpenVINO bf16": ("openvino", "bf16")}
# Name of a result, which begins with the recipe -> changes of the recipe.
PRUNED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deit_s_hetdpt", "deit_b_hetdpt", "nose_deit_s_4", "up_deit_s"), ()),
    "deit_iso_2_6g as released": ("step.0.target=ratios", "step.0.amount=", "step.0.round_to=2"),
    "deit_iso_2_6g aligned": (),
    "hetdpt_plus_2_4g as released": ("step.3.target=ratios", "step.3.amount=", "step.3.round_to=2"),
    "hetdpt_plus_2_4g aligned": (),
}
# Widths of one head's q/k and v, and of an FFN, 30 % in all: SERo's table 3 prunes q/k most and v least.
SERO = {"unaligned": (7, 49, 724), "uniform": (8, 48, 720), "tied": (32, 32, 576), "padded": (8, 48, 720)}
SERO_ARCH = "deit_base_patch16_224"
SERVED = {  # files that are compared with that of the dense model in fp32 in ONNX Runtime
    "ONNX Runtime fp32": ("onnx", "fp32"),
    "ONNX Runtime int8": ("onnx", "int8"),
    "OpenVINO int8": ("openvino", "int8"),
    "OpenVINO bf16": ("openvino", "bf16"),
    "OpenVINO int8+bf16": ("openvino", "int8+bf16"),
}
RANGE_IMAGES = 12  # of noise: no time depends on the ranges
QUANTIZED = ("deit_s_hetdpt", "deit_s_sero_70", "deit_iso_2_6g", "hetdpt_plus_2_4g", "up_deit_s")


@dataclass(frozen=True)
class Options:
    """threads: of one call of a runtime."""

    batch: int = 8
    runs: int = 20
    threads: int | None = None

    @property
    def bench(self) -> suite.BenchOptions:
        """The published protocol with the batch and runs of these options and a short warm-up."""
        return suite.BenchOptions("paper", self.batch, 3, self.runs, RunnerOptions(threads=self.threads))


def run_dense(options: Options) -> Iterator[Line]:
    """Dense DeiT-T and DeiT-S: our ONNX file and OpenVINO over timm's own ONNX export of the same architecture."""
    for arch in DENSE:
        for name, form in FILES.items():
            pair = {"timm's own ONNX": f"{artifacts.TIMM_ONNX}{arch}", name: create_model(arch)}
            yield {"what": f"{arch}, {name} over timm's own ONNX", **compare(pair, options.bench, *form)}


def run_pruned(options: Options) -> Iterator[Line]:
    """Speed-up of pruned models on ONNX Runtime (CPU) over the ratio of their MACs, by layout of the widths."""
    for name, changes in PRUNED.items():
        yield realised(name, *prune_recipe(name.partition(" ")[0], changes), options)
    dense = create_model(SERO_ARCH)
    for layout, widths in SERO.items():
        yield realised(f"deit_b_sero {layout}", dense, keep_widths(dense, *widths, layout == "padded"), options)


def run_int8(options: Options) -> Iterator[Line]:
    """Dense and pruned files in fp32, int8 and, if fast here, bf16 over the dense one in fp32, all interleaved."""
    for name in QUANTIZED:
        dense, pruned = prune_recipe(name)
        models = {"dense": dense, name: vc.fold(pruned)}
        with TemporaryDirectory() as folder:
            files = {
                f"{label}, {where}": write(model, Path(folder, f"{label}-{precision}"), form, ExportOptions(precision))
                for label, model in models.items()
                for where, (form, precision) in SERVED.items()
                if form == "onnx" or not slow_reason(precision)
            }
            bench = suite.run(list(files.values()), replace(options.bench, protocol="robust", batch=(1, 8)))
        names = dict(zip(map(str, files.values()), files, strict=True))
        times = {(names[row["artifact"]], row["batch"]): row["samples_ms"] for row in bench.rows}
        macs = [count_cost(model, input_config(dense).size).macs for model in models.values()]
        about = {"macs_ratio": macs[0] / macs[1], "conditions": bench.machine["conditions"]}
        for ratio in bench.ratios:
            pair = {end: names[ratio[end]] for end in ("a", "b")}
            samples = {file: times[file, ratio["batch"]] for file in pair.values()}
            what = f"{name}: {pair['b']}, batch {ratio['batch']}"
            yield {"what": what, "ratio": ratio["median"], **ratio, **pair, "samples_ms": samples, **about}


def prune_recipe(name: str, changes: Sequence[str] = ()) -> tuple[nn.Module, nn.Module]:
    """Dense model of a recipe with random weights, and a copy after all steps without scoring. changes: as `--set`."""
    recipe = load_recipe(name, changes)
    dense = model = create_model(recipe.model.name, recipe.model.args)
    # As in a trained model, no two biases are equal: a file would store them once.
    dense.load_state_dict({name: value + 0.01 * torch.rand_like(value) for name, value in dense.state_dict().items()})
    for step in recipe.steps:
        delta = find_method(step.method).structure(model, family_of(model), plan_of(model), step.options)
        model = vc.prune(model, delta)
    return dense, model


def keep_widths(dense: nn.Module, qk: int, v: int, ffn: int, padded: bool) -> nn.Module:
    """A copy with the first q/k and v channels of each head and the first FFN channels of every block.

    padded: attention computes with zeros up to the wider of q/k and v.
    """
    sizes = {"qk": qk, "v": v, "mlp": ffn}
    spaces = [space for space in family_of(dense).spaces(dense) if space.kind in sizes]
    kept = {s.name: tuple(c for c in range(s.size) if c % (s.size // s.heads) < sizes[s.kind]) for s in spaces}
    attentions = dict.fromkeys(s.attention for s in spaces if s.attention and padded)
    return vc.prune(dense, Plan(plan_of(dense).arch, kept=kept, padded=tuple(attentions)))


def realised(name: str, dense: nn.Module, pruned: nn.Module, options: Options) -> Line:
    """Speed-up of the folded model over its ratio of multiply-accumulates."""
    models = {"dense": dense, name: vc.fold(pruned)}
    before, after = (count_cost(model, input_config(dense).size).macs for model in models.values())
    line = compare(models, options.bench)
    return {"what": f"realised {name}", **line, **over_macs(line, before / after)}


def over_macs(ratio: Mapping[str, Any], macs_ratio: float) -> Line:
    """The `median` of a ratio of speeds over the ratio of the MACs, and both."""
    ends = [None if end is None else end / macs_ratio for end in ratio["ci95"]]
    figures = {"macs_ratio": macs_ratio, "speedup": ratio["median"], "speedup_ci95": ratio["ci95"]}
    return {"ratio": ratio["median"] / macs_ratio, "ci95": ends, **figures}


def compare(
    models: Mapping[str, nn.Module | str], settings: suite.BenchOptions, form: str = "onnx", precision: Any = "fp32"
) -> Line:
    """Speed of the second model over the first, interleaved, with every sample, in one format and precision.

    models: by name; text is opened as by `vitcompress bench`.
    """
    with TemporaryDirectory() as folder:
        options, new = ExportOptions(precision), {name: Path(folder) / name for name in models}
        paths = [m if isinstance(m, str) else write(m, new[name], form, options) for name, m in models.items()]
        bench = suite.run(paths, settings)
    warnings = [shorten_names(text, [row["artifact"] for row in bench.rows]) for text in bench.warnings]
    rows = [{**row, "artifact": name} for name, row in zip(models, bench.rows, strict=True)]
    conditions = bench.machine["conditions"]
    ratio = {**bench.ratios[0], **dict(zip("ab", models, strict=True))}
    return {**ratio, "ratio": ratio["median"], "rows": rows, "conditions": conditions, "warnings": warnings}


def write(model: nn.Module, path: Path, form: str, options: ExportOptions) -> Path:
    """Write the model to a file, whose suffix is added to `path`."""
    exporter = available_exporter(form, hint="")
    path = path.with_name(f"{path.name}{exporter.suffix}")
    config = input_config(model)
    ranges = partial(calibrate, images=artifacts.synthetic_images(config.size, RANGE_IMAGES), precision="int8")
    return exporter.export(model, path, input=config, options=options.only(exporter.uses), calibrate=ranges).path


def describe(line: Line) -> str:
    """A line as text: the ratio with its interval."""
    text = f"{line['what']}: {format_ratio(line['ratio'], 3)} ({format_interval(line['ci95'], 3)})"
    if "speedup" in line:
        text += f", {line['speedup']:.3f} times as fast at a MACs ratio of {line['macs_ratio']:.3f}"
    return text


def record(lines: Iterable[Line], out: Path, settings: Mapping[str, object], shown: Callable[[Line], str]) -> None:
    """Print each of `lines` as it is measured, and write all so far to `out`, so that an error loses no result."""
    facts, figures = environment.facts(), list[Line]()

    def write() -> None:
        state = {"load_average": machine.cpu_state()["load_average"], "torch_threads": torch.get_num_threads()}
        write_json(out, {"figures": figures, "machine": facts, **state, "settings": settings})

    write()  # fails now if the file cannot be written
    for line in lines:
        sys.stdout.write(f"{shown(line)}\n")
        sys.stdout.flush()
        figures.append(line)
        write()


PARTS: dict[str, Callable[[Options], Iterator[Line]]] = {"realised": run_pruned, "dense": run_dense, "int8": run_int8}


def positive(text: str) -> int:
    """A number from 1. Raises ValueError, which argparse reports."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, in this order."""
    default, summaries = Options(), [f"{name}: {str(part.__doc__).splitlines()[0]}" for name, part in PARTS.items()]
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description="\n  ".join([str(__doc__), *summaries]), formatter_class=form)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--batch", type=positive, default=default.batch, help="images per run")
    parser.add_argument("--runs", type=positive, default=default.runs, help="timed runs")
    parser.add_argument("--threads", type=positive, help="of one call of a runtime (default: the runtime's)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/speed.json"), help="file, or folder")
    args = parser.parse_args(arguments)
    names = args.parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}")
    options = Options(args.batch, args.runs, args.threads)
    out = args.out if args.out.suffix == ".json" else args.out / f"speed-{'-'.join(names)}.json"
    lines = (line for name in names for line in PARTS[name](options))
    record(lines, out, {"parts": names, **asdict(options)}, describe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
