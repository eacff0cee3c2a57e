"""The smallest run of every part of the campaign on a GPU. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch

from tests.campaigns import gpu

RECIPE = """\
model = { name = "test_vit", weights = "random", args = { num_classes = 10 } }
data = { source = "digits" }
step = [{ method = "fixed", activation = [0], attention = [1] }]
"""
SMALL = ("--batch", "2", "--runs", "6", "--images", "4", "--scored", "4", "--model", "test_vit", "--large", "test_vit")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return str(path)


def test_speeds_are_compared_with_macs_on_the_device(recipe: str, tmp_path: Path) -> None:
    forms = ("torch fp32", "onnx fp32", "onnx fp32+23", "trt fp32")
    out, words = tmp_path / "speed.json", ("--recipes", recipe, "--forms", *forms, *SMALL)
    assert gpu.main(["speed", "--out", str(out), *words]) == 0
    written = json.loads(out.read_text())
    lines = {line["what"].split(", ")[1]: line for line in written["figures"]}
    for form in forms[:3]:
        line = lines[form]
        assert line["ratio"] * line["macs_ratio"] == pytest.approx(line["speedup"]) and line["macs_ratio"] > 1
        assert [row["artifact"] for row in line["rows"]] == ["dense", "pruned"]
        assert all(row["samples_ms"] and row["device"].startswith(gpu.DEVICE) for row in line["rows"])
        assert all(row["protocol"] == "paper-10/6/2" for row in line["rows"])
    assert gpu.DEVICE == "cuda" or "not measured" in lines["trt fp32"]["text"]
    assert written["settings"]["runs"] == 6 and written["machine"]["versions"]["torch"]


def test_every_other_part_measures(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "with_another_process", lambda folder, options: {"text": "left out: takes seconds"})
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(gpu, "SMALL_SIZE", 64)
    parts, out = [part for part in gpu.PARTS if part != "speed"], tmp_path / "others.json"
    assert gpu.main([*parts, "--out", str(out), "--recipes", recipe, "--giant", recipe, *SMALL]) == 0
    lines = json.loads(out.read_text())["figures"]
    assert not [line for line in lines if "not measured" in line.get("text", "")]
    assert {line["what"].split(",")[0] for line in lines} >= {"giant", "transfer entropy", "UP-ViT", "training step"}


def test_a_recipe_or_a_model_that_fails_does_not_end_the_campaign(recipe: str, tmp_path: Path) -> None:
    out, words = tmp_path / "speed.json", ("--recipes", "no_recipe", recipe, "--forms", "torch fp32", *SMALL)
    words = (*words, "--model", "no_model")
    assert gpu.main(["harness", "kernels", "speed", "--out", str(out), *words]) == 0
    lines = {line["what"]: line for line in json.loads(out.read_text())["figures"]}
    failed = [what for what, line in lines.items() if line.get("text", "").startswith("not measured: ")]
    assert failed == ["harness", "no_recipe, kernels", "no_recipe"]
    assert lines[f"{recipe}, torch fp32"]["speedup"]
