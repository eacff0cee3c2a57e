"""A teacher that is not available, or cannot teach, is rejected before anything is trained."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from click.testing import CliRunner
from command_line import begin, expect_error, recipe_with
from safetensors.torch import load_file, save_file
from whole_runs import ARCH, ARGS

import vitcompress as vc
from vitcompress.cli import main
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model
from vitcompress.plan import Plan


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "home", monkeypatch)


def teacher_run(**changes: Any) -> str:
    """A folder with a model for the classes of the digits that differs from the student."""
    arguments = {**ARGS, "num_classes": 10, **changes}
    model = create_model(ARCH, arguments)
    write_model(Path("teacher"), model, Plan(ARCH, arguments))
    return "teacher"


def taught_by(*settings: str) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def test_a_teacher_of_other_classes() -> None:
    message = expect_error(
        "recipe", "small.toml", *taught_by("finetune.teacher=vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    )
    assert "has 1000 classes, the student 10" in message and "teacher_weights" in message and "'dense'" in message
    message = expect_error("recipe", "small.toml", *taught_by(f"finetune.teacher={teacher_run(num_classes=7)}"))
    assert "has 7 classes, the student 10" in message


def test_a_teacher_that_is_no_folder() -> None:
    words, text = ["recipe", "small.toml", *taught_by("finetune.teacher=runs/none")], "there is no run folder"
    message = expect_error(*words)
    assert f"{text} {Path.cwd() / 'runs/none'}" in message and "finetune.teacher_weights" in message
    assert text in " ".join(CliRunner().invoke(main, [*words, "--dry-run"]).output.split())


def test_weights_of_another_teacher() -> None:
    other = Path("swin.pth")
    torch.save(timm.create_model("swin_tiny_patch4_window7_224", depths=[1, 1], num_heads=[1, 2]).state_dict(), other)
    message = expect_error(
        "recipe",
        "small.toml",
        *taught_by("finetune.teacher=vit_tiny_patch16_224", f"finetune.teacher_weights={other}"),
    )
    assert "teacher vit_tiny_patch16_224" in message and "contains Swin Transformer" in message


def test_weights_of_a_teacher_show_its_sizes() -> None:
    """As those of the dense model do; arguments after the name state what they do not show."""
    saved = RunFolder(Path(teacher_run(embed_dim=40, num_heads=5))).weights  # its plan states everything
    known = taught_by(f"finetune.teacher_weights={saved}", f"finetune.teacher={ARCH}")
    assert CliRunner().invoke(main, ["recipe", "small.toml", *known, "--dry-run"]).exit_code == 0
    save_file(load_file(saved), "plain.safetensors")
    words = (
        "recipe",
        "small.toml",
        *taught_by("finetune.teacher_weights=plain.safetensors", f"finetune.teacher={ARCH}"),
    )
    assert f"{ARCH}?num_heads=4" in expect_error(*words)
    done = CliRunner().invoke(main, [*words[:-1], f"finetune.teacher='{ARCH}?num_heads=5'", "--dry-run"])
    assert done.exit_code == 0, done.output


def test_a_teacher_of_no_family() -> None:
    """DeiT learns from a RegNet."""
    arch = "regnety_002"
    torch.save(timm.create_model(arch, num_classes=10, in_chans=1).state_dict(), "cnn.pth")
    words = taught_by(f"finetune.teacher='{arch}?in_chans=1'", "finetune.teacher_weights=cnn.pth")
    message = expect_error("recipe", "small.toml", *words)
    assert "the teacher takes images of (1, 224, 224)" in message, message


@pytest.mark.parametrize(
    ("kind", "teacher", "sentence"),
    [
        ("features", {"embed_dim": 32}, "pooled features have 32 channels, the student's 16"),
        ("soft_patch", {"patch_size": 2}, "the teacher's features are (16, 16), the student's (4, 16)"),
        ("soft", {"img_size": 16}, "the teacher takes images of (1, 16, 16)"),
    ],
)
def test_a_teacher_that_cannot_teach(kind: str, teacher: dict[str, int], sentence: str) -> None:
    sets = taught_by(f"finetune.distillation={kind}", f"finetune.teacher={teacher_run(**teacher)}")
    assert sentence in expect_error("recipe", "small.toml", *sets)


def test_a_teacher_that_orders_the_classes_otherwise() -> None:
    vc.save_model(create_model(ARCH, {**ARGS, "num_classes": 10}), "teacher", classes=[*"1023456789"])
    message = expect_error("recipe", "small.toml", *taught_by("finetune.teacher=teacher"))
    assert "has the classes of the student in another order" in message


def test_a_student_that_becomes_narrower_than_its_teacher() -> None:
    path = recipe_with(
        'method = "random"\npruned_layers = 2', 'method = "isomorphic"\nalign = { residual = 4, ffn = 4, head_dim = 2 }'
    )
    message = expect_error("recipe", path, *taught_by("finetune.distillation=features"))
    assert "pooled features have 16 channels" in message
    pruned = taught_by("finetune.distillation=features", f"finetune.teacher={teacher_run(embed_dim=8)}")
    message = expect_error("recipe", path, *pruned, "--control")  # which is as wide as the dense model
    assert "pooled features have 8 channels, the student's 16" in message
    assert "while layers fade out" in expect_error(
        "recipe", "small.toml", *taught_by("step.0.method=nose", "finetune.distillation=features")
    )


@pytest.mark.parametrize(
    ("arch", "alpha", "sentence"),
    [
        (ARCH, 1.5, "with alpha = 1.5 the labels would weigh -0.5"),
        ("deit_tiny_distilled_patch16_224", 1.0, "alpha = 1 would leave one of the two heads untrained"),
    ],
)
def test_weights_of_losses_between_steps_are_checked_before_the_training(
    arch: str, alpha: float, sentence: str
) -> None:
    path = recipe_with("[finetune]", f'[[step]]\nmethod = "recover"\nepochs = 1\nalpha = {alpha}\n\n[finetune]')
    assert sentence in expect_error("recipe", path, *taught_by(f"model.name={arch}", "finetune.teacher=dense"))


def test_a_student_that_drops_patches_while_it_trains() -> None:
    sets = taught_by("model.args.patch_drop_rate=0.5", "finetune.teacher=dense", "finetune.distillation=soft_patch")
    assert "features are (4, 16), the student's (2, 16)" in expect_error("recipe", "small.toml", *sets)


def test_the_dense_model_has_no_teacher() -> None:
    assert "dense.distillation" in expect_error("recipe", "small.toml", *taught_by("dense.distillation=soft"))
