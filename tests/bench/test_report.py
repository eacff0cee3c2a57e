"""A report shows what was measured."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts import build
from PIL import Image

from vitcompress.bench import suite
from vitcompress.bench.report import compare, page, run
from vitcompress.bench.report.measurements import bench_table, describe_conditions, describe_speedup, list_warnings
from vitcompress.cli.output import tables
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.onnx.export import export
from vitcompress.io.text import NOT_MEASURED, Table
from vitcompress.models.cost import count_cost
from vitcompress.models.create import input_config
from vitcompress.training.metrics import mcnemar

LOSS = "-0.6 points (p = 0.45), loses at most 1.83 points (95 %)"
CLASSES = ("ant", "bee", "cat", "dog", "eel")
COST = {
    "dense": {"params": 87338192, "macs": 17656811520, "macs_linear": 16934203392},
    "compressed": {"params": 54867152, "macs": 10932541440, "macs_linear": 10511020032},
}
PLAN = {
    "arch": "x",
    "arch_args": {},
    "removed": {},
    "appended": {},
    "folded": [],
    "kept": {},
    "heads": {},
    "standard": {},
}
PLAN["format"] = 1
STATED = {"command": None, "passed": True}


def accuracy(correct: int) -> dict[str, object]:
    return {
        "correct": correct,
        "correct5": 540,
        "top5": 1.0,
        "loss": 0.1,
        "total": 540,
        "top1": correct / 540,
        "top1_ci95": [correct / 540 - 0.01, correct / 540 + 0.01],
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A folder with a dense and a compressed file (here the same model), and its report."""
    folder = tmp_path_factory.mktemp("digits_hetdpt")
    model = build("plain", dtype=torch.float32)
    for name in ("dense.onnx", "model.onnx"):
        export(model, folder / name, input=input_config(model), classes=CLASSES)
    options = suite.BenchOptions("paper", batch=2, warmup=1, runs=20)
    bench = suite.run([folder / "dense.onnx", folder / "model.onnx"], options)
    plan = {
        **PLAN,
        "removed": {"blocks.1.attn": "norm_identity"},
        "kept": {"blocks.0.mlp": [0, 2, 5], "residual": [1, 3]},
        "appended": {"blocks.1": "gelu"},
        "folded": ["blocks.1.mlp"],
    }
    data = {
        "recipe": "digits_hetdpt",
        "model": {"arch": "x", "input": vars(input_config(model)), "classes": list(CLASSES)},
        "plan": plan,
        "widths": {"title": "Widths", "columns": ["block", "FFN"], "rows": [["blocks.0", "3 of 8"]]},
        "cost": COST,
        "accuracy": {
            "dense": accuracy(524),
            "compressed": accuracy(521),
            "mcnemar": {"only_a": 5, "only_b": 2, "p_value": 0.45},  # without an interval, as of version 1
        },
        "bench": [bench.to_dict()],
        "files": {name: (folder / name).stat().st_size for name in ("dense.onnx", "model.onnx")},
        "verify": {
            "passed": True,
            "checks": [{"name": "fold", "verdict": "passed", "value": 0.5, "tolerance": 1.0, "detail": "a|b"} | STATED],
        },
        "searched": "the dense model",
        "teacher": None,
        "published": {"source": "HetDPT, Table 1", "hardware": "H800", "top1": 81.8, "speedup": 1.58, "note": ""},
        "notes": ["short training"],
    }
    page.write_report(folder, data)
    return folder, data


def test_the_summary_shows_before_after_and_change(measured: tuple[Path, dict[str, object]]) -> None:
    rows = {row[0].split(" (")[0]: row[1:] for row in run.summary_table(measured[1]).rows}
    assert rows["accuracy, test images"] == ("97.0 % (524 of 540)", "96.5 % (521 of 540)", LOSS)
    assert rows["parameters"] == ("87.34 M", "54.87 M", "-37.2 %")
    assert rows["MACs per image"] == ("17.66 G", "10.93 G", "-38.1 %")
    assert {"latency, median", "throughput", "speed-up", "file size"} <= set(rows)


