"""A whole recipe: what it leaves; that it continues, starts over and refuses; that a kill changes nothing."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import whole_runs as world
from torch import Tensor, nn
from whole_runs import RANDOM, SMALL

import vitcompress
from vitcompress import checkpoint, cost, models, pipeline, surgery
from vitcompress.data import DataOptions, open_data
from vitcompress.errors import InputError, OutputError, PlanError, WeightsError
from vitcompress.evaluate import calibration_images
from vitcompress.families import family_of
from vitcompress.gates import GatedModel
from vitcompress.models import input_config
from vitcompress.pipeline.folder import HEADER, sole_user
from vitcompress.plan import Plan

# Keys of report.json, as bench/report.py explains them.
KEYS = {"recipe", "summary", "model", "plan", "plan_sha256", "cost", "accuracy", "before_recovery", "bench", "files"}
KEYS |= {"tables", "verify", "folding", "searched", "layers", "teacher", "published", "notes"}
EPS = 2.0**-24  # float32 rounding
# Two float32 computations of a logit: sums of at most 64 terms, some 10 of them one after the other in each of 3
# blocks, each of which may double what came in.
LOGITS = EPS * 64 * 10 * 3 * 8


def with_steps(*steps: str) -> str:
    """SMALL with other steps."""
    return SMALL.replace(f"[[step]]\n{RANDOM}", "\n".join(f"[[step]]\n{step}\n" for step in steps))


def tree(folder: Path) -> dict[str, int]:
    """Every file and folder, with the time of its last change."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(images)
    return out


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {"images": images.numpy()})[0]))


