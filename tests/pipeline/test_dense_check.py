"""The dense model is measured before the first step, with the preprocessing that the user sets."""

import json
import shutil
import tomllib
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from command_line import begin, expect_error, tree
from PIL import Image

import vitcompress as vc
from vitcompress import cli
from vitcompress.io.run_folder import RunFolder
from vitcompress.pipeline import training
from vitcompress.training.loaders import EVAL_BATCH

ARGS = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
OPTIONS = [word for name, values in IMAGENET.items() for word in (f"--{name}", ",".join(map(str, values)))]
RECIPE = """
[model]
name = "vit_tiny_patch16_224"
args = { img_size = 8, patch_size = 4, embed_dim = 16, depth = 2, num_heads = 2 }
weights = "plain.pth"
[data]
source = "imagefolder"
path = "pictures"
heldout = 0.5
[[step]]
method = "magnitude"
[finetune]
epochs = 1
batch_size = 4
[bench]
runtimes = []
[export]
formats = []
[run]
device = "cpu"
"""
NAMES = ("dark gray", "gray", "light gray", "white")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Color images in classes of brightness, and weights that are right on images with ImageNet's mean and std."""
    folder, generator = tmp_path_factory.mktemp("world"), np.random.default_rng(0)
    for (label, name), split, number in product(enumerate(NAMES), ("train", "val"), range(12)):
        place = folder / "pictures" / split / name
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.normal(40 + 55 * label, 9, (8, 8, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS)
    files = sorted((folder / "pictures" / "train").rglob("*.png"))
    labels = torch.tensor([NAMES.index(file.parent.name) for file in files])
    mean, std = (torch.tensor(IMAGENET[key]).view(3, 1, 1) for key in ("mean", "std"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255 for file in files])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model((pixels - mean) / std), labels).backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / "plain.pth")
    options = Namespace(model="vit_tiny_patch16_224", **IMAGENET)
    torch.save({"state_dict": model.state_dict(), "epoch": 3, "args": options}, folder / "last.pth.tar")
    (folder / "mine.toml").write_text(RECIPE)
    return folder