def test_a_pair_of_models_has_one_speed_up() -> None:
    """A stalled machine changes the throughput, not the median of interleaved rounds."""

    def row(name: str, rate: float, p50: float) -> dict[str, object]:
        about = {"runtime": "onnxruntime", "device": "cpu", "precision": "fp32", "batch": 2, "artifact": name}
        about |= {"compile": False, "cuda_graph": False, "transfers": False, "threads": 1}
        about["provider"] = "CPUExecutionProvider"
        return about | {"images_per_second": rate, "latency_ms": {"p50": p50}}

    def cells(high: float | None) -> list[tuple[str, ...]]:
        ratio = {
            "a": "dense.onnx",
            "b": "model.onnx",
            "batch": 2,
            "median": 1.5,
            "ci95": [1.4 if high else 0.0, high],
            "verdict": "faster" if high else "not distinguishable",
        }
        bench = [{"rows": [row("dense.onnx", 3831.0, 3.0), row("model.onnx", 121.0, 2.0)], "ratios": [ratio]}]
        rows = run.summary_table({"cost": COST, "bench": bench}).rows
        return [row[1:] for row in rows if "batch 2" in row[0]]

    measured = [("3 ms", "2 ms", ""), ("3,831 images/s", "121 images/s", "")]
    assert cells(1.6) == [*measured, ("", "", "1.50x (95 % interval 1.40 to 1.60): faster")]
    assert cells(None) == [*measured, ("", "", "1.50x (no interval)")]


def test_the_table_shows_the_speed_up_of_each_artifact_at_each_batch_size(
    measured: tuple[Path, dict[str, Any]],
) -> None:
    (row, *_) = measured[1]["bench"][0]["rows"]
    ratios = [{"median": 1.0 + n / 10, "ci95": [1.0, 2.0]} for n in range(4)]
    table = bench_table([{"rows": [row] * 6, "ratios": ratios}, {"rows": [row], "ratios": []}])
    cells = ["", "1.00x (1.00 to 2.00)", "1.10x (1.00 to 2.00)", "", "1.20x (1.00 to 2.00)", "1.30x (1.00 to 2.00)", ""]
    assert [cells[-1] for cells in table.rows] == cells and table.columns[-1] == "speed-up (95 %)"


def test_the_page_names_what_was_removed_measured_and_published(measured: tuple[Path, dict[str, object]]) -> None:
    page = (measured[0] / "report.md").read_text()
    for text in (
        "blocks.1.attn: norm_identity (replaced by its normalized input)",
        "folded into linear layers: blocks.1.mlp",
        "| blocks.0 | 3 of 8 |",
        "blocks.1: followed by gelu",
        "54,867,152",
        "As published by others",
        "H800",
        "short training",
        "Chosen on: the dense model.",
        "ant, bee, cat, dog, eel",
        "a\\|b",
    ):
        assert text in page
    assert run.read_report(measured[0]) == json.loads(json.dumps(measured[1]))


def test_published_figures_have_units_and_are_beside_our_counts() -> None:
    published = {"source": "SERo", "top1": 80.25, "params_m": 54.9, "macs_g": 10.5, "images_per_second": 1960.3}
    published |= {"speedup": 2.4, "macs_linear": True, "deviation": "widths differ", "note": "", "hardware": "A6000"}
    page = run.markdown({"recipe": "x", "cost": COST, "published": published})
    quoted = page.partition("not measured here\n\n")[2].splitlines()
    assert quoted == [
        "- top-1: 80.25 %",
        "- parameters: 54.9 M (counted here: 54.87 M)",
        "- MACs per image without attention products: 10.5 G (counted here: 10.51 G)",
        "- throughput: 1,960.3 images/s",
        "- speed-up: 2.4x",
        "- source: SERo",
        "- hardware: A6000",
        "- why the counts differ: widths differ",
    ]
    counted = run.markdown({"recipe": "x", "cost": COST, "published": published | {"macs_linear": False}})
    assert "- MACs per image: 10.5 G (counted here: 10.93 G)" in counted
    assert "As published" not in run.markdown({"recipe": "x", "cost": COST, "published": None})


