"""Open any artifact as a runner: an ONNX file, an OpenVINO model, an engine, a run folder, a timm name.

A runner never changes device, provider or precision by itself: what cannot run as asked is an error.
To add a runtime: a file beside this one with a `Runner`, and a line in `RUNNERS`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError
from vitcompress.exporters.onnx.runner import OnnxRunner
from vitcompress.exporters.openvino.runner import OpenVinoRunner
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.tensorrt.runner import EngineRunner
from vitcompress.exporters.torch_runner import TIMM, TorchRunner
from vitcompress.io.files import file_sha256
from vitcompress.models.checkpoint import WEIGHTS, load_model
from vitcompress.models.create import create_model, is_known

__all__ = ["RUNNERS", "Runner", "RunnerOptions", "TorchRunner", "open_runner"]

# Suffix -> what runs the file.
RUNNERS: dict[str, Callable[[Path, RunnerOptions], Runner]] = {
    ".onnx": OnnxRunner,
    ".xml": OpenVinoRunner,
    **dict.fromkeys((".engine", ".trt", ".plan"), EngineRunner),
}


def open_runner(artifact: str | Path, options: RunnerOptions | None = None, **settings: Any) -> Runner:
    """The runner of a file, a run folder or `timm:NAME`; `settings` are fields of RunnerOptions.

    Raises:
        ArtifactError: a file that is missing, damaged, or of a kind that is not run here.
        DeviceError: a device, provider or precision that this machine or this file does not have.
    """
    options = replace(options or RunnerOptions(), **settings)
    name, path = str(artifact), Path(artifact)
    if name.startswith(TIMM):
        return TorchRunner(create_model(name[len(TIMM) :], weights=options.weights), options, name=name)
    if path.is_dir():
        weights = path / WEIGHTS
        return TorchRunner(load_model(path), options, name=name, sha256=file_sha256(weights))
    if path.suffix in RUNNERS:
        return RUNNERS[path.suffix](path, options)
    what = "cannot be run" if path.exists() else "does not exist"
    hint = f"give a run folder, timm:NAME, or a file ({', '.join(RUNNERS)})"
    if is_known(name):
        hint = f"for timm's model of that name give {TIMM}{name}"
    raise ArtifactError(f"{path} {what}", hint=hint)
