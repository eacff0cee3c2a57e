"""Files that do not say how their images are prepared: told in timm's terms, never guessed in silence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from vitcompress.bench import accuracy
from vitcompress.bench.preprocessing import Preparation
from vitcompress.cli import main
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan
from vitcompress.training.data import DataOptions, open_test

MEAN, STD = 0.25, 0.5
ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}


def saved(path: Path, nodes: list[Any], takes: Any, held: dict[str, np.ndarray]) -> Path:
    """ONNX as other tools write it, without metadata."""
    gives = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 10])
    tensors = [numpy_helper.from_array(value, name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "g", [takes], [gives], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.save(model, str(path))
    return path


# Class c for images whose mean, as it comes in, is near c / 9.
CLASSIFIER = [
    helper.make_node("Flatten", ["images"], ["flat"]),
    helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"]),
]
WEIGHTS = {
    "weight": np.tile(np.linspace(0, 1, 10, dtype=np.float32) / 32, (64, 1)),
    "bias": -(np.linspace(0, 1, 10, dtype=np.float32) ** 2),
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    takes = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 1, 8, 8])
    return saved(tmp_path / "foreign.onnx", CLASSIFIER, takes, WEIGHTS)


def of_bytes(folder: Path, sides: tuple[int, int, int] = (8, 8, 1)) -> Path:
    """The same with the normalisation by MEAN and STD inside."""
    nodes = [
        helper.make_node("Cast", ["bytes"], ["numbers"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["numbers", "factor"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "offset"], ["images"]),
        *CLASSIFIER,
    ]
    inside = {"factor": np.float32(1 / (255 * STD)).reshape(1), "offset": np.float32(MEAN / STD).reshape(1)}
    takes = helper.make_tensor_value_info("bytes", onnx.TensorProto.UINT8, ["batch", *sides])
    return saved(folder / "bytes.onnx", nodes, takes, {**WEIGHTS, **inside})


def evaluated(path: Path, **told: Any) -> dict[str, Any]:
    options = accuracy.EvaluateOptions(data="digits", preparation=Preparation(**told))
    row: dict[str, Any] = accuracy.run([str(path)], options)["rows"][0]
    return row


def test_images_are_prepared_as_told(foreign: Path) -> None:
    """Against a count by hand in numpy, and with other values another count."""
    _, images = open_test(DataOptions())
    pixels = np.stack([np.asarray(images[i][0], np.float32) / 255 for i in range(len(images))]).reshape(len(images), -1)
    labels = np.array([images[i][1] for i in range(len(images))])
    level = ((pixels - MEAN) / STD).mean(1, keepdims=True)
    classes = np.linspace(0, 1, 10)
    right = int(((2 * level * classes - classes**2).argmax(1) == labels).sum())
    row = evaluated(foreign, mean=(MEAN,), std=(STD,), crop_pct=1.0)
    assert row["correct"] == right != evaluated(foreign, mean=(0.0,), std=(1.0,), crop_pct=1.0)["correct"]
    assert row["input"]["mean"] == (MEAN,) and row["input"]["interpolation"] == "bicubic"


def test_a_file_that_takes_bytes_is_given_them_as_they_are(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It normalises them itself, so that it is as right as the one that is told how to."""
    path = of_bytes(foreign.parent)
    told = evaluated(foreign, mean=(MEAN,), std=(STD,), crop_pct=1.0)
    assert evaluated(path, crop_pct=1.0)["correct"] == told["correct"]
    assert evaluated(path, crop_pct=0.5)["correct"] != told["correct"]  # what is said of the crop reaches it
    arguments = ["evaluate", str(foreign), str(path), "--data", "digits", "--mean", str(MEAN), "--std", str(STD)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--crop-pct", "1", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and [row["correct"] for row in json.loads(out)["rows"]] == [told["correct"]] * 2
    said = " ".join(err.split())
    assert "it takes bytes, and so normalises them itself; --mean and --std did not touch it; told: crop_pct 1" in said
    assert "assumed, as timm does: interpolation bicubic, crop_mode center" in said


def test_bytes_with_channels_first_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="bytes of 1 x 8 x 8, which with channels last are no images"):
        evaluated(of_bytes(tmp_path, (1, 8, 8)))


def test_nothing_is_guessed_and_what_is_assumed_is_said(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for told in ({}, {"mean": (0.5,)}, {"interpolation": "bilinear"}):
        with pytest.raises(ArtifactError, match="does not say how its images are prepared") as error:
            evaluated(foreign, **told)
        assert "--mean and --std" in str(error.value.hint)
    words = ["evaluate", str(foreign), "--data", "digits", "--mean", "0.5", "--std", "0.5", "--crop-mode", "squash"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    said = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(said.out)["rows"][0]["input"]["crop_mode"] == "squash"
    assert "told: mean 0.5, std 0.5, crop_mode squash; assumed, as timm does:" in said.err
    assert "interpolation bicubic, crop_pct 0.875" in " ".join(said.err.split())


@pytest.mark.parametrize(
    "told",
    [{"mean": (0.5, 0.5, 0.5), "std": (0.5,)}, {"mean": (0.5,), "std": (0.0,)}, {"mean": (0.1,), "std": (np.nan,)}],
)
def test_values_that_cannot_be_are_refused(told: dict[str, Any], foreign: Path) -> None:
    with pytest.raises(InputError, match=r"--mean has 3 values|--(mean|std) cannot be"):
        evaluated(foreign, **told)


def test_a_file_that_says_it_is_not_contradicted(tmp_path: Path) -> None:
    model, plan = create_model(ARCH, ARGS), Plan(ARCH, ARGS)
    write_model(tmp_path / "run", model, plan)
    config = input_config(model)
    path = tmp_path / "run" / "model.onnx"
    export(model, path, input=config)
    same = {"mean": config.mean, "std": config.std, "crop_pct": config.crop_pct, "crop_mode": config.crop_mode}
    for artifact in (path, tmp_path / "run"):
        assert evaluated(artifact, **same)["correct"] == evaluated(artifact)["correct"]
        with pytest.raises(ArtifactError, match=r"says mean 0\.5, not 0\.4"):
            evaluated(artifact, mean=(0.4,))
        with pytest.raises(ArtifactError, match="says interpolation"):
            evaluated(artifact, interpolation="hamming")
