"""Options of a run: structure only, other weights, a dry run, layers that fade out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whole_runs as world
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from whole_runs import LOGITS, SMALL, digits, logits, onnx_logits, tree, with_steps

from vitcompress import surgery
from vitcompress.errors import DataError, OutputError, WeightsError
from vitcompress.families import Family, family_of
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import save_tensors
from vitcompress.io.training_state import load_state
from vitcompress.methods.table import METHODS
from vitcompress.models.checkpoint import load_model, load_model_files
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model
from vitcompress.pipeline import report
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.job import RunOptions, apply_options, create_job
from vitcompress.pipeline.run import run_recipe
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.data import NO_IMAGES, Splits, open_data
from vitcompress.training.datasets import ArrayImages
from vitcompress.training.distributed import Runtime
from vitcompress.training.options import DataOptions


def test_the_path_of_a_data_folder_is_recorded_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read it from a recorded recipe in any folder."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("digits_hetdpt", ["data.source=imagefolder", "data.path=mine"])
    assert apply_options(recipe, RunOptions()).data.path == str(tmp_path.resolve() / "mine")


def test_all_files_of_a_recipe_are_recorded_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run can be continued with the recipe in its folder, from any folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teacher").mkdir()
    texts = ("model.weights=dense.pth", "model.class_names=~/names.txt", "finetune.teacher=teacher")
    texts = (*texts, "data.source=imagefolder", "data.path=~nobody-of-this-name/mine")
    recipe = apply_options(load_recipe("digits_hetdpt", [*texts, "dense="]), RunOptions(out=Path("~/run")))
    assert recipe.model.weights == str(tmp_path / "dense.pth")
    assert recipe.model.class_names == str(tmp_path / "home" / "names.txt")
    assert recipe.finetune.teacher == str(tmp_path / "teacher")
    assert recipe.data.path == str(tmp_path.resolve() / "~nobody-of-this-name" / "mine")
    assert RunOptions(out=Path("~/run")).folder(recipe) == (tmp_path / "home" / "run").resolve()
    for name in ("hub", "random", "hf-hub:timm/test_vit.r160_in1k"):
        named = (f"model.weights={name}", "dense=", f"finetune.teacher_weights={name}", "finetune.teacher=test_vit")
        recipe = apply_options(load_recipe("digits_hetdpt", named), RunOptions())
        assert (recipe.model.weights, recipe.finetune.teacher, recipe.finetune.teacher_weights) == (
            name,
            "test_vit",
            name,
        )


def test_only_none_keeps_the_formats_of_the_recipe() -> None:
    recipe = load_recipe("digits_random", ["export.formats=['onnx']"])
    for formats, expected in ((None, ("onnx",)), ((), ()), (("openvino",), ("openvino",))):
        assert apply_options(recipe, RunOptions(export=formats)).export == replace(recipe.export, formats=expected)


def test_a_run_trains_where_the_caller_disables_gradients(tmp_path: Path) -> None:
    with torch.no_grad():
        result, _ = world.run(tmp_path, *world.BARE, "data.heldout=0", text=SMALL)
    assert result.report["accuracy"] is not None


def test_without_heldout_images_fixed_layers_are_still_removed(tmp_path: Path) -> None:
    fixed = with_steps('method = "fixed"\nattention = [1]\nactivation = [2]')
    result, _ = world.run(tmp_path, *world.BARE, "data.heldout=0", text=fixed)
    assert result.report["before_recovery"] is None and result.report["layers"] == "the recipe"
    assert set(result.report["plan"]["removed"]) == {"blocks.1.attn", "blocks.2.mlp.act"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "size"), [(world.ARCH, [8, 16]), ("deit_tiny_distilled_patch16_224", 8)], ids=["non-square", "distilled"]
)
def test_structure_only_needs_neither_data_nor_training(tmp_path: Path, arch: str, size: Any) -> None:
    text = with_steps('method = "hetdpt"\npruned_layers = 3').replace("source", "# source")
    text = text.replace(world.ARCH, arch).replace("img_size = 8", f"img_size = {size}")
    result, progress = world.run(tmp_path, text=text, data="nowhere", structure_only=True, weights="random")
    height, width = size if isinstance(size, list) else (size, size)
    report, folder = result.report, result.folder
    assert result.passed and not [title for title in progress.stages if "rain" in title]
    assert report["accuracy"] is None and report["recovery"] is None and len(report["plan"]["removed"]) == 3
    assert report["model"]["input"]["size"] == [1, height, width] and len(report["model"]["classes"]) == 1000
    dense, compressed = load_model(folder / "state" / "dense"), load_model(folder)
    for name, model in (("dense", dense), ("compressed", compressed)):
        assert report["cost"][name] == vars(count_cost(model, (1, height, width)))
        assert report["cost"][name]["macs_linear"] < report["cost"][name]["macs"]
    assert all(len(tensor.unique()) > 1 for model in (dense, compressed) for tensor in model.parameters())
    images = torch.randn(3, 1, height, width, generator=torch.Generator().manual_seed(0))
    apart = (logits(compressed, images) - onnx_logits(folder / "model.onnx", images)).abs().max()
    assert float(apart) <= LOGITS * max(1.0, float(logits(compressed, images).abs().max()))
    assert len([note for note in report["notes"] if "random" in note or "Nothing was trained" in note]) == 2
    page = (folder / "report.md").read_text()
    assert "Nothing was trained" in page and "without --structure-only" in page


def test_a_recipe_is_run_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    result = run_recipe(tmp_path / "small.toml", RunOptions(out=tmp_path / "run", structure_only=True, export=()))
    assert result.report["recipe"] == "small"


def test_structure_only_counts_the_classes_of_the_data(tmp_path: Path) -> None:
    """Structure only counts the same parameters as the whole run."""
    recipe = world.recipe(tmp_path, text=SMALL)

    def params(*, args: dict[str, int] | None = None, weights: str | None = None, **options: Any) -> int:
        loaded = world.recipe(tmp_path, weights=weights)
        changed = replace(loaded, model=replace(loaded.model, args=loaded.model.args | (args or {})))
        wishes = RunOptions(out=tmp_path / "new", **options)
        return int(dry_run_recipe(changed, wishes).cost["dense"].params)

    whole, row = params(), int(recipe.model.args["embed_dim"]) + 1  # a class is a row of the classifier and a bias
    assert params(structure_only=True) == whole
    for name in ("ant", "bee", "cat"):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
    data = str(tmp_path / "images")
    assert params(structure_only=True, data=data) == whole - 7 * row
    assert params(structure_only=True, data="nowhere") == whole + 990 * row, "timm's own"
    assert params(structure_only=True, args={"num_classes": 5}) == whole - 5 * row
    assert params(structure_only=True, weights="hub") == whole + 990 * row, "the weights' own"


def save_weights(folder: Path, suffix: str, classes: int) -> tuple[Path, nn.Module]:
    model = create_model(world.ARCH, {**world.ARGS, "num_classes": classes}, seed=7)
    path = folder / f"own{suffix}"
    if suffix == ".pth":
        torch.save({"model": model.state_dict()}, path)
    else:
        save_tensors(path, model.state_dict())
    return path, model


def test_a_checkpoint_becomes_the_dense_model(tmp_path: Path) -> None:
    path, model = save_weights(tmp_path, ".pth", 10)
    result, _ = world.run(tmp_path, *world.BARE, text=SMALL, weights=str(path))
    dense = load_model(result.folder / "state" / "dense").state_dict()
    assert all(torch.equal(dense[name], value) for name, value in model.state_dict().items())
    assert not list(tmp_path.glob("dense-*")) and result.report["model"]["weights"] == str(path)
    path.unlink()  # a run that has started does not need it
    (result.folder / "report.json").unlink()
    assert world.run(tmp_path, *world.BARE, weights=str(path))[0].passed


def test_weights_of_another_class_count_need_a_new_head(tmp_path: Path) -> None:
    path, model = save_weights(tmp_path, ".safetensors", 7)
    world.recipe(tmp_path, text=SMALL)
    before = tree(tmp_path)
    with pytest.raises(WeightsError, match="7 classes") as caught:
        world.run(tmp_path, *world.BARE, weights=str(path))
    assert "new_head" in str(caught.value.hint) and tree(tmp_path) == before
    result, _ = world.run(tmp_path, *world.BARE, "model.new_head=true", weights=str(path))
    dense = load_model(result.folder / "state" / "dense").state_dict()
    assert dense["head.weight"].shape[0] == 10
    assert torch.equal(dense["blocks.0.attn.qkv.weight"], model.state_dict()["blocks.0.attn.qkv.weight"])


def test_a_dry_run_lists_the_work_and_writes_nothing(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path)
    before = tree(tmp_path)
    result = dry_run_recipe(recipe, RunOptions(out=tmp_path / "run"))
    assert tree(tmp_path) == before and result.missing == [] and result.folder == str(tmp_path / "run")
    rows = {row.stage: (row.rounds, row.epochs, row.images) for row in result.stages}
    train = len(open_data(recipe.data, 0).train)
    assert rows["train the dense model"] == rows["fine-tune the pruned model"] == (1, 2, train)
    assert rows["hetdpt: step 1, transfer entropy"] == (15 + 6, 1, 40)  # candidates, and the model of each round
    assert rows["hetdpt: step 1, fast fine-tuning"] == (2 * 2 + 2, 1, 80)
    assert rows["hetdpt: step 2, importance search"] == (1, 2, 80)
    assert rows["evaluate on the test images"] == (1, None, 540)
    assert {"fold", "export onnx", "verify", "measure (paper, batch 2)", "report"} <= set(rows)
    dense = create_model(world.ARCH, {**world.ARGS, "num_classes": 10})
    assert result.cost["dense"] == count_cost(dense, (1, 8, 8))
    assert result.cost["compressed"].macs < result.cost["dense"].macs


def test_a_dry_run_computes_each_structure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a structure of a given size may need dozens of candidates."""
    calls, method = list[Any](), METHODS["hetdpt"]

    def structure(model: nn.Module, family: Family, base: Plan, options: Any) -> Plan:
        calls.append(options)
        return method.structure(model, family, base, options)

    monkeypatch.setitem(METHODS, "hetdpt", replace(method, structure=structure))
    result = dry_run_recipe(world.recipe(tmp_path), RunOptions(out=tmp_path / "run"))
    assert len(calls) == 1 and result.cost["compressed"].macs < result.cost["dense"].macs


