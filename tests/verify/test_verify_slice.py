"""Masked equals sliced, for every family and every kind of channel; a wrong channel fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import build, contract, every_variant, images, kept_channels, spaces_of
from layer_plans import depth_plan

from vitcompress import surgery
from vitcompress.io.files import write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import load_model, load_model_files, write_model
from vitcompress.plan import Plan
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.slice import keep_step_input, slice_check, slice_folder_checks


def delta(variant: str, model: Any, *, whole_heads: bool = False) -> Plan:
    kinds = {space.kind for space in spaces_of(model).values()} - {"sr"}
    kept = kept_channels(model, kinds, whole_heads=whole_heads)
    heads = {space.attention: 2 for space in spaces_of(model).values() if space.attention} if whole_heads else {}
    return replace(contract(variant).plan, kept=kept, heads=heads)


@every_variant
def test_masked_equals_sliced(variant: str) -> None:
    model = build(variant, dtype=torch.float32)
    check = slice_check(model, delta(variant, model), images(variant, dtype=torch.float32))
    assert check.verdict == "passed", check
    assert check.tolerance is not None and check.tolerance < 1e-11


def test_whole_heads_are_masked_too() -> None:
    model = build("plain", dtype=torch.float32)
    check = slice_check(model, delta("plain", model, whole_heads=True), images("plain", dtype=torch.float32))
    assert check.verdict == "passed", check


def test_one_wrong_channel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("plain", dtype=torch.float32)
    right = delta("plain", model)
    space, kept = "blocks.1.mlp", right.kept["blocks.1.mlp"]
    other = next(c for c in range(32) if c not in kept)
    wrong = replace(right, kept={**right.kept, space: (other, *kept[1:])})
    applied = surgery.apply_to_copy

    def slips(model: Any, plan: Plan) -> Any:
        return applied(model, replace(plan, kept=wrong.kept) if plan.kept else plan)

    x = images("plain", dtype=torch.float32)
    assert slice_check(model, right, x).verdict == "passed"
    monkeypatch.setattr(surgery, "apply_to_copy", slips)
    assert slice_check(model, right, x).verdict == "failed"


def test_regrouped_heads_have_no_mask() -> None:
    """Four heads become two, each of channels of two old ones."""
    model = build("plain", dtype=torch.float32)
    spread = (0, 4, 8, 12)
    plan = replace(
        contract("plain").plan, kept={"blocks.0.qk": spread, "blocks.0.v": spread}, heads={"blocks.0.attn": 2}
    )
    check = slice_check(model, plan, images("plain", dtype=torch.float32))
    assert check.verdict == "not_run" and "blocks.0.attn are regrouped" in check.detail


@pytest.mark.parametrize(
    ("qk", "v", "mixed"),
    [
        ((0, 1, 4, 5), (8, 9, 12, 13), True),  # the first two heads choose among the values of the last two
        ((0, 1, 2, 3), (0, 1, 2, 3), True),  # one head becomes two
        ((0, 1, 2, 4), (0, 1, 2, 4), True),  # only the second head takes channels of two
        ((0, 1, 4, 5), (0, 1, 4, 5), False),
    ],
)
def test_heads_are_regrouped_unless_each_is_a_part_of_one_old_head(
    qk: tuple[int, ...], v: tuple[int, ...], mixed: bool
) -> None:
    """The other channels are checked on a model that has the new heads."""
    model, x = build("plain", dtype=torch.float32), images("plain", dtype=torch.float32)
    new = {"blocks.0.qk": qk, "blocks.0.v": v}
    plan = replace(contract("plain").plan, kept=new, heads={"blocks.0.attn": 2})
    check = slice_check(model, plan, x)
    assert check.verdict == ("not_run" if mixed else "passed")
    more = slice_check(model, replace(plan, kept={**new, "blocks.1.mlp": tuple(range(3, 32))}), x)
    assert more.verdict == "passed" and ("blocks.0.attn are regrouped" in more.detail) is mixed
    assert f"{1 if mixed else 3} spaces" in more.detail


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that removes an activation, slices once and then trains."""
    model = build("plain", dtype=torch.float32)
    base = contract("plain").plan
    base = base.then(depth_plan(model, base, [], [0]))
    surgery.apply_plan(model, base)
    added = delta("plain", model)
    step = tmp_path / "state/step-1-isomorphic"
    keep_step_input(step, model, base)
    write_text(step / "plan.json", added.to_json())
    surgery.apply_plan(model, added)
    write_model(tmp_path, model, base.then(added))
    return tmp_path