def test_counts_are_written_in_full_and_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    check = {"name": "weights.model.onnx.bytes", "verdict": "passed", "value": 951836.0, "tolerance": 951836.0}
    checks = [{**check, "detail": ""}, {**check, "name": "fold", "value": 0.2284, "tolerance": 1.0, "detail": ""}]
    page = run.check_table(checks).rows
    assert [row[2:4] for row in page] == [("951,836", "951,836"), ("0.228", "1")]
    tables.print_checks(checks)
    shown = capsys.readouterr().out
    assert shown.count("951,836") == 2 and "0.228 " in shown


def test_an_engine_has_no_threads(measured: tuple[Path, dict[str, Any]]) -> None:
    (row, *_) = measured[1]["bench"][0]["rows"]
    table = bench_table([{"rows": [{**row, "threads": None}, {**row, "threads": 2}]}])
    assert [cells[table.columns.index("threads")] for cells in table.rows] == ["", "2"]


def test_remarks_appear_once_with_their_runtimes_and_short_names() -> None:
    def entry(runtime: str, *names: str, warnings: tuple[str, ...], notes: tuple[str, ...] = ()) -> dict[str, object]:
        return {
            "rows": [{"artifact": name, "runtime": runtime} for name in names],
            "warnings": warnings,
            "notes": notes,
        }

    files = entry(
        "onnxruntime", "/runs/x/dense.onnx", "/runs/x/model.onnx", warnings=("/runs/x/dense.onnx, batch 2: noisy",)
    )
    busy = ("others kept 1 core busy",)
    folders = entry("torch", "/runs/x/state/dense", "/runs/x", warnings=("/runs/x, batch 2: noisy", *busy))
    lines = list_warnings([{**files, "warnings": (*files["warnings"], *busy), "notes": ("device: cpu",)}, folders])
    assert lines == [
        "- note (onnxruntime): dense.onnx, batch 2: noisy",
        "- note (onnxruntime, torch): others kept 1 core busy",
        "- note (onnxruntime): device: cpu",
        "- note (torch): x, batch 2: noisy",
    ]


def test_a_remark_on_one_artifact_has_the_runtime_of_that_artifact() -> None:
    rows = [{"artifact": "dense.onnx", "runtime": "onnxruntime"}, {"artifact": "run", "runtime": "torch"}]
    entry: Any = {"rows": rows, "warnings": ["run, batch 1: noisy"], "notes": ["device: cpu"]}
    assert list_warnings([entry]) == ["- note (torch): run, batch 1: noisy", "- note (onnxruntime, torch): device: cpu"]
    entry["warnings"] = ["run: 4 threads on 2 cores; use --threads 2"]
    assert list_warnings([entry])[0] == "- note (torch): run: 4 threads on 2 cores; use --threads 2"


def test_removed_layers_are_in_natural_order() -> None:
    removed = {f"blocks.{number}.attn": "double" for number in (10, 11, 9)}
    page = run.markdown({"recipe": "x", "cost": COST, "plan": {**PLAN, "removed": removed}})
    assert page.index("blocks.9.attn") < page.index("blocks.10.attn") < page.index("blocks.11.attn")


def test_an_engine_is_beside_the_dense_one() -> None:
    files = {"dense.rtx.engine": 4_000_000, "model.rtx.engine": 3_000_000, "model.onnx": 1}
    rows = run.summary_table({"recipe": "x", "cost": COST, "files": files}).rows
    sizes = [row for row in rows if row[0].startswith("file size")]
    assert sizes == [("file size (rtx.engine)", "4.00 MB", "3.00 MB", "-25.0 %")]


def test_a_run_without_data_has_a_report_too() -> None:
    page = run.markdown({"recipe": "deit_b_hetdpt", "cost": COST})
    assert page.count(NOT_MEASURED) == 6