def test_a_dry_run_lists_everything_that_is_missing(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path, "data.source=imagefolder", "finetune.batch_size=5000", weights="none.pth")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    options = RunOptions(out=tmp_path / "run", data="nowhere", export=("tflite",), device="cuda:99")
    before = tree(tmp_path)
    missing = "\n".join(dry_run_recipe(recipe, options).missing)
    weights = f"no weights at {Path.cwd() / 'none.pth'}"
    for part in ("nowhere", weights, "no export format 'tflite'", "cuda:99", "not a run folder"):
        assert part in missing
    recipe = world.recipe(tmp_path, "data.source=imagefolder")
    only = dry_run_recipe(recipe, RunOptions(out=tmp_path / "new", structure_only=True))
    assert only.missing == [] and not [row for row in only.stages if row.epochs]
    assert tree(tmp_path) == before


def test_the_order_of_formats_makes_no_other_recipe(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path)
    one, other = (apply_options(recipe, RunOptions(export=formats)) for formats in (("trt", "onnx"), ("onnx",) * 2))
    assert (one.export.formats, other.export.formats) == (("onnx", "trt"), ("onnx",))
    assert one == apply_options(recipe, RunOptions(export=("onnx", "trt", "onnx")))


def test_images_from_python_replace_those_of_the_recipe(tmp_path: Path) -> None:
    """They are recorded, so that the run continues with them, and with no others."""
    digits_data = replace(open_data(DataOptions(), 0), name="mine")
    recipe, options = (
        world.recipe(tmp_path, *world.BARE, "data.source=imagefolder", text=SMALL),
        RunOptions(tmp_path / "run"),
    )
    result = run_recipe(recipe, options, data=digits_data)
    assert result.passed and result.report["accuracy"]["dense"]["total"] == len(digits_data.test)
    assert 'source = "python:mine (' in (tmp_path / "run" / "recipe.toml").read_text()
    assert run_recipe(recipe, options, data=digits_data).report == result.report
    with pytest.raises(OutputError, match=r"data\.source"):
        run_recipe(recipe, options, data=replace(digits_data, name="others"))
    train = ArrayImages(np.zeros((len(digits_data.train), 8, 8), np.uint8), digits_data.train.labels)
    with pytest.raises(DataError, match="images or labels of mine are not"):  # runs share the dense model
        run_recipe(recipe, RunOptions(tmp_path / "other"), data=replace(digits_data, train=train))


