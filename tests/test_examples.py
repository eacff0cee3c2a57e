"""The programs in recipes/examples run on small models and generated data."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import vitcompress as vc
from vitcompress.io.tensors import save_tensors

EXAMPLES = Path(__file__).parents[1] / "recipes" / "examples"


def run(name: str, *arguments: str | Path, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "compress_checkpoint.py",
        "use_as_backbone.py",
        "my_method.py",
    }


def test_compress_checkpoint(tmp_path: Path) -> None:
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
    out = run("compress_checkpoint.py", *model_arguments, *training, "--protocol", "paper", cwd=tmp_path)
    assert "verified: True" in out and (tmp_path / "compressed" / "model.onnx").is_file()


def test_use_as_backbone(tmp_path: Path) -> None:
    dense = vc.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=3, num_heads=2, num_classes=10
    )
    vc.save_model(vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5)), tmp_path / "run")
    out = run("use_as_backbone.py", tmp_path / "run", cwd=tmp_path)
    assert "even or odd:" in out and (tmp_path / "even_digits" / "model.onnx").is_file()


def test_my_method(tmp_path: Path) -> None:
    assert "->" in run("my_method.py", cwd=tmp_path)
