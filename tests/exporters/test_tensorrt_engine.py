"""Engines of TensorRT for RTX, built with the real library: their bytes, their sidecars, and rejected options."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
import torch
from contracts import build, spaces_of, traces
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError, OutputError, VitcompressError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.exporters.tensorrt import export, runner
from vitcompress.exporters.tensorrt.build import Built
from vitcompress.exporters.tensorrt.build import build as build_engine
from vitcompress.exporters.tensorrt.export import RTX_DEFAULT, layers_path, source_path
from vitcompress.exporters.tensorrt.flavours import RTX, create_log
from vitcompress.io.files import file_sha256, find_changed_files
from vitcompress.io.progress import Progress
from vitcompress.io.validation import options_of
from vitcompress.models.create import input_config
from vitcompress.plan import Plan

tensorrt_rtx = pytest.importorskip("tensorrt_rtx", reason="no such library for this platform")
TENSORRT_RTX = EXPORTERS["trt-rtx"]
SMALL: dict[str, Any] = {"sm": (89,), "batch": (1, 2, 4)}


class Listener(Progress):
    def __init__(self) -> None:
        self.updates: list[tuple[str, int, int]] = []

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.updates.append((label, done, total))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("plain", dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 engine for one capability; tests that change it work on a copy."""
    path = tmp_path_factory.mktemp("engine") / "model.rtx.engine"
    TENSORRT_RTX.export(
        model,
        path,
        input=input_config(model),
        classes=("ant", "bee", "cat", "dog", "eel"),
        plan_digest="ab12",
        options=ExportOptions(precision="fp16", **SMALL),
    )
    return path


def built(model: nn.Module, path: Path, kept: dict[Any, Any] | None = None, **options: Any) -> dict[str, Any]:
    """kept: traces of this model."""
    kept = traces("plain") if kept is None else kept
    wanted = ExportOptions(**{**SMALL, **options})
    about: Any = {"input": input_config(model), "traces": kept}
    return TENSORRT_RTX.export(model, path, options=wanted, **about).to_dict()


def test_an_engine_for_other_gpus_is_built_and_not_opened(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (export, runner):
        monkeypatch.setattr(module, "capability", lambda index=0: 86)  # a GPU that a test machine need not have
    path = tmp_path / "model.rtx.engine"
    assert built(model, path)["build"]["sm"] == [89]
    assert path.is_file() and "truth" not in json.loads(sidecar_path(path).read_text())["build"]


def test_the_sidecar_describes_the_engine(engine: Path) -> None:
    sidecar = json.loads(sidecar_path(engine).read_text())
    assert sidecar["files"] == {engine.name: file_sha256(engine)} and sidecar["bytes"] == engine.stat().st_size
    assert (sidecar["format"], sidecar["precision"], sidecar["verified"]) == ("trt-rtx", "fp16", False)
    assert sidecar["source"] == {"name": source_path(engine).name, "sha256": file_sha256(source_path(engine))}
    build = sidecar["build"]
    assert (build["sm"], build["batch"], build["tf32"]) == ([89], [1, 2, 4], False)
    assert build["runtime_version"] == tensorrt_rtx.__version__
    assert build["warnings"] == []
    known = {key: json.loads(text) for key, text in sidecar["metadata"].items()}
    assert sidecar["opset"] == 20 and "TensorRT" in sidecar["opset_reason"] == known["opset_reason"]
    assert known["plan_sha256"] == "ab12" and known["classes"][0] == "ant" and known["size"] == [3, 8, 8]
    assert find_changed_files(sidecar_path(source_path(engine))) == {}
    assert json.loads(sidecar_path(source_path(engine)).read_text())["build"] == {"batch": [1, 2, 4]}
    assert not layers_path(engine).exists() or torch.cuda.is_available()


def rebuilt(engine: Path, *targets: int, **options: Any) -> Built:
    """Only the build, from the ONNX file beside `engine`."""
    wanted = ExportOptions(**{"precision": "fp16", **SMALL, **options, "sm": targets or (89,)})
    return build_engine(RTX, source_path(engine), (3, 8, 8), wanted, Progress())


def test_two_builds_have_the_same_bytes(engine: Path) -> None:
    data = engine.read_bytes()
    assert rebuilt(engine).data == data
    assert len({rebuilt(engine, 80).data, rebuilt(engine, batch=(1, 2, 8)).data, data}) == 3


def test_the_default_targets_are_recorded_and_tf32_is_off_unless_requested(model: nn.Module, tmp_path: Path) -> None:
    plain, path = built(model, tmp_path / "m.engine", precision="fp32", sm=()), tmp_path / "m.engine"
    assert tuple(plain["build"]["sm"]) == RTX_DEFAULT and plain["build"]["tf32"] is False
    without_tf32 = rebuilt(path, precision="fp32").data
    tf32 = built(model, path, precision="tf32", keep_onnx=False)
    assert path.read_bytes() != without_tf32
    assert (tf32["precision"], tf32["build"]["tf32"]) == ("tf32", True)
    assert tf32["source"]["sha256"] == plain["source"]["sha256"]  # the same fp32 file
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "m.engine",
        "m.engine.json",
    ]  # without the older ONNX file