def digits(model: nn.Module, count: int = 16) -> Tensor:
    """Test images, as the model wants them."""
    return calibration_images(open_data(DataOptions(), 0).test, input_config(model), count, seed=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[pipeline.RunResult, world.Told]:
    """One whole run, in home/run."""
    return world.run(home)


# ---------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_run_leaves_a_folder_that_explains_itself(home: Path, finished: tuple[Any, Any]) -> None:
    folder = finished[0].folder
    assert folder == home / "run" and finished[0].passed
    files = {path.name for path in folder.iterdir()} - {"tensorboard"}
    exported = {"dense.onnx", "dense.onnx.json", "model.onnx", "model.onnx.json"}
    reports = {"verify.json", "bench.json", "report.json", "report.md", "log.jsonl", "state"}
    assert files == {"recipe.toml", "plan.json", "model.safetensors"} | exported | reports
    assert checkpoint.read_json(folder / "verify.json")["passed"] is True
    stages = {json.loads(line)["stage"] for line in (folder / "log.jsonl").read_text().splitlines()}
    assert {"recovery", "step-0-hetdpt/search", "step-0-hetdpt/attention_01"} <= stages
    assert not [path for path in home.rglob("*") if path.name.endswith(".part")]
    again = world.recipe(home / "copy", text=(folder / "recipe.toml").read_text())
    assert again == world.recipe(home)


@pytest.mark.slow
def test_the_report_agrees_with_the_folder(finished: tuple[Any, Any]) -> None:
    folder, report = finished[0].folder, finished[0].report
    assert set(report) >= KEYS and report == checkpoint.read_json(folder / "report.json")
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert report["plan"] == json.loads(plan.to_json()) and report["plan_sha256"] == plan.digest
    assert len(plan.removed) == 2 and len(report["model"]["classes"]) == 10
    dense, compressed = models.create(plan.arch, plan.arch_args), vitcompress.load(folder)
    for name, model in (("dense", dense), ("compressed", compressed)):
        assert report["cost"][name] == cost.measure(model, (1, 8, 8)).to_dict()
    assert report["cost"]["compressed"]["macs"] < report["cost"]["dense"]["macs"]
    assert report["files"] == {name: (folder / name).stat().st_size for name in ("dense.onnx", "model.onnx")}
    assert [entry["rows"][0]["runtime"] for entry in report["bench"]] == ["onnxruntime", "torch"]
    for row in (row for entry in report["bench"] for row in entry["rows"]):
        assert (row["batch"], row["warmup"], row["runs"]) == (2, 1, 3) and sum(map(len, row["samples_ms"])) == 3
    assert (report["layers"], report["teacher"]) == ("search", "dense")
    assert "vit_tiny_patch16_224" in report["searched"] and report["verify"]["passed"]


@pytest.mark.slow
def test_accuracy_is_counted_on_the_test_images(finished: tuple[Any, Any]) -> None:
    folder, found = finished[0].folder, finished[0].report["accuracy"]
    test = open_data(DataOptions(), 0).test
    model = vitcompress.load(folder)
    images = calibration_images(test, input_config(model), len(test), seed=0)
    right = int((logits(model, images).argmax(1) == torch.from_numpy(test.labels)).sum())
    assert found["compressed"]["total"] == found["dense"]["total"] == len(test) >= 500
    assert found["compressed"]["correct"] == found["model.onnx"]["correct"] == right > len(test) / 5
    gained = found["mcnemar"]["only_b"] - found["mcnemar"]["only_a"]
    assert gained == found["compressed"]["correct"] - found["dense"]["correct"]


@pytest.mark.slow
def test_the_loaded_model_is_the_exported_one(finished: tuple[Any, Any]) -> None:
    folder = finished[0].folder
    model = vitcompress.load(folder)
    images = digits(model)
    answers = logits(model, images)
    scale = max(1.0, float(answers.abs().max()))
    assert float((answers - onnx_logits(folder / "model.onnx", images)).abs().max()) <= LOGITS * scale
    assert float((answers - onnx_logits(folder / "dense.onnx", images)).abs().max()) > 100 * LOGITS * scale


# ------------------------------------------------------------------------------------------------------------ and again


@pytest.mark.slow
def test_run_again_nothing_is_done(home: Path, finished: tuple[Any, Any]) -> None:
    before = tree(home)
    result, told = world.run(home)
    assert tree(home) == before and told.stages == []
    assert result == finished[0] and [note for note in told.notes if note.startswith("all is done")]


@pytest.mark.slow
def test_a_lost_report_is_written_again_without_training(home: Path, finished: tuple[Any, Any]) -> None:
    before = tree(home / "run")
    (home / "run" / "report.json").unlink()
    result, told = world.run(home)
    assert result.report == finished[0].report and told.stages == []
    changed = {name for name, when in tree(home / "run").items() if before.get(name) != when}
    assert changed == {"report.json", "report.md"}


@pytest.mark.slow
def test_recipes_that_train_the_same_dense_model_share_it(home: Path, finished: tuple[Any, Any]) -> None:
    (folder,) = home.glob("dense-*")
    before = tree(folder)
    # SMALL trains its dense model for one epoch, the whole run for two: the rest of [dense] is the same.
    sets = (*world.BARE, "dense.epochs=2")
    other = world.recipe(home / "recipes", *sets, text=SMALL)
    told = world.Told()
    result = pipeline.run(other, pipeline.RunOptions(out=home / "second"), told)
    assert [note for note in told.notes if note.startswith("dense model: taken from")]
    assert tree(folder) == before and list(home.glob("dense-*")) == [folder]
    assert result.report["layers"] == "chance" and result.report["searched"] is None
    assert result.report["files"] == {} and [e["rows"][0]["runtime"] for e in result.report["bench"]] == ["torch"]


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a finished `run` of SMALL, and the dense model beside it."""
    world.run(tmp_path, *world.BARE, text=SMALL)
    return tmp_path


def test_a_folder_of_another_recipe_is_refused(small: Path) -> None:
    before = tree(small)
    with pytest.raises(OutputError, match="another recipe") as caught:
        world.run(small, *world.BARE, "dense.epochs=2", "run.seed=4")
    assert "dense.epochs is 1 there, 2 here; run.seed is 0 there, 4 here" in caught.value.message
    assert "--fresh" in str(caught.value.hint)
    with pytest.raises(OutputError, match="another recipe"):  # what was trained is not what was not
        world.run(small, *world.BARE, weights="random", structure_only=True)
    assert tree(small) == before


def test_structure_only_is_not_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    model = models.create(world.ARCH, {**world.ARGS, "num_classes": 10}, seed=5)
    checkpoint.save_tensors(tmp_path / "weights" / "own.safetensors", model.state_dict())
    same = {"weights": str(tmp_path / "weights" / "own.safetensors"), "text": SMALL}
    world.run(tmp_path, *world.BARE, "model.classes=10", structure_only=True, **same)
    with pytest.raises(OutputError, match=r"another recipe \(structure only there\)"):
        world.run(tmp_path, *world.BARE, "model.classes=10", **same)


def test_two_runs_do_not_share_a_folder(small: Path) -> None:
    (small / "run" / "report.json").unlink()
    with sole_user(small / "run" / "state"), pytest.raises(OutputError, match="another process is working in"):
        world.run(small, *world.BARE, text=SMALL)
    world.run(small, *world.BARE, text=SMALL)
    assert (small / "run" / "report.json").is_file()


def test_fresh_starts_over_and_keeps_what_is_not_a_runs(small: Path) -> None:
    (small / "run" / "notes.txt").write_text("mine")
    (small / "run" / "state" / ".a.json.12345678.part").write_text("half")
    dense = tree(next(small.glob("dense-*")))
    weights = (small / "run" / "model.safetensors").read_bytes()
    result, told = world.run(small, *world.BARE, "finetune.epochs=2", fresh=True)
    assert (small / "run" / "notes.txt").read_text() == "mine"
    assert not list((small / "run").rglob("*.part"))
    assert (
        "Recover by training the pruned model" in told.stages
        and "epochs = 2" in (result.folder / "recipe.toml").read_text()
    )
    assert (small / "run" / "model.safetensors").read_bytes() != weights
    assert tree(next(small.glob("dense-*"))) == dense


@pytest.mark.parametrize("fresh", [False, True])
def test_folders_of_others_are_left_alone(tmp_path: Path, fresh: bool) -> None:
    world.recipe(tmp_path, text=SMALL)
    for name in ("full", "written", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "written" / "recipe.toml").write_text("name = 'by hand'\n")
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    for name, said in (
        ("full", "not a run folder"),
        ("written", "not written by a run" if fresh else "another recipe"),
        ("file", "is a file"),
        ("file/run", "is a file"),
    ):
        with pytest.raises(OutputError, match=said):
            world.run(tmp_path, *world.BARE, name=name, fresh=fresh)
    with pytest.raises(OutputError):
        pipeline.run(world.recipe(tmp_path, *world.BARE), pipeline.RunOptions(out=Path("/proc/run"), fresh=fresh))
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("sets", "options", "kind", "said"),
    [
        (["step.0.pruned_layers=9"], {}, PlanError, "pruned_layers is 9"),
        (["dense.batch_size=5000"], {}, InputError, "batch_size 5000"),
        (["finetune.teacher=nobody"], {}, InputError, "timm has no model 'nobody'"),
        (["model.name=resnet18", "model.args={}"], {}, InputError, "resnet18|ResNet"),
        ([], {"weights": "nowhere.pth"}, WeightsError, "no weights at nowhere.pth"),
        ([], {"export": ("tensorrt",)}, InputError, "no export format 'tensorrt'"),
        (["dense.lr=1"], {"weights": "random", "data": "nowhere"}, InputError, "nowhere"),
        (["bench.batch=0"], {}, InputError, "batch"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, sets: list[str], options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    world.recipe(tmp_path, text=SMALL)
    before = tree(tmp_path)
    with pytest.raises(kind, match=said):
        world.run(tmp_path, *sets, **options)
    assert tree(tmp_path) == before


def test_settings_that_contradict_the_method_are_refused(tmp_path: Path) -> None:
    nose = with_steps('method = "nose"\npruned_layers = 1\nte = { images = 20 }')
    with pytest.raises(InputError, match="fades the layers out"):
        world.run(tmp_path / "nose", "finetune.select=best", text=nose)
    with pytest.raises(InputError, match="heldout is 0"):
        world.run(tmp_path / "hetdpt", "data.heldout=0")
    with pytest.raises(InputError, match="needs a \\[dense\\] table"):
        hub = SMALL.replace('"train"', '"hub"').replace("[dense]\nepochs = 1\nbatch_size = 64\nlr = 2e-3\n", "")
        world.run(tmp_path / "hub", text=hub, weights="train")
    assert {path.name for path in tmp_path.rglob("*")} == {"nose", "hetdpt", "hub", "tiny.toml"}


def test_without_held_out_images_fixed_layers_are_still_removed(tmp_path: Path) -> None:
    fixed = with_steps('method = "fixed"\nattention = [1]\nactivation = [2]')
    result, _ = world.run(tmp_path, *world.BARE, "data.heldout=0", text=fixed)
    assert result.report["before_recovery"] is None and result.report["layers"] == "the recipe"
    assert set(result.report["plan"]["removed"]) == {"blocks.1.attn", "blocks.2.mlp.act"}


# ------------------------------------------------------------------------------------------------------- structure only


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "size"), [(world.ARCH, [8, 16]), ("deit_tiny_distilled_patch16_224", 8)], ids=["non-square", "distilled"]
)
def test_structure_only_needs_neither_data_nor_training(tmp_path: Path, arch: str, size: Any) -> None:
    text = with_steps('method = "hetdpt"\npruned_layers = 3').replace("source", "# source")
    text = text.replace(world.ARCH, arch).replace("img_size = 8", f"img_size = {size}")
    result, told = world.run(tmp_path, text=text, data="nowhere", structure_only=True, weights="random")
    height, width = size if isinstance(size, list) else (size, size)
    report, folder = result.report, result.folder
    assert result.passed and not [title for title in told.stages if "rain" in title]
    assert report["accuracy"] is None and report["recovery"] is None and len(report["plan"]["removed"]) == 3
    assert report["model"]["input"]["size"] == [1, height, width] and len(report["model"]["classes"]) == 1000
    dense, compressed = vitcompress.load(folder / "state" / "dense"), vitcompress.load(folder)
    for name, model in (("dense", dense), ("compressed", compressed)):
        assert report["cost"][name] == cost.measure(model, (1, height, width)).to_dict()
        assert report["cost"][name]["macs_linear"] < report["cost"][name]["macs"]
    images = torch.randn(3, 1, height, width, generator=torch.Generator().manual_seed(0))
    apart = (logits(compressed, images) - onnx_logits(folder / "model.onnx", images)).abs().max()
    assert float(apart) <= LOGITS * max(1.0, float(logits(compressed, images).abs().max()))
    assert len([note for note in report["notes"] if "random" in note or "Nothing was trained" in note]) == 2
    assert "Nothing was trained" in (folder / "report.md").read_text()


# -------------------------------------------------------------------------------------------------------------- weights


def own_weights(folder: Path, suffix: str, classes: int) -> tuple[Path, nn.Module]:
    model = models.create(world.ARCH, {**world.ARGS, "num_classes": classes}, seed=7)
    path = folder / f"own{suffix}"
    if suffix == ".pth":
        torch.save({"model": model.state_dict()}, path)
    else:
        checkpoint.save_tensors(path, model.state_dict())
    return path, model


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_an_own_checkpoint_is_the_dense_model(tmp_path: Path, suffix: str) -> None:
    path, model = own_weights(tmp_path, suffix, 10)
    result, _ = world.run(tmp_path, *world.BARE, text=SMALL, weights=str(path))
    dense = vitcompress.load(result.folder / "state" / "dense").state_dict()
    assert all(torch.equal(dense[name], value) for name, value in model.state_dict().items())
    assert not list(tmp_path.glob("dense-*")) and result.report["model"]["weights"] == str(path)
    path.unlink()  # what was begun does not need it any more
    (result.folder / "report.json").unlink()
    assert world.run(tmp_path, *world.BARE, weights=str(path))[0].passed


def test_weights_of_another_class_count_need_a_new_head(tmp_path: Path) -> None:
    path, model = own_weights(tmp_path, ".safetensors", 7)
    world.recipe(tmp_path, text=SMALL)
    before = tree(tmp_path)
    with pytest.raises(WeightsError, match="7 classes") as caught:
        world.run(tmp_path, *world.BARE, weights=str(path))
    assert "new_head" in str(caught.value.hint) and tree(tmp_path) == before
    result, _ = world.run(tmp_path, *world.BARE, "model.new_head=true", weights=str(path))
    dense = vitcompress.load(result.folder / "state" / "dense").state_dict()
    assert dense["head.weight"].shape[0] == 10
    assert torch.equal(dense["blocks.0.attn.qkv.weight"], model.state_dict()["blocks.0.attn.qkv.weight"])


def test_a_teacher_that_cannot_teach_is_refused_first(small: Path, tmp_path: Path) -> None:
    for name, changes, said in (("classes", {"num_classes": 7}, "7 classes"), ("size", {"img_size": 16}, "images of")):
        args = {**world.ARGS, "num_classes": 10, **changes}
        checkpoint.save_model(tmp_path / name, models.create(world.ARCH, args), Plan(world.ARCH, args))
        before = tree(tmp_path)
        with pytest.raises(InputError, match=said):
            world.run(small, *world.BARE, f"finetune.teacher={tmp_path / name}", name="taught")
        assert tree(tmp_path) == before
    result, _ = world.run(small, *world.BARE, f"finetune.teacher={small / 'run'}", name="taught")
    assert result.report["teacher"] == str(small / "run")


# -------------------------------------------------------------------------------------------------------------- dry run


def test_a_dry_run_tells_the_work_and_writes_nothing(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path)
    before = tree(tmp_path)
    found = pipeline.dry_run(recipe, pipeline.RunOptions(out=tmp_path / "run"))
    assert tree(tmp_path) == before and found["missing"] == [] and found["folder"] == str(tmp_path / "run")
    rows = {row["stage"]: (row["rounds"], row["epochs"], row["images"]) for row in found["stages"]}
    train = len(open_data(recipe.data, 0).train)
    assert rows["train the dense model"] == rows["recover"] == (1, 2, train)
    assert rows["hetdpt: step 1, transfer entropy"] == (2 * 2 + 2, 1, 40)
    assert rows["hetdpt: step 1, fast fine-tuning"] == (2 * 2 + 2, 1, 80)
    assert rows["hetdpt: step 2, importance search"] == (1, 2, 80)
    assert rows["judge on the test images"] == (1, None, 540)
    assert {"fold", "export onnx", "verify", "measure (paper, batch 2)"} <= set(rows)
    dense = models.create(world.ARCH, {**world.ARGS, "num_classes": 10})
    assert found["cost"]["dense"] == cost.measure(dense, (1, 8, 8)).to_dict()
    assert found["cost"]["compressed"]["macs"] < found["cost"]["dense"]["macs"]


def test_a_dry_run_names_all_that_is_missing(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path, "data.source=imagefolder", "finetune.batch_size=5000")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    options = pipeline.RunOptions(
        out=tmp_path / "run", data="nowhere", weights="none.pth", export=("trt",), device="cuda:99"
    )
    before = tree(tmp_path)
    said = "\n".join(pipeline.dry_run(recipe, options)["missing"])
    for part in ("nowhere", "no weights at none.pth", "no export format 'trt'", "cuda:99", "not a run folder"):
        assert part in said
    only = pipeline.dry_run(recipe, pipeline.RunOptions(out=tmp_path / "new", structure_only=True))
    assert only["missing"] == [] and not [row for row in only["stages"] if row["epochs"]]
    assert tree(tmp_path) == before


# ------------------------------------------------------------------------------------------------------------- dilution

NOSE = 'method = "nose"\npruned_layers = 2\nte = { images = 20 }'
ACTIVATIONS = 'method = "activation_only"\npruned_layers = 2\nte = { images = 20 }'
FIRST = 'method = "fixed"\nattention = [0]\nactivation = [0]'


@pytest.mark.parametrize("steps", [[NOSE], [ACTIVATIONS], [FIRST, NOSE.replace("2", "1", 1)]], ids=len)
def test_what_faded_out_is_what_is_deployed(tmp_path: Path, steps: list[str]) -> None:
    result, _ = world.run(tmp_path, *world.BARE, "finetune.epochs=3", text=with_steps(*steps))
    state = result.folder / "state"
    plan = Plan.from_json((state / "unfolded_plan.json").read_text())
    last = Plan.from_json(next(state.glob(f"step-{len(steps) - 1}-*/plan.json")).read_text())
    before = Plan(
        plan.arch, plan.arch_args, {name: by for name, by in plan.removed.items() if name not in last.removed}
    )
    assert len(before.removed) == (2 if len(steps) > 1 else 0)

    model = surgery.apply(models.create(plan.arch, plan.arch_args), before)
    family = family_of(model)
    sites = [site for site in family.sites(model) if site.name in last.removed]
    gated = GatedModel(
        model, family, sites, attention_bypass=next(iter({*last.removed.values()} - {"identity"}), "drop")
    )
    kept = checkpoint.load_state(state / "recovery")
    assert kept is not None
    gated.load_state_dict({name.removeprefix("module."): value for name, value in kept.tensors.items()})
    assert set(gated.gate_values().values()) == {0.0}, "faded out when training ends"

    images = digits(model)
    deployed = logits(checkpoint.load_parts(state / "unfolded_plan.json", state / "unfolded.safetensors"), images)
    scale = max(1.0, float(deployed.abs().max()))
    assert float((logits(gated, images) - deployed).abs().max()) <= LOGITS * scale
    assert float((logits(vitcompress.load(result.folder), images) - deployed).abs().max()) <= LOGITS * scale
    for site in sites:
        gated.set_gate(site.name, 1.0)
    assert float((logits(gated, images) - deployed).abs().max()) > 100 * LOGITS * scale


# --------------------------------------------------------------------------------------------------------- small things


def test_the_recipe_of_a_run_says_what_it_is(small: Path) -> None:
    text = (small / "run" / "recipe.toml").read_text()
    assert text.startswith(HEADER) and tomllib.loads(text)["run"]["seed"] == 0
