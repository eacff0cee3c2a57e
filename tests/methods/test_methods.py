"""The contracts of every method of `METHODS`."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from method_rows import OPTIONS, ROWS
from method_world import context, model
from packages import write_package
from pydantic import TypeAdapter
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError, PlanError, VitcompressError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.methods import ablations, options
from vitcompress.methods.base import Context, Method, StepInfo, StepReport, context_for, load_handed_over
from vitcompress.methods.latency import plan_step
from vitcompress.methods.table import ABLATIONS, METHODS, find_method
from vitcompress.models.create import create_on_meta
from vitcompress.plan import Plan
from vitcompress.recipe.keys import keys_of, recipe_schema
from vitcompress.training.distributed import Runtime
from vitcompress.training.options import TrainOptions

every_method = pytest.mark.parametrize("name", METHODS)


def test_every_method_has_a_row() -> None:
    assert set(ROWS) == set(METHODS)
    assert all(type(OPTIONS[name]) is method.options for name, method in METHODS.items())
    assert {name: method.options for name, method in METHODS.items()} == options.OPTIONS
    assert tuple(method.name for method in ABLATIONS) == options.ABLATION_NAMES


def start(name: str, *, earlier: bool = False) -> tuple[nn.Module, Plan]:
    """The model that the method of a row receives, and its plan. earlier: a step before removed a whole block."""
    dense = model(4)
    base = context(Path(), dense).plan
    removed = {**ROWS[name].before, **({"blocks.1": "drop"} if earlier else {})}
    plan = base.then(base.delta(removed=removed))
    return surgery.apply_plan(dense, plan), plan


def run(name: str, folder: Path, *, earlier: bool = False, **changes: Any) -> Plan:
    """The plan of a row."""
    vit, plan = start(name, earlier=earlier)
    return METHODS[name].plan(vit, context(folder, vit, plan=plan, **changes), OPTIONS[name])


def size(plan: Plan) -> Any:
    """What plans of one size have in common. They may name other layers and channels, and two halves of a block."""
    blocks = sum(name.rpartition(".")[2].isdigit() for name in plan.removed)
    widths = sorted(map(len, plan.kept.values()))
    return len(plan.removed) + blocks, widths, sorted(plan.heads.values()), len(plan.folded), len(plan.padded)


def carry_out(vit: nn.Module, plan: Plan, around: Context) -> nn.Module:
    """The model after a step, with the weights that it handed over."""
    copy = deepcopy(vit)
    load_handed_over(copy, around.folder, around.plan, around.runtime)
    return surgery.apply_plan(copy, plan)


def pixels() -> torch.Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@every_method
def test_a_plan_leaves_the_model_unchanged_and_affects_its_copy(name: str, tmp_path: Path) -> None:
    """Its mode, too. The context raises if a test image is read. Folding changes no outputs."""
    vit, plan = start(name)
    vit.train()
    before = {key: value.clone() for key, value in vit.state_dict().items()}
    around = context(tmp_path, vit, plan=plan)
    delta = METHODS[name].plan(vit, around, OPTIONS[name])
    assert all(torch.equal(value, before[key]) for key, value in vit.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in vit.modules())
    change = (carry_out(vit, delta, around)(pixels()) - vit(pixels())).abs().max()
    assert change < 1e-4 if delta.folded else change > 1e-3
    assert Plan.from_json(delta.to_json()) == delta


@every_method
def test_structure_has_the_size_of_the_plan(name: str, tmp_path: Path) -> None:
    """On the meta device."""
    vit, plan = start(name)
    blank = surgery.apply_plan(create_on_meta(plan.arch, plan.arch_args), plan)
    delta = METHODS[name].structure(blank, family_of(blank), plan, OPTIONS[name])
    assert size(delta) == size(run(name, tmp_path))
    surgery.apply_to_copy(vit, delta)


@every_method
def test_a_plan_composes_with_the_one_before(name: str, tmp_path: Path) -> None:
    """In dense channel and block numbers. Both models compute with the same weights: only rounding may differ."""
    vit, plan = start(name, earlier=True)
    delta = run(name, tmp_path, earlier=True)
    composed = surgery.apply_plan(model(4), plan.then(delta))
    torch.testing.assert_close(composed(pixels()), surgery.apply_to_copy(vit, delta)(pixels()), rtol=1e-4, atol=1e-5)


class Calls(Progress):
    """Counts its calls; with `limit` it interrupts the call after as many, as a kill would."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.count, self.limit = 0, limit

    def stage(self, title: str) -> None:
        self.update(title, 0, 0)

    def note(self, text: str) -> None:
        self.update(text, 0, 0)

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        self.count += 1
        if self.count > self.limit:
            raise KeyboardInterrupt