def test_a_run_folder_is_checked_with_its_step_inputs(folder: Path) -> None:
    verdicts = {check.name: check.verdict for check in verify_folder(folder).checks}
    assert (verdicts["slice"], verdicts["slice.plan"]) == ("passed", "passed")


def test_each_step_that_sliced_is_checked_and_their_channels_are_those_of_the_dense_model(folder: Path) -> None:
    model, base = load_model(folder), Plan.from_json((folder / "plan.json").read_text())
    narrow = tuple(range(1, len(base.kept["blocks.0.mlp"])))
    added = replace(contract("plain").plan, kept={"blocks.0.mlp": narrow})
    step = folder / "state/step-2-sero"
    keep_step_input(step, model, base)
    write_text(step / "plan.json", added.to_json())
    plan, x = base.then(added), images("plain", dtype=torch.float32)
    assert plan.kept["blocks.0.mlp"] not in (base.kept["blocks.0.mlp"], narrow)
    verdicts = {check.name: check.verdict for check in slice_folder_checks(RunFolder(folder), plan, x)}
    assert verdicts == dict.fromkeys(("slice.step-1-isomorphic", "slice.step-2-sero", "slice.plan"), "passed")
    assert slice_folder_checks(RunFolder(folder), base, x)[-1].verdict == "failed"


def test_a_repeated_step_keeps_its_first_input(folder: Path) -> None:
    step = folder / "state/step-1-isomorphic"
    before = {path.name: path.read_bytes() for path in step.iterdir()}
    keep_step_input(step, build("plain", seed=1), contract("plain").plan)
    assert {path.name: path.read_bytes() for path in step.iterdir()} == before


def test_a_deployed_plan_that_keeps_other_channels_fails(folder: Path) -> None:
    plan = Plan.from_json((folder / "plan.json").read_text())
    other = replace(plan, kept={**plan.kept, "blocks.0.mlp": plan.kept["blocks.0.mlp"][:-1]})
    checks = {
        check.name: check
        for check in slice_folder_checks(RunFolder(folder), other, images("plain", dtype=torch.float32))
    }
    assert checks["slice.plan"].verdict == "failed" and "blocks.0.mlp" in checks["slice.plan"].detail


def test_a_fold_between_the_steps_is_checked_too(folder: Path) -> None:
    model = load_model_files(
        folder / "state/step-1-isomorphic/given_plan.json", folder / "state/step-1-isomorphic/given.safetensors"
    )
    base = Plan.from_json((folder / "state/step-1-isomorphic/given_plan.json").read_text())
    step = folder / "state/step-0-fold"
    keep_step_input(step, model, base)
    folded = surgery.fold_linears(surgery.apply_to_copy(model, contract("plain").plan), contract("plain").plan)[0]
    assert folded.folded == ("blocks.0.mlp",)
    write_text(step / "plan.json", folded.to_json())
    verdicts = {check.name: check.verdict for check in verify_folder(folder).checks}
    names = {f"fold{part}.step-0-fold" for part in ("", ".agreement", ".blocks.0.mlp")}
    assert {name: verdicts[name] for name in names} == dict.fromkeys(names, "passed")
    assert verdicts["slice"] == "passed"


def test_without_the_weights_before_slicing_it_is_not_run(folder: Path) -> None:
    (folder / "state/step-1-isomorphic/given_plan.json").unlink()
    checks = {check.name: check for check in verify_folder(folder).checks}
    assert checks["slice"].verdict == "not_run" and "before slicing" in checks["slice"].detail