def test_runs_side_by_side(measured: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    folder, _ = measured
    comparison = compare.compare_runs({str(folder): run.read_report(folder)})
    compare.plot(comparison["runs"], tmp_path / "plot.png")
    dense, row = comparison["table"].rows
    assert dense[:2] == ("dense", "97.0 % (524 of 540)") and comparison["not_plotted"] == {}
    assert (*row[:2], row[-1]) == (folder.name, "96.5 % (521 of 540)", "1 passed")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width > 500
    with pytest.raises(InputError):
        compare.plot(comparison["runs"], tmp_path / "plot.exe")
    with pytest.raises(ArtifactError):
        run.read_report(tmp_path)


def test_an_undisturbed_measurement_with_an_interval_is_compared(measured: tuple[Path, dict[str, Any]]) -> None:
    report = deepcopy(measured[1])
    entry = report["bench"][0]
    disturbed = deepcopy(entry)
    disturbed["disturbed"], disturbed["ratios"][0]["median"] = ["another process"], 99.0
    short = deepcopy(entry)  # of fewer than 6 rounds
    short["ratios"][0] |= {"median": 88.0, "ci95": [None, None]}
    assert entry["ratios"][0]["ci95"][1] is not None

    def cells(*entries: Any) -> str:
        runs: Any = {"run": {**report, "bench": list(entries)}}
        return " | ".join(compare.compare_runs(runs)["table"].rows[1])

    assert "batch 2" in cells(disturbed, entry) and "99.0x" not in cells(disturbed, entry)
    assert "99.0x" in cells(disturbed)
    assert "88.0x" not in cells(short, entry)
    assert "88.0x (no interval)" in cells(short)


def test_a_comparison_names_the_setting_of_each_speed(measured: tuple[Path, dict[str, Any]]) -> None:
    """A speed-up in torch and one in ONNX Runtime, or in fp32 and int8, looked alike."""
    entry = measured[1]["bench"][0]
    runs = {}
    for name, change in {"a": {}, "b": {"runtime": "torch"}, "c": {"precision": "int8", "threads": 3}}.items():
        runs[name] = {**measured[1], "bench": [{**entry, "rows": [{**row, **change} for row in entry["rows"]]}]}
    table = compare.compare_runs({**runs, "d": {**measured[1], "bench": None}})["table"]
    threads = entry["rows"][0]["threads"]
    settings = [f"{name} cpu fp32, threads {threads}, batch 2" for name in ("onnxruntime", "torch")]
    cells = [row[table.columns.index("measured in")] for row in table.rows]
    assert cells == [settings[0], *settings, "onnxruntime cpu int8, threads 3, batch 2", ""]


def test_what_the_plot_shows(measured: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    (dense, _, no_ratio, before), (_, _, ratio, after) = compare.points({"run": measured[1]})
    assert (dense, no_ratio, before["top1"]) == ("dense", None, 524 / 540)
    assert after["top1"] == 521 / 540
    assert ratio["ci95"][0] <= ratio["median"]
    structure = {"run": {"recipe": "x", "cost": COST}}
    assert not list(compare.points(structure))
    with pytest.raises(InputError, match="both an accuracy and a speed"):
        compare.plot(structure, tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


def test_a_speed_up_without_an_interval_has_no_bar(
    measured: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, path: figures.append(figure))
    entry = measured[1]["bench"][0]
    for ends in ([1.2, 1.8], [0.0, None]):
        short = {**entry, "ratios": [{**entry["ratios"][0], "median": 1.5, "ci95": ends}]}
        compare.plot({"run": {**measured[1], "bench": [short]}}, tmp_path / "plot.png")
    bars = [figure.axes[0].containers[1] for figure in figures]
    assert [(bar.has_xerr, bar.has_yerr) for bar in bars] == [(True, True), (False, True)]


def test_the_plot_names_each_run_and_the_batch_size(
    measured: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one name in several folders looked alike, and long names were cut off."""
    figures: list[Any] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, path: figures.append(figure))
    runs = dict.fromkeys(("a/run", "b/run", "b/$x_1$", f"b/{'long_' * 12}", f"b/{'long_' * 30}"), measured[1])
    compare.plot(runs, tmp_path / "plot.png")
    (figure,) = figures
    figure.draw_without_rendering()
    (legend,) = figure.legends
    labels = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert labels == ["dense", "a/run", "b/run", r"\$x_1\$", "long_" * 12, "long_" * 30]
    assert legend.get_window_extent().x0 >= 0 and legend.get_window_extent().x1 <= figure.bbox.x1
    setting = f"onnxruntime cpu fp32, threads {measured[1]['bench'][0]['rows'][0]['threads']}, batch 2"
    assert figure.axes[0].get_xlabel() == f"times as fast as its dense model ({setting})"


def test_the_plot_of_runs_with_several_batch_sizes_states_that_of_each(
    measured: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label of the axis listed all of them, ran over both edges, and left open which run had which."""
    figures: list[Any] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, path: figures.append(figure))
    entry, runs = measured[1]["bench"][0], {}
    for batch in (2, 8, 256):
        ratio = {**entry["ratios"][0], "batch": batch}
        rows = [{**row, "batch": batch} for row in entry["rows"]]
        runs[f"run{batch}"] = {**measured[1], "bench": [{**entry, "rows": rows, "ratios": [ratio]}]}
    compare.plot(runs, tmp_path / "plot.png")
    (figure,) = figures
    figure.draw_without_rendering()
    label = figure.axes[0].xaxis.label
    assert label.get_window_extent().x0 >= 0 and label.get_window_extent().x1 <= figure.bbox.x1
    assert label.get_text() == "times as fast as its dense model"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    setting = f"onnxruntime cpu fp32, threads {entry['rows'][0]['threads']}, batch"
    assert names == ["dense", *(f"run{batch}, {setting} {batch}" for batch in (2, 8, 256))]


def test_the_summary_has_one_speed_of_each_setting(measured: tuple[Path, dict[str, Any]]) -> None:
    """Repeated measurements gave rows with the same name and other values. The latest undisturbed one is shown."""
    (entry, *_) = measured[1]["bench"]
    old, quiet, disturbed = (
        {**entry, "disturbed": bad, "ratios": [{**entry["ratios"][0], "median": median, "ci95": [median, median]}]}
        for median, bad in ((1.1, False), (1.2, False), (1.3, True))
    )
    for entries, shown in (([disturbed, quiet, old], "1.20x"), ([disturbed], "1.30x")):
        rows = run.summary_table({**measured[1], "bench": entries}).rows
        speeds = [row for row in rows if row[0].startswith(("latency", "throughput", "speed-up"))]
        assert len(speeds) == len({row[0] for row in speeds}) == 3
        assert speeds[-1][-1].startswith(shown)
    copied = {**quiet, "rows": [{**row, "transfers": True} for row in quiet["rows"]]}
    names = [row[0] for row in run.summary_table({**measured[1], "bench": [copied, quiet]}).rows]
    assert sum(name.startswith("speed-up") for name in names) == 2 and sum(" +transfers" in name for name in names) == 3


def test_the_summary_states_threads_if_they_differ(measured: tuple[Path, dict[str, Any]]) -> None:
    (entry, *_) = measured[1]["bench"]
    entries = [{**entry, "rows": [{**row, "threads": threads} for row in entry["rows"]]} for threads in (1, 2, None)]
    for count, named in ((1, 0), (2, 2), (3, 2)):
        rows = run.summary_table({**measured[1], "bench": entries[:count]}).rows
        names = [row[0] for row in rows if row[0].startswith("speed-up")]
        assert len(set(names)) == count and sum(", threads " in name for name in names) == named


def test_the_summary_separates_providers(measured: tuple[Path, dict[str, Any]]) -> None:
    (entry, *_) = measured[1]["bench"]
    entries = [
        {**entry, "rows": [{**row, "device": "cuda:0", "provider": provider} for row in entry["rows"]]}
        for provider in ("CUDAExecutionProvider", "TensorrtExecutionProvider")
    ]
    names = [row[0] for row in run.summary_table({**measured[1], "bench": entries}).rows]
    named = ["fp32 +TensorrtExecutionProvider" in name for name in names if name.startswith("speed-up")]
    assert named == [False, True]
    assert len({row[2] for row in bench_table(entries).rows}) == 2


def test_the_page_names_every_machine_and_input(measured: tuple[Path, dict[str, Any]]) -> None:
    """Measurements of the target, which `report --bench` adds, had the machine and the input of the first one."""
    (entry, *_) = measured[1]["bench"]
    assert describe_conditions([entry, entry]) == describe_conditions([entry])
    target = {**entry, "machine": {**entry["machine"], "cpu": "ARM N1"}}
    target["rows"] = [{**row, "runtime": "openvino", "input": "bytes of images", "tf32": True} for row in entry["rows"]]
    here, there, *_ = describe_conditions([entry, target])[1].replace("\\", "").splitlines()
    assert here.startswith(f"- onnxruntime: {entry['machine']['cpu']}, ") and there.startswith("- openvino: ARM N1, ")
    assert here.endswith("there is nothing to transfer; TF32 off") and there.endswith("bytes of images; TF32 on")


def test_the_cost_of_a_model_fits_the_report() -> None:
    counted = vars(count_cost(build("plain", dtype=torch.float32), (3, 8, 8)))
    rows = run.cost_table({"recipe": "x", "cost": {"dense": counted, "compressed": counted}}).rows
    assert rows[0] == ("parameters", f"{counted['params']:,}", f"{counted['params']:,}", "+0.0 %")


def test_an_exported_file_has_accuracy_speed_and_hash_in_one_row() -> None:
    known = {"file": "model.onnx", "sha256": "0123456789abcdef", "bytes": 712340, "precision": "fp32", "verified": True}
    speed = {"images_per_second": 9457.4, "batch": 256}
    engine = {**known, "file": "model.engine", "verified": False, "accuracy": None, "speed": None}
    slow = {**engine, "file": "model.xml", "speed": {"images_per_second": 0.2987, "batch": 1}}
    now = {"format": "onnx", "input": "uint8", "agreement": "passed, 0 of 64 differ"}
    files = [{**known, **now, "accuracy": accuracy(529), "speed": speed}, engine, slow]
    data = {"recipe": "x", "cost": COST, "artifacts": files}
    page = run.markdown(data)
    cells = "onnx | fp32 +uint8 | 712,340 | passed, 0 of 64 differ | 98.0 % (529 of 540) | 9,457 (batch 256)"
    assert f"| model.onnx | {cells} | 0123456789ab |" in page
    assert "| model.engine | - | fp32 | 712,340 | not run | - | - |" in page  # as earlier versions recorded it
    assert "| model.xml | - | fp32 | 712,340 | not run | - | 0.299 (batch 1) |" in page
    rows = {row[0]: row for row in run.summary_table(data).rows}
    assert rows["accuracy of model.onnx"][2] == "98.0 % (529 of 540)" and "accuracy of model.engine" not in rows


def test_files_that_only_engines_are_built_from_have_no_lines_of_python() -> None:
    input = {"size": [3, 8, 8], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 1.0}
    model = {"input": {**input, "crop_mode": "center"}}
    about = {"sha256": "0", "bytes": 1, "verified": True, "accuracy": None, "speed": None, "format": "onnx"}
    files = {"model.onnx": "fp32", "model.engine.onnx": "int8", "model-fp8.onnx": "fp8", "model-int8.onnx": "int8"}
    artifacts = [{**about, "file": name, "precision": precision} for name, precision in files.items()]
    artifacts.append({**about, "file": "fast.engine", "precision": "fp8", "format": "trt", "batch": [1, 8, 8]})
    page = run.markdown({"recipe": "x", "cost": COST, "artifacts": artifacts, "model": model})
    shown = [line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")]
    assert shown == ["model.onnx", "model-int8.onnx", "fast.engine"]


def test_equal_weights_of_several_blocks_are_one_row() -> None:
    def tensor(block: int, torch: list[int]) -> dict[str, object]:
        name = f"blocks.{block}.mlp.fc1.weight"
        turned = {"tensor": "val_3", "shape": torch[::-1], "bytes": 4096}
        files = {"model.onnx": turned, "edge.onnx": turned, "model.xml": {**turned, "shape": torch}}
        sizes = {"dense": {name: [128, 16]}, "planned": torch, "torch": torch}
        return {"name": name, "change": "sliced", **sizes, "files": files}

    gone = {**tensor(3, []), "change": "removed", "planned": None, "torch": None, "files": {}}
    about = {"bytes": 9, "of_model": 5, "of_constants": 1, "of_graph": 3, "parameters": 2}
    sizes = [{"file": name, **about} for name in ("edge.onnx", "model.onnx", "model.xml")]
    ways = {"tensors": [tensor(0, [64, 16]), tensor(1, [32, 16]), tensor(2, [64, 16]), gone], "files": sizes}
    verify = {"passed": True, "checks": [], "weights": ways}
    page = run.markdown({"recipe": "x", "cost": COST, "verify": verify})
    way = "| blocks.{0,2}.mlp.fc1.weight | sliced | 128x16 | 64x16 | 64x16 |"
    assert f"{way} 16x64, 4,096 B | edge.onnx, model.onnx |" in page and f"{way} 64x16, 4,096 B | model.xml |" in page
    assert "| blocks.1.mlp.fc1.weight | sliced | 128x16 | 32x16 |" in page
    assert "| blocks.3.mlp.fc1.weight | removed | 128x16 | - | - | - | all |" in page
    assert "model.onnx: 9 bytes, 5 of them the tensors of the model (2 parameters), 1 constants, 3 the graph" in page


def test_a_speed_up_is_shown_with_its_interval() -> None:
    near = {"median": 1.18, "ci95": [0.89, 1.26], "verdict": "not distinguishable"}
    assert describe_speedup(near) == "1.18x (95 % interval 0.89 to 1.26): not distinguishable"
    slow = {"median": 0.9962, "ci95": [0.9941, 0.9983], "verdict": "slower"}
    assert describe_speedup(slow) == "0.996x (95 % interval 0.994 to 0.998): slower", "1.00 is not slower"
    fast = {"median": 1.01, "ci95": [1.00004, 1.02], "verdict": "faster"}
    assert describe_speedup(fast) == "1.010x (95 % interval >1.000 to 1.020): faster"
    just = {"median": 0.99999, "ci95": [0.9, 0.999999], "verdict": "slower"}
    assert describe_speedup(just) == "<1.000x (95 % interval 0.900 to <1.000): slower"


def test_a_small_loss_is_neither_none_nor_above_its_limit() -> None:
    """24 and 30 of 50,000 images: one decimal would be -0.0 points, and -0.1 that are at most 0.09."""
    texts = []
    for lost in (24, 30):
        test = mcnemar(np.ones(50_000, bool), np.arange(50_000) >= lost)
        texts.append(re.sub(r" \(p = .*?\)", "", run.describe_difference(test)))
    assert texts == [
        "-0.048 points, loses at most 0.08 points (95 %)",
        "-0.06 points, loses at most 0.09 points (95 %)",
    ]


def test_numbers_are_aligned_right_and_words_left() -> None:
    table = Table("", ("name", "value", "how"), (("a", "1.5", "2 of 3"), ("b", "-", "not run"), ("c", "", "")))
    assert table.markdown().splitlines()[1] == "| --- | ---: | --- |"
    files = Table("", ("file", "bytes", "sha256"), (("model.onnx", "712,406", "94487752a12a"),))
    assert files.markdown().splitlines()[1] == "| --- | ---: | --- |"