def test_the_build_shows_its_progress(engine: Path) -> None:
    listener = Listener()
    build_engine(RTX, source_path(engine), (3, 8, 8), ExportOptions(**SMALL), listener)
    dones = [done for _, done, _ in listener.updates]
    label, done, total = listener.updates[-1]
    assert "TensorRT for RTX" in label and done == total > 1 and dones == sorted(dones) and len(set(dones)) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sm": (90,)}, "data center"),
        ({"sm": (100,)}, "data center"),
        ({"sm": (61,)}, "does not support compute capability 61"),
        ({"sm": (75, 89)}, "fp16 only, not fp32"),
        ({"batch": (8, 4, 16)}, "not in ascending order"),
        ({"batch": (1, 16, 8)}, "not in ascending order"),
        ({"timing_cache": Path("kernels.bin")}, "timing_cache is kernels.bin"),
        ({"optimization_level": 2}, "optimization_level is 2"),
        ({"hardware_compatible": "ampere+"}, "has no such option"),
        ({"version_compatible": True}, "version_compatible is True"),
        ({"precision": "int3"}, "int3"),
        ({"opset": 17}, "17"),
    ],
)
def test_unsupported_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TENSORRT_RTX.check(ExportOptions(**options))


def test_one_number_replaces_a_list_of_equal_ones() -> None:
    options = options_of(ExportOptions, {"batch": 4, "sm": 89}, "an export")
    assert (options.batch, options.sm) == ((4, 4, 4), (89,))
    assert options_of(ExportOptions, {"batch": [1, 2, 4], "sm": [80, 89]}, "an export").batch == (1, 2, 4)
    for wrong in (True, 0, 1.5, "4"):
        with pytest.raises(InputError, match=r"(?s)batch.*sm"):
            options_of(ExportOptions, {"batch": wrong, "sm": wrong}, "an export")


