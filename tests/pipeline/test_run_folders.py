"""Folders and recipes: runs continue, other folders are not touched, and a rejected run writes nothing."""

import json
import logging
import shutil
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import whole_runs as world
from command_line import expect_error, images
from whole_runs import SMALL, tree, with_steps

from vitcompress.errors import ArtifactError, DataError, InputError, OutputError, PlanError, WeightsError
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model
from vitcompress.pipeline.export_folder import export_folder
from vitcompress.pipeline.folder import HEADER, claim_folder, difference, open_folder, recipe_text
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.verify.folder import verify_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    world.run(folder, *world.BARE, text=SMALL)
    return folder


@pytest.fixture
def small(finished: Path, tmp_path: Path) -> Path:
    """A folder with a finished `run` of SMALL, and the dense model beside it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_folder_of_another_recipe_is_rejected(small: Path) -> None:
    before = tree(small)
    with pytest.raises(OutputError, match="another recipe") as caught:
        world.run(small, *world.BARE, "dense.epochs=2", "run.seed=4")
    assert "dense.epochs is 1 there, 2 here; run.seed is 0 there, 4 here" in caught.value.message
    assert "--fresh" in str(caught.value.hint) and "`vitcompress export`" not in str(caught.value.hint)
    with pytest.raises(OutputError, match="another recipe"):  # what was trained is not what was not
        world.run(small, *world.BARE, weights="random", structure_only=True)
    with pytest.raises(OutputError, match="another recipe") as caught:
        world.run(small, *world.BARE, "export.formats=['onnx']")
    assert "`vitcompress export`" in str(caught.value.hint)
    with pytest.raises(InputError, match="no export format 'onxn', did you mean onnx"):
        world.run(small, *world.BARE, "export.formats=['onxn']")
    assert tree(small) == before
    world.run(small, *world.BARE, "summary='a text has no effect'")
    with pytest.raises(OutputError, match=r"another recipe \(run\.seed is 0 there, 4 here\)"):
        world.run(small, *world.BARE, "summary='another'", "run.seed=4")
    next(small.rglob("report.json")).unlink()  # `vitcompress export` needs a finished run
    with pytest.raises(OutputError, match="another recipe") as caught:
        world.run(small, *world.BARE, "export.formats=['onnx']")
    assert "`vitcompress export`" not in str(caught.value.hint) and "finish this run first" in str(caught.value.hint)


def test_structure_only_is_not_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    model = create_model(world.ARCH, {**world.ARGS, "num_classes": 10}, seed=5)
    save_tensors(tmp_path / "weights" / "own.safetensors", model.state_dict())
    same = {"weights": str(tmp_path / "weights" / "own.safetensors"), "text": SMALL}
    world.run(tmp_path, *world.BARE, "model.classes=10", structure_only=True, **same)
    with pytest.raises(OutputError, match=r"another recipe \(structure only there, a whole run here\)"):
        world.run(tmp_path, *world.BARE, "model.classes=10", **same)


def test_the_difference_tells_which_run_is_structure_only(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path)
    whole, structure = (recipe_text(recipe, structure_only=only) for only in (False, True))
    assert difference(whole, structure) == ["a whole run there, structure only here"]
    assert difference(structure, whole) == ["structure only there, a whole run here"]
    assert difference(whole, f"{whole}# a comment\n") == ["written by another version"]


def test_the_difference_names_a_list_that_one_recipe_leaves_empty(tmp_path: Path) -> None:
    recipe = world.recipe(tmp_path)
    texts = [replace(recipe, bench=replace(recipe.bench, runtimes=runtimes)).to_toml() for runtimes in (None, ())]
    assert difference(*texts) == ["bench.runtimes is not set there, [] here"]


def unlocked(folder: Path) -> dict[str, int]:
    """The tree without locks, whose times change when they are tested."""
    return {name: when for name, when in tree(folder).items() if not name.endswith(("state", ".lock"))}


@pytest.mark.parametrize("fresh", [False, True])
def test_two_runs_do_not_share_a_folder(small: Path, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one changes nothing, not even unfinished files of the first one; nor do `verify` and `export`."""
    monkeypatch.chdir(small)
    (small / "run" / "report.json").unlink()
    (small / "run" / "state" / ".a.json.12345678.part").write_text("half")
    with claim_folder(small / "run" / "state"):
        before = unlocked(small)
        with pytest.raises(OutputError, match="another process is working in"):
            world.run(small, *world.BARE, text=SMALL, fresh=fresh)
        for command in ("verify", "export"):
            assert "another process is working in" in expect_error(command, "run")
        assert unlocked(small) == before
    world.run(small, *world.BARE, text=SMALL, fresh=fresh)
    assert (small / "run" / "report.json").is_file() and not list((small / "run").rglob("*.part"))


