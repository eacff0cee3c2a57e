"""Open what is to be measured: artifacts by name, timm's own ONNX export, torch models in several settings."""

import contextlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from timm.utils.onnx import onnx_export
from torch import Tensor

from vitcompress.errors import InputError, VitcompressError, did_you_mean, first_line
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.runtimes import RUNNERS, Runner, RunnerOptions, open_runner
from vitcompress.exporters.tensorrt.runner import EngineRunner
from vitcompress.exporters.torch_runner import TIMM, TORCH_TYPES
from vitcompress.io import hardware
from vitcompress.models.create import create_model, input_config

TIMM_ONNX = "timm-onnx:"  # the file that timm itself exports
WORDS: dict[str, dict[str, Any]] = {
    **{name: {"precision": name} for name in TORCH_TYPES},
    "compile": {"compile": True},
    "graph": {"cuda_graph": True},
}
ALL = {
    "cuda": ("fp32", "tf32", "fp16", "bf16", "fp16+compile", "bf16+compile", "fp16+graph", "bf16+graph"),
    "cpu": ("fp32", "bf16"),
    "mps": ("fp32", "fp16"),
}


def open_all(
    artifacts: Sequence[str | Path], options: RunnerOptions, variants: str | None, stack: ExitStack
) -> list[Runner]:
    """A runner for every artifact, and for every variant of those that run in torch; `stack` closes them.

    Raises:
        ArtifactError, DeviceError: one of them cannot be run as asked.
        InputError: unknown variants, or a setting that a runtime does not have.
    """
    runners = []
    for artifact, changes, variant in _wanted(artifacts, variants, options.device):
        runner = _opened(artifact, replace(options, **changes))
        runner.name = f"{artifact} {variant}" if variant else runner.name
        stack.callback(runner.close)
        _check_done(runner, options)
        runners.append(runner)
    return runners


def _wanted(
    artifacts: Sequence[str | Path], variants: str | None, device: str | None
) -> list[tuple[str | Path, dict[str, Any], str | None]]:
    """What is opened, in order: an artifact, how its options change, and the variant that this is."""
    place = _beside_engines(artifacts, device)
    changes = {} if variants is None else settings(variants, place.get("device", device))
    if changes and not any(map(_in_torch, artifacts)):
        raise InputError(
            "--variants are settings of torch, and nothing that was given runs in torch",
            hint="leave --variants out, or add a run folder or timm:NAME",
        )
    plain: dict[str | None, dict[str, Any]] = {None: {}}
    return [
        (artifact, {**(place if _may_move(artifact) else {}), **change}, variant)
        for artifact in artifacts
        for variant, change in (changes if changes and _in_torch(artifact) else plain).items()
    ]


def _beside_engines(artifacts: Sequence[str | Path], device: str | None) -> dict[str, Any]:
    """Where no device is asked for, what is measured beside engines computes on their GPU, where there is one."""
    engines = device is None and any(RUNNERS.get(Path(artifact).suffix) is EngineRunner for artifact in artifacts)
    return {"device": "cuda"} if engines and hardware.count() else {}


def _may_move(artifact: str | Path) -> bool:
    """Whether an artifact can compute on more than one kind of device: what runs in torch or in ONNX Runtime."""
    return _in_torch(artifact) or str(artifact).startswith(TIMM_ONNX) or Path(artifact).suffix == ".onnx"


def named(artifacts: Sequence[str | Path], variants: str | None, device: str | None) -> list[tuple[str, str | None]]:
    """Artifact and variant of each runner that `open_all` gives."""
    return [(str(artifact), variant) for artifact, _, variant in _wanted(artifacts, variants, device)]


def synthetic_images(size: tuple[int, int, int], batch: int, seed: int) -> Tensor:
    """(batch, channels, height, width), standard normal: what normalised images look like to the arithmetic."""
    return torch.randn(batch, *size, generator=torch.Generator().manual_seed(seed))


