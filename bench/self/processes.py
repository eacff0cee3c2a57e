"""Exports and slicing of large models, each in a process of its own: seconds, peak memory and bytes."""

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from vitcompress import recipes, surgery
from vitcompress.bench import machine
from vitcompress.bench.self.parts import Line, Options, first_channels, plan_recipe
from vitcompress.errors import first_line
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.options import ExportOptions
from vitcompress.families import family_of
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

EXPORTED, SLICED = "deit_b_hetdpt", "vit_giant_patch14_dinov2"
GPU_SETS: tuple[tuple[int, ...], ...] = ((80,), (86,), (89,), (120,), (80, 86, 89, 120))  # compute capabilities


def run_exports(options: Options) -> Iterator[Line]:
    """Folding and exporting DeiT-B in every format: seconds, peak memory and bytes, or why it is not possible here."""
    for form in EXPORTERS:
        yield _export_alone(form, EXPORTED if options.arch == Options.arch else options.arch, ExportOptions())


def run_rtx(options: Options) -> Iterator[Line]:
    """TensorRT for RTX, DeiT-S in fp16: seconds of the build and bytes of the engine for each set of GPUs."""
    for sm in GPU_SETS:
        yield _export_alone("trt-rtx", options.arch, ExportOptions(precision="fp16", sm=sm, batch=(1, 8, 64)))


def run_slicing(options: Options) -> Iterator[Line]:
    """Slicing a model of 1.1 billion parameters (DINOv2-g) to half of every width: seconds and peak memory."""
    yield run_alone(f"slice {SLICED}", slice_model, SLICED)


def _export_alone(form: str, name: str, options: ExportOptions) -> Line:
    gpus = f", {options.precision}, sm {', '.join(map(str, options.sm))}" if options.sm else ""
    what = f"{form} of {name}{gpus}"
    if reason := EXPORTERS[form].unavailable():
        return {"what": what, "text": f"not measured: {reason}"}
    return run_alone(what, export_model, name, form, options)


def run_alone(what: str, work: Callable[..., Line], *arguments: object) -> Line:
    """`what`, and the result of `work` in a process of its own, whose peak memory is then that of the work."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return {"what": what, **pool.submit(work, *arguments).result()}
        except Exception as error:  # noqa: BLE001 - also of a process that was killed
            return {"what": what, "text": f"failed: {first_line(error)}"}


def export_model(name: str, form: str, options: ExportOptions) -> Line:
    """Seconds and peak memory (GiB) of pruning, folding and exporting a recipe's model, or exporting a timm model."""
    exporter = EXPORTERS[form]
    exporter.check_options(options)
    plan = plan_recipe(name) if name in recipes.names() else None
    model = create_model(plan.arch, plan.arch_args) if plan else create_model(name)
    loaded, began = peak_gib(), time.perf_counter()
    if plan:
        surgery.apply_plan(model, plan)
        surgery.fold_linears(model, plan)
    folded = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{exporter.suffix}"
        size = exporter.export(model, path, input=input_config(model), options=options).bytes
        seconds = time.perf_counter() - folded
    fold_seconds, peak = folded - began if plan else None, peak_gib()
    fold = "" if fold_seconds is None else f"fold {fold_seconds:.1f} s, export "
    settings = {name: getattr(options, name) for name in options.changed()}
    text = f"{fold}{seconds:.1f} s, peak {peak:.2f} GiB, file {size / 1e6:.1f} MB"
    times = {"fold_seconds": fold_seconds, "export_seconds": seconds}
    return {"text": text, "settings": settings, **times, "loaded_gib": loaded, "peak_gib": peak, "file_bytes": size}


def slice_model(arch: str) -> Line:
    """Seconds and peak memory (GiB) of keeping the first half of every head and space of `arch` in this process."""
    model = create_model(arch)
    halves = {s.name: first_channels(s, s.size // s.heads // 2) for s in family_of(model).spaces(model)}
    loaded, before, began = peak_gib(), sum(p.numel() for p in model.parameters()), time.perf_counter()
    surgery.apply_plan(model, Plan(arch, kept=halves))
    seconds, peak = time.perf_counter() - began, peak_gib()
    after = sum(p.numel() for p in model.parameters())
    sizes = f"{before / 1e6:.0f} M to {after / 1e6:.0f} M parameters"
    text = f"{sizes} in {seconds:.1f} s, peak {peak:.2f} GiB ({loaded:.2f} before)"
    return {"text": text, "seconds": seconds, "loaded_gib": loaded, "peak_gib": peak, "params": [before, after]}


def peak_gib() -> float:
    """Peak memory of this process."""
    return (machine.peak_bytes() or 0) / 2**30
