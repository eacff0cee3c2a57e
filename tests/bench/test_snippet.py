"""The ten lines in a report classify an image as the model does, without vitcompress."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import build
from PIL import Image

from vitcompress.bench.report import run
from vitcompress.bench.report.snippet import snippet
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.runtimes import open_runner
from vitcompress.models.cost import count_cost
from vitcompress.models.create import InputConfig, input_config
from vitcompress.training.metrics import random_images

CLASSES = ("ant", "bee", "cat", "dog", "eel")


def test_the_ten_lines_classify_a_jpeg_without_vitcompress(tmp_path: Path) -> None:
    model = build("plain", dtype=torch.float32)
    export(model, tmp_path / "model.onnx", input=input_config(model), classes=CLASSES)
    about = {"arch": "x", "input": vars(input_config(model)), "classes": list(CLASSES)}
    counted = vars(count_cost(model, (3, 8, 8)))
    data = {"recipe": "x", "model": about, "cost": {"dense": counted, "compressed": counted}}
    file = {"file": "model.onnx", "sha256": "0", "bytes": 1, "precision": "fp32", "verified": True}
    page = run.markdown({**data, "artifacts": [{**file, "accuracy": None, "speed": None}]})
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) == 10
    for other in ({"crop_mode": "border"}, {"crop_pct": 1.1}, {"size": (2, 8, 8)}):
        unreadable = {**data, "model": {**about, "input": {**about["input"], **other}}}
        assert "```python" not in run.markdown({**unreadable, "artifacts": [{**file, "accuracy": None, "speed": None}]})
    assert "vitcompress" not in code
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8).astype(np.uint8))
    image.save(tmp_path / "photo.jpg")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == best(tmp_path / "model.onnx", tmp_path / "photo.jpg")


class OnePhoto:
    """A data set of one image."""

    labels = np.zeros(1, int)
    prepared = False  # images, not tensors

    def __init__(self, path: Path, mode: str = "RGB") -> None:
        self.path, self.mode = path, mode

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.path).convert(self.mode), 0


def best(onnx: Path, photo: Path) -> str:
    runner = open_runner(onnx)
    assert runner.input is not None
    return CLASSES[int(runner(random_images(OnePhoto(photo), runner.input, 1, 0)).argmax())]


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (33, 33), (97, 50)])
@pytest.mark.parametrize(
    "input",
    [
        InputConfig((3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", 0.9, "center"),
        InputConfig((3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear", 1.0, "squash"),
        InputConfig((3, 16, 24), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", 0.8, "center"),
        InputConfig((1, 8, 8), (0.5,), (0.5,), "bicubic", 1.0, "center"),
    ],
    ids=["center", "squash", "wide", "gray"],
)
def test_the_ten_lines_preprocess_images_like_the_evaluation(
    input: InputConfig, size: tuple[int, int], tmp_path: Path
) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (size[1], size[0], 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    file = {"file": "model.onnx", "precision": "fp32"}
    lines = snippet(vars(input), file, image=str(tmp_path / "photo.png")).splitlines()
    scope: dict[str, object] = {}
    exec("\n".join([*lines[:2], *lines[4:9]]), scope)  # without the session and the printed class
    photo = OnePhoto(tmp_path / "photo.png", "L" if input.size[0] == 1 else "RGB")
    expected = random_images(photo, input, 1, 0).numpy()
    # timm scales by 255 and normalizes in float32, the lines in float64: four roundings of values up to 1 / std.
    atol = 4 * np.finfo(np.float32).eps * 2 / min(input.std)
    np.testing.assert_allclose(scope["images"], expected, rtol=0, atol=atol)


def test_the_lines_name_a_provider_that_computes_in_the_precision() -> None:
    """The CPU provider has no kernels for bf16."""
    input = vars(InputConfig((3, 8, 8), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0, "center"))
    assert 'providers=["CUDAExecutionProvider"]' in snippet(input, {"file": "model.onnx", "precision": "bf16"})
