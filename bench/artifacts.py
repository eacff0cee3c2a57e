"""Open the artifacts of a measurement: files, run folders, models in several settings, and timm's ONNX export."""

import contextlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
import torch
from timm.utils.onnx import onnx_export
from torch import Tensor, nn

from vitcompress.errors import InputError, VitcompressError, did_you_mean, first_line
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.runtimes import RUNNERS, Runner, RunnerOptions, open_runner
from vitcompress.exporters.tensorrt.runner import EngineRunner
from vitcompress.exporters.torch_runner import TIMM, TORCH_TYPES, TorchRunner
from vitcompress.families import copy_model
from vitcompress.io import hardware
from vitcompress.io.files import user_path
from vitcompress.models.create import create_model, input_config
from vitcompress.models.source import create_named, resolve_model
from vitcompress.models.weights import NOT_FILES
from vitcompress.recipe.load import load_recipe
from vitcompress.training.data import class_count

TIMM_ONNX = "timm-onnx:"  # prefix of the ONNX file that timm itself exports

Artifact = nn.Module | str | Path  # a model in memory, a name, or a path
Settings = dict[str, Any]  # fields of RunnerOptions that a variant changes
WORDS: dict[str, Settings] = {
    **{name: {"precision": name} for name in TORCH_TYPES},
    "compile": {"compile": True},
    "graph": {"cuda_graph": True},
}
ALL = {
    "cuda": ("fp32", "tf32", "fp16", "bf16", "fp16+compile", "bf16+compile", "fp16+graph", "bf16+graph"),
    "cpu": ("fp32", "bf16", "fp32+compile"),
    "mps": ("fp32", "fp16"),
}


def open_artifacts(
    artifacts: Sequence[Artifact], options: RunnerOptions, variants: str | None, stack: ExitStack
) -> dict[Runner, tuple[Artifact, str | None]]:
    """Open one runner per artifact, and one per variant of those that run in torch; `stack` closes them.

    Returns runner -> (artifact, variant or None). Raises ArtifactError or DeviceError if one of them cannot run with
    these options, and InputError for unknown variants, or a setting that a runtime does not have.
    """
    # Artifacts that are measured together with an engine run on its GPU.
    engines = options.device is None and any(RUNNERS.get(_suffix(artifact)) is EngineRunner for artifact in artifacts)
    device = "cuda" if engines and hardware.count_gpus() else options.device
    settings = {} if variants is None else parse_variants(variants, device)
    if settings and not any(map(_runs_in_torch, artifacts)):
        problem = "--variants are settings of torch, and none of these artifacts runs in torch"
        raise InputError(problem, hint="leave --variants out, or add a run folder or timm:NAME")
    runners = dict[Runner, tuple[Artifact, str | None]]()
    for number, artifact in enumerate(artifacts):
        in_torch, from_timm = _runs_in_torch(artifact), str(artifact).startswith(TIMM_ONNX)
        any_device = in_torch or from_timm or _suffix(artifact) == ".onnx"
        for variant in settings if in_torch and settings else (None,):
            own = replace(options, device=device if any_device else options.device, **settings.get(variant or "", {}))
            with as_file(artifact, own) as file:
                runner = open_artifact(file, own, number)
            name = str(artifact) if from_timm else runner.name
            runner.name = f"{name} {variant}" if variant else name
            stack.callback(runner.close)
            _check_settings(runner, options)
            runners[runner] = artifact, variant
    return runners


def open_artifact(artifact: Artifact, options: RunnerOptions, number: int = 0) -> Runner:
    """A runner; a model in memory is copied, as a runner moves it to its device and precision. number: in its name."""
    if isinstance(artifact, nn.Module):
        return TorchRunner(copy_model(artifact), options, name=f"{type(artifact).__name__} {number}")
    return open_runner(artifact, options)


def _suffix(artifact: Artifact) -> str:
    """The suffix of a file; empty for a model in memory."""
    return "" if isinstance(artifact, nn.Module) else Path(artifact).suffix


def _runs_in_torch(artifact: Artifact) -> bool:
    return isinstance(artifact, nn.Module) or str(artifact).startswith(TIMM) or user_path(artifact).is_dir()


def synthetic_images(size: tuple[int, int, int], batch: int) -> Tensor:
    """Standard normal values, the distribution of normalized images; shape (batch, channels, height, width)."""
    return torch.randn(batch, *size, generator=torch.Generator().manual_seed(0))


