"""`vitcompress evaluate`: counts that equal a count by hand, and errors before anything is evaluated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from whole_runs import RecordedProgress

import vitcompress as vc
from vitcompress.bench import accuracy, suite
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.io.files import file_sha256, write_json
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.models.preprocessing import Preprocessing
from vitcompress.plan import Plan
from vitcompress.training.data import open_test
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader
from vitcompress.training.metrics import evaluate, mcnemar
from vitcompress.training.options import DataOptions

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}


TRACES: dict[Any, Any] = {}  # of the model with seed 1


def folder(path: Path, seed: int, **changes: int) -> Path:
    args = {**ARGS, **changes}
    write_model(path, create_model(ARCH, args, seed=seed), Plan(ARCH, args))
    return path


def with_fixed_batch(path: Path, batch: int) -> Path:
    model = onnx.load(str(path))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, str(path.with_name("fixed.onnx")))
    return path.with_name("fixed.onnx")


def test_counts_are_those_of_a_count_by_hand_in_torch_and_onnx(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1)
    model = load_model(run)
    config = input_config(model)
    export(model, run / "model.onnx", input=config, traces=TRACES)
    images = open_test(DataOptions()).test
    with torch.inference_mode():
        loader = EvalLoader(images, config, 100, Runtime(torch.device("cpu")))
        by_hand = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    artifacts = [run, run / "model.onnx", with_fixed_batch(run / "model.onnx", 7)]
    result = accuracy.run(list(map(str, artifacts)), accuracy.EvaluateOptions(data="digits"))
    assert result["images"] == len(images) >= 500 and result["classes"] == 10 and len(images) % 7
    assert [row["correct"] for row in result["rows"]] == [by_hand] * 3
    assert [row["runtime"] for row in result["rows"]] == ["torch", "onnxruntime", "onnxruntime"]
    assert all(row["correct"] <= row["correct5"] < row["total"] for row in result["rows"])
    assert result["mcnemar"][0]["p_value"] == 1.0
    fixed = vc.evaluate(artifacts[2], list(EvalLoader(images, config, 10, Runtime(torch.device("cpu")))))
    assert (fixed.correct, fixed.total) == (by_hand, len(images))


def test_all_are_opened_before_the_first_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.onnx").write_text("this is not a graph")
    run = folder(tmp_path / "run", seed=1)
    monkeypatch.setattr(accuracy, "_evaluate", lambda *args: pytest.fail("evaluated before all were open"))
    with pytest.raises(ArtifactError, match="is not an ONNX file"):
        accuracy.run([str(run), str(tmp_path / "text.onnx")], accuracy.EvaluateOptions(data="digits"))


def test_a_difference_is_tested_on_the_same_images(tmp_path: Path) -> None:
    runs = [folder(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))]
    result = accuracy.run([str(path) for path in runs], accuracy.EvaluateOptions(data="digits"))
    test, rows = result["mcnemar"][0], result["rows"]
    assert test["only_a"] - test["only_b"] == rows[0]["correct"] - rows[1]["correct"]
    masks = [torch.ones(result["images"], dtype=torch.bool) for _ in range(2)]
    masks[1][: test["only_a"]], masks[0][test["only_a"] :][: test["only_b"]] = False, False
    assert mcnemar(masks[0].numpy(), masks[1].numpy()).items() <= test.items()


def test_the_data_is_that_of_the_run_folder_unless_another_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1)
    (run / "recipe.toml").write_text(
        f'[model]\nname = "{ARCH}"\n[data]\nheldout = 0.25\n[[step]]\nmethod = "of_another_package"\n'
    )
    none, digits = accuracy.EvaluateOptions(), accuracy.EvaluateOptions(data="digits")
    assert accuracy.select_data([str(run / "model.onnx")], none).heldout == 0.25
    assert accuracy.select_data([str(run)], digits) == DataOptions()
    elsewhere = accuracy.select_data([str(run)], accuracy.EvaluateOptions(data="pictures", split="val2"))
    assert (elsewhere.source, elsewhere.path, elsewhere.test_split) == ("imagefolder", "pictures", "val2")
    with pytest.raises(InputError, match="have no split 'val2'"):
        accuracy.select_data([str(run)], replace(none, split="val2"))
    with pytest.raises(InputError, match="no data"):
        accuracy.select_data(["timm:vit_tiny_patch16_224"], none)


def test_another_number_of_classes_is_rejected(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1, num_classes=7)
    with pytest.raises(ArtifactError, match="has 7 classes, the data has 10"):
        accuracy.run([str(run)], accuracy.EvaluateOptions(data="digits"))


def test_a_trusted_engine_needs_no_usable_sidecar_for_its_classes(tmp_path: Path) -> None:
    (tmp_path / "model.engine").touch()
    (tmp_path / "model.engine.json").write_text("{")
    assert accuracy.compare_classes(tmp_path / "model.engine", ["a", "b"]) == ""


def test_other_names_of_another_number_of_classes_are_no_other_names(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1, num_classes=4)
    path = export(load_model(run), run / "model.onnx", input=input_config(load_model(run)), classes=list("pqrs")).path
    assert "assumed equal" in accuracy.compare_classes(path, ["a", "b", "c", "d"])
    with pytest.raises(ArtifactError, match="has 4 classes, the data has 3"):
        accuracy.compare_classes(path, ["a", "b", "c"])


def test_numbers_in_another_order_are_other_classes(tmp_path: Path) -> None:
    """torchvision sorts class folders by characters: 0, 1, 10, 2."""
    run = folder(tmp_path / "run", seed=1, num_classes=11)
    path = export(load_model(run), run / "model.onnx", input=input_config(load_model(run))).path
    numbers = [str(number) for number in range(11)]
    assert accuracy.compare_classes(path, numbers) == accuracy.compare_classes(path, list("abcdefghijk")) == ""
    with pytest.raises(ArtifactError, match=r"in another order: 0, 1, 2.*; the data has 0, 1, 10") as caught:
        accuracy.compare_classes(path, sorted(numbers))
    assert "torchvision" in str(caught.value.hint)


DIGIT_NAMES = tuple(str(number) for number in range(10))


def test_classes_that_do_not_match_by_name_are_rejected(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1)
    model = load_model(run)
    names = ("ten", *DIGIT_NAMES[1:])
    export(model, run / "model.onnx", input=input_config(model), classes=names, traces=TRACES)
    for artifact in (run, run / "model.onnx"):
        with pytest.raises(ArtifactError, match="trained with class ten, the data has 0 instead"):
            accuracy.run([str(artifact)], accuracy.EvaluateOptions(data="digits"))


@pytest.mark.parametrize("named_by", ["other.onnx", "plan"])
def test_the_data_has_the_order_of_the_class_names_of_a_run_folder_without_model_onnx(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the path has a `~`."""
    run, model = tmp_path / "run", create_model(ARCH, ARGS, seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    vc.save_model(model, run, classes=DIGIT_NAMES[::-1] if named_by == "plan" else None)
    if named_by != "plan":
        export(model, run / named_by, input=input_config(model), classes=DIGIT_NAMES[::-1], traces=TRACES)
    with torch.inference_mode():
        loader = EvalLoader(open_test(DataOptions()).test, input_config(model), 100, Runtime(torch.device("cpu")))
        by_hand = sum(int((model(x).argmax(1) == 9 - y).sum()) for x, y in loader)
    other = folder(tmp_path / "other", seed=1)
    export(model, other / "model.onnx", input=input_config(model), classes=DIGIT_NAMES, traces=TRACES)
    for artifact in (str(run), "~/run", *(f"~/run/{path.name}" for path in run.glob("*.onnx"))):
        (row,) = accuracy.run([artifact], accuracy.EvaluateOptions(data="digits"))["rows"]
        assert row["correct"] == by_hand
        with pytest.raises(ArtifactError, match="in another order: 0, 1, 2, 3, 4 and 5 more; the data has 9, 8"):
            accuracy.run([artifact, str(other)], accuracy.EvaluateOptions(data="digits"))


def test_data_and_benchmark_of_a_run_folder_in_the_home_folder_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path / "run", seed=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    (run / "recipe.toml").write_text(f'[model]\nname = "{ARCH}"\n[data]\nsource = "digits"\n')
    bench = suite.run([run], suite.BenchOptions(protocol="paper", batch=2, warmup=1, runs=2))
    write_json(run / "bench.json", [bench.to_dict()])
    row = accuracy.run(["~/run"])["rows"][0]
    assert row["speed"] is not None and row["speed"]["batch"] == 2


def test_completely_different_class_names_are_reported(tmp_path: Path) -> None:
    run, progress = folder(tmp_path / "run", seed=1), RecordedProgress()
    model = load_model(run)
    names = [f"n{number}" for number in range(10)]
    export(model, run / "model.onnx", input=input_config(model), classes=names, traces=TRACES)
    accuracy.run([str(run)], accuracy.EvaluateOptions(data="digits"), progress)
    assert "its classes are named n0, n1, n2, n3, n4 and 5 more, those of the data 0, 1," in progress.notes[0]


def test_the_figures_are_those_of_evaluate(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=3)
    model = load_model(run)
    images = open_test(DataOptions()).test
    runtime = Runtime(torch.device("cpu"))
    expected = evaluate(model, EvalLoader(images, input_config(model), 64, runtime), runtime).to_dict()
    row = accuracy.run([str(run)], accuracy.EvaluateOptions(data="digits"))["rows"][0]
    assert expected.items() <= row.items()


def test_rows_hold_the_speed_of_the_same_bytes_run_in_the_same_way(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1)
    model = load_model(run)
    export(model, run / "model.onnx", input=input_config(model), traces=TRACES)
    bench = suite.BenchOptions("paper", 2, 1, 3)
    measured = suite.run((run / "model.onnx", run / "model.onnx"), bench).to_dict()
    options = accuracy.EvaluateOptions(data="digits", batch=540)
    artifacts = [str(run / "model.onnx"), str(run)]
    assert [row["speed"] for row in accuracy.run(artifacts, options)["rows"]] == [None, None]
    write_json(tmp_path / "printed.json", measured)
    printed = accuracy.run(artifacts, replace(options, bench=tmp_path / "printed.json"))["rows"]
    write_json(run / "bench.json", [measured])
    rows = accuracy.run(artifacts, options)["rows"]
    expected = measured["rows"][0]
    assert rows == printed and rows[1]["speed"] is None  # torch was not measured
    assert rows[0]["sha256"] == expected["sha256"] == file_sha256(run / "model.onnx")
    assert {key: expected[key] for key in rows[0]["speed"]} == rows[0]["speed"] and rows[0]["speed"]["batch"] == 2
    rows = [{**expected, "threads": number} for number in (7, expected["threads"])]  # the first is the latest
    for measurements, threads in ((rows, expected["threads"]), (rows[:1], 7)):
        write_json(run / "bench.json", [{**measured, "rows": measurements}])
        speed = accuracy.run(artifacts, options)["rows"][0]["speed"]
        assert speed is not None and speed["threads"] == threads
    for other in ({"precision": "bf16"}, {"compile": True}, {"transfers": True}):
        write_json(run / "bench.json", [{**measured, "rows": [{**row, **other} for row in measured["rows"]]}])
        assert accuracy.run(artifacts, options)["rows"][0]["speed"] is None


def test_a_benchmark_of_other_files_is_rejected(tmp_path: Path) -> None:
    """The speed that is shown would be another one, of the run folder."""
    run, other = (folder(tmp_path / name, seed=seed) for seed, name in enumerate(("run", "other")))
    write_json(tmp_path / "b.json", suite.run((other,), suite.BenchOptions("paper", 2, 1, 3)).to_dict())
    options = accuracy.EvaluateOptions(data="digits", batch=540, bench=tmp_path / "b.json")
    with pytest.raises(InputError, match=r"b\.json measures none of these artifacts"):
        accuracy.run([str(run)], options)
    assert accuracy.run([str(run), str(other)], options)["rows"][1]["speed"] is not None


def test_a_model_without_a_file_has_no_recorded_speed(tmp_path: Path) -> None:
    """Neither it nor the row of its measurement has a hash: they were taken for equal."""
    run, timms = folder(tmp_path / "run", seed=1), "timm:test_vit?img_size=8&patch_size=4&in_chans=1&num_classes=10"
    write_json(tmp_path / "b.json", suite.run((timms, run), suite.BenchOptions("paper", 2, 1, 3)).to_dict())
    options = accuracy.EvaluateOptions(data="digits", batch=540, bench=tmp_path / "b.json")
    speeds = [row["speed"] for row in accuracy.run([timms, str(run)], options)["rows"]]
    assert speeds[0] is None and speeds[1] is not None
    with pytest.raises(InputError, match="measures none of these artifacts"):
        accuracy.run([timms], options)


def test_the_file_that_timm_exports_is_evaluated_as_its_model() -> None:
    name = "test_vit?img_size=8&patch_size=4&in_chans=1&num_classes=10"
    own = Preprocessing(mean=(0.5,), std=(0.5,), crop_pct=0.95, interpolation="bicubic")
    options = accuracy.EvaluateOptions(data="digits", batch=540, preprocessing=own)
    rows = accuracy.run([f"timm:{name}", f"timm-onnx:{name}"], options)["rows"]
    assert [row["runtime"] for row in rows] == ["torch", "onnxruntime"] and rows[0]["mistakes"] == rows[1]["mistakes"]


def test_a_file_of_that_name_outside_a_run_is_not_read(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", seed=1)
    model = load_model(run)
    export(model, run / "model.onnx", input=input_config(model), traces=TRACES)
    options = accuracy.EvaluateOptions(data="digits", batch=540)
    (tmp_path / "elsewhere").mkdir()
    alone = (run / "model.onnx").rename(tmp_path / "elsewhere" / "model.onnx")
    (run / "model.onnx.json").rename(tmp_path / "elsewhere" / "model.onnx.json")
    (tmp_path / "elsewhere" / "bench.json").write_text('{"answer": 42}')
    assert accuracy.run([str(alone)], options)["rows"][0]["speed"] is None
    (run / "bench.json").write_text('{"answer": 42}')
    with pytest.raises(ArtifactError, match="contains no measurement"):
        accuracy.run([str(run)], options)


@pytest.mark.parametrize("other", [{"rows": 3}, {"rows": [{"artifact": "model.onnx", "top1": 0.5}]}, [3]])
def test_a_file_without_a_measurement_is_rejected(other: object, tmp_path: Path) -> None:
    write_json(tmp_path / "other.json", other)
    with pytest.raises(ArtifactError, match="contains no measurement"):
        accuracy.run(["nowhere.onnx"], accuracy.EvaluateOptions(data="digits", bench=tmp_path / "other.json"))
