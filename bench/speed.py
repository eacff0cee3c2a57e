"""What vitcompress itself costs, and what pruning really gains: `python -m vitcompress.bench.speed`.

    gates      time of a training step of a gated model over that of the plain timm model
    harness    throughput that the suite reports over that of a bare loop on the same ONNX Runtime session
    realised   speed-up of the HetDPT models on ONNX Runtime (CPU) over the ratio of their MACs
    export     fold and export of DeiT-B in a process of its own: seconds and peak memory

Everything that is compared takes turns. Weights are random, as no time depends on them.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitcompress import cost, models, surgery
from vitcompress.bench import machine, suite, timing
from vitcompress.checkpoint import write_json
from vitcompress.exporters.onnx_graph import export
from vitcompress.exporters.onnx_session import Session
from vitcompress.exporters.runtimes import RunnerOptions
from vitcompress.families import family_of
from vitcompress.gates import GatedModel, channel_gates
from vitcompress.models import input_config
from vitcompress.plan import Plan

# Published layers: HetDPT, tables 1 and 8 (attention, activation), with the bypass of the released code.
PUBLISHED = {
    "deit_s_hetdpt": ("deit_small_distilled_patch16_224", (1, 7, 10, 11), (7, 8, 10, 11)),
    "deit_b_hetdpt": ("deit_base_distilled_patch16_224", (0, 3, 7, 8, 11), (2, 7, 8, 10, 11)),
}
AIMS = {
    "channel gates": (0.0, 1.05),
    "score search": (0.0, 1.12),
    "harness": (0.99, 1.01),
    "realised": (0.97, math.inf),
}
BYPASS: dict[str, Any] = {"attention_bypass": "norm_identity", "both_pruned_output_act": "gelu"}


def compressed(name: str) -> tuple[nn.Module, nn.Module]:
    """Dense and folded model of a published configuration, with random weights."""
    arch, attentions, activations = PUBLISHED[name]
    dense, model = (models.create(arch) for _ in range(2))
    plan = surgery.depth_plan(model, Plan(arch), attentions, activations, **BYPASS)
    surgery.apply(model, plan)
    surgery.fold(model, plan)
    return dense, model


# ---------------------------------------------------------------------------------------------------------------- gates


def gates(arch: str, batch: int, runs: int) -> list[dict[str, Any]]:
    """Training steps of the plain model, of one with every channel gated, and of one in the score search, in turns."""
    plain, widths, searched = (models.create(arch).train() for _ in range(3))
    family = family_of(widths)
    values = {space.name: torch.ones(space.size) for space in family.spaces(widths) if space.kind != "residual"}
    sites = [site for site in family.sites(searched) if site.kind in ("attention", "activation")]
    search = GatedModel(searched, family, sites, **BYPASS)
    images = suite.synthetic_images(input_config(plain).size, batch, 0)
    with channel_gates(widths, family, values):
        named = {"plain": plain, "channel gates": widths, "score search": search}
        targets = [timing.Target(name, _training_step(model, images)) for name, model in named.items()]
        samples = timing.measure(targets, timing.Protocol("steps", batch, warmup=2, runs=runs))
    return [_line(s.name, s, samples[0]) for s in samples[1:]]


def _training_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    targets = torch.zeros(len(images), dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        answers = model(images)
        logits = torch.stack(answers).mean(0) if isinstance(answers, tuple) else answers  # two heads in training
        loss: Any = nn.functional.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()

    return step


# ------------------------------------------------------------------------------------------------- harness and speed-up


def harness(path: Path, batch: int, rounds: int, threads: int | None) -> dict[str, Any]:
    """The harness's throughput over that of a bare loop on the same session.

    Many short blocks: what disturbs a machine comes in bursts, which then spoil few of them, and medians forget those.
    """
    session = Session(path, threads=threads)
    images = suite.synthetic_images(session.input_size, batch, 0).numpy()
    bare = partial(session.session.run, None, {"images": images})
    protocol = timing.Protocol("block", batch, warmup=1, runs=5)
    ours, plain = timing.Samples("harness", batch, "wall"), timing.Samples("bare loop", batch, "wall")
    target = timing.Target("harness", session.bind(images))
    for _ in range(rounds):
        (part,) = timing.measure([target], protocol)
        ours.blocks_ms.append([1000 * batch / part.images_per_second])
        bare()
        began = time.perf_counter()
        for _ in range(protocol.runs):
            bare()
        plain.blocks_ms.append([1000 * (time.perf_counter() - began) / protocol.runs])
    return _line("harness", plain, ours)


def realised(name: str, folder: Path, batch: int, runs: int, threads: int | None) -> dict[str, Any]:
    """Measured speed-up over the ratio of multiply-accumulates, attention products counted."""
    dense, model = compressed(name)
    size = input_config(dense).size
    macs = [cost.measure(m, size).macs for m in (dense, model)]
    paths = [folder / f"{name}-{kind}.onnx" for kind in ("dense", "model")]
    for path, module in zip(paths, (dense, model), strict=True):
        export(module, path, input=input_config(dense))
    options = suite.BenchOptions("paper", batch, 3, runs, RunnerOptions(threads=threads))
    found = suite.run(paths, options)
    ratio, of_macs = found.ratios[0], macs[0] / macs[1]
    low, high = (end / of_macs for end in ratio["ci95"])
    rates = [row["images_per_second"] for row in found.rows]
    figures = {
        "macs_ratio": of_macs,
        "speedup": ratio["median"],
        "speedup_ci95": ratio["ci95"],
        "images_per_second": rates,
        "samples_ms": {Path(row["artifact"]).name: row["samples_ms"] for row in found.rows},
    }
    line = {
        "what": f"realised {name}",
        "ratio": ratio["median"] / of_macs,
        "ci95": [low, high],
        "aim": AIMS["realised"][0],
    }
    return {**line, **figures, "batch": batch, "threads": threads, "warnings": list(found.warnings)}


def _line(name: str, a: timing.Samples, b: timing.Samples) -> dict[str, Any]:
    """Time of `a` over time of `b`, what was aimed at, and every sample behind it."""
    ratio, (low, high) = timing.ratio(a, b), AIMS[name]
    found = {"what": name, "ratio": ratio.median, "ci95": list(ratio.ci95), "aim": [low, high], "batch": a.batch}
    return {**found, "verdict": ratio.verdict, "samples_ms": {s.name: s.blocks_ms for s in (a, b)}}


# --------------------------------------------------------------------------------------------------------------- export


def export_alone(name: str = "deit_b_hetdpt") -> dict[str, Any]:
    """Fold and export in a fresh process, so that its peak memory is its own."""
    done = subprocess.run(
        [sys.executable, "-m", "vitcompress.bench.speed", "--export-here", name],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def export_here(name: str) -> dict[str, Any]:
    """Seconds and peak memory (GiB) of folding and exporting a published configuration in this process."""
    arch, attentions, activations = PUBLISHED[name]
    model = models.create(arch)
    plan = surgery.depth_plan(model, Plan(arch), attentions, activations, **BYPASS)
    before = _peak_gib()
    began = time.perf_counter()
    surgery.apply(model, plan)
    surgery.fold(model, plan)
    folded = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        size = export(model, Path(folder) / "model.onnx", input=input_config(model)).bytes
        exported = time.perf_counter()
    times = {"fold_seconds": folded - began, "export_seconds": exported - folded}
    return {
        "what": f"fold and export {name}",
        **times,
        "loaded_gib": before,
        "peak_gib": _peak_gib(),
        "file_bytes": size,
    }


def _peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


# ----------------------------------------------------------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per figure and write all of them to a JSON file."""
    options = _options(arguments)
    if options.export_here:
        _say(json.dumps(export_here(options.export_here)))
        return 0
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            for line in _part(part, Path(folder), options):
                _say(_text(line))
                lines.append(line)
    about = {
        "machine": machine.facts(),
        "load_average": machine.load_average(),
        "torch_threads": torch.get_num_threads(),
    }
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "export_here")}
    write_json(options.out, {"figures": lines, **about, "settings": settings})
    _say(f"written to {options.out}")
    return 0


