"""What a runner holds is free when it is closed, also where its bound calls are still there."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, contract, images

from vitcompress.bench import timing
from vitcompress.bench.artifacts import synthetic_images
from vitcompress.errors import VitcompressError
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.runner import Queued
from vitcompress.exporters.runtimes import open_runner
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import input_config

X = images("plain", dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, model = tmp_path_factory.mktemp("run"), build("plain", dtype=torch.float32)
    write_model(made, model, contract("plain").plan)
    for exporter in (EXPORTERS["onnx"], EXPORTERS["openvino"]):
        if not exporter.unavailable():
            exporter.export(model, made / f"model{exporter.suffix}", input=input_config(model))
    return made


def held(runner: Any) -> list[Any]:
    """What is large."""
    parts = {
        "OnnxRunner": ("_session.session",),
        "OpenVinoRunner": ("_compiled", "_request"),
        "TorchRunner": ("_call",),
    }
    found = []
    for place in parts[type(runner).__name__]:
        part = runner
        for name in place.split("."):
            part = getattr(part, name)
        found.append(weakref.ref(part))
    return found


@pytest.mark.parametrize("name", ["model.onnx", "model.xml", ""])
def test_nothing_is_held_by_calls_of_a_closed_runner(name: str, folder: Path) -> None:
    if not (path := folder / name).exists():
        pytest.skip("OpenVINO is not here")
    runner = open_runner(path)
    other = open_runner(path)
    calls, stays = [runner.bind(X), runner.bind(X[:1])], other.bind(X)
    target = timing.Target(runner.name, calls[0], runner.synchronize)
    parts = held(runner)
    for call in calls:
        call()
    assert all(part() is not None for part in parts)
    runner.close()
    assert [part() for part in parts] == [None] * len(parts)
    for call in (*calls, target.step):
        with pytest.raises(VitcompressError, match="is closed"):
            call()
    runner.close()
    stays()
    other.close()


def test_the_images_and_the_stream_of_a_call_on_a_gpu_are_given_back() -> None:
    given = torch.zeros(3)
    call, seen = Queued(given.add_, None, (given,)), weakref.ref(given)
    del given
    assert seen() is not None
    call.release()
    assert seen() is None
    with pytest.raises(VitcompressError, match="is closed"):
        call.step()


def test_a_call_that_nobody_has_any_more_is_not_kept(folder: Path) -> None:
    """A sweep over batches binds many."""
    runner = open_runner(folder)
    call = runner.bind(synthetic_images((3, 8, 8), 2, 0))
    seen = weakref.ref(call)
    del call
    assert seen() is None
    runner.close()