@every_method
def test_killed_and_resumed_is_uninterrupted(name: str, tmp_path: Path) -> None:
    calls = Calls()
    whole = run(name, tmp_path / "whole", progress=calls)
    for share in (0.3, 0.8) if calls.count else ():  # a method that reports nothing is not interrupted
        folder = tmp_path / f"{share}"
        with pytest.raises(KeyboardInterrupt):
            run(name, folder, progress=Calls(round(share * (calls.count - 1))))
        assert run(name, folder) == whole
        for path in (tmp_path / "whole").glob("*.json"):
            assert read_json(folder / path.name) == read_json(path), path.name


@every_method
def test_options_are_plain_data_and_documented(name: str) -> None:
    adapter = TypeAdapter(METHODS[name].options)
    assert adapter.validate_json(adapter.dump_json(OPTIONS[name])) == OPTIONS[name]
    undocumented = [key.key for key in keys_of(name) if key.key.startswith("step.") and not key.about]
    assert not undocumented


@every_method
def test_descriptions(name: str, tmp_path: Path) -> None:
    method, vit = METHODS[name], start(name)[0]
    assert method.summary and isinstance(method.describe(OPTIONS[name]), StepInfo)
    estimates = method.estimate(vit, family_of(vit), OPTIONS[name])
    assert all(estimate.rounds >= 1 and estimate.epochs >= 1 for estimate in estimates)
    assert not any(vars(method.report(tmp_path)).values()), "nothing was measured in this folder"
    run(name, tmp_path)
    report = method.report(tmp_path)
    assert isinstance(report, StepReport)
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    assert all(len(line.x) == len(line.y) > 0 for chart in report.charts for line in chart.lines)


# ----------------------------------------------------------------------------------------------- contexts and look-up


def test_a_method_is_known_by_name_or_passed_as_an_object() -> None:
    own = Method("own", "of a user", ablations.FixedOptions, ablations.FIXED.plan, ablations.FIXED.structure)
    assert find_method("nose") is METHODS["nose"] and find_method(own) is own
    with pytest.raises(InputError, match="no method 'isomorfic', did you mean isomorphic") as caught:
        find_method("isomorfic")
    assert "hetdpt, nose" in str(caught.value.hint)


@pytest.mark.parametrize("options", [dict, None])
def test_the_options_of_a_method_are_a_dataclass(options: Any) -> None:
    with pytest.raises(InputError, match=rf"options of method own .* got {re.escape(repr(options))}, expected"):
        Method("own", "of a user", options, ablations.FIXED.plan, ablations.FIXED.structure)


def test_a_method_that_returns_no_plan_is_named(tmp_path: Path) -> None:
    own = Method("own", "of a user", ablations.FixedOptions, lambda *_: None, lambda *_: {"removed": {}})  # type: ignore
    vit = model()
    for scored, what in ((True, "None"), (False, "{'removed': {}}")):
        with pytest.raises(InputError, match=f"the method own returned {what}, not a plan") as caught:
            plan_step(own, vit, context(tmp_path, vit), ablations.FixedOptions(), scored=scored)
        assert "help(vitcompress.Method)" in str(caught.value.hint)


@pytest.mark.parametrize("change", ["weights", "parameter", "layer"])
def test_a_method_that_changes_the_model_is_named(change: str, tmp_path: Path) -> None:
    def plan(model: Any, around: Context, options: Any) -> Plan:
        with torch.no_grad():
            if change == "weights":
                model.head.weight.mul_(1.5)
            elif change == "parameter":
                model.head.weight = nn.Parameter(1.5 * model.head.weight)
            else:
                model.blocks[0].mlp.fc1 = nn.Linear(16, 8)
        return ablations.FIXED.plan(model, around, options)

    own = Method("own", "of a user", ablations.FixedOptions, plan, ablations.FIXED.structure)
    vit, options = model(), ablations.FixedOptions(activation=(0,))
    assert plan_step(own, vit, context(tmp_path, vit), options, scored=False).removed
    with pytest.raises(PlanError, match="the method own changed the model that it plans for") as caught:
        plan_step(own, vit, context(tmp_path, vit), options)
    assert "context.hand_over(copy)" in str(caught.value.hint)


PRUNER = "from vitcompress.methods.ablations import FIXED as METHOD\nOTHER = 1\n"


