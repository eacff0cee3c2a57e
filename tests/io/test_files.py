"""Atomic files and states: after a failure or a crash, the old content or all of the new content exists."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from contracts import build, contract

from vitcompress.errors import ArtifactError, OutputError
from vitcompress.io.checks import Check, Verification, update_verification
from vitcompress.io.files import lock_file, read_json, read_text, write_file, write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.io.training_state import load_state, save_state
from vitcompress.models.checkpoint import write_model


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A path below a regular file is not writable for any user, including root."""
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    for save in (
        lambda: write_json(below / "a.json", {}),
        lambda: save_tensors(below / "a.safetensors", {"a": torch.zeros(1)}),
        lambda: save_state(below, {"a": torch.zeros(1)}, {}),
        lambda: write_model(below, build("plain"), contract("plain").plan),
    ):
        with pytest.raises(OutputError, match="cannot be written: Not a directory") as caught:
            save()
        assert caught.value.hint
    assert load_state(below) is None


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
        write_json(tmp_path / "a.json", {})
        save_state(tmp_path / "state", {"a": torch.zeros(1)}, {})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert set(modes) == {"a.safetensors", "a.json", "state.safetensors"}
    assert set(modes.values()) == {0o640}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fails(beside: Path) -> None:
        beside.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="the disk is full"):
        write_file(path, fails)
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"new": float("nan")})
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def run_forked(work: Callable[[], int]) -> int:
    """Exit status of a child process that runs `work`; negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_limit_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The kernel limits the file size, like a full disk: old files stay, partial files are removed."""
    big = {"a": torch.zeros(100_000)}
    save_state(tmp_path / "state", {"a": torch.ones(3)}, {"was": "here"})

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        failures = 0
        for save in (
            lambda: save_tensors(tmp_path / "new.safetensors", big),
            lambda: write_text(tmp_path / "new.txt", "x" * 99_999),
            lambda: save_state(tmp_path / "state", big, {}),
        ):
            try:
                save()
            except OutputError as error:
                failures += "cannot be written: " in error.message
        return failures

    assert run_forked(limited) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    state = load_state(tmp_path / "state")
    assert state is not None
    assert state.data == {"was": "here"}
    assert len(list((tmp_path / "state").iterdir())) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_has_its_own_message(tmp_path: Path) -> None:
    def fill(beside: Path) -> None:
        with Path("/dev/full").open("w") as full:
            full.write("x")

    with pytest.raises(OutputError, match="the disk is full") as caught:
        write_file(tmp_path / "a", fill)
    assert "continues where it stopped" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
def test_json_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")


def test_json_is_plain_and_stable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "a": "é"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"b": [1, 2.5, None], "a": "é"}


@pytest.mark.skipif(sys.platform == "win32", reason="files are locked on POSIX")
def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    """The second one reports that it waits, and works after the first one."""
    waits, work = threading.Event(), list[str]()

    def second() -> None:
        with lock_file(tmp_path, waits.set):
            work.append("second")

    with ThreadPoolExecutor(1) as pool:
        with lock_file(tmp_path, lambda: work.append("the first one waits")):
            done = pool.submit(second)
            assert waits.wait(60)
            work.append("first")
        done.result()
    assert work == ["first", "second"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders are locked on POSIX")
def test_concurrent_updates_are_all_kept(tmp_path: Path) -> None:
    """For example while a folder is exported to several formats at once."""

    def record(name: str) -> None:
        for number in range(25):
            check = Check(f"{name}.{number}", "passed", 0.0, 0.0)
            update_verification(tmp_path, Verification((check,)), lambda other: False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, "abcd"))
    names = {check["name"] for check in read_json(tmp_path / "verify.json")["checks"]}
    assert names == {f"{name}.{number}" for name in "abcd" for number in range(25)}
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]


def test_the_last_state_is_loaded(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    other = tmp_path / "state-machine" / "notes.txt"  # of the user: `vc.finetune` takes any folder
    other.parent.mkdir()
    other.touch()
    for value in (10.0, 20.0, 21.0):
        save_state(tmp_path, {"a": torch.tensor(value)}, {"value": value})
        state = load_state(tmp_path)
        assert state is not None
        assert (float(state.tensors["a"]), state.data) == (value, {"value": value})
        assert len(list(tmp_path.iterdir())) == 2 and other.exists()


WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save_until(folder: Path, stop: int) -> int:
    """Save value 2 and kill the process before its file operation number `stop`. Returns their number."""
    steps = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal steps
        if event in WATCHED and str(folder) in "".join(map(str, args)):
            steps += 1
            if steps == stop:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # cannot be removed: call this in a child process
    save_state(folder, {"a": torch.full((50,), 2.0)}, {"value": 2})
    return steps


def test_a_save_that_is_killed_leaves_one_complete_state(tmp_path: Path) -> None:
    """Killed before the 1st, 2nd, ... file operation."""
    start = tmp_path / "start"
    save_state(start, {"a": torch.full((50,), 1.0)}, {"value": 1})
    whole = shutil.copytree(start, tmp_path / "whole")
    total = run_forked(lambda: save_until(whole, 0))
    assert 5 <= total < 255
    seen = []
    for stop in range(1, total + 1):
        folder = shutil.copytree(start, tmp_path / f"killed-{stop}")
        assert run_forked(lambda folder=folder, stop=stop: save_until(folder, stop)) == -signal.SIGKILL
        state = load_state(folder)
        assert state is not None
        assert len(list(folder.iterdir())) == 1, "loading removes leftovers"
        seen.append(state.data["value"])
        assert torch.equal(state.tensors["a"], torch.full((50,), float(seen[-1])))
    assert seen == sorted(seen), "the old state until one operation, the new one after it"
    assert set(seen) == {1, 2}


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_text(tmp_path / "a.toml") == "a = 1\n"


def test_more_than_ten_steps_are_in_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in (10, 2, 0, 11, 1):
        folder.step(number, "sero").mkdir(parents=True)
    assert [path.name for path in folder.steps()] == [f"step-{number}-sero" for number in (0, 1, 2, 10, 11)]
