"""Engines of both libraries on a GPU: build, run, compare with the model, inspect, measure."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from vitcompress.cli import main
from vitcompress.exporters.runtimes import EXPORTERS, open_runner
from vitcompress.exporters.sidecar import read_sidecar
from vitcompress.exporters.tensorrt.export import layers_path
from vitcompress.exporters.tensorrt.layers import parse_layers
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import create_model
from vitcompress.plan import Plan

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 112, "embed_dim": 128, "depth": 2, "num_heads": 2, "num_classes": 10}  # heads of 64, 50 tokens
FLAVOURS = ("trt", "trt-rtx")
WHY_NOT = {name: EXPORTERS[name].unavailable() or EXPORTERS[name].cannot_run() for name in FLAVOURS}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(all(WHY_NOT.values()), reason="; ".join(f"{name}: {why}" for name, why in WHY_NOT.items())),
]


def run_command(*words: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module", params=FLAVOURS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine in fp16, exported from a run folder on the command line."""
    if why := WHY_NOT[request.param]:
        pytest.skip(why)
    run = tmp_path_factory.mktemp(request.param) / "run"
    write_model(run, create_model(ARCH, ARGS), Plan(ARCH, ARGS))
    options = ("--precision", "fp16", "--batch", "1:4:8", "--workspace", "1G")
    options += ("--optimization-level", "2") if request.param == "trt" else ()
    done = CliRunner().invoke(main, ["export", str(run), "--format", request.param, *options, "--json"])
    assert done.exit_code in (0, 1), done.output  # 1: checks of so small an engine may fail
    return run / json.loads(done.stdout)["path"]


@torch.inference_mode()
def expected(engine: Path, images: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = load_model(engine.parent)(images)
    return logits


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within the limit of the agreement checks in fp16."""
    return float((got - want).abs().max()) <= 1e-2 * float(want.abs().max())


IMAGES = torch.randn(8, 3, 112, 112, generator=torch.Generator().manual_seed(0))


def test_it_agrees_with_the_model_and_the_folder_verifies(engine: Path) -> None:
    known = read_sidecar(engine)
    assert known["verified"] is True and known["verification"]["verdict"] == "passed"
    result = run_command("verify", engine.parent)
    assert {c["verdict"] for c in result["checks"] if c["name"].startswith(f"agreement.{engine.name}")} == {"passed"}


def test_a_version_compatible_engine_is_verified_where_it_is_built(engine: Path) -> None:
    """Its code is trusted there. Later it needs --trust, and is no failed check without."""
    if read_sidecar(engine)["format"] != "trt":
        pytest.skip("TensorRT for RTX has no such engines")
    words = ("--format", "trt", "--precision", "fp16", "--version-compatible", "--out")
    assert run_command("export", engine.parent, *words, engine.with_name("compatible.engine"))["verified"] is True
    later = run_command("verify", engine.parent)["checks"]
    assert [c["verdict"] for c in later if c["name"] == "agreement.compatible.engine"] == ["not_run"]


def test_it_runs_at_every_batch_of_its_range_and_at_no_other(engine: Path) -> None:
    with closing(open_runner(engine)) as runner:
        for batch in (1, 3, 8):
            assert close(runner(IMAGES[:batch]), expected(engine, IMAGES[:batch]))
        many = IMAGES.repeat(2, 1, 1, 1)[:11]
        assert close(runner.predict(many), expected(engine, many))
        about = runner.describe()
        assert about["device"] == "cuda:0" and about["device_name"] and about["batch_range"] == [1, 4, 8]
    rejected = CliRunner().invoke(main, ["bench", str(engine), "--batch", "9", "--json"])
    assert rejected.exit_code == 2 and "takes batches of 1 to 8, got 9" in json.loads(rejected.stdout)["error"]


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_recipe_that_would_measure_another_batch_is_rejected(name: str) -> None:
    words = ["recipe", "digits_hetdpt", "--dry-run", "--export", name, "--set", "export.batch=[1,8,64]", "--json"]
    rejected = CliRunner().invoke(main, words)
    assert rejected.exit_code == 2 and "bench.batch is 256, outside export.batch" in rejected.stdout
    assert CliRunner().invoke(main, [*words, "--set", "bench.batch=64"]).exit_code == 0


def test_its_layers_are_recorded_and_heavy_ones_compute_in_half_precision(engine: Path) -> None:
    layers = parse_layers(layers_path(engine).read_text())
    assert any(layer.heavy for layer in layers)
    checks = {check["name"]: check for check in read_sidecar(engine)["build"]["truth"]}
    assert set(checks) == {"engine.precision", "engine.attention", "engine.copies"}
    assert checks["engine.precision"]["verdict"] == "passed", checks


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_alternating_bindings_use_their_own_images(cuda_graph: bool, engine: Path) -> None:
    with closing(open_runner(engine, cuda_graph=cuda_graph)) as runner:
        parts = [IMAGES[:1], IMAGES[1:5]]
        bound: list[Any] = [runner.bind(part) for part in parts]
        for turn in (0, 1, 0, 1):
            times, wall = bound[turn].timed(3)
            assert len(times) == 3 and min(times) > 0 and wall > 0
            got = runner._process.logits(turn + 1)  # type: ignore[attr-defined]
            assert close(got, expected(engine, parts[turn]))


@pytest.mark.parametrize("settings", [(), ("--cuda-graph",), ("--transfers",), ("--cuda-graph", "--transfers")])
def test_bench_measures_every_setting_beside_the_model_in_torch(settings: tuple[str, ...], engine: Path) -> None:
    options = ("--protocol", "paper", "--runs", "20", "--batch", "1,8")
    result = run_command("bench", engine, engine.parent, *options, *settings)
    assert not [warning for warning in result["warnings"] if "devices" in warning]
    rows = result["rows"]
    assert [(row["runtime"].startswith("TensorRT"), row["batch"]) for row in rows] == [
        (True, 1),
        (False, 1),
        (True, 8),
        (False, 8),
    ]
    for row in rows:
        assert row["clock"] == "cuda events" and row["images_per_second"] > 0 and min(row["samples_ms"][0]) > 0
        assert (row["cuda_graph"], row["transfers"]) == ("--cuda-graph" in settings, "--transfers" in settings)


def test_the_timing_cache_is_reused(engine: Path, tmp_path: Path) -> None:
    if read_sidecar(engine)["format"] != "trt":
        pytest.skip("TensorRT for RTX has no such cache")
    cache, out = tmp_path / "kernels.bin", tmp_path / "model.engine"
    words = ["export", str(engine.parent), "--format", "trt", "--timing-cache", str(cache), "--out", str(out)]
    for _ in range(2):
        assert CliRunner().invoke(main, words).exit_code in (0, 1)
        assert cache.stat().st_size > 0
    cache.write_bytes(b"nothing of the kind")
    rejected = CliRunner().invoke(main, words)
    assert rejected.exit_code == 2 and "not a timing cache" in rejected.stderr