@pytest.fixture(autouse=True)
def home(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of `world` as the working folder."""
    begin(tmp_path / "home", monkeypatch)
    shutil.copytree(world, ".", dirs_exist_ok=True)


def run(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(cli.main, ["recipe", "mine.toml", "--json", *words])
    assert done.exit_code == code, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check(*words: str, code: int = 0) -> dict[str, Any]:
    before = tree(Path())
    result = run("--dry-run", "--check", *words, code=code)
    assert tree(Path()) == before
    return result


def test_options_and_keys_of_preprocessing_do_the_same() -> None:
    assert check()["dense"]["top1"] < 0.9, "the preprocessing does not matter"
    assert check(*OPTIONS)["dense"]["correct"] == 48
    keys = [word for name, values in IMAGENET.items() for word in ("--set", f"data.{name}={values}")]
    assert check(*keys)["dense"]["correct"] == 48
    assert check(*keys, "--mean", "0.5", "--std", "0.5")["dense"] == check()["dense"]  # options override keys
    overlay = "model.args.pretrained_cfg_overlay={ mean = [0.1, 0.1, 0.1], crop_pct = 0.5 }"
    assert check("--set", overlay, *OPTIONS, "--crop-pct", "0.9")["dense"]["correct"] == 48


def test_options_of_the_training_script_apply_unless_the_user_sets_others() -> None:
    result = check("--weights", "last.pth.tar")
    sources = {row["name"]: row["source"] for row in result["settings"]}
    assert result["dense"]["correct"] == 48 and "checkpoint" in sources["mean"]
    assert sources["crop_pct"] == "timm's default for vit_tiny_patch16_224"
    other = check("--weights", "last.pth.tar", "--mean", "0.5", "--std", "0.5")
    assert other["dense"] == check()["dense"] and other["settings"][-5]["source"] == "the user"
    both = check("--set", "data.std=[0.5]", "--set", "data.crop_pct=1.0", "--mean", "0.5")
    sources = {row["name"]: row["source"] for row in both["settings"]}
    assert [sources[name] for name in ("mean", "std", "crop_pct")] == ["the user", "the recipe", "the recipe"]


def test_a_run_records_preprocessing_in_plan_metadata_and_loaded_model() -> None:
    run(*OPTIONS, "--crop-pct", "1", "--out", "run", "--expect", "90", "--set", 'export.formats=["onnx"]')
    plan = json.loads(RunFolder(Path("run")).plan.read_text())
    assert plan["arch_args"]["pretrained_cfg_overlay"] == {**IMAGENET, "crop_pct": 1.0}
    config = timm.data.resolve_model_data_config(vc.load_model("run"), use_test_size=True)
    assert config["input_size"] == (3, 8, 8) and config["mean"] == (0.485, 0.456, 0.406) and config["crop_pct"] == 1
    assert vc.load_model("run").pretrained_cfg["num_classes"] == 4
    done = CliRunner().invoke(cli.main, ["evaluate", "run/model.onnx", "run", "--json", "--data", "pictures"])
    assert [row["input"]["mean"] for row in json.loads(done.stdout)["rows"]] == [IMAGENET["mean"]] * 2
    run("--out", "other")
    plan = json.loads(RunFolder(Path("other")).plan.read_text())
    assert plan["arch_args"] == {**ARGS, "num_classes": 4}  # as before these options existed


def test_a_worse_model_stops_before_the_first_step_and_again_when_continued() -> None:
    for _ in range(2):
        result = run("--expect", "99", "--out", "run", code=1)
        assert "expected 99 %" in result["error"] and " of 48)" in result["error"]
        assert all(cause in result["hint"] for cause in ("mean 0.5,0.5,0.5", "dark gray, gray", "num_heads 2"))
    assert not RunFolder(Path("run")).steps()
    assert RunFolder(Path("run")).dense_accuracy.is_file()
    assert "expected 99 %" in check("--expect", "99", code=1)["failed"]
    assert "expected 99 %" in run("--dry-run", "--expect", "99", code=1)["failed"]  # also without --check
    low, high = (100 * end for end in check()["dense"]["top1_ci95"])
    assert check("--expect", str(high - 0.01))["failed"] is None and low < high  # only beyond the interval


def test_a_model_that_the_run_trains_is_not_worse_for_its_preprocessing() -> None:
    sizes = ("--set", "dense.epochs=1", "--set", "dense.batch_size=4")
    result = run("--weights", "train", *sizes, "--expect", "100", "--out", "run", code=1)
    assert "expected 100 %" in result["error"] and "[dense]" in result["hint"] and "mean" not in result["hint"]


def test_a_finished_run_is_checked_too() -> None:
    run("--out", "run")
    before = tree(Path("run"))
    assert "expected 99 %" in run("--expect", "99", "--out", "run", code=1)["error"]
    assert (
        "correct them, and add --fresh if the run folder exists"
        in check("--expect", "99", "--out", "run", code=1)["failed"]
    )
    assert check("--expect", "1", "--out", "run")["failed"] is None
    assert tree(Path("run")) == before


def test_a_continued_run_does_not_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path("mine.toml").read_text()
    run("--expect", "99", "--out", "run", code=1)
    monkeypatch.setattr("vitcompress.pipeline.dense.measure_accuracy", None)
    assert "expected 99 %" in run("--expect", "99", "--out", "run", code=1)["error"]
    assert Path("mine.toml").read_text() == text


def test_other_test_images_are_measured_again() -> None:
    run(*OPTIONS, "--expect", "99", "--out", "run")
    for name, other in zip(NAMES, ("x", *NAMES), strict=False):  # each label is wrong
        Path("pictures/val", name).rename(Path("pictures/val", other))
    Path("pictures/val/x").rename(Path("pictures/val", NAMES[-1]))
    assert " of 48)" in run(*OPTIONS, "--expect", "99", "--out", "run", code=1)["error"]


def test_a_finished_run_is_not_continued_with_other_weights() -> None:
    run("--out", "run")
    torch.save({k: v + 1 for k, v in torch.load("plain.pth").items()}, "plain.pth")
    for words in ((), ("--dry-run",)):
        result = run("--out", "run", *words, code=2)
        assert "plain.pth has other weights" in (result.get("error") or result["missing"][0])
    Path("plain.pth").unlink()
    run("--out", "run")  # it needs no weights


def test_a_finished_run_is_rejected_by_a_dry_run_that_expects_an_accuracy_of_missing_images() -> None:
    run("--out", "run")
    Path("pictures").rename("moved")
    run("--dry-run", "--out", "run")
    for words in ((), ("--dry-run",)):
        run("--expect", "30", "--out", "run", *words, code=2)


def test_other_class_names_are_not_those_of_the_dense_model() -> None:
    words = ("--classes", "names.txt", "--out", "run", "--expect", "99")
    Path("names.txt").write_text("\n".join(NAMES))
    run(*words, code=1)
    Path("names.txt").write_text("\n".join((*NAMES[:-1], "snow")))
    for more in ((), ("--dry-run",)):
        result = run(*words[:-2], *more, code=2)
        assert "label_names.3 is 'white' there, 'snow' here" in (result.get("error") or result["missing"][0])


def test_a_run_that_starts_over_is_checked_before_its_files_are_removed() -> None:
    run("--out", "run")
    before = tree(Path("run"))
    assert "expected 99 %" in run("--out", "run", "--fresh", "--expect", "99", code=1)["error"]
    assert tree(Path("run")) == before
    run(*OPTIONS, "--out", "run", "--fresh", "--expect", "99")
    assert tree(Path("run")) != before


def test_a_stopped_run_continues_with_files_at_another_place() -> None:
    """But not with other files, and a finished run has the places that it records."""
    run("--out", "whole")
    run("--out", "run", "--expect", "99", code=1)
    Path("pictures").rename("moved")
    shutil.copy("plain.pth", "other.pth")
    words = ("--out", "run", "--data", "moved", "--weights", "other.pth")
    torch.save({k: v + 1 for k, v in torch.load("plain.pth").items()}, "worse.pth")
    before = tree(Path("run"))
    assert "worse.pth has other weights" in run(*words[:-1], "worse.pth", code=2)["error"]
    file = next(Path("moved/train").rglob("*.png"))
    content = file.read_bytes()
    shutil.copy(next(Path("moved/val").rglob("*.png")), file)
    assert "the images or labels of" in run(*words, code=2)["error"]
    file.write_bytes(content)
    assert tree(Path("run")) == before
    run(*words)
    recipe = tomllib.loads(Path("run/recipe.toml").read_text())
    assert [Path(recipe["data"]["path"]).name, Path(recipe["model"]["weights"]).name] == ["moved", "other.pth"]
    assert (
        vc.verify("run").passed and tree(Path("run"))["model.safetensors"] == tree(Path("whole"))["model.safetensors"]
    )
    assert "of another recipe (model.weights" in run("--out", "whole", *words[2:], code=2)["error"]


def rename_classes(*names: str) -> None:
    """Rename the folders of the classes, in the order of the outputs of the weights."""
    for split, (old, new) in product(("train", "val"), zip(NAMES, names, strict=True)):
        Path("pictures", split, old).rename(Path("pictures", split, new))


def test_the_data_has_the_order_of_the_classifier() -> None:
    """Also in later commands on the run, and a model of another order is not compared with it."""
    names = ("Zebra", "ant", "class10", "class9")  # as torchvision sorts them
    rename_classes(*names)
    assert check(*OPTIONS)["dense"]["correct"] < 40
    (note,) = (note for note in run("--dry-run", *OPTIONS)["notes"] if "weights name no classes" in note)
    assert "timm's order, with ant where torchvision's has Zebra: pass --classes" in note
    Path("names.txt").write_text("\n".join(names))
    options = (*OPTIONS, "--classes", "names.txt")
    assert check(*options)["dense"]["correct"] == 48
    assert not any("weights name" in note for note in run("--dry-run", *options)["notes"])
    run(*options, "--expect", "99", "--out", "run", "--set", "finetune.epochs=5")
    report = json.loads(Path("run/report.json").read_text())
    assert report["model"]["classes"] == list(names) and report["accuracy"]["compressed"]["correct"] > 40
    assert CliRunner().invoke(cli.main, ["export", "run", "--precision", "int8"]).exit_code == 0
    vc.save_model(vc.load_model("run"), "other", classes=names[::-1])
    done = CliRunner().invoke(cli.main, ["evaluate", "run", "run/model-int8.onnx", "--json", "--data", "pictures"])
    assert [row["correct"] > 40 for row in json.loads(done.stdout)["rows"]] == [True, True], done.output
    assert "in another order" in expect_error("evaluate", "run", "other", "--data", "pictures")


def test_a_stopped_run_has_the_order_of_weights_that_are_gone() -> None:
    names = ("Zebra", "ant", "class10", "class9")
    rename_classes(*names)
    torch.save({"state_dict": torch.load("plain.pth"), "classes": names}, "plain.pth")
    words = (*OPTIONS, "--out", "run")
    run(*words)
    Path("plain.pth").unlink()
    for name in ("report.json", "manifest.json"):  # as if it had been stopped
        Path("run", name).unlink()
    run(*words)
    assert vc.verify("run").passed
    assert json.loads(Path("run/report.json").read_text())["model"]["classes"] == list(names)


def test_images_are_evaluated_in_batches_that_do_not_depend_on_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a training may be split into parts to fit into memory."""
    sizes, real = list[int](), training.EvalLoader
    monkeypatch.setattr(training, "EvalLoader", lambda *about: sizes.append(about[2]) or real(*about))
    check("--set", "finetune.batch_size=20")
    assert sizes == [EVAL_BATCH]


def test_a_check_needs_a_dry_run() -> None:
    assert "--check is for dry runs" in expect_error("recipe", "mine.toml", "--check")


def test_images_of_a_calibration_are_those_of_the_run() -> None:
    run("--out", "run")
    assert CliRunner().invoke(cli.main, ["export", "run", "--precision", "int8"]).exit_code == 0
    for file in Path("pictures/train").rglob("*.png"):
        shutil.copy(next(Path("pictures/val").rglob("*.png")), file)
    assert "int8 needs images: the images or labels" in expect_error("export", "run", "--precision", "int8")


def test_images_of_a_calibration_may_have_moved() -> None:
    run("--out", "run")
    Path("pictures").rename("moved")
    words = ["export", "run", "--precision", "int8"]
    assert "--data" in expect_error(*words)
    assert CliRunner().invoke(cli.main, [*words, "--data", "moved"]).exit_code == 0
    next(Path("moved/train").rglob("*.png")).unlink()
    assert "the images or labels of moved" in expect_error(*words, "--data", "moved", "--calibration", "20")


def test_a_run_that_an_earlier_version_began_is_continued() -> None:
    """It recorded one accuracy, not that of each set of images."""
    run("--out", "run", "--expect", "99", code=1)
    record = RunFolder(Path("run")).dense_accuracy
    (accuracy,) = json.loads(record.read_text()).values()
    record.write_text(json.dumps(accuracy))
    assert "expected 99 %" in run("--out", "run", "--expect", "99", code=1)["error"]
    assert list(json.loads(record.read_text()).values()) == [accuracy]


def test_a_dry_run_without_the_data_does_not_compare_the_model() -> None:
    """Its number of classes is not known."""
    words = ["--weights", "train", "--out", "run", "--set", "dense.epochs=1", "--set", "dense.batch_size=4"]
    run(*words)
    Path("run/report.json").unlink()
    Path("pictures").rename("moved")
    (problem,) = run(*words, "--dry-run", code=2)["missing"]
    assert "does not exist" in problem


def test_what_the_weights_do_not_state_is_a_note() -> None:
    (note,) = (note for note in run("--dry-run")["notes"] if "do not state" in note)
    assert "weights do not state mean, std, interpolation, crop_pct." in note and "--crop-pct V" in note
    for words in (OPTIONS, ("--weights", "last.pth.tar"), ("--weights", "random")):
        assert not any("do not state" in note for note in run("--dry-run", *words)["notes"])
    heads = run("--dry-run", *OPTIONS, "--model", "vit_large_patch16_224")["notes"]
    assert any("do not state num_heads." in note and "model.args.num_heads=N" in note for note in heads)
    assert any(note.startswith("dense model: test top-1") for note in check(*OPTIONS)["notes"])


def test_a_problem_that_several_checks_see_is_listed_once() -> None:
    (missing,) = run("--dry-run", "--export", "onxn", code=2)["missing"]
    assert "no export format 'onxn', did you mean onnx?" in missing


def test_what_weights_state_that_cannot_be_read_is_no_note() -> None:
    result = run("--dry-run", "--weights", "nothing.pth", "--set", "data.std=[0.5]", "--mean", "0.5", code=2)
    sources = {row["name"]: row["source"] for row in result["settings"]}
    assert (sources["mean"], sources["std"]) == ("the user", "the recipe")
    assert f"no weights at {Path('nothing.pth').absolute()}" in result["missing"][0]
    assert not any("do not state" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("arch", "size"),
    [
        ("swin_tiny_patch4_window7_224", "img_size=64"),
        ("vit_small_patch16_dinov3", "img_size=64"),
        ("pvt_v2_b0", "pretrained_cfg_overlay.input_size=[3,64,64]"),
    ],
)
def test_an_image_size_that_the_weights_do_not_show_is_a_note(arch: str, size: str) -> None:
    """A model without absolute positions computes images of any size, and is less accurate on those of another one."""
    torch.save(timm.create_model(arch, num_classes=4).state_dict(), "sized.pth")
    words = ("--dry-run", *OPTIONS, "--weights", "sized.pth", "--model", arch)
    (note,) = (note for note in run(*words)["notes"] if "do not state" in note)
    assert "img_size" in note and f"--set model.args.{size.replace('64', 'N')}" in note
    assert not any("img_size" in note for note in run(*words, "--set", f"model.args.{size}")["notes"])


def test_a_folder_of_a_training_script_names_its_checkpoints() -> None:
    Path("output").mkdir()
    Path("last.pth.tar").rename("output/model_best.pth.tar")
    (missing,) = run("--dry-run", "--weights", "output", code=2)["missing"]
    assert f"use one of its checkpoints: {Path('output/model_best.pth.tar').absolute()}" in missing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--expect", "101"], "101.0 is not in the range 1<=x<=100"),
        (["--expect", "-1"], "-1.0 is not in the range 1<=x<=100"),
        (["--expect", "0.875"], "0.875 is not in the range 1<=x<=100"),
        (["--expect", "nan"], "expect   got nan, expected a finite number"),
        (
            ["--expect", "90", "--structure-only"],
            "--expect cannot be checked: there are no images with --structure-only\nleave it out",
        ),
        (["--mean", "0.5,0.5"], "mean has 2 values, the images of vit_tiny_patch16_224 have 3 channels"),
        (["--mean", "nan"], "preprocessing.mean.0   got nan, expected a finite number"),
        (["--mean", "123.7,116.3,103.5"], "numbers from 0 to 1"),
        (["--std", "0"], "preprocessing.std.0   got 0.0, expected more than 0"),
        (["--set", "data.std=[0.5, -1.0, 0.5]"], "data.std.1"),
        (["--set", "data.interpolation=cubic"], "did you mean bicubic?"),
        (["--set", "model.classes=10"], "model.classes is 10, the data has 4"),
        (["--set", "model.classes=10", "--structure-only"], "model.classes is 10, the data has 4"),
    ],
)
def test_wrong_values_are_rejected(words: list[str], message: str) -> None:
    assert message in expect_error("recipe", "mine.toml", *words)