def tensors(labels: list[int], *shape: int) -> ArrayImages:
    """Noise with 1 x 8 x 8 pixels, or another `shape`."""
    return ArrayImages(torch.randn(len(labels), *(shape or (1, 8, 8))), np.array(labels))


TWO = ("a", "b")
FITTING = tensors([0, 1] * 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": NO_IMAGES}, "no test images"),
        ({"classes": ()}, "mine has 0 classes, at least 2"),
        ({"train": tensors([1] * 64)}, "mine has images of one class only"),
        ({"train": tensors([0, 1, 2, 1] * 16)}, "labels .* from 0 to 2 cannot be used"),
        ({"heldout": tensors([-1, 1])}, "labels .* from -1 to 1 cannot be used"),
        ({"test": tensors([0, 1], 1, 12, 12)}, "images of shape 1x1x12x12 do not fit"),
        ({"heldout": tensors([0, 1], 3, 8, 8)}, "images of shape 1x3x8x8 do not fit"),
    ],
)
def test_images_from_python_must_fit_the_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """They ended in errors of torch, some after the training."""
    data = replace(Splits("mine", TWO, FITTING, heldout=FITTING, test=FITTING), **changes)
    with pytest.raises(DataError, match=message):
        run_recipe(world.recipe(tmp_path, *world.BARE, text=SMALL), RunOptions(tmp_path / "new"), data=data)
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("dense-*"))


