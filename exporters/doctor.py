"""What this machine can export, run and measure, and what is missing for the rest."""

import os
import platform
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnx import TensorProto, helper

from vitcompress.errors import VitcompressError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.onnx_session import Session

LIBRARIES = ("torch", "timm", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
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
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
        "devices": _devices(),
        "export": {name: exporter.unavailable() for name, exporter in EXPORTERS.items()},
        "providers": {name: _provider_works(name) for name in onnxruntime.get_available_providers()},
        "optional": [_optional(package, *about) for package, about in OPTIONAL.items()],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, str | None]:
    """Device -> its name, None where this machine has none."""
    gpus = {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    mps = platform.processor() if torch.backends.mps.is_available() else None
    return {"cpu": platform.processor() or platform.machine(), **(gpus or {"cuda": None}), "mps": mps}


def works_on(device: str) -> bool:
    """Whether ONNX Runtime can work on `device` (`cpu`, `cuda`, `cuda:1`) here."""
    return _provider_works(None, device)


def _provider_works(name: str | None, device: str = "cpu") -> bool:
    """Whether a session really runs on the provider: that it is in the build says nothing about this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smallest.onnx"
        path.write_bytes(_smallest_model())
        try:
            Session(path, device=device, provider=name).close()
        except VitcompressError:
            return False
        return True


def _smallest_model() -> bytes:
    images, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("images", [1, 1, 1, 1]), ("logits", [1, 1]))
    )
    node = helper.make_node("Flatten", ["images"], ["logits"])
    graph = helper.make_graph([node], "smallest", [images], [logits])
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
