"""The model that is loaded is the one that was saved, and the one of timm that the plan says it is."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, contract, images

from vitcompress.errors import OutputError
from vitcompress.io.checks import LEDGER, Check
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.standard import WEIGHTS, save_standard
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.verify.folder import SEEN, known_images, noise, reload_check, standard_check, verify_folder
from vitcompress.verify.tolerance import reference

X = images("plain", dtype=torch.float32)


def test_reload_sees_one_bit() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    x = images("plain", dtype=torch.float32)
    assert reload_check(model, other, x).verdict == "passed"
    with torch.no_grad():
        bias = other.get_submodule("head").bias
        bias[0] = torch.nextafter(bias[0], torch.tensor(torch.inf))
    check = reload_check(model, other, x)
    assert (check.verdict, "head.bias" in check.detail) == ("failed", True)


def test_reload_sees_another_function_of_the_same_tensors() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    other.get_submodule("blocks.0.attn").scale *= 1.01
    other.get_submodule("norm").eps = 0.1
    assert "answers" in reload_check(model, other, images("plain", dtype=torch.float32)).detail


def test_reload_sees_a_tensor_that_only_one_of_them_has() -> None:
    model = build("plain", dtype=torch.float32)
    other = deepcopy(model)
    other.register_buffer("statistics", torch.zeros(3))
    for ours, theirs in ((model, other), (other, model)):
        assert reload_check(ours, theirs, X).detail == "1 wrong: statistics"


def test_models_are_asked_at_rest() -> None:
    model = build("plain", dtype=torch.float32, attn_drop_rate=0.5).train()
    assert reload_check(model, deepcopy(model), X).verdict == "passed"


# ------------------------------------------------------------------------------------------------------------- standard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of three blocks that has lost its second one: one of two blocks."""
    row = contract("plain", depth=3)
    goal: dict[str, Any] = {"arch": row.arch, "args": {**row.arch_args, "depth": 2}}
    plan = replace(row.plan, removed={"blocks.1": "drop"}, standard=goal)
    model = apply_to_copy(build("plain", depth=3, dtype=torch.float32), plan)
    write_model(tmp_path, model, plan)
    save_standard(tmp_path, model, plan)
    return tmp_path


def standard(folder: Path) -> Check:
    plan = Plan.from_json((folder / "plan.json").read_text())
    return standard_check(folder, load_model(folder), plan, X)


def test_the_standard_model_is_verified_with_its_folder_and_answers_within_rounding(folder: Path) -> None:
    assert {check.name: check.verdict for check in verify_folder(folder, X).checks}["standard"] == "passed"
    found = standard(folder)
    assert (found.verdict, found.tolerance) == ("passed", reference(load_model(folder), X).between)


def test_another_model_than_the_plan_says_fails(folder: Path) -> None:
    tensors = load_tensors(folder / WEIGHTS)
    tensors["blocks.1.mlp.fc2.weight"][3, 5] *= 1.01
    save_tensors(folder / WEIGHTS, tensors, {})
    assert standard(folder).verdict == "failed"
    tensors.pop("blocks.1.mlp.fc2.weight")
    save_tensors(folder / WEIGHTS, tensors, {})
    found = standard(folder)
    assert found.verdict == "failed" and "does not load into vit_tiny_patch16_224" in found.detail
    (folder / WEIGHTS).unlink()
    found = standard(folder)
    assert found.verdict == "failed" and "standard.safetensors is missing" in found.detail


# --------------------------------------------------------------------------------------------------------------- images


def test_noise_is_not_passed_off_as_images(folder: Path) -> None:
    """What serves the files is told which of both it is given, now and whenever the folder is verified again."""
    told: list[tuple[bool, torch.Tensor]] = []

    def served(where: Path, given: torch.Tensor, real: bool, dense: Path) -> list[Check]:
        assert (where, dense) == (folder, folder / "state/dense")
        told.append((real, given))
        return [Check("served", "passed")]

    model = load_model(folder)
    for given, real, expected in ((None, False, noise(model)), (X, True, X), (None, True, X)):
        found = verify_folder(folder, given, served=served)
        assert Check("served", "passed") in found.checks
        assert told[-1][0] is real and torch.equal(told[-1][1], expected)
        again, known = known_images(folder, model)
        assert known is real and torch.equal(again, expected)


def test_what_was_never_verified_must_be_recorded_and_what_was_need_not(folder: Path) -> None:
    """A read-only copy can be checked all the same; places that are taken cannot be written by anybody."""
    (folder / LEDGER).mkdir()
    with pytest.raises(OutputError, match=LEDGER):
        verify_folder(folder)
    (folder / LEDGER).rmdir()
    assert verify_folder(folder).passed
    before = (folder / LEDGER).read_bytes()
    (folder / SEEN).mkdir(parents=True)
    assert verify_folder(folder, X).passed
    assert (folder / LEDGER).read_bytes() == before