NOSE = 'method = "nose"\npruned_layers = 2\nte = { images = 20 }'


ACTIVATIONS = 'method = "activation_only"\npruned_layers = 2\nte = { images = 20 }'


FIRST = 'method = "fixed"\nattention = [0]\nactivation = [0]'


@pytest.mark.parametrize("steps", [[NOSE], [ACTIVATIONS], [FIRST, NOSE.replace("2", "1", 1)]], ids=len)
def test_layers_that_faded_out_are_removed_from_the_deployed_model(tmp_path: Path, steps: list[str]) -> None:
    trained = list[nn.Parameter]()
    handle = register_optimizer_step_pre_hook(
        lambda own, *_: trained.extend(p for g in own.param_groups for p in g["params"])
    )
    try:
        result, _ = world.run(tmp_path, *world.BARE, "finetune.epochs=3", text=with_steps(*steps))
    finally:
        handle.remove()
    assert all(parameter.ndim for parameter in trained), "the scores of gates are not trained, nor clipped"
    state = result.folder / "state"
    plan = Plan.from_json((state / "unfolded_plan.json").read_text())
    last = Plan.from_json(next(state.glob(f"step-{len(steps) - 1}-*/plan.json")).read_text())
    before = Plan(
        plan.arch, plan.arch_args, {name: by for name, by in plan.removed.items() if name not in last.removed}
    )
    assert len(before.removed) == (2 if len(steps) > 1 else 0)

    model = surgery.apply_plan(create_model(plan.arch, plan.arch_args), before)
    gated = GatedModel(model, family_of(model), last, {})
    kept = load_state(state / "recovery")
    assert kept is not None
    gated.load_state_dict({name.removeprefix("module."): value for name, value in kept.tensors.items()})
    assert set(gated.gate_values().values()) == {0.0}, "faded out at the end of training"

    images = digits(model)
    deployed = logits(load_model_files(state / "unfolded_plan.json", state / "unfolded.safetensors"), images)
    scale = max(1.0, float(deployed.abs().max()))
    assert float((logits(gated, images) - deployed).abs().max()) <= LOGITS * scale
    assert float((logits(load_model(result.folder), images) - deployed).abs().max()) <= LOGITS * scale
    for site in gated.sites:
        gated.set_gate(site.name, 1.0)
    assert float((logits(gated, images) - deployed).abs().max()) > 100 * LOGITS * scale


@pytest.mark.parametrize(("name", "distilled"), [("deit_s_hetdpt", True), ("nose_deit_s_3", False)])
def test_only_reports_of_distilled_weights_name_their_teacher(name: str, distilled: bool) -> None:
    options, recipe = RunOptions(), load_recipe(name)
    job = create_job(apply_options(recipe, options), options, Runtime(torch.device("cpu")), Progress(), None)
    assert any("RegNetY" in line for line in report._remarks(job)) == distilled
