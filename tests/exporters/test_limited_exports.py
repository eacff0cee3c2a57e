"""Exports to places that cannot be written, to full disks, and stopped by Ctrl-C, without simulation.

Root drops its right to write everywhere with setpriv; full disks are small file systems in memory.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

HERE = Path(__file__).parents[1] / "helpers"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
ROOT = os.name == "posix" and os.geteuid() == 0
NOBODY = 65534
ENGINE = "m.rtx.engine"
# The rights that root drops: to ignore permissions, and to act as the owner of files of others.
DROP_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-fowner"] if ROOT and shutil.which("setpriv") else []

pytestmark = [
    pytest.mark.skipif(EXPORTERS["trt-rtx"].unavailable() is not None, reason="no TensorRT for RTX here"),
    pytest.mark.skipif(sys.platform != "linux", reason="about Linux's permissions and file systems"),
]


def saved(folder: Path, **changes: int) -> Path:
    args = {**ARGS, **changes}
    write_model(folder, create_model(ARCH, args), Plan(ARCH, args))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def closed(folder: Path) -> Path:
    """A folder in which nobody may write."""
    folder.mkdir()
    folder.chmod(0o555)
    return folder


def with_a_foreign_sidecar(folder: Path) -> Path:
    """A folder in which everybody may write, but replace only their own files, which the sidecar is not."""
    folder.mkdir()
    (folder / ENGINE).write_text("an older engine")
    (folder / f"{ENGINE}.json").write_text("{}")
    os.chown(folder / f"{ENGINE}.json", NOBODY, NOBODY)
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o1777)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A disk of 60 kB, None if this machine does not allow creating one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def results_by_place(small: Path | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Place -> result of the export to it; all exports run in one process without root's rights."""
    if ROOT and not DROP_RIGHTS:
        pytest.skip("root may write everywhere, and there is no setpriv to drop that right")
    world = tmp_path_factory.mktemp("world")
    places = {"closed": f"trt-rtx={closed(world / 'closed') / ENGINE}"}
    if ROOT:
        places["sidecar"] = f"trt-rtx={with_a_foreign_sidecar(world / 'shared') / ENGINE}"
    if small is not None:
        places |= {"full": f"trt-rtx={small / ENGINE}", "full, OpenVINO": f"openvino={small / 'm.xml'}"}
    folders = [world, *([] if small is None else [small])]
    run = saved(world / "run")
    before = list(map(tree, folders))
    words = [*DROP_RIGHTS, sys.executable, str(HERE / "limited_exports.py"), str(run), *places.values()]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    results = dict(zip(places, map(json.loads, done.stdout.splitlines()), strict=True))
    assert list(map(tree, folders)) == before, "something was written, or left incomplete"
    return results


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("closed", f"{ENGINE} cannot be written: Permission denied"),
        ("sidecar", f"{ENGINE}.json cannot be written: Operation not permitted"),
        ("full", "the disk is full"),
        ("full, OpenVINO", "the disk is full"),
    ],
)
def test_an_unwritable_place_is_named_and_unchanged(
    place: str, sentence: str, results_by_place: dict[str, dict[str, Any]]
) -> None:
    if place not in results_by_place:
        pytest.skip("this machine does not allow creating such a place")
    error = results_by_place[place]
    assert (error["code"], error["kind"], error["traceback"]) == (2, "OutputError", False)
    assert sentence in error["error"] and error["hint"]


def test_ctrl_c_during_a_build_leaves_nothing(tmp_path: Path) -> None:
    """Pressed as soon as the source of the build exists, during the build for six kinds of GPU."""
    run = saved(tmp_path / "run", embed_dim=128, depth=6)
    before = tree(run)
    words = ["export", str(run), "--format", "trt-rtx", "--precision", "fp16", "--sm", "75,80,86,89,120,121"]
    with subprocess.Popen(
        [sys.executable, "-m", "vitcompress", *words], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not list(run.glob(".*.part/*.onnx.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130 and "stopped" in error.splitlines() and "Traceback" not in error
    assert tree(run) == before