def _in_torch(artifact: str | Path) -> bool:
    return str(artifact).startswith(TIMM) or Path(artifact).is_dir()


def _opened(artifact: str | Path, options: RunnerOptions) -> Runner:
    timms = str(artifact).startswith(TIMM_ONNX)
    return _timm_onnx(str(artifact), options) if timms else open_runner(artifact, options)


def settings(variants: str, device: str | None) -> dict[str, dict[str, Any]]:
    """`fp32,fp16+compile` as changes of RunnerOptions by name; `all`: what this kind of device has."""
    kind = str(device or "cpu").partition(":")[0]
    names: Sequence[str] = [name.strip() for name in variants.split(",") if name.strip()]
    if not names:
        raise InputError(f"no variant is named in {variants!r}", hint="as in --variants fp32,fp16+compile, or all")
    if names == ["all"]:
        all_of = (*ALL.get(kind, ()), *(("fp32+compile",) if kind == "cpu" else ()))
        names = [
            name
            for name in all_of
            if ("compile" not in name or _has_compiler(kind)) and (kind != "cuda" or _computes(str(device), name))
        ]
    found = {}
    for name in names:
        words = name.split("+")
        for word in words:
            if word not in WORDS:
                hint = f"join words from {', '.join(WORDS)} with +, as in fp32,fp16+compile, or say all"
                raise InputError(f"there is no variant {word!r}{did_you_mean(word, WORDS)}", hint=hint)
        found[name] = {key: value for word in words for key, value in WORDS[word].items()}
    return found


def _computes(device: str, name: str) -> bool:
    """Whether a GPU computes in the precision of a variant; where there is none to be asked it is taken to."""
    index = int(device.partition(":")[2] or 0)
    return index >= hardware.count() or hardware.is_ampere(index) or not {"tf32", "bf16"} & set(name.split("+"))


def _has_compiler(kind: str) -> bool:
    """Whether the compiler is here that torch.compile needs: c++; on CUDA, for Triton, $CC, gcc or clang."""
    if kind == "cpu":
        return shutil.which("c++") is not None
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def _timm_onnx(name: str, options: RunnerOptions) -> Runner:
    """timm's own export of its model in fp32, with the batch dynamic; the file is deleted once it is open."""
    if options.precision in HALF:
        raise InputError(
            f"{name} is exported by timm in fp32, {options.precision} was asked for",
            hint=f"leave --precision out: files run in their own; in torch {TIMM}NAME runs in {options.precision}",
        )
    model = create_model(name[len(TIMM_ONNX) :], weights=options.weights)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timm.onnx"
        export_by_timm(model, path)
        _label(path, precision="fp32")
        runner = open_runner(path, options)
    runner.name = name
    return runner


def export_by_timm(model: Any, path: Path) -> None:
    """What `timm.utils.onnx.onnx_export` writes with torch's current exporter, at timm's own settings."""
    size = input_config(model).size
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            onnx_export(model.eval(), str(path), input_size=size, use_dynamo=True)
    except Exception as error:  # whatever torch's exporter raises when timm calls it
        raise VitcompressError(f"timm could not export its model: {first_line(error)}") from error


def _label(path: Path, **known: str) -> None:
    """Have an ONNX file say of itself what is known of it, as our own files do."""
    model = onnx.load(str(path), load_external_data=False)
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in known.items()})
    onnx.save(model, str(path))


def _check_done(runner: Runner, options: RunnerOptions) -> None:
    """A setting that a runtime does not have is refused, never left out in silence."""
    known = runner.describe()
    if options.cuda_graph and not known.get("cuda_graph"):
        raise InputError(
            f"{runner.name} runs in {known['runtime']}, which is not offered with CUDA graphs",
            hint="leave --cuda-graph out",
        )
    if options.transfers and not known.get("transfers") and not str(known["device"]).startswith("cpu"):
        raise InputError(
            f"{runner.name} runs in {known['runtime']}, whose transfers are not timed", hint="leave --transfers out"
        )
