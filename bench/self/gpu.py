"""Pruned and dense models on a GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vitcompress import surgery
from vitcompress.bench import artifacts, suite
from vitcompress.bench.self.parts import Line, Options, prune_recipe
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
}  # on GPUs; on the CPU only the first precision
PROVIDERS = (CUDA, TENSORRT, RTX)  # of ONNX Runtime
Open = Callable[[ExitStack], Sequence[Runner]]  # a dense and a pruned runner


def run(options: Options) -> Iterator[Line]:
    """The paper protocol on a GPU (without one on the CPU): dense and pruned in torch, ONNX Runtime and TensorRT."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, dense, model in _pairs(options):
        for what, open_both in _settings(name, {"dense": dense, "pruned": model}, device, options):
            try:
                yield {"what": what, **_compare(open_both, options), "device": device}
            except Exception as error:  # noqa: BLE001 - a failure in one runtime is reported, and the others continue
                kind = "" if isinstance(error, VitcompressError) else f"{type(error).__name__}: "
                yield {"what": what, "device": device, "text": f"not measured: {kind}{first_line(error)}"}


def _pairs(options: Options) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Dense and pruned models with random weights; of an explicit architecture only one, without an attention."""
    if options.arch != Options.arch:
        dense, model = create_model(options.arch), create_model(options.arch)
        surgery.apply_plan(model, depth_plan(model, Plan(options.arch), (0,), (0,), attention_bypass="norm_identity"))
        yield f"{options.arch} without its first attention", dense, model
        return
    for name in RECIPES:
        yield name, *prune_recipe(name)


def _settings(name: str, both: Mapping[str, nn.Module], device: str, options: Options) -> Iterator[tuple[str, Open]]:
    """Every runtime and setting as text, with a function that opens both models in it."""
    runner_options = RunnerOptions(device=device, threads=options.threads)
    for variant, changes in artifacts.parse_variants(",".join(artifacts.ALL[device]), device).items():
        yield f"{name}, torch {variant}", partial(_open_in_torch, both, replace(runner_options, **changes))
    batch = options.explicit[0]
    for form, precisions in FILES.items():
        for precision in precisions if device == "cuda" else precisions[:1]:
            export_options = ExportOptions(precision=precision)
            if batch:  # engines are tuned for the batch size that is measured
                export_options = replace(export_options, batch=(1, batch, batch))
            if form == "trt-rtx" and (sm := capability()):
                export_options = replace(export_options, sm=(sm,))
            export_options = export_options.only(EXPORTERS[form].uses)
            for provider in PROVIDERS if form == "onnx" and device == "cuda" else (None,):
                own = replace(runner_options, provider=provider, batch=(batch, batch, batch) if batch else None)
                what = f"{name}, {form} {precision}{f' in {provider}' if provider else ''}"
                yield what, partial(_open_exported, both, form, export_options, own, options.folder)


def _open_in_torch(both: Mapping[str, nn.Module], options: RunnerOptions, stack: ExitStack) -> list[Runner]:
    runners: list[Runner] = []
    for name, model in both.items():
        runners.append(TorchRunner(deepcopy(model), options, name=name))
        stack.callback(runners[-1].close)
    return runners


def _open_exported(
    both: Mapping[str, nn.Module],
    form: str,
    export_options: ExportOptions,
    options: RunnerOptions,
    folder: Path,
    stack: ExitStack,
) -> list[Runner]:
    exporter = EXPORTERS[form]
    if reason := exporter.unavailable() or exporter.cannot_run():
        raise VitcompressError(reason)
    runners = []
    for name, model in both.items():
        path = folder / f"{name}{exporter.suffix}"
        exporter.export(model, path, input=input_config(model), options=export_options)
        runners.append(open_runner(path, options))
        runners[-1].name = name
        stack.callback(runners[-1].close)
    return runners


def _compare(open_both: Open, options: Options) -> Line:
    with ExitStack() as stack:
        batch, runs = options.explicit
        bench = suite.compare(open_both(stack), suite.BenchOptions("paper", batch, None, runs)).to_dict()
    ratio = bench["ratio"]
    figures = {"ratio": ratio["median"], "ci95": ratio["ci95"], "aim": [None, None], "verdict": ratio["verdict"]}
    return {**figures, "bench": {"rows": bench["rows"], "machine": bench["machine"], "warnings": bench["warnings"]}}