def test_a_folder_taken_during_the_checks_of_a_run(small: Path) -> None:
    """Both find the folder free; the other run is faster, and done."""
    late = world.recipe(small, *world.BARE, "run.seed=4")
    before = unlocked(small)
    with (
        pytest.raises(OutputError, match="another recipe"),
        open_folder(small / "run", late, structure_only=False, fresh=False),
    ):
        pass
    assert unlocked(small) == before


def test_killed_before_its_recipe_was_written_a_run_begins_again(tmp_path: Path) -> None:
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / ".lock").touch()
    (tmp_path / "run" / ".recipe.toml.12345678.part").write_text("half")
    world.run(tmp_path, *world.BARE, text=SMALL)
    assert not list((tmp_path / "run").glob(".recipe*"))


def test_fresh_removes_exports_of_any_name(small: Path) -> None:
    """`verify` compares every file with a sidecar with the model, so that of an earlier run failed the new one."""
    for name, dense in (("mine.onnx", False), ("dense-mine.onnx", True)):
        export_folder(small / "run", out=small / "run" / name, dense=dense)
    (small / "run" / "mine.txt").write_text("a text")
    result, _ = world.run(small, *world.BARE, "finetune.epochs=2", fresh=True)
    assert result.passed and (result.folder / "mine.txt").read_text() == "a text"
    assert not list(result.folder.glob("*.onnx*"))


@pytest.mark.parametrize(
    ("key", "name", "sets"),
    [
        ("finetune.teacher", "run", ()),
        ("finetune.teacher_weights", "run/model.safetensors", (f"finetune.teacher={world.ARCH}",)),
        ("model.weights", "run/model.safetensors", ("dense=",)),
        ("model.class_names", "run/state/names.txt", ()),
        ("data.path", "run/state/images/../images", ("data.source=imagefolder",)),
    ],
)
def test_fresh_keeps_what_the_new_run_reads(small: Path, key: str, name: str, sets: tuple[str, ...]) -> None:
    (small / "run" / "state" / "names.txt").touch()
    (small / "run" / "state" / "images").mkdir()
    before = tree(small)
    with pytest.raises(OutputError, match=f"--fresh would remove {(small / name).resolve()}, which this run reads"):
        world.run(small, *world.BARE, *sets, f"{key}={small / name}", fresh=True)
    assert tree(small) == before


def test_the_files_of_exports_are_those_of_the_run(tmp_path: Path) -> None:
    beside = {
        "onnx": ("data", "json", "dsse"),
        "xml": ("json",),
        "bin": (),
        "engine": ("json", "layers.json", "onnx.json"),
    }
    names = {f"model.{kind}{end}" for kind, more in beside.items() for end in ("", *(f".{one}" for one in more))}
    names |= {"model.engine.onnx", "model-int8+bf16.xml", "model-fp16-uint8.onnx", "dense-fp16.rtx.engine", "dense.bin"}
    names |= {"model.safetensors", "standard.safetensors"}
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in RunFolder(tmp_path).run_files() if path.exists()} == names


def test_fresh_starts_over_and_keeps_other_files(small: Path) -> None:
    own = [
        small / "run" / name for name in ("notes.txt", "model-card.md", "dense.txt", "model.onnx.old", "standard.py")
    ]
    own.append(small / "run" / "model.notes" / "model.onnx")
    own[-1].parent.mkdir()
    for path in own:
        path.write_text("mine")
    (small / "run" / "state" / ".a.json.12345678.part").write_text("half")
    dense = tree(next(small.glob("dense-*")))
    weights = (small / "run" / "model.safetensors").read_bytes()
    result, progress = world.run(small, *world.BARE, "finetune.epochs=2", fresh=True)
    assert all(path.read_text() == "mine" for path in own)
    assert not list((small / "run").rglob("*.part"))
    assert (
        "Fine-tune the pruned model" in progress.stages and "epochs = 2" in (result.folder / "recipe.toml").read_text()
    )
    assert (small / "run" / "model.safetensors").read_bytes() != weights
    assert tree(next(small.glob("dense-*"))) == dense


