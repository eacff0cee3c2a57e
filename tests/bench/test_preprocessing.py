"""Files that do not record their preprocessing: options in timm's terms, and every assumption is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from vitcompress.bench import accuracy
from vitcompress.cli import main
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.io.validation import options_of
from vitcompress.models.checkpoint import write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.models.preprocessing import Preprocessing
from vitcompress.plan import Plan
from vitcompress.training.data import open_test
from vitcompress.training.options import DataOptions

MEAN, STD = 0.25, 0.5
ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}


def save(path: Path, nodes: list[Any], images: Any, tensors: dict[str, np.ndarray]) -> Path:
    """ONNX as other tools write it, without metadata."""
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 10])
    constants = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [images], [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.save(model, str(path))
    return path


# Class c for inputs with a mean near c / 9.
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
    images = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 1, 8, 8])
    return save(tmp_path / "foreign.onnx", CLASSIFIER, images, WEIGHTS)


def uint8_file(folder: Path, sides: tuple[int, int, int] = (8, 8, 1)) -> Path:
    """The same with the normalization by MEAN and STD inside."""
    nodes = [
        helper.make_node("Cast", ["bytes"], ["numbers"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["numbers", "factor"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "offset"], ["images"]),
        *CLASSIFIER,
    ]
    inside = {"factor": np.float32(1 / (255 * STD)).reshape(1), "offset": np.float32(MEAN / STD).reshape(1)}
    images = helper.make_tensor_value_info("bytes", onnx.TensorProto.UINT8, ["batch", *sides])
    return save(folder / "bytes.onnx", nodes, images, {**WEIGHTS, **inside})


def evaluate(path: Path, **options: Any) -> Any:
    settings = options_of(accuracy.EvaluateOptions, {"data": "digits", "preprocessing": options}, "evaluate")
    return accuracy.run([str(path)], settings)["rows"][0]


def test_options_are_used(foreign: Path) -> None:
    """Equal to a count by hand in numpy; other values give another count."""
    images = open_test(DataOptions()).test
    pixels = np.stack([np.asarray(images[i][0], np.float32) / 255 for i in range(len(images))]).reshape(len(images), -1)
    labels = np.array([images[i][1] for i in range(len(images))])
    level = ((pixels - MEAN) / STD).mean(1, keepdims=True)
    classes = np.linspace(0, 1, 10)
    right = int(((2 * level * classes - classes**2).argmax(1) == labels).sum())
    row = evaluate(foreign, mean=(MEAN,), std=(STD,), crop_pct=1.0)
    assert row["correct"] == right != evaluate(foreign, mean=(0.0,), std=(1.0,), crop_pct=1.0)["correct"]
    assert row["input"]["mean"] == (MEAN,) and row["input"]["interpolation"] == "bicubic"


def test_a_uint8_file_receives_the_bytes_unchanged(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It normalizes them itself, so its accuracy equals that of the float file with mean and std."""
    path = uint8_file(foreign.parent)
    reference = evaluate(foreign, mean=(MEAN,), std=(STD,), crop_pct=1.0)
    assert evaluate(path, crop_pct=1.0)["correct"] == reference["correct"]
    assert evaluate(path, crop_pct=0.5)["correct"] != reference["correct"]  # the crop is applied
    arguments = ["evaluate", str(foreign), str(path), "--data", "digits", "--mean", str(MEAN), "--std", str(STD)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--crop-pct", "1", "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and [row["correct"] for row in json.loads(out)["rows"]] == [reference["correct"]] * 2
    text = " ".join(err.split())
    assert "it takes uint8 images and normalizes them itself; --mean and --std have no effect on it" in text
    assert "used: crop_pct 1; assumed, timm's defaults: interpolation bicubic, crop_mode center" in text


def test_uint8_input_with_channels_first_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="uint8 input of 1 x 8 x 8, which is no image with channels last"):
        evaluate(uint8_file(tmp_path, (1, 8, 8)))


def test_mean_and_std_are_required_and_other_values_assumed(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"mean": (0.5,)}, {"interpolation": "bilinear"}):
        with pytest.raises(ArtifactError, match="does not record its preprocessing") as error:
            evaluate(foreign, **options)
        assert "--mean and --std" in str(error.value.hint)
    words = ["evaluate", str(foreign), "--data", "digits", "--mean", "0.5", "--std", "0.5", "--crop-mode", "squash"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0 and json.loads(out)["rows"][0]["input"]["crop_mode"] == "squash"
    text = " ".join(err.split())
    assert "used: mean 0.5, std 0.5, crop_mode squash; assumed, timm's defaults:" in text
    assert "interpolation bicubic, crop_pct 0.875" in text


@pytest.mark.parametrize(
    "options",
    [
        {"mean": (0.5, 0.5, 0.5), "std": (0.5,)},
        {"mean": (0.5,), "std": (0.0,)},
        {"mean": (0.1,), "std": (np.nan,)},
        {"mean": (0.5,), "std": (0.5,), "crop_pct": np.nan},
    ],
)
def test_invalid_values_are_rejected(options: dict[str, Any], foreign: Path) -> None:
    with pytest.raises(InputError, match=r"mean has 3 values|(std\.0|crop_pct)   got (0\.0|nan), expected"):
        evaluate(foreign, **options)


def test_options_must_not_contradict_the_file(tmp_path: Path) -> None:
    model, plan = create_model(ARCH, ARGS), Plan(ARCH, ARGS)
    write_model(tmp_path / "run", model, plan)
    config = input_config(model)
    path = tmp_path / "run" / "model.onnx"
    export(model, path, input=config)
    same = {"mean": config.mean, "std": config.std, "crop_pct": config.crop_pct, "crop_mode": config.crop_mode}
    for artifact in (path, tmp_path / "run"):
        assert evaluate(artifact, **same)["correct"] == evaluate(artifact)["correct"]
        with pytest.raises(ArtifactError, match=r"records mean 0\.5, not 0\.4"):
            evaluate(artifact, mean=(0.4,))
        with pytest.raises(ArtifactError, match="records interpolation"):
            evaluate(artifact, interpolation="hamming")


@pytest.mark.parametrize(("channels", "allowed"), [(1, "give 1 value"), (3, "give 1 value or 3")])
def test_the_number_of_values_per_channel(channels: int, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        Preprocessing(mean=(0.5, 0.5)).changes_for(channels, "the model")
    assert caught.value.hint == allowed