def test_a_method_of_another_package_is_an_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Declared in the metadata of an installed distribution, here in a folder of `sys.path`."""
    site = write_package(tmp_path / "site", "methods", "mine = pruner:METHOD\nwrong = pruner:OTHER", pruner=PRUNER)
    monkeypatch.syspath_prepend(site)
    assert find_method("mine") is METHODS["fixed"]
    with pytest.raises(InputError, match="wrong = pruner:OTHER is not of type Method"):
        find_method("wrong")
    assert keys_of("mine")[0].key.startswith("step.0.")
    for find in (find_method, keys_of):
        with pytest.raises(InputError, match="'min', did you mean mine") as error:
            find("min")
        assert ", mine, wrong" in str(error.value.hint)


def test_the_schema_describes_the_built_in_method_of_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which is the one that a recipe uses."""
    points = "mine = pruner:METHOD\nmagnitude = pruner:METHOD"
    site = write_package(tmp_path / "site", "methods", points, pruner=PRUNER)

    def steps() -> dict[str, Any]:
        listed = recipe_schema()["properties"]["step"]["items"]["oneOf"]  # type: ignore[index]
        return {step["properties"]["method"]["const"]: step["properties"].keys() for step in listed}

    before = steps()
    monkeypatch.syspath_prepend(site)
    assert steps() == {**before, "mine": before["fixed"]}


def test_two_values_of_one_name_are_an_error(tmp_path: Path) -> None:
    around = context(tmp_path, model())
    assert around.memo("scores", lambda: [1]) == [1]
    with pytest.raises(VitcompressError, match="two values of one step are called 'scores'"):
        around.memo("scores", lambda: [2])
    assert context(tmp_path, model()).memo("scores", lambda: [2]) == [1], "a resumed run"


def test_values_that_are_not_finite_are_an_error_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(VitcompressError, match="the measured scores contain a value that is not finite") as caught:
        context(tmp_path, model()).memo("scores", lambda: [float("nan")])
    assert "NaN" in str(caught.value.hint) and not list(tmp_path.iterdir())


def batches(count: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Normalized images with labels 0, 1, 2, 0, ..."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(12, 1, 8, 8, generator=draw), torch.arange(12) % 3


@pytest.mark.parametrize("data", ["splits", "batches", "generator"])
@pytest.mark.parametrize("name", ["isomorphic", "hetdpt", "recover", "nose"])
def test_methods_run_without_a_recipe(name: str, data: str, tmp_path: Path) -> None:
    vit, plan = start(name)
    source: Any = {"splits": context(tmp_path, vit).data.train, "batches": list(batches()), "generator": batches()}
    around = context_for(vit, source[data], plan=plan, train=context(tmp_path, vit).train)
    assert around.folder.is_dir() and len(around.data.heldout) == (6 if data == "splits" else 3)
    delta = METHODS[name].plan(vit, around, OPTIONS[name])
    assert (carry_out(vit, delta, around)(pixels()) - vit(pixels())).abs().max() > 1e-3
    folder = around.folder
    del around
    assert not folder.exists()


def test_a_context_needs_no_data(tmp_path: Path) -> None:
    vit = model()
    around = context_for(vit, folder=tmp_path, seed=3)
    assert around.plan.arch == "vit_tiny_patch16_224" and around.folder == tmp_path
    assert len(ablations.RANDOM.plan(vit, around, OPTIONS["random"]).removed) == 2
    with pytest.raises(InputError, match="no training images") as caught:
        METHODS["isomorphic"].plan(vit, context_for(vit), OPTIONS["isomorphic"])
    assert "pass data" in str(caught.value.hint)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_method
def test_a_plan_on_a_gpu_is_that_of_the_cpu(name: str, tmp_path: Path) -> None:
    """In float64, where the rounding of the two devices is far below the differences between layers or channels."""
    assert plan_on("cuda", name, tmp_path / "cuda") == plan_on("cpu", name, tmp_path / "cpu")


def plan_on(device: str, name: str, folder: Path) -> Plan:
    vit, plan = start(name)
    vit.to(device, torch.float64)
    changes = {"runtime": Runtime(torch.device(device), dtype=torch.float64)}
    # After few steps of Adam, whose first ones have the size of the learning rate, learned scores are equal in float32.
    changes |= {"train": TrainOptions(epochs=2, batch_size=4, lr=1e-3)}
    return METHODS[name].plan(vit, context(folder, vit, plan=plan, **changes), OPTIONS[name])
