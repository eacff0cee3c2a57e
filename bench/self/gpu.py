"""The paper protocol on a GPU (else, labelled, on the CPU): dense and pruned in torch, ONNX Runtime and TensorRT."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import artifacts, suite
from vitcompress.bench.self.parts import Options, structured
from vitcompress.errors import VitcompressError, first_line
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx.libraries import RTX
from vitcompress.exporters.onnx.providers import CUDA, TENSORRT
from vitcompress.exporters.options import ExportOptions, Precision
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.exporters.tensorrt.flavours import capability
from vitcompress.methods.depth import depth_plan
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

RECIPES = (
    "deit_s_hetdpt",
    "deit_b_hetdpt",
    "deit_s_sero",
    "deit_b_sero",
    "up_deit_s",
    "deit_iso_2_6g",
    "hetdpt_plus_2_4g",
)
FILES: dict[str, tuple[Precision, ...]] = {
    "onnx": ("fp32", "fp16"),
    "trt": ("fp32", "tf32", "fp16", "bf16"),
    "trt-rtx": ("fp32", "fp16", "bf16"),
}  # for GPUs
PROVIDERS = (CUDA, TENSORRT, RTX)  # of ONNX Runtime


def run(options: Options) -> Iterator[dict[str, Any]]:
    """A line per structure, runtime and setting: its speed-up over the dense model in the same ones, with both rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, dense, model in _pairs(options):
        for what, make in _ways(name, dense, model, device, options):
            try:
                yield {"what": what, **_compared(make, options, device)}
            except Exception as error:  # noqa: BLE001 - whatever fails in one runtime is told, and the others go on
                kind = "" if isinstance(error, VitcompressError) else f"{type(error).__name__}: "
                yield {"what": what, "device": device, "text": f"not measured: {kind}{first_line(error)}"}


def _pairs(options: Options) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Dense and pruned models, random weights; with another architecture than the default that one, pruned a little."""
    if options.arch != Options.arch:
        dense, model = create_model(options.arch), create_model(options.arch)
        surgery.apply_plan(model, depth_plan(model, Plan(options.arch), (0,), (0,), attention_bypass="norm_identity"))
        yield f"{options.arch} without its first attention", dense, model
        return
    for name in RECIPES:
        yield name, *structured(name)


Make = Callable[[ExitStack], Sequence[Runner]]


def _ways(name: str, dense: nn.Module, model: nn.Module, device: str, options: Options) -> Iterator[tuple[str, Make]]:
    """Each runtime and setting in words, and what opens dense and pruned in it."""
    both = {"dense": dense, "pruned": model}
    how = RunnerOptions(device=device, threads=options.threads)
    for variant, changes in artifacts.settings(",".join(artifacts.ALL[device]), device).items():
        yield f"{name}, torch {variant}", partial(_in_torch, both, replace(how, **changes))
    batch = options.given[0]
    for form, precisions in FILES.items():
        for precision in precisions if device == "cuda" else precisions[:1]:
            wanted = _export_options(form, precision, batch)
            for provider in PROVIDERS if form == "onnx" and device == "cuda" else (None,):
                served = replace(how, provider=provider, batch=(batch, batch, batch) if batch else None)
                where = f" in {provider}" if provider else ""
                yield (
                    f"{name}, {form} {precision}{where}",
                    partial(_exported, both, form, wanted, served, options.folder),
                )


def _export_options(form: str, precision: Precision, batch: int | None) -> ExportOptions:
    """An engine is built for the GPU that is here, and tuned for the batch that is measured."""
    options = ExportOptions(precision=precision)
    if batch:
        options = replace(options, batch=(1, batch, batch))
    if form == "trt-rtx" and (here := capability()):
        options = replace(options, sm=(here,))
    return options.only(EXPORTERS[form].uses)


def _in_torch(both: Mapping[str, nn.Module], how: RunnerOptions, stack: ExitStack) -> list[Runner]:
    runners: list[Runner] = []
    for name, model in both.items():
        runner = TorchRunner(deepcopy(model), how, name=name)
        stack.callback(runner.close)
        runners.append(runner)
    return runners


def _exported(
    both: Mapping[str, nn.Module],
    form: str,
    wanted: ExportOptions,
    how: RunnerOptions,
    folder: Path,
    stack: ExitStack,
) -> list[Runner]:
    exporter = EXPORTERS[form]
    for reason in (exporter.unavailable(), exporter.cannot_run()):
        if reason:
            raise VitcompressError(reason)
    runners = []
    for name, model in both.items():
        path = folder / f"{name}{exporter.suffix}"
        exporter.export(model, path, input=input_config(model), options=wanted)
        runner = open_runner(path, how)
        stack.callback(runner.close)
        runner.name = name
        runners.append(runner)
    return runners


def _compared(make: Make, options: Options, device: str) -> dict[str, Any]:
    with ExitStack() as stack:
        batch, runs = options.given
        found = suite.compare(make(stack), suite.BenchOptions("paper", batch, None, runs)).as_data()
    ratio = found["ratio"]
    figures = {"ratio": ratio["median"], "ci95": list(ratio["ci95"]), "aim": [None, None], "device": device}
    return {
        **figures,
        "verdict": ratio["verdict"],
        "bench": {key: found[key] for key in ("rows", "machine", "warnings")},
    }
