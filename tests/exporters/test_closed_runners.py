"""Closing a runner frees its memory, even if its bound calls still exist."""

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts import build, contract, images, traces

from vitcompress.bench.artifacts import synthetic_images
from vitcompress.errors import VitcompressError
from vitcompress.exporters.calls import QueuedCall
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config

X = images("plain", dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("run"), build("plain", dtype=torch.float32)
    about: Any = {"input": input_config(model), "traces": traces("plain")}
    write_model(folder, model, contract("plain").plan)
    for exporter in (EXPORTERS["onnx"], EXPORTERS["openvino"]):
        if not exporter.unavailable():
            exporter.export(model, folder / f"model{exporter.suffix}", **about)
    return folder


def large_parts(runner: Any) -> list[Any]:
    """Weak references to the parts that use much memory."""
    match type(runner).__name__:
        case "OnnxRunner":
            parts = [runner.session]
        case "OpenVinoRunner":
            parts = [runner._compiled(1), runner._compiled(len(X))]
        case "TorchRunner":
            parts = [runner._call]
    return list(map(weakref.ref, parts))


@pytest.mark.parametrize("name", ["model.onnx", "model.xml", ""])
def test_closing_a_runner_frees_the_memory_of_its_calls(name: str, folder: Path) -> None:
    if not (path := folder / name).exists():
        pytest.skip("OpenVINO is not here")
    runner = open_runner(path)
    other = open_runner(path)
    calls, stays = [runner.bind(X), runner.bind(X[:1])], other.bind(X)
    parts = large_parts(runner)
    for call in calls:
        call()
    assert all(part() is not None for part in parts)
    runner.close()
    assert [part() for part in parts] == [None] * len(parts)
    for call in calls:
        with pytest.raises(VitcompressError, match="is closed"):
            call()
    runner.close()
    stays()
    other.close()


def test_releasing_a_call_on_a_gpu_frees_its_images() -> None:
    tensor = torch.zeros(3)
    call, seen = QueuedCall(tensor.add_, None), weakref.ref(tensor)
    del tensor
    assert seen() is not None
    call.release()
    assert seen() is None
    with pytest.raises(VitcompressError, match="is closed"):
        call.step()


def test_a_call_without_references_is_not_kept(folder: Path) -> None:
    """A sweep over batches binds many calls."""
    runner = open_runner(folder)
    call = runner.bind(synthetic_images((3, 8, 8), 2))
    seen = weakref.ref(call)
    del call
    assert seen() is None
    runner.close()


def test_a_call_on_a_gpu_returns_when_its_pass_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "stream", lambda own: nullcontext())
    QueuedCall(lambda: done.append("queued"), stream)()
    assert done == ["queued", "waited"]