@pytest.mark.parametrize("fresh", [False, True])
def test_other_folders_are_not_touched(tmp_path: Path, fresh: bool) -> None:
    world.recipe(tmp_path, text=SMALL)
    for name in ("full", "written", "taken"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "written" / "recipe.toml").write_text("name = 'by hand'\n")
    (tmp_path / "file").write_text("")
    before = tree(tmp_path)
    for name, message in (
        ("full", "not a run folder"),
        ("written", "not written by a run" if fresh else "another recipe"),
        ("file", "is a file"),
        ("file/run", "is a file"),
    ):
        with pytest.raises(OutputError, match=message):
            world.run(tmp_path, *world.BARE, name=name, fresh=fresh)
    with pytest.raises(OutputError):
        run_recipe(world.recipe(tmp_path, *world.BARE), RunOptions(out=Path("/proc/run"), fresh=fresh))
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("sets", "options", "kind", "message"),
    [
        (["step.0.pruned_layers=9"], {}, PlanError, "pruned_layers is 9"),
        (["dense.batch_size=5000"], {}, InputError, "batch_size 5000"),
        (["dense.batch_size=1200", "dense.augmentation.repeats=3"], {}, InputError, "more than the 113. "),
        (["finetune.batch_size=63", "finetune.augmentation.mixup=0.8"], {}, InputError, "mix pairs"),
        (["finetune.augmentation={no_aug=false,auto_augment='rand-x5'}"], {}, InputError, "Unknown RandAugment"),
        (["finetune.augmentation.reprob=0.5"], {}, InputError, "reprob has no effect: no_aug"),
        (["finetune.augmentation={no_aug=false,remode='const'}"], {}, InputError, "remode has no effect: reprob is 0"),
        (["finetune.augmentation.mixup_prob=0.5"], {}, InputError, "mixup_prob has no effect: mixup and cutmix are 0"),
        (
            ["finetune.augmentation={mixup=1,mixup_switch_prob=0}"],
            {},
            InputError,
            "switch_prob has no effect: mixup or",
        ),
        (["finetune.teacher=nobody"], {}, InputError, "finetune.teacher: timm has no model 'nobody'"),
        (["model.name=resnet18", "model.args={}"], {}, InputError, "resnet18|ResNet"),
        ([], {"weights": "nowhere.pth"}, WeightsError, "no weights at .*/nowhere.pth"),
        ([], {"export": ("tensorrt",)}, InputError, "no export format 'tensorrt'"),
        ([], {"weights": "random", "data": "nowhere"}, InputError, "nowhere"),
        (["bench.batch=0"], {}, InputError, "batch"),
    ],
)
def test_a_run_that_cannot_work_is_rejected_before_anything_is_written(
    tmp_path: Path, sets: list[str], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    world.recipe(tmp_path, text=SMALL)
    before = tree(tmp_path)
    with pytest.raises(kind, match=message):
        world.run(tmp_path, *sets, **options)
    assert tree(tmp_path) == before


def test_settings_that_contradict_the_method_are_rejected(tmp_path: Path) -> None:
    nose = with_steps('method = "nose"\npruned_layers = 1\nte = { images = 20 }')
    with pytest.raises(InputError, match="fades the layers out"):
        world.run(tmp_path / "nose", "finetune.select=best", text=nose)
    between = with_steps('method = "nose"\npruned_layers = 1\ndilution = 0.5', 'method = "fold"')
    with pytest.raises(InputError, match=r"dilution = 0\.5 has no effect: only the layers of the last step"):
        world.run(tmp_path / "between", text=between)
    with pytest.raises(InputError, match="heldout is 0"):
        world.run(tmp_path / "hetdpt", "data.heldout=0")
    with pytest.raises(InputError, match="needs a \\[dense\\] table"):
        hub = SMALL.replace('"train"', '"hub"').replace("[dense]\nepochs = 1\nbatch_size = 64\nlr = 2e-3\n", "")
        world.run(tmp_path / "hub", text=hub, weights="train")
    assert {path.name for path in tmp_path.rglob("*")} == {"nose", "between", "hetdpt", "hub", "tiny.toml"}


def test_a_teacher_that_cannot_teach_is_rejected_first(small: Path, tmp_path: Path) -> None:
    for name, changes, message in (
        ("classes", {"num_classes": 7}, "7 classes"),
        ("size", {"img_size": 16}, "images of"),
    ):
        args = {**world.ARGS, "num_classes": 10, **changes}
        write_model(tmp_path / name, create_model(world.ARCH, args), Plan(world.ARCH, args))
        before = tree(tmp_path)
        with pytest.raises(InputError, match=message):
            world.run(small, *world.BARE, f"finetune.teacher={tmp_path / name}", name="taught")
        assert tree(tmp_path) == before
    result, _ = world.run(small, *world.BARE, f"finetune.teacher={small / 'run'}", name="taught")
    assert result.report["teacher"] == str(small / "run")


@pytest.mark.parametrize("setting", ["finetune.epochs=0", "finetune.distillation=none"])
def test_a_report_names_no_teacher_that_taught_nothing(small: Path, setting: str) -> None:
    result, progress = world.run(small, *world.BARE, setting, name="untaught")
    assert result.report["teacher"] is None
    assert any("the selected weights" in note for note in progress.notes) == (setting != "finetune.epochs=0")


def test_the_recipe_of_a_run_has_a_header(small: Path) -> None:
    text = (small / "run" / "recipe.toml").read_text()
    assert text.startswith(HEADER) and tomllib.loads(text)["run"]["seed"] == 0


def test_a_run_folder_keeps_the_warnings_of_libraries(tmp_path: Path) -> None:
    recipe = load_recipe("digits_random")
    for fresh, text in ((False, "first"), (False, "second"), (True, "third")):
        with open_folder(tmp_path / "run", recipe, structure_only=True, fresh=fresh), pytest.warns(UserWarning):
            logging.getLogger("a.library").warning(text)
            warnings.warn(text, stacklevel=1)
        kept = (tmp_path / "run" / "warnings.log").read_text()
        assert text in kept and ("first" in kept) == (not fresh)


@pytest.mark.parametrize("shared", [True, False])
def test_other_images_than_those_of_the_dense_model_are_rejected(tmp_path: Path, shared: bool) -> None:
    """A run does not continue with other labels, nor does another one start from a model that learned them."""
    images(str(tmp_path / "images"))
    data = ["data.source=imagefolder", f"data.path={json.dumps(str(tmp_path / 'images'))}", "finetune.batch_size=2"]
    dense = ["dense.batch_size=2"] if shared else ["model.weights=random", "dense="]
    sets = (*world.BARE, *data, *dense)
    run, _ = world.run(tmp_path, *sets, text=SMALL)
    (run.folder / "report.json").unlink()  # as if it had been stopped
    for split in ("train", "val"):
        for old, new in (("class0", "class2"), ("class1", "class0"), ("class2", "class1")):
            (tmp_path / "images" / split / old).rename(tmp_path / "images" / split / new)
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"images or labels of .* are not those that .*dense.* was created"):
        world.run(tmp_path, *sets, text=SMALL)
    if shared:
        with pytest.raises(DataError) as second:
            world.run(tmp_path, *sets, text=SMALL, name="second", fresh=True)
        assert "delete this folder and start over" in str(second.value.hint)
    assert tree(tmp_path) == before
    if not shared:
        world.run(tmp_path, *sets, text=SMALL, fresh=True)


def test_a_changed_dense_model_that_runs_share_is_detected(small: Path) -> None:
    """Another run does not start from it, and `verify` names it in the runs that did."""
    (weights,) = small.glob("dense-*/model.safetensors")
    assert verify_folder(small / "run", dense=weights.parent).passed
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # of one value
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"dense-\w+ is not as it was written: model.safetensors: sha256 is"):
        world.run(small, *world.BARE, "finetune.lr=5e-4", name="second")
    assert not (small / "second").exists()
    verification = verify_folder(small / "run", dense=weights.parent)
    failed = {check.name for check in verification.checks if check.verdict == "failed"}
    assert failed == {"dense.manifest.model.safetensors"}


def test_a_dense_model_without_manifest_is_not_finished(small: Path) -> None:
    """The manifest is its last file; without it, a run could not tell that images or weights are others."""
    (manifest,) = small.glob("dense-*/manifest.json")
    written = manifest.read_bytes()
    manifest.unlink()  # as if it had been stopped just before
    world.run(small, *world.BARE, "finetune.lr=5e-4", name="second")
    assert manifest.read_bytes() == written
