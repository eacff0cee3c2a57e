"""Every option of every method has an effect in at least one case. Cases of rejected options of width methods are in
test_unused_options.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_rows import OPTIONS, ROWS, Case
from method_world import clock, context, model
from test_methods_families import world
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.families import family_of
from vitcompress.methods.base import Context
from vitcompress.methods.latency import check_target, plan_step
from vitcompress.methods.table import METHODS
from vitcompress.training.options import TrainOptions


def leaves(options: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all options."""
    for option in fields(options):
        value = getattr(options, option.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{option.name}.")
        else:
            yield f"{prefix}{option.name}"


def change(options: Any, changes: dict[str, Any]) -> Any:
    """`options` with other values at these paths."""
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        options = replace(options, **{name: change(getattr(options, name), {inner: value}) if inner else value})
    return options


@pytest.mark.parametrize("name", METHODS)
def test_every_option_has_a_case(name: str) -> None:
    assert {case.option for case in ROWS[name].cases} == set(leaves(OPTIONS[name]))


@dataclass(frozen=True)
class RecordingContext(Context):
    """Records the trainings that a method starts."""

    trainings: list[Any] = field(default_factory=list)

    def run_training(
        self, module: nn.Module, images: Any, heldout: Any, options: TrainOptions, *a: Any, **k: Any
    ) -> Any:
        self.trainings.append((options, len(images)))
        return super().run_training(module, images, heldout, options, *a, **k)


def receive(family: str, folder: Path) -> tuple[nn.Module, Context]:
    """The model that a method receives, and its context."""
    if family == "swiglu":
        return world("swiglu", folder)
    dense = model(4, num_heads=4 if family == "four heads" else 2)
    around = context(folder, dense)
    kind, bypass = {"without activations": ("mlp.act", "identity"), "without attentions": ("attn", "drop")}.get(
        family, ("", "")
    )
    removed = {f"blocks.{block}.{kind}": bypass for block in range(3)} if kind else {}
    delta = around.plan.delta(removed=removed)
    return surgery.apply_plan(dense, delta), replace(around, plan=around.plan.then(delta))


def effects(name: str, options: Any, case: Case, folder: Path) -> Any:
    """Everything that a method does with its options: plans, files, trainings, batches and descriptions."""
    torch.manual_seed(0)
    vit, around = receive(case.family, folder)
    method, batches = METHODS[name], list[Any]()
    vit.register_forward_pre_hook(lambda module, args: batches.append(tuple(args[0].shape)))
    milliseconds = lambda candidate, runtime: sum(p.numel() for p in candidate.parameters()) / 1000  # noqa: E731
    teacher = model(4) if case.train.distillation != "none" else None
    known = {entry.name: getattr(around, entry.name) for entry in fields(around) if entry.init}
    changes = {"train": case.train, "latency": clock(milliseconds), "teacher": lambda: teacher}
    recording = RecordingContext(**{**known, **changes})
    check_target(options)
    structure = method.structure(vit, family_of(vit), recording.plan, options)
    plan = plan_step(method, vit, recording, options)
    info = method.describe(options)
    return (
        structure,
        plan,
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.*"))},
        recording.trainings,
        batches,
        method.estimate(vit, family_of(vit), options),
        (info.choice, info.training and info.training(case.train), info.uses_heldout, info.equal_widths),
        method.dilute and [method.dilute(options, 8)(epoch) for epoch in range(8)],
    )


@pytest.fixture(scope="module")
def effects_of_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`effects` of the options that a case changes; cases with the same ones share a run."""
    known: dict[str, Any] = {}

    def run(name: str, options: Any, case: Case) -> Any:
        key = repr((name, options, case.family, case.train))
        if key not in known:
            known[key] = effects(name, options, case, tmp_path_factory.mktemp("base"))
        return known[key]

    return run


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, row in ROWS.items() for case in row.cases],
    ids=lambda value: value if isinstance(value, str) else value.option + "-rejected" * value.rejected,
)
def test_an_option_has_an_effect_or_is_rejected(
    name: str, case: Case, effects_of_base: Callable[..., Any], tmp_path: Path
) -> None:
    base = change(OPTIONS[name], case.base)
    changed = change(base, {case.option: case.value})
    table = case.option.partition(".")[0]
    if case.rejected and table in METHODS[name].describe(changed).unused:
        return  # a recipe may hold it for another choice; --set and vc.plan reject it
    if case.rejected:
        with pytest.raises(InputError, match=case.option.rpartition(".")[2]):
            effects(name, changed, case, tmp_path / "changed")
        assert not list(tmp_path.rglob("*.json")), "rejected before anything is measured"
    elif case.option == "layers":
        assert effects_of_base(name, base, case)[0].removed.keys() == {"blocks.0.attn", "blocks.2.mlp.act"}
    else:
        assert effects_of_base(name, base, case) != effects(name, changed, case, tmp_path / "changed")