def _part(part: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    if part == "gates":
        return gates(options.arch, options.batch, options.runs)
    if part == "harness":
        path = folder / "harness.onnx"
        model = models.create("deit_tiny_patch16_224")
        export(model, path, input=input_config(model))
        return [harness(path, 1, 5 * options.runs, options.threads)]
    if part == "realised":
        return [realised(name, folder, options.batch, options.runs, options.threads) for name in PUBLISHED]
    return [export_alone()]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parts = ("gates", "harness", "realised", "export")
    parser = argparse.ArgumentParser(prog="python -m vitcompress.bench.speed", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=parts, help=f"which of {', '.join(parts)} (default: all)")
    parser.add_argument("--arch", default="deit_small_patch16_224", help="model of the gates")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, help="threads of ONNX Runtime")
    parser.add_argument("--out", type=Path, default=Path("bench/results/speed.json"))
    parser.add_argument("--export-here", metavar="NAME", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if unknown := set(found.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    return found


def _text(line: dict[str, Any]) -> str:
    if "peak_gib" in line:
        seconds = f"{line['fold_seconds']:.1f} s + {line['export_seconds']:.1f} s"
        return f"{line['what']}: {seconds}, peak {line['peak_gib']:.2f} GiB"
    low, high = line["ci95"]
    text = f"{line['what']}: {line['ratio']:.3f} (95 % interval {low:.3f} to {high:.3f})"
    if "speedup" in line:
        text += f", {line['speedup']:.3f} times as fast at a MACs ratio of {line['macs_ratio']:.3f}"
    return text


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
