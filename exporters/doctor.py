"""What this machine can export, run and measure, and what is missing for the rest."""

import os
import platform
import sys
import tempfile
from contextlib import closing
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper

from vitcompress.errors import VitcompressError, first_line
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx.libraries import said_by
from vitcompress.exporters.onnx.providers import PROVIDERS
from vitcompress.exporters.onnx.session import Session
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.io import hardware
from vitcompress.io.hardware import versions

LIBRARIES = ("torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
NO_FORMAT = "-"
NO_CLOCKS = "times yes; clocks, power and energy not: pip install 'vitcompress[cuda]'"
# Distributions whose versions matter, by target.
PACKAGES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript"),
    "openvino": ("openvino",),
    "trt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "trt-rtx": ("tensorrt-rtx",),
}
# Package that must be importable, what brings it, what it is for.
OPTIONAL = {
    "sklearn": ("pip install 'vitcompress[demo]'", "the built-in digits"),
    "matplotlib": ("pip install 'vitcompress[plots]'", "plots of reports and diagnostics"),
    "tensorboard": ("pip install tensorboard", "training curves"),
}


def examine() -> dict[str, Any]:
    """Versions, devices, formats, providers and optional packages as plain data. Nothing is changed."""
    return {
        "machine": {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "versions": versions(LIBRARIES),
        "devices": _devices(),
        "export": {name: exporter.unavailable() for name, exporter in EXPORTERS.items()},
        "providers": {n: provider_problem(n) is None for n, found in PROVIDERS.items() if found.present},
        "targets": targets(),
        "optional": [_optional(package, *about) for package, about in OPTIONAL.items()],
    }


def _devices() -> dict[str, str | None]:
    """Device -> its name, None where this machine has none."""
    found = {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(hardware.count())}
    mps = platform.processor() if torch.backends.mps.is_available() else None
    return {"cpu": platform.processor() or platform.machine(), **(found or {"cuda": None}), "mps": mps}


def targets() -> list[dict[str, Any]]:
    """What can be exported, run and measured here: one record per format, ONNX Runtime provider and device of torch.

    `export`, `run`, `measure`: None where it works, else why not and what to do; a target without a format of its own
    has `-` for export.
    """
    formats = [
        _target(name, exporter.unavailable(), exporter.cannot_run(), PACKAGES.get(name, ()), gpu=name.startswith("trt"))
        for name, exporter in EXPORTERS.items()
    ]
    served = [
        _target(f"onnxruntime {n}", NO_FORMAT, provider_problem(n), found.packages, gpu=found.device == "cuda")
        for n, found in PROVIDERS.items()
        if found.device != "mps" or found.present
    ]
    devices = [
        _target(
            f"torch {name}",
            NO_FORMAT,
            torch_problem(name) if what else _no_device(name),
            ("torch",),
            gpu="cuda" in name,
        )
        for name, what in _devices().items()
        if what or name != "mps" or sys.platform == "darwin"
    ]
    return [*formats, *served, *devices]


def _no_device(name: str) -> str:
    if name == "cuda":
        lacks_cuda = "" if torch.version.cuda else ": it is built without CUDA (see pytorch.org)"
        return f"torch finds no such device here{hardware.because() or lacks_cuda}"
    return "torch finds no such device here"


def torch_problem(name: str) -> str | None:
    """Why torch cannot compute on a device that it finds. It is tried: kernels may be missing for a GPU of its age."""
    try:
        float(torch.ones(1, device=name).add(1))
    except Exception as error:  # noqa: BLE001 - whatever a driver or a missing kernel leads to
        return f"torch finds it and cannot compute on it: {first_line(error)}"
    return None


def _target(name: str, export: str | None, run: str | None, packages: tuple[str, ...], *, gpu: bool) -> dict[str, Any]:
    installed = [f"{package} {version}" for package, version in versions(packages).items()]
    clocks = None if not gpu or util.find_spec("pynvml") else NO_CLOCKS
    return {"target": name, "export": export, "run": run, "measure": run or clocks, "version": ", ".join(installed)}


def device_problem(device: str) -> str | None:
    """Why ONNX Runtime cannot work on `device` (`cpu`, `cuda`, `cuda:1`) here, and what to do; None where it can."""
    return _session_problem(RunnerOptions(device))


def provider_problem(name: str) -> str | None:
    """Why a session cannot run on a provider, and what to do. It is tried: what is installed may not work."""
    return _session_problem(RunnerOptions(provider=name))


def _session_problem(options: RunnerOptions) -> str | None:
    """Why a session with a single matrix product cannot be opened and run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smallest.onnx"
        path.write_bytes(_smallest_model())
        try:
            with closing(Session(path, options)) as session:
                session.run(np.ones((1, 1, 1, 1), np.float32))
        except VitcompressError as error:
            said = f"{error.message}: {error.hint}" if error.hint else error.message
            return said.replace(str(path), "a model").removeprefix(f"{options.provider} was asked for: ")
        except Exception as error:  # noqa: BLE001 - a pass may fail where a session opens; no base but this one
            return f"it opens a model and cannot run it: {said_by(error)}"
        return None


def _smallest_model() -> bytes:
    images, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("images", [1, 1, 1, 1]), ("logits", [1, 1]))
    )
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [1, 1], [2.0])
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(nodes, "smallest", [images], [logits], [weight])
    made: bytes = helper.make_model(
        graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]
    ).SerializeToString()
    return made


def _optional(package: str, install: str, purpose: str) -> dict[str, Any]:
    return {
        "package": package,
        "present": util.find_spec(package) is not None,
        "for": purpose,
        "install": install,
    }
