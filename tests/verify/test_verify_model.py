"""A loaded model is the one that was saved, and the plain timm model that its plan names."""

import json
import resource
import shlex
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, contract, images

from vitcompress.errors import OutputError
from vitcompress.exporters.onnx.export import export
from vitcompress.io.checks import Check
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.checkpoint import load_model, read_plan, write_model
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.verify.folder import noise_images, recorded_images, reload_check, standard_check, verify_folder
from vitcompress.verify.outputs import Original
from vitcompress.verify.tolerance import pair_limits

X = images("plain", dtype=torch.float32)


def test_reload_sees_one_bit() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    x = images("plain", dtype=torch.float32)
    assert reload_check(Original(model, x), other).verdict == "passed"
    with torch.no_grad():
        bias = other.get_submodule("head").bias
        bias[0] = torch.nextafter(bias[0], torch.tensor(torch.inf))
    check = reload_check(Original(model, x), other)
    assert (check.verdict, "head.bias" in check.detail) == ("failed", True)


def test_reload_sees_another_function_of_the_same_tensors() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    other.get_submodule("blocks.0.attn").scale *= 1.01
    other.get_submodule("norm").eps = 0.1
    assert "outputs" in reload_check(Original(model, images("plain", dtype=torch.float32)), other).detail


def test_reload_sees_a_tensor_that_only_one_of_them_has() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    other.register_buffer("statistics", torch.zeros(3))
    for ours, theirs in ((model, other), (other, model)):
        assert reload_check(Original(ours, X), theirs).detail == "1 wrong: statistics"


def test_models_are_compared_in_eval_mode() -> None:
    model = build("plain", dtype=torch.float32, attn_drop_rate=0.5).train()
    assert reload_check(Original(model, X), deepcopy(model)).verdict == "passed"


def test_an_export_in_another_thread_does_not_change_the_check() -> None:
    """torch disables oneDNN for the whole process while it traces, here while one of the two models computes."""

    def restore(*_: object) -> None:
        torch.backends.mkldnn.set_flags(*flags.pop())

    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    other, flags = deepcopy(model), list[Any]()
    other.register_forward_pre_hook(lambda *_: flags.append(torch.backends.mkldnn.set_flags(False)))
    other.register_forward_hook(restore)
    with torch.no_grad():
        assert not torch.equal(model(x), other(x))
    assert reload_check(Original(model, x), other).verdict == "passed"


# ------------------------------------------------------------------------------------------------------------- standard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of three blocks without its second one: a model of two blocks."""
    row = contract("plain", depth=3)
    goal: dict[str, Any] = {"arch": row.arch, "args": {**row.arch_args, "depth": 2}}
    plan = replace(row.plan, removed={"blocks.1": "drop"}, standard=goal)
    model = apply_to_copy(build("plain", depth=3, dtype=torch.float32), plan)
    write_model(tmp_path, model, plan)
    return tmp_path


def standard(folder: Path) -> Check:
    plan = Plan.from_json((folder / "plan.json").read_text())
    return standard_check(RunFolder(folder), load_model(folder), plan, X)


def test_the_standard_model_is_verified_with_its_folder_and_differs_by_rounding_only(folder: Path) -> None:
    assert {check.name: check.verdict for check in verify_folder(folder, X).checks}["standard"] == "passed"
    check = standard(folder)
    assert (check.verdict, check.tolerance) == ("passed", pair_limits(load_model(folder), X)[0])


def test_another_model_than_the_planned_one_fails(folder: Path) -> None:
    tensors = load_tensors(RunFolder(folder).standard)
    tensors["blocks.1.mlp.fc2.weight"][3, 5] *= 1.01
    save_tensors(RunFolder(folder).standard, tensors, {})
    assert standard(folder).verdict == "failed"
    tensors.pop("blocks.1.mlp.fc2.weight")
    save_tensors(RunFolder(folder).standard, tensors, {})
    check = standard(folder)
    assert check.verdict == "failed" and "does not load into vit_tiny_patch16_224" in check.detail
    RunFolder(folder).standard.unlink()
    check = standard(folder)
    assert check.verdict == "failed" and "standard.safetensors is missing" in check.detail


# --------------------------------------------------------------------------------------------------------------- images


def test_noise_is_not_reported_as_images(folder: Path) -> None:
    """Neither when a folder is verified, nor when it is verified again without the images."""
    model = load_model(folder)
    export(model, folder / "model.onnx", input=input_config(model))
    noise = noise_images(model, read_plan(RunFolder(folder).plan))
    for x, real, expected in ((None, False, noise), (X, True, X), (None, True, X)):
        checks = {check.name: check for check in verify_folder(folder, x).checks}
        assert checks["agreement.model.onnx.error"].detail.endswith("on noise") is not real
        known, is_real = recorded_images(folder, model)
        assert is_real is real and torch.equal(known, expected)


def test_only_a_folder_that_was_verified_before_may_be_read_only(folder: Path) -> None:
    """Paths at which there is a folder cannot be written by anybody."""
    files = RunFolder(folder)
    files.verification.mkdir()
    with pytest.raises(OutputError, match=r"verify\.json"):
        verify_folder(folder)
    files.verification.rmdir()
    assert verify_folder(folder).passed
    files.recorded_outputs.mkdir(parents=True)
    verification = verify_folder(folder, X)
    assert verification.passed
    assert json.loads(files.verification.read_text()) == json.loads(json.dumps(verification.to_dict(folder)))


def test_checks_that_cannot_write_a_temporary_copy_are_an_error(folder: Path) -> None:
    """Also in a folder that was verified before: otherwise it would pass without any check of its model."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert verify_folder(folder).passed
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            verify_folder(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_command_for_a_missing_export_quotes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    write_model(folder, build("plain", dtype=torch.float32), contract("plain").plan)
    (check,) = (check for check in verify_folder(folder).checks if check.name == "onnx")
    assert shlex.split(check.command or "") == ["vitcompress", "export", str(folder), "--format", "onnx"]
