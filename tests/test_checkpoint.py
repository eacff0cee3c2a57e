"""Saved == loaded, every kind of damage told in a sentence, and a crash at any moment leaves a whole state."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contracts import assert_moved, build, contract, every_variant, images, kept_channels, logits, sites_of, without_act
from torch import nn

from vitcompress import checkpoint
from vitcompress.checkpoint import (
    PLAN,
    WEIGHTS,
    load,
    load_state,
    load_tensors,
    read_json,
    save_model,
    save_state,
    save_tensors,
    write_json,
    write_text,
)
from vitcompress.errors import ArtifactError, OutputError, PlanError, WeightsError
from vitcompress.plan import Plan
from vitcompress.surgery import apply, fold

# -------------------------------------------------------------------------------------------------------------- models


def compressed(variant: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Plan]:
    """Three blocks that lost something of every kind."""
    model = build(variant, depth=3, dtype=dtype)
    _, second, last = (site.name for site in sites_of(model, "block"))
    linear = {n: s for a in sites_of(model, "activation") if a.block == second for n, s in without_act(a).items()}
    kept = kept_channels(model, {"qk", "v", "mlp", "residual", "sr"})
    plan = replace(
        contract(variant, depth=3).plan,
        removed={f"{second}.attn": "norm_identity", **linear, f"{last}.attn": "drop"},
        appended={second: "gelu"},
        kept={n: k for n, k in kept.items() if not n.startswith((last, f"{second}.qk", f"{second}.v", f"{second}.sr"))},
    )
    return model, fold(apply(model, plan), plan).plan


@every_variant
def test_saved_equals_loaded(variant: str, tmp_path: Path) -> None:
    model, plan = compressed(variant)
    x = images(variant)
    save_model(tmp_path / "run", model, plan)
    again = load(tmp_path / "run")
    assert again.plan == plan
    assert not any(module.training for module in again.modules())
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(again, x), logits(model, x))
    assert_moved(logits(again, x), logits(build(variant, depth=3), x))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [WEIGHTS, PLAN]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_come_back_in_the_type_they_were_saved_in(dtype: torch.dtype, tmp_path: Path) -> None:
    model, plan = compressed("layer_scale", dtype)
    save_model(tmp_path, model, plan)
    assert {p.dtype for p in load(tmp_path).parameters()} == {dtype}


def saved(folder: Path) -> Path:
    save_model(folder, *compressed("plain"))
    return folder


@pytest.mark.parametrize("missing", [PLAN, WEIGHTS])
def test_a_folder_without_a_part_is_not_a_finished_run(missing: str, tmp_path: Path) -> None:
    (saved(tmp_path) / missing).unlink()
    with pytest.raises(ArtifactError, match=f"not a finished run folder: {missing} is missing"):
        load(tmp_path)


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    plan = Plan.from_json((saved(tmp_path) / PLAN).read_text())
    write_text(tmp_path / PLAN, replace(plan, appended={}).to_json())
    with pytest.raises(PlanError, match=r"is not the plan that model\.safetensors was saved with"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1"])
def test_a_damaged_plan(content: bytes, tmp_path: Path) -> None:
    (saved(tmp_path) / PLAN).write_bytes(content)
    with pytest.raises(PlanError):
        load(tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    plan = Plan.from_json((saved(tmp_path) / PLAN).read_text())
    save_tensors(tmp_path / WEIGHTS, {"head.weight": torch.zeros(3)}, {"plan": plan.digest})
    with pytest.raises(WeightsError, match=r"does not fit its plan: Missing key"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("length", [0, 4, 8, 40, -1])
def test_truncated_safetensors(length: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        load_tensors(path)


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("content", [Evil(), {"state_dict": {"a": torch.zeros(2)}, "args": Evil()}])
def test_pickled_code_is_never_run(content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "weights.pth")
    with pytest.raises(WeightsError, match="would run code from the file"):
        load_tensors(Path("weights.pth"))
    assert not Path("owned").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_pytorch_files_are_told_and_never_a_traceback(zipped: bool, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.pth", tmp_path / "damaged.pth"
    torch.save({"a": torch.arange(10.0)}, whole, _use_new_zipfile_serialization=zipped)
    data, told = whole.read_bytes(), 0
    step = max(1, len(data) // 100)
    for position in range(0, len(data), step):
        flipped = bytes([data[position] ^ 0x5A])
        for damaged in (data[:position], data[:position] + flipped + data[position + 1 :]):
            path.write_bytes(damaged)
            try:
                load_tensors(path)
            except WeightsError:
                told += 1
    assert told > 50
    for text in (b"", b"hello world", b"PK\x03\x04", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(text)
        with pytest.raises(WeightsError, match="not a whole PyTorch checkpoint"):
            load_tensors(path)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s, "epoch": 3}])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_of_training_scripts_are_unwrapped(wrap, prefix: str, tmp_path: Path) -> None:
    torch.save(wrap({f"{prefix}a.weight": torch.ones(2)}), tmp_path / "w.pth")
    assert load_tensors(tmp_path / "w.pth").keys() == {"a.weight"}


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"a": 1}, {"model": {"a": "b"}}, torch.zeros(2)])
def test_files_that_are_no_state_dict(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match="not a state dict of tensors"):
        load_tensors(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["missing.safetensors", "missing.pth", "."])
def test_missing_weights(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights at"):
        load_tensors(tmp_path / name)


def test_tensors_that_share_storage_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    save_tensors(tmp_path / "t.safetensors", {"a": base, "b": base[2:], "c": base.reshape(2, 3).T})
    found = load_tensors(tmp_path / "t.safetensors")
    assert torch.equal(found["b"], base[2:])
    assert torch.equal(found["c"], base.reshape(2, 3).T)


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A path below a regular file: no user may write there, not even root."""
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "run"
    for save in (
        lambda: write_json(below / "a.json", {}),
        lambda: save_tensors(below / "a.safetensors", {"a": torch.zeros(1)}),
        lambda: save_state(below, 1, {"a": torch.zeros(1)}, {}),
        lambda: save_model(below, *compressed("plain")),
    ):
        with pytest.raises(OutputError, match="cannot be written: Not a directory") as caught:
            save()
        assert caught.value.hint
    assert load_state(below) is None


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_files_have_the_permissions_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
        write_json(tmp_path / "a.json", {})
        save_state(tmp_path / "state", 1, {"a": torch.zeros(1)}, {})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert set(modes) == {"a.safetensors", "a.json", "tensors.safetensors", "data.json"}
    assert set(modes.values()) == {0o640}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fails(beside: Path) -> None:
        beside.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="the disk is full"):
        checkpoint.write(path, fails)
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"new": float("nan")})
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def forked(work: Callable[[], int]) -> int:
    """Exit status of a child process that does `work`: negative when a signal ended it."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_limit_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """The kernel refuses to write on, as a full disk does: what was there before stays, and no half file."""
    big = {"a": torch.zeros(100_000)}
    save_state(tmp_path / "state", 1, {"a": torch.ones(3)}, {"was": "here"})

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        refused = 0
        for save in (
            lambda: save_tensors(tmp_path / "new.safetensors", big),
            lambda: write_text(tmp_path / "new.txt", "x" * 99_999),
            lambda: save_state(tmp_path / "state", 2, big, {}),
        ):
            try:
                save()
            except OutputError as error:
                refused += "cannot be written: " in error.message
        return refused

    assert forked(limited) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    state = load_state(tmp_path / "state")
    assert state is not None
    assert (state.epoch, state.data) == (1, {"was": "here"})
    assert len(list((tmp_path / "state").iterdir())) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_has_its_own_sentence(tmp_path: Path) -> None:
    def fill(beside: Path) -> None:
        with Path("/dev/full").open("w") as full:
            full.write("x")

    with pytest.raises(OutputError, match="the disk is full") as caught:
        checkpoint.write(tmp_path / "a", fill)
    assert "continues where it stopped" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
def test_json_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"a\.json cannot be read as JSON"):
        read_json(tmp_path / "a.json")


# --------------------------------------------------------------------------------------------------------------- states


def test_the_last_state_is_the_one_that_counts(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    for epoch, value in ((1, 10.0), (2, 20.0), (2, 21.0), (12, 30.0), (3, 40.0)):
        save_state(tmp_path, epoch, {"a": torch.tensor(value)}, {"value": value})
        state = load_state(tmp_path)
        assert state is not None
        assert (state.epoch, float(state.tensors["a"]), state.data) == (epoch, value, {"value": value})
        assert len(list(tmp_path.iterdir())) == 1


WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save_until(folder: Path, stop: int) -> int:
    """Save epoch 2 and kill the process before its file operation number `stop`; how many there were."""
    steps = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal steps
        if event in WATCHED and str(folder) in "".join(map(str, args)):
            steps += 1
            if steps == stop:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # stays for the life of the process: call this in a child
    save_state(folder, 2, {"a": torch.full((50,), 2.0)}, {"value": 2})
    return steps


@pytest.mark.parametrize("epoch", [1, 2])
def test_killed_before_any_step_of_a_save_leaves_one_whole_state(epoch: int, tmp_path: Path) -> None:
    """Killed before the 1st, 2nd, ... file operation; saving the same epoch again is no exception."""
    start = tmp_path / "start"
    save_state(start, epoch, {"a": torch.full((50,), 1.0)}, {"value": 1})
    whole = shutil.copytree(start, tmp_path / "whole")
    total = forked(lambda: save_until(whole, 0))
    assert 6 <= total < 255
    seen = []
    for stop in range(1, total + 1):
        folder = shutil.copytree(start, tmp_path / f"killed-{stop}")
        assert forked(lambda folder=folder, stop=stop: save_until(folder, stop)) == -signal.SIGKILL
        state = load_state(folder)
        assert state is not None
        seen.append(state.data["value"])
        assert torch.equal(state.tensors["a"], torch.full((50,), float(seen[-1])))
        assert state.epoch == (2 if seen[-1] == 2 else epoch)
        save_state(folder, 3, {"a": torch.zeros(1)}, {})
        assert len(list(folder.iterdir())) == 1, "leftovers go with the next save"
    assert seen == sorted(seen), "old until one moment, new from then on"
    assert set(seen) == {1, 2}


def test_json_is_plain_and_stable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "a": "é"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"b": [1, 2.5, None], "a": "é"}
