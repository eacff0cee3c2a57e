"""Exports and slicing of large models, each in a process of its own: seconds, peak memory and bytes."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vitcompress import recipes, surgery
from vitcompress.bench import machine
from vitcompress.bench.self.parts import Line, Options, plan_recipe
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.options import ExportOptions
from vitcompress.families import family_of
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

EXPORTED, SLICED = "deit_b_hetdpt", "vit_giant_patch14_dinov2"
GPU_SETS: tuple[tuple[int, ...], ...] = ((80,), (86,), (89,), (120,), (80, 86, 89, 120))  # compute capabilities


def run_exports(options: Options) -> Iterator[Line]:
    """Folding and exporting DeiT-B in every format: seconds, peak memory and bytes, or why it is not possible here."""
    for name, exporter in EXPORTERS.items():
        if reason := exporter.unavailable():
            yield {"what": f"{name} of {EXPORTED}", "text": f"not measured: {reason}"}
        else:
            yield run_alone("export", EXPORTED if options.arch == Options.arch else options.arch, name, {})


def run_rtx(options: Options) -> Iterator[Line]:
    """TensorRT for RTX, DeiT-S in fp16: seconds of the build and bytes of the engine for each set of GPUs."""
    if reason := EXPORTERS["trt-rtx"].unavailable():
        yield {"what": "trt-rtx", "text": f"not measured: {reason}"}
        return
    for sm in GPU_SETS:
        yield run_alone("export", options.arch, "trt-rtx", {"precision": "fp16", "sm": sm, "batch": (1, 8, 64)})


def run_slicing(options: Options) -> Iterator[Line]:
    """Slicing a model of 1.1 billion parameters (DINOv2-g) to half of every width: seconds and peak memory."""
    yield run_alone("slice", SLICED)


def run_alone(work: str, *arguments: object) -> Line:
    """The result of a function of WORK in a process of its own, whose peak memory is then that of the work."""
    command = [sys.executable, "-m", "vitcompress.bench.self.processes", work, json.dumps(arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"what": " ".join(map(str, (work, *arguments))), "text": f"failed: {reason}"}
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def export_model(name: str, form: str, settings: Line) -> Line:
    """Seconds and peak memory (GiB) of pruning, folding and exporting a recipe's model, or of exporting a timm model.

    settings: fields of ExportOptions.
    """
    model, plan = plan_recipe(name) if name in recipes.names() else (create_model(name), None)
    loaded, began = peak_gib(), time.perf_counter()
    if plan:
        surgery.apply_plan(model, plan)
        surgery.fold_linears(model, plan)
    folded = time.perf_counter()
    exporter = EXPORTERS[form]
    fields: Line = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    options = ExportOptions(**fields)
    exporter.check_options(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{exporter.suffix}"
        size = exporter.export(model, path, input=input_config(model), options=options).bytes
        seconds = time.perf_counter() - folded
    fold_seconds, peak = folded - began if plan else None, peak_gib()
    text = f"{seconds:.1f} s, peak {peak:.2f} GiB, file {size / 1e6:.1f} MB"
    what = ", ".join([f"{form} of {name}", *([str(settings["precision"])] if "precision" in settings else [])])
    what += f", sm {', '.join(map(str, settings['sm']))}" if "sm" in settings else ""
    return {
        "what": what,
        "text": text if fold_seconds is None else f"fold {fold_seconds:.1f} s, export {text}",
        "settings": settings,
        "fold_seconds": fold_seconds,
        "export_seconds": seconds,
        "loaded_gib": loaded,
        "peak_gib": peak,
        "file_bytes": size,
    }


def slice_model(arch: str) -> Line:
    """Seconds and peak memory (GiB) of keeping the first half of every head and space of `arch` in this process."""
    model = create_model(arch)
    loaded, kept = peak_gib(), {}
    for space in family_of(model).spaces(model):
        head = space.size // space.heads
        kept[space.name] = tuple(c for c in range(space.size) if c % head < head // 2)
    before = sum(parameter.numel() for parameter in model.parameters())
    began = time.perf_counter()
    surgery.apply_plan(model, Plan(arch, kept=kept))
    seconds, peak = time.perf_counter() - began, peak_gib()
    after = sum(parameter.numel() for parameter in model.parameters())
    sizes = f"{before / 1e6:.0f} M to {after / 1e6:.0f} M parameters"
    text = f"{sizes} in {seconds:.1f} s, peak {peak:.2f} GiB ({loaded:.2f} before)"
    figures = {"seconds": seconds, "loaded_gib": loaded, "peak_gib": peak, "params": [before, after]}
    return {"what": f"slice {arch}", "text": text, **figures}


def peak_gib() -> float:
    """Peak memory of this process."""
    return (machine.peak_bytes() or 0) / 2**30


WORK: dict[str, Callable[..., Line]] = {"export": export_model, "slice": slice_model}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(WORK[sys.argv[1]](*json.loads(sys.argv[2]))) + "\n")