def parse_variants(variants: str, device: str | None) -> dict[str, Settings]:
    """The settings of each variant in `fp32,fp16+compile`; `all` means those that this kind of device supports.

    Raises InputError for no variant, an unknown word, or two settings of the same kind in one variant.
    """
    kind = str(device or "cpu").partition(":")[0]
    names: Sequence[str] = [name.strip() for name in variants.split(",") if name.strip()]
    if not names:
        raise InputError(f"no variant is named in {variants!r}", hint="as in --variants fp32,fp16+compile, or all")
    if names == ["all"]:
        on_gpu = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # for Triton
        compiler = shutil.which("c++") if kind == "cpu" else on_gpu
        names = [name for name in ALL.get(kind, ()) if compiler or "compile" not in name]
        names = [name for name in names if kind != "cuda" or _supports(str(device), name)]
    words = {name: name.split("+") for name in names}
    for word in chain.from_iterable(words.values()):
        if word not in WORDS:
            hint = f"join words from {', '.join(WORDS)} with +, as in fp32,fp16+compile, or use all"
            raise InputError(f"there is no variant {word!r}{did_you_mean(word, WORDS)}", hint=hint)
    settings = {name: dict(chain.from_iterable(WORDS[word].items() for word in words[name])) for name in names}
    for name, own in settings.items():
        if len(own) != len(words[name]):  # each word sets one thing
            raise InputError(f"the variant {name!r} sets something twice", hint="name one precision in each variant")
    return settings


def _supports(device: str, name: str) -> bool:
    """Whether a GPU computes in the precision of a variant; True if there is no such GPU to check."""
    index = int(device.partition(":")[2] or 0)
    return index >= hardware.count_gpus() or hardware.is_ampere(index) or not {"tf32", "bf16"} & set(name.split("+"))


@contextlib.contextmanager
def as_file(artifact: Artifact, options: RunnerOptions) -> Iterator[Artifact]:
    """`artifact`, or of `timm-onnx:NAME` the file that timm writes in fp32 with torch's exporter, for this block."""
    if not (name := str(artifact)).startswith(TIMM_ONNX):
        yield artifact
        return
    if options.precision in HALF:
        hint = f"leave --precision out: files run in their own; in torch {TIMM}NAME runs in {options.precision}"
        raise InputError(f"timm exports {name} in fp32, the requested precision is {options.precision}", hint=hint)
    model = _dense_model(name[len(TIMM_ONNX) :])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timm.onnx"
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
                onnx_export(model.eval(), str(path), input_size=input_config(model).size, use_dynamo=True)
        except Exception as error:  # any exception of torch's exporter
            raise VitcompressError(f"timm could not export its model: {first_line(error)}") from error
        proto = onnx.load(str(path), load_external_data=False)
        onnx.helper.set_model_props(proto, {"precision": json.dumps("fp32")})  # as in the metadata of our own files
        onnx.save(proto, str(path))
        yield path


def _dense_model(name: str) -> nn.Module:
    """timm's model `NAME` or `NAME?img_size=48`, or the dense model of a recipe, `FILE.toml`, with its weights."""
    if not name.endswith(".toml"):
        return create_named(name)
    recipe = load_recipe(name)
    table = recipe.model
    weights = "random" if table.weights in NOT_FILES else table.weights
    classes = table.classes or (class_count(recipe.data) if weights in NOT_FILES else None)
    resolved = resolve_model(table.name, table.args, weights, classes=classes)
    return create_model(resolved.arch, resolved.arch_args, resolved.weights, new_head=table.new_head)


def _check_settings(runner: Runner, options: RunnerOptions) -> None:
    """Raise InputError for a setting that a runtime does not have, instead of ignoring it."""
    runtime = runner.describe()
    problems = {"cuda_graph": "does not support CUDA graphs here", "transfers": "cannot time transfers here"}
    if str(runtime["device"]).startswith("cpu"):
        del problems["transfers"]  # nothing is copied, which a warning states
    for setting, problem in problems.items():
        if getattr(options, setting) and not runtime.get(setting):
            hint = f"leave --{setting.replace('_', '-')} out"
            raise InputError(f"{runner.name} runs in {runtime['runtime']}, which {problem}", hint=hint)
