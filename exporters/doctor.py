"""What this machine can export, run and measure, and what is missing for the rest."""

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib import util
from pathlib import Path
from typing import Any

import onnx
import psutil
import torch

from vitcompress.errors import InputError, VitcompressError, first_line
from vitcompress.exporters.onnx.libraries import error_text, find_conflict
from vitcompress.exporters.onnx.providers import PROVIDERS
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.runtimes import EXPORTERS, RunnerOptions, find_exporter
from vitcompress.io import hardware
from vitcompress.io.plugins import plugin_names

LIBRARIES = ("torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
NO_FORMAT = "-"
NO_CLOCKS = "times only, without clocks, power and energy; pip install 'vitcompress[cuda]'"
# Format -> the distributions whose versions matter.
PACKAGES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript"),
    "openvino": ("openvino",),
    "trt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "trt-rtx": ("tensorrt-rtx",),
}
# Optional package -> how to install it, and its purpose.
OPTIONAL = {
    "sklearn": ("pip install 'vitcompress[demo]'", "the built-in digits"),
    "matplotlib": ("pip install 'vitcompress[plots]'", "plots of reports and diagnostics"),
    "tensorboard": ("pip install tensorboard", "training curves"),
}
Record = dict[str, str | None]
SMALLEST_MODEL = """
<ir_version: 10, opset_import: ["": 20]>
smallest (float[1, 1, 1, 1] images) => (float[1, 1] logits) <float[1, 1] weight = {2.0}> {
    flat = Flatten (images)
    logits = Gemm (flat, weight)
}
"""


def examine() -> dict[str, Any]:
    """Processor, versions, devices, formats, providers and optional packages as plain data. Nothing is changed."""
    return {
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "cpu": hardware.cpu_name(),
            "instruction_sets": hardware.instruction_sets(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "precisions": {name: hardware.slow_reason(name) for name in hardware.PRECISIONS},
        "warnings": [conflict] if (conflict := find_conflict()) else [],
        "versions": hardware.package_versions(LIBRARIES),
        "devices": _devices(),
        "targets": list(targets()),
        "optional": [
            {"package": name, "present": util.find_spec(name) is not None, "for": purpose, "install": install}
            for name, (install, purpose) in OPTIONAL.items()
        ],
    }


def _devices() -> dict[str, str | None]:
    """Device -> its name, None if this machine has none."""
    gpus = {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(hardware.count_gpus())}
    mps = platform.processor() if torch.backends.mps.is_available() else None
    return {"cpu": hardware.cpu_name(), **(gpus or {"cuda": None}), "mps": mps}


def targets() -> Iterator[Record]:
    """What can be exported, run and measured here: one record per format, ONNX Runtime provider and device of torch.

    `export`, `run`, `measure`: None if it works, else `reason; remedy`; `export` is `-` for targets without a format.
    """
    for name in dict.fromkeys((*EXPORTERS, *plugin_names("exporters"))):
        on_gpu = name.startswith("trt")
        try:
            exporter = find_exporter(name)
            export, run = exporter.unavailable(), exporter.cannot_run()
        except InputError as error:  # of another package
            export = run = error.sentence()
        yield _target(name, export, run, PACKAGES.get(name, ()), on_gpu)
    for name, provider in PROVIDERS.items():
        if provider.device == "mps" and not provider.present:
            continue
        problem, on_gpu = onnx_problem(provider=name), provider.device == "cuda"
        if on_gpu and not hardware.count_gpus():
            problem = f"torch finds no NVIDIA GPU here{hardware.cuda_reason()}; with one: {provider.remedy}"
        yield _target(f"onnxruntime {name}", NO_FORMAT, problem, provider.packages, on_gpu)
    for device, present in _devices().items():
        reason = hardware.cuda_reason() or ("" if torch.version.cuda else "; built without CUDA, see pytorch.org")
        missing = f"torch finds no NVIDIA GPU here{reason}" if device == "cuda" else f"torch finds no {device} here"
        if present or device == "cuda" or sys.platform == "darwin":
            problem = torch_problem(device) if present else missing
            yield _target(f"torch {device}", NO_FORMAT, problem, ("torch",), "cuda" in device)


def _target(name: str, export: str | None, run: str | None, packages: Iterable[str], gpu: bool) -> Record:
    installed = [f"{package} {version}" for package, version in hardware.package_versions(packages).items()]
    clocks = None if not gpu or util.find_spec("pynvml") else NO_CLOCKS
    return {"target": name, "export": export, "run": run, "measure": run or clocks, "version": ", ".join(installed)}


def torch_problem(device: str) -> str | None:
    """Why torch cannot compute on a device that it finds, or None. Tested: kernels for an old GPU may be missing."""
    try:
        float(torch.ones(1, device=device).add(1))
    except Exception as error:  # noqa: BLE001 - a driver or a missing kernel can raise anything
        return f"torch finds it and cannot compute on it: {first_line(error)}"
    return None


def onnx_problem(device: str | None = None, *, provider: str | None = None) -> str | None:
    """Why ONNX Runtime cannot run a model with a single matrix product here, and the remedy; None if it can.

    device: such as `cpu`, `cuda`, `cuda:1`. provider: full name of an execution provider.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smallest.onnx"
        onnx.save(onnx.parser.parse_model(SMALLEST_MODEL), str(path))
        try:
            with closing(OnnxRunner(path, RunnerOptions(device, provider))) as runner:
                runner(torch.ones(1, 1, 1, 1))
        except VitcompressError as error:
            return error.sentence().replace(str(path), "a model").removeprefix(f"{provider} is not available: ")
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions have no other common base class
            return f"it opens a model and cannot run it: {error_text(error)}"
    return None
