"""What can be told of an engine without running it: its bytes, its plan, and the ONNX file that it was built from.

Whether the engine itself answers as the model does is asked where it can be run, by `exporters.agreement`.
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitcompress.checkpoint import differing, file_sha256, read_json
from vitcompress.verdicts import Check, listed
from vitcompress.verify_onnx import onnx_checks, plan_check

KNOWN = {field.name for field in fields(Check)}


def engine_checks(path: Path, model: nn.Module | None, digest: str, images: Tensor) -> Iterator[Check]:
    """Checks of the engine `path` being `model`, or only of its file where that is None (the dense model's engine)."""
    sidecar, name = path.with_name(f"{path.name}.json"), path.name
    if not sidecar.is_file():
        yield Check(f"{name}.file", "failed", detail=f"{sidecar.name} is missing: nobody vouches for the engine")
        return
    yield listed(f"{name}.file", differing(sidecar), f"sha256 as in {sidecar.name}")
    if model is None:
        return
    known = dict(read_json(sidecar))
    yield from _source(path, model, digest, images, known)
    for check in known.get("build", {}).get("truth", ()):  # asked of the engine when it was built
        kept = {key: value for key, value in check.items() if key in KNOWN}
        yield Check(**{**kept, "name": f"{name}.{check['name'].removeprefix('engine.')}"})


def _source(path: Path, model: nn.Module, digest: str, images: Tensor, known: dict[str, Any]) -> Iterator[Check]:
    """The ONNX file that the engine was built from: the recorded one, and the model?"""
    source, name = path.with_name(f"{path.name}.onnx"), f"{path.name}.source"
    if not source.is_file():
        yield Check(name, "not_run", detail="the ONNX file that it was built from was not kept")
        return
    recorded = known.get("source", {}).get("sha256")
    wrong = [] if file_sha256(source) == recorded else [f"{source.name} is not the file that it was built from"]
    yield listed(name, wrong, f"built from {source.name}, sha256 {str(recorded)[:12]}")
    yield from onnx_checks(model, source, images, name=name)
    yield plan_check(source, digest, name)