def test_nothing_to_check_is_stated() -> None:
    dense = ["--set", "model.weights=train", "--set", "dense.epochs=1", "--set", "dense.batch_size=4"]
    for words, reason in (
        (dense, "trained first"),
        (["--weights", "random"], "random"),
        (["--structure-only"], "no images"),
    ):
        result = check(*words)
        assert result["dense"] is None and reason in " ".join(result["notes"])


def test_a_folder_one_level_too_deep_gets_one_message() -> None:
    result = run("--dry-run", "--data", "pictures/train", code=2)
    assert len(result["missing"]) == 1 and "use its parent" in result["missing"][0] and result["cost"] == {}


def test_unreadable_images_are_named_or_skipped() -> None:
    bad = [Path("pictures", split, NAMES[0], "bad.png") for split in ("train", "val")]
    for path in bad:
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n")
    assert str(bad[0]) in run("--dry-run", code=2)["missing"][0]
    result = check("--set", "data.broken=skip", *OPTIONS)
    assert "cannot be read: 2 images" in " ".join(result["notes"]) and result["dense"]["correct"] == 48
    run("--set", "data.broken=skip", "--structure-only", "--out", "run", "--set", "export.formats=[]")
    done = CliRunner().invoke(cli.main, ["evaluate", "run", "--json"])
    assert done.exit_code == 0, done.output
    assert "cannot be read: 1 image," in done.stderr and json.loads(done.stdout)["images"] == 48
