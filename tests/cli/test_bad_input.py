"""Wrong input: one message with the problem and what is allowed, exit code 2, and nothing written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from command_line import RECIPE, begin, expect_error, images, recipe_with
from whole_runs import ARCH, ARGS

from vitcompress import cli
from vitcompress.io.tensors import save_tensors
from vitcompress.models.create import create_model

SOURCE = Path(cli.__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)


# ------------------------------------------------------------------------------------------------------------- recipes


def test_an_unknown_recipe_names_the_nearest() -> None:
    message = expect_error("recipe", "digits_hetdp")
    assert "digits_hetdp" in message and "digits_hetdpt" in message and "vitcompress recipes" in message


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("recipe digits_hetdp", "digits_hetdpt"),
        ("recipe nowhere.toml", "nowhere.toml cannot be read"),
        ("recipe up", "nearest: up_deit_s"),
        ("recipe digits_hetdpt --set finetune.epoch=3", "did you mean epochs?"),
        ("recipe digits_hetdpt --set step.0.method=hetdp", "did you mean hetdpt?"),
        ("recipe digits_hetdpt --weights nowhere.pth", "nowhere.pth does not exist"),
        ("recipe digits_hetdpt --data nowhere", "nowhere does not exist"),
        ("recipes keys hetdp", "did you mean hetdpt?"),
        ("recipes keys finetune", "recipes keys fold --all"),
        ("study nowhere.toml", "nowhere.toml cannot be read"),
        ("study digit", "nearest: digits"),
        ("study digits digits", "Got unexpected extra argument"),
        ("verify nowhere", "nowhere does not exist"),
        ("export nowhere", "nowhere does not exist"),
        ("report nowhere", "nowhere does not exist"),
        ("bench timm:x nowhere.onnx", "nowhere.onnx does not exist"),
        ("evaluate nowhere.onnx --data digits", "nowhere.onnx does not exist"),
        ("recipe digits_hetdpt --classes nowhere.txt", "nowhere.txt does not exist"),
        ("report tests --bench nowhere.json", "nowhere.json does not exist"),
        ("evaluate tests --data digits --bench nowhere.json", "nowhere.json does not exist"),
    ],
)
def test_a_mistake_is_reported_without_importing_torch(words: str, sentence: str) -> None:
    code = (
        "import sys; from vitcompress import cli\ntry: cli.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, cwd=SOURCE)
    assert (done.returncode, done.stdout) == (2, "False\n") and sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize("option", ["--weights", "--data"])
def test_an_empty_option(option: str) -> None:
    """As from an unset variable of the shell."""
    assert f"{option} is empty" in expect_error("recipe", "small.toml", option, "")
    assert f"{option} is empty" in expect_error("recipe", "small.toml", f"{option}=")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("bench", ""), "the argument after `bench`"),
        (("verify", ""), "the argument after `verify`"),
        (("bench", "timm:x", ""), "the argument after `timm:x`"),
        (("bench", "timm:x", "--batch", ""), "--batch"),
        (("export", "run", "-o", ""), "-o"),
        (("",), "the argument after `vitcompress`"),
    ],
)
def test_an_empty_argument(words: tuple[str, ...], place: str) -> None:
    assert expect_error(*words).startswith(f"{place} is empty")


@pytest.mark.parametrize(
    "words",
    ["recipe small.toml --out", "recipe small.toml --dry-run --weights", "keygen", "study", "recipes show"],
)
def test_a_name_that_is_too_long(words: str) -> None:
    """File systems allow 255 bytes."""
    assert "File name too long" in expect_error(*words.split(), "x" * 300)


def test_a_name_that_is_not_utf8() -> None:
    """Libraries cannot open it. This is how Python represents the byte 0xfc."""
    for words in (("evaluate", "run", "--data", "d\udcfct"), ("bench", "r\udcfcn/model.onnx")):
        assert "\\udcfc" in (message := expect_error(*words)) and "is not UTF-8" in message


def test_a_folder_or_another_file_instead_of_a_recipe() -> None:
    Path("folder").mkdir()
    message = expect_error("recipe", "folder")
    assert "is a folder" in message and ".toml file" in message and len(message) < 200
    Path("notes.toml").write_text("# Title\n[model\n")
    assert "vitcompress recipes show" in expect_error("recipe", "notes.toml")


def test_an_index_that_a_recipe_does_not_have() -> None:
    message = expect_error("recipe", "small.toml", "--set", "step.7.pruned_layers=1")
    assert "no entry 7: numbers start at 0 (here: 0)\n" in message


@pytest.mark.parametrize("key", ["nothing.4", "step.0.layers.3", "step.0.options.3"])
def test_a_number_where_no_list_is(key: str) -> None:
    assert "unknown key" in expect_error("recipe", "small.toml", "--dry-run", "--set", f"{key}=")


def test_a_file_instead_of_a_folder_of_images() -> None:
    assert "small.toml is a file" in expect_error("recipe", "small.toml", "--data", "small.toml")


def test_several_mistakes_are_shown_together() -> None:
    path = recipe_with("pruned_layers = 2", "pruned_layer = 2\n[finetun]\nepochs = 2")
    message = expect_error("recipe", path)
    assert "did you mean pruned_layers?" in message and "did you mean finetune?" in message and "2 problems" in message


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("finetune.epochs=-3", "got -3, expected 0 or more"),
        ("finetune.epochs=many", "got 'many', expected a whole number"),
        ("data.heldout=1.0", "got 1.0, expected less than 1"),
        ("bench.protocol=papers", "did you mean paper?"),
        ("step.0.pruned_layers=0", "got 0, expected 1 or more"),
        ("run.threads=100000", "got 100000, expected 1024 or less"),
        ("run.amp=fp8", "expected one of none, fp16, bf16"),
        ("model.args.depth=none", "got 'none', expected a whole number"),
        ("model.args.dept=3", "did you mean depth?"),
        ("model.args.patch_size=16", "rejects images of (1, 8, 8): "),
        ("model.args.patch_size=16", "input size per channel"),
        ("model.args.in_chans=0", "rejects images of (0, 8, 8)"),
        ("model.args.num_classes=-3", "got -3, expected 0 or more"),
        ('model.args.global_pool=""', "for an image, not one logit per class"),
        ("finetune.optimizer=adamq", "adamq"),
        ("export.opset=3", "opset 3"),
    ],
)
def test_wrong_types_and_ranges(setting: str, sentence: str) -> None:
    assert sentence in expect_error("recipe", "small.toml", "--set", setting)


def test_a_model_without_a_classifier() -> None:
    message = expect_error("recipe", "small.toml", "--structure-only", "--set", "model.args.num_classes=0")
    assert "num_classes is 0" in message and "model.classes" in message


def test_a_budget_larger_than_the_model() -> None:
    message = expect_error("recipe", "small.toml", "--set", "step.0.pruned_layers=9")
    assert "9" in message and "3 attention" in message


def test_published_layers_that_the_model_does_not_have() -> None:
    sets = ["step.0.method=fixed", "step.0.attention=[1, 7]"]
    path = recipe_with("pruned_layers = 2\n", "")
    message = expect_error("recipe", path, *(word for one in sets for word in ("--set", one)))
    assert "7" in message


@pytest.mark.parametrize("name", ["resnet18", "swinv2_tiny_window8_256", "vit_tinny_patch16_224"])
def test_a_model_of_another_kind(name: str) -> None:
    path = recipe_with(
        RECIPE[RECIPE.index('name = "') : RECIPE.index("[[step]]")],
        f'name = "{name}"\nweights = "random"\nclasses = 10\n\n',
    )
    message = expect_error("recipe", path, "--structure-only")
    assert ("vit_tiny" in message) if "tinny" in name else ("supported" in message or "ViT" in message)


# ------------------------------------------------------------------------------------------------------------- weights


def saved(path: str, **changes: Any) -> str:
    model = create_model(ARCH, {**ARGS, "num_classes": 10, **changes})
    save_tensors(Path(path), model.state_dict())
    return path


def wrong_architecture() -> str:
    return saved("other.safetensors", embed_dim=32)


def wrong_classes() -> str:
    return saved("seven.safetensors", num_classes=7)


def truncated() -> str:
    whole = Path(saved("whole.safetensors")).read_bytes()
    Path("half.safetensors").write_bytes(whole[: len(whole) // 2])
    return "half.safetensors"


class Code:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def pickled() -> str:
    torch.save({"model": Code()}, "code.pth")
    return "code.pth"


def truncated_pth() -> str:
    torch.save({"head.weight": torch.zeros(4000)}, "whole.pth")
    Path("half.pth").write_bytes(Path("whole.pth").read_bytes()[:3000])
    return "half.pth"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: "nowhere.safetensors", "nowhere.safetensors does not exist"),
        (wrong_architecture, "embed_dim is 32 in the weights, 16 in model.args"),
        (wrong_classes, "7 classes"),
        (truncated, "not a complete safetensors file"),
        (pickled, "would run code"),
        (truncated_pth, "damaged or not a PyTorch checkpoint"),
    ],
    ids=["missing", "architecture", "classes", "truncated", "pickled", "truncated_pth"],
)
def test_weights_that_cannot_be_used(make: Callable[[], str], sentence: str) -> None:
    path = make()
    assert sentence in expect_error("recipe", "small.toml", "--weights", path)
    assert not Path("executed").exists()


def test_a_missing_data_folder() -> None:
    assert "nowhere" in expect_error("recipe", "small.toml", "--data", "nowhere")


def test_empty_class_folders() -> None:
    images("pictures")
    Path("pictures/train/class_empty").mkdir()
    assert "class_empty" in expect_error("recipe", "small.toml", "--data", "pictures")


def test_broken_images() -> None:
    images("pictures")
    Path("pictures/train/class1/3.png").write_bytes(b"\x89PNG but not really")
    assert "3.png" in expect_error("recipe", "small.toml", "--data", "pictures")


def test_one_class_only() -> None:
    images("pictures", classes=1)
    message = expect_error("recipe", "small.toml", "--data", "pictures")
    assert "1 class" in message and "at least 2" in message


def test_good_images_are_accepted() -> None:
    images("pictures", each=10)
    words = ["recipe", "small.toml", "--data", "pictures", "--dry-run", "--json"]
    result = CliRunner().invoke(cli.main, [*words, "--set", "dense.batch_size=8", "--set", "finetune.batch_size=8"])
    assert result.exit_code == 0 and json.loads(result.stdout)["missing"] == []


# -------------------------------------------------------------------------------------------------------------- folders


def test_an_output_folder_of_another_recipe() -> None:
    Path("out").mkdir()
    Path("out/recipe.toml").write_text("name = 'other'\n")
    message = expect_error("recipe", "small.toml", "--out", "out")
    assert "another recipe" in message and "--out" in message and "--fresh" in message


def test_an_output_folder_with_other_files() -> None:
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("years of work")
    assert "not a run folder" in expect_error("recipe", "small.toml", "--out", "out")
    assert "not a run folder" in expect_error("recipe", "small.toml", "--out", "out", "--fresh")
    assert "thesis.txt" in expect_error("recipe", "small.toml", "--out", "out/thesis.txt")


@pytest.mark.skipif(sys.platform != "linux", reason="/sys is Linux's read-only file system")
def test_a_read_only_folder() -> None:
    assert "/sys" in expect_error("recipe", "small.toml", "--out", "/sys/run")


def test_too_little_disk_space_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**5, 10**5))
    assert "free" in expect_error("recipe", "small.toml")


def test_a_disk_that_fills_up_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(cli.main, ["recipe", "small.toml", "--structure-only", "--json"])
    assert result.exit_code == 2 and "disk is full" in json.loads(result.stdout)["error"]
    assert not [path for path in Path().rglob("*") if ".part" in path.name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "arguments", ["recipes --json", "recipes show digits_nose", "recipes show nowhere --json", "--help"]
)
def test_what_standard_output_refuses_is_reported_once(arguments: str) -> None:
    command = f"{sys.executable} -m vitcompress {arguments}"
    full = subprocess.run(f"{command} >/dev/full", shell=True, cwd=SOURCE, capture_output=True, text=True)
    assert full.returncode == (2 if "nowhere" in arguments else 1)
    assert ("nowhere" if "nowhere" in arguments else "No space left") in full.stderr
    assert "Traceback" not in full.stderr and "Exception" not in full.stderr
    closed = subprocess.run(f"{command} >&-", shell=True, cwd=SOURCE, capture_output=True, text=True)
    assert closed.returncode == (2 if "nowhere" in arguments else 0) and not closed.stderr


@pytest.mark.skipif(os.name != "posix", reason="POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_commands_run_without_standard_streams(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m vitcompress recipe digits_hetdpt --dry-run {closed}"
    result = subprocess.run(command, shell=True, cwd=SOURCE, capture_output=True, text=True)
    assert result.returncode == 0 and ("MACs" in result.stdout) == (closed == "2>&-")
