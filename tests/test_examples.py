"""The programs in recipes/examples run on small models and generated data."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from packages import write_package
from PIL import Image

import vitcompress as vc
from vitcompress.cli import main
from vitcompress.families import FAMILIES
from vitcompress.io.tensors import save_tensors

EXAMPLES = Path(__file__).parents[1] / "recipes" / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example as a program with these arguments in `tmp_path`, on the CPU; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run_example(name: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "compress_checkpoint.py",
        "use_as_backbone.py",
        "my_exporter.py",
        "my_family.py",
        "my_method.py",
    }


def test_compress_checkpoint(tmp_path: Path, run: Callable[..., str]) -> None:
    for split, count in (("train", 8), ("val", 4)):
        for label, level in (("dark", 0), ("light", 128)):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = np.random.default_rng(index).integers(level, level + 127, (40, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    model = vc.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2)
    save_tensors(tmp_path / "mine.safetensors", model.state_dict())
    model_arguments = (
        "--model",
        "vit_tiny_patch16_224",
        "--weights",
        tmp_path / "mine.safetensors",
        "--img-size",
        "32",
    )
    training = ("--data", tmp_path / "data", "--classes", "2", "--epochs", "1", "--batch-size", "8")
    out = run("compress_checkpoint.py", *model_arguments, *training, "--protocol", "paper")
    assert "verified: True" in out and (tmp_path / "compressed" / "model.onnx").is_file()


def test_use_as_backbone(tmp_path: Path, run: Callable[..., str]) -> None:
    dense = vc.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=3, num_heads=2, num_classes=10
    )
    vc.save_model(vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5)), tmp_path / "run")
    out = run("use_as_backbone.py", tmp_path / "run")
    assert "even or odd:" in out and (tmp_path / "even_digits" / "model.onnx").is_file()


def test_my_family(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More in tests/families/test_family_of_a_package.py."""
    monkeypatch.setitem(FAMILIES, "cait", FAMILIES["vit"])  # so that it is removed after the test
    assert "->" in run("my_family.py")


def test_my_method(run: Callable[..., str]) -> None:
    assert "->" in run("my_method.py")


def test_my_exporter(tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the command line, declared as an entry point."""
    assert "agrees with the model" in run("my_exporter.py")
    source = (EXAMPLES / "my_exporter.py").read_text()
    monkeypatch.syspath_prepend(
        write_package(tmp_path / "site", "exporters", "ort = my_exporter:ORT", my_exporter=source)
    )
    model = vc.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    vc.save_model(model, "run")
    output = CliRunner().invoke(main, ["export", "run", "--format", "ort"], standalone_mode=False)
    assert "takes float32 images, NCHW: batch x 3 x 8 x 8" in output.output, output
    assert vc.verify("run").passed
    sidecar = Path("run/model.ort.json")
    sidecar.write_text(sidecar.read_text().replace('"fp32"', '"fp16"'))
    assert not vc.verify("run").passed