def test_an_unsupported_target_is_rejected_with_a_remedy(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        built(model, tmp_path / "m.engine", sm=(89, 90))
    assert "--format trt" in str(caught.value.hint) and "75, 80, 86, 89" in caught.value.message
    with pytest.raises(InputError) as caught:
        built(model, tmp_path / "m.engine", sm=(70,))
    assert "--sm 75, 80, 86, 89, 120" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_reports_what_is_missing() -> None:
    reason, why_not = EXPORTERS["trt"].unavailable(), EXPORTERS["trt"].cannot_run()
    if torch.cuda.is_available() and shutil.which("trtexec"):
        return
    assert reason and ("vitcompress[trt]" in reason or "GPU" in reason)
    assert why_not
    assert torch.cuda.is_available() or "there is no CUDA GPU here" in str(TENSORRT_RTX.cannot_run())
    assert TENSORRT_RTX.unavailable() is None


def test_an_unsupported_graph_is_reported_with_its_node(model: nn.Module, tmp_path: Path) -> None:
    """Attention as one node whose values are wider than its keys."""
    wide = pruned_keys(model)
    with pytest.raises(VitcompressError, match=r"does not support the node .*attention.*\(Attention\)") as caught:
        built(wide, tmp_path / "m.engine", {}, opset=23, precision="fp16")
    assert "--opset 20" in str(caught.value.hint) and "same" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def pruned_keys(model: nn.Module) -> nn.Module:
    """The model with half of the channels of q and k, and all channels of v."""
    copy = build("plain", dtype=torch.float32)
    kept = {name: tuple(range(0, s.size, 2)) for name, s in spaces_of(copy).items() if s.kind == "qk"}
    surgery.apply_plan(copy, Plan("vit_tiny_patch16_224", {}, kept=kept))
    return copy


def test_a_failed_build_keeps_no_reference_to_its_builder(tmp_path: Path) -> None:
    """Otherwise the garbage collector could free it under a lock of the library: a deadlock."""
    (tmp_path / "m.onnx").write_bytes(b"not ONNX")
    with pytest.raises(VitcompressError) as caught:
        build_engine(RTX, tmp_path / "m.onnx", (3, 8, 8), ExportOptions(**SMALL), Progress())
    values = [value for frame, _ in walk_tb(caught.value.__traceback__) for value in frame.f_locals.values()]
    assert values and not any(type(value).__module__.startswith("tensorrt") for value in values)


def test_a_file_that_is_not_onnx(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not ONNX")
    with pytest.raises(VitcompressError, match="ONNX"):
        build_engine(RTX, tmp_path / "m.onnx", (3, 8, 8), ExportOptions(**SMALL), Progress())


@pytest.mark.parametrize("place", ["m.engine", "m.engine.json", "m.engine.onnx"])
def test_an_unwritable_place_is_an_error_before_the_build(place: str, model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / place).mkdir()
    began = Listener()
    with pytest.raises(OutputError, match=place):
        TENSORRT_RTX.export(
            model, tmp_path / "m.engine", input=input_config(model), options=ExportOptions(**SMALL), progress=began
        )
    assert [path.name for path in tmp_path.iterdir()] == [place] and began.updates == []


def test_a_full_disk_leaves_the_previous_files(
    model: nn.Module, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in engine.parent.iterdir():
        shutil.copy(path, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        if list(tmp_path.glob(f".{engine.name}.*/.{engine.name}.*")):  # the engine is being written
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="disk is full"):
        built(model, tmp_path / engine.name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_engine_that_takes_bytes(model: nn.Module, tmp_path: Path) -> None:
    engine = built(model, tmp_path / "m.engine", precision="fp16", uint8=True)
    assert engine["metadata"]["input"] == '"uint8"' and engine["metadata"]["layout"] == '"NHWC"'
    assert engine["build"]["warnings"] == []


STOPPED = """
import signal
import sys
from pathlib import Path
from threading import Event
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.tensorrt.build import build
from vitcompress.exporters.tensorrt.flavours import RTX
from vitcompress.io.progress import Progress
from vitcompress.io.validation import options_of

updates = Event()

def interrupted(number, frame):
    updates.set()
    raise KeyboardInterrupt

class Beginning(Progress):
    def update(self, label, done, total, text=""):
        print(done, total, flush=True)
        updates.wait()  # otherwise the signal may come after the end of the build on a busy machine

signal.signal(signal.SIGINT, interrupted)
options = ExportOptions(precision="fp16", sm=(75, 80, 86, 89, 120, 121))
build(RTX, Path(sys.argv[1]), (3, 8, 8), options, Beginning())
"""


def test_ctrl_c_cancels_the_build(engine: Path) -> None:
    words = [sys.executable, "-c", STOPPED, str(source_path(engine))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout is not None
        first = p.stdout.readline()
        p.send_signal(signal.SIGINT)
        out, errors = p.communicate(timeout=120)
    assert b"KeyboardInterrupt" in errors and p.returncode not in (0, -signal.SIGABRT, -signal.SIGSEGV), errors
    done, total = map(int, (first + out).split()[-2:])
    assert done < total


def test_an_error_has_the_first_and_the_last_message() -> None:
    log = create_log(tensorrt_rtx)
    assert log.first_and_last_error() == log.last_error() == "no reason reported"
    log.log(tensorrt_rtx.ILogger.ERROR, "out of memory\nat a line of the library")
    assert log.first_and_last_error() == log.last_error() == "out of memory"
    for message in ("skipped a tactic", "no implementation for a node"):
        log.log(tensorrt_rtx.ILogger.ERROR, message)
    assert log.first_and_last_error() == "out of memory; no implementation for a node"
