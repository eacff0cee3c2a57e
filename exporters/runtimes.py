"""Open any artifact as a runner: an exported file, a run folder, or a model of timm.

A runner never changes device, provider or precision by itself: what cannot run as requested is an error.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitcompress.errors import ArtifactError
from vitcompress.exporters.formats import BY_SUFFIX, exporter_of
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.torch_runner import TIMM, TorchRunner
from vitcompress.io.files import file_sha256
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model
from vitcompress.models.create import create_model, is_known

__all__ = ["RUNNERS", "Runner", "RunnerOptions", "TorchRunner", "open_runner"]

# Suffix of a file -> its runner.
RUNNERS: dict[str, Callable[[Path, RunnerOptions], Runner]] = {s: e.runner for s, e in BY_SUFFIX.items()}


def open_runner(artifact: str | Path, options: RunnerOptions | None = None, **settings: Any) -> Runner:
    """The runner of a file, a run folder or `timm:NAME`; `settings` are fields of RunnerOptions.

    Raises:
        ArtifactError: a file that is missing, damaged, or of an unknown format.
        DeviceError: a device, provider or precision that this machine or this file does not have.
    """
    options = replace(options or RunnerOptions(), **settings)
    name, path = str(artifact), Path(artifact)
    if name.startswith(TIMM):
        return TorchRunner(create_model(name[len(TIMM) :], weights=options.weights), options, name=name)
    if path.is_dir():
        return TorchRunner(load_model(path), options, name=name, sha256=file_sha256(RunFolder(path).weights))
    if (path.suffix in RUNNERS or path.is_file()) and (exporter := exporter_of(path)):
        return exporter.runner(path, options)
    problem = "cannot be run" if path.exists() else "does not exist"
    hint = f"give a run folder, timm:NAME, or a file ({', '.join(RUNNERS)})"
    if is_known(name):
        hint = f"for timm's model of that name give {TIMM}{name}"
    raise ArtifactError(f"{path} {problem}", hint=hint)
