"""The smallest run of every kind of part of `bench.self`. No time is asserted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vitcompress.bench.artifacts import synthetic_images
from vitcompress.bench.self import __main__ as speed
from vitcompress.bench.self import methods, parts, processes, runtimes
from vitcompress.errors import OutputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.families import family_of
from vitcompress.methods.upvit.importance import Importance, components
from vitcompress.models.create import create_model, input_config
from vitcompress.plan import Plan

TINY, DEPTH = "test_vit", 6


def test_a_part_prints_and_writes_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert speed.main(["gates", "--arch", TINY, "--batch", "2", "--runs", "6", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [figure["what"] for figure in written["figures"]] == list(methods.GATES)
    for figure in written["figures"]:
        assert figure["ci95"][0] <= figure["ratio"] <= figure["ci95"][1]
        assert [len(blocks) for blocks in figure["samples_ms"].values()] == [6, 6]
    assert written["settings"]["parts"] == ["gates"]
    assert written["machine"]["versions"]["torch"]
    assert "channel gates: " in capsys.readouterr().out


def test_an_error_keeps_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: parts.Options) -> Iterator[dict[str, Any]]:
        yield {"what": "first", "text": "1 s"}
        raise KeyboardInterrupt

    monkeypatch.setitem(speed.PARTS, "gates", broken)
    out = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        speed.main(["gates", "--out", str(out)])
    assert [figure["what"] for figure in json.loads(out.read_text())["figures"]] == ["first"]


def test_an_unwritable_file_fails_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.PARTS, "gates", lambda options: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        speed.main(["gates", "--out", str(tmp_path / "file" / "speed.json")])


@pytest.mark.parametrize("option", ["--batch", "--runs", "--threads"])
def test_nothing_is_measured_with_a_zero(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["gates", option, "0"])
    assert f"{option} must be 1 or more, got 0" in capsys.readouterr().err


def test_an_unknown_part_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        speed.main(["speeed"])
    assert caught.value.code == 2
    assert "there are gates, " in capsys.readouterr().err


def test_every_part_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in speed.PARTS)


def test_a_line_without_a_ratio_shows_its_text() -> None:
    assert parts.describe({"what": "fold", "text": "0.5 s"}) == "fold: 0.5 s"


def test_exact_scores_are_compared_with_a_pass_per_candidate(tmp_path: Path) -> None:
    """The counts follow from the depth and widths of the model, see test_upvit_scores."""
    work, time, screen = methods.run_exact(parts.Options(tmp_path, arch=TINY))
    assert work["ratio"] == work["evaluations"][1] / work["evaluations"][0] > 1.5
    assert work["evaluations"][1] == work["candidates"] * DEPTH
    assert time["ratio"] > 0 and screen["ratio"] > 0


def test_the_baseline_computes_the_same_scores() -> None:
    model = create_model(TINY).double().eval()
    family = family_of(model)
    loader: Any = [(synthetic_images(input_config(model).size, 1, 0).double(), None)]
    exact = Importance(model, family, images_at_once=4)
    for component in components(family.spaces(model))[:3]:
        alone = methods.each_alone(model, loader)(component, loader, [0, 5])
        assert alone.tolist() == pytest.approx(exact.scores(component, loader, [0, 5])[[0, 5]].tolist(), rel=1e-9)
        assert float(alone.max()) > 0


def test_exploration_is_timed_in_whole_cycles(tmp_path: Path) -> None:
    lines = list(methods.time_exploration(parts.Options(tmp_path, arch=TINY, batch=1, runs=1)))
    assert [line["what"] for line in lines] == [
        "exploration step, masked criterion",
        "exploration step, dense criterion",
    ]
    assert all(len(blocks) == 3 for line in lines for blocks in line["samples_ms"].values())


def test_slicing_halves_every_space() -> None:
    line = processes.slice_model(TINY)
    assert 0.2 < line["params"][1] / line["params"][0] < 0.6
    assert line["peak_gib"] >= line["loaded_gib"] > 0


def test_nose_is_timed_without_the_attentions_that_its_authors_removed() -> None:
    dense, model = runtimes.without_attentions(runtimes.NOSE, runtimes.GREEDY)
    left = [site.index for site in family_of(model).sites(model) if site.kind == "attention"]
    assert left == [1, 3, 5, 7, 8, 9, 10, 11] and len(family_of(dense).blocks(dense)) == 12
    x = synthetic_images(input_config(dense).size, 1, 0)
    with torch.inference_mode():
        assert not torch.equal(model.eval()(x), dense.eval()(x))


def test_speed_is_compared_with_macs(tmp_path: Path) -> None:
    args = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    dense, half = (create_model("vit_tiny_patch16_224", {**args, "mlp_ratio": ratio}) for ratio in (4.0, 1.0))
    (line,) = runtimes.realised(dense, {"a half": half}, parts.Options(tmp_path, batch=1, runs=2), 0.9)
    assert line["what"] == "realised a half" and line["macs_ratio"] > 1.2
    assert line["ratio"] == pytest.approx(line["speedup"] / line["macs_ratio"])
    assert not list(tmp_path.glob("*.onnx"))


def test_padded_layouts_are_built_as_such() -> None:
    model = runtimes.keep_widths(TINY, 8, 16, 32, padded=True)
    assert all(block.attn.padded and block.attn.qk_dim < block.attn.v_dim for block in model.blocks)


def test_proxy_scores_are_compared_by_removed_channels() -> None:
    exact, proxy = (Plan("any", kept={"a": kept, "b": (0,)}) for kept in ((0, 1), (1, 2)))
    assert methods.share_in_common({"a": 4, "b": 2}, exact, proxy) == pytest.approx(2 / 3)


@pytest.fixture(scope="module")
def gpu_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Results of the smallest GPU measurement."""
    folder = tmp_path_factory.mktemp("results")
    assert speed.main(["gpu", "--arch", TINY, "--batch", "1", "--runs", "1", "--out", str(folder)]) == 0
    (written,) = folder.glob("speed-gpu-*.json")
    content: dict[str, object] = json.loads(written.read_text())
    return content


def test_the_gpu_measurement_runs_and_records_the_device(gpu_lines: dict[str, list[dict[str, object]]]) -> None:
    what = {line["what"].split(", ")[1]: line for line in gpu_lines["figures"]}
    assert {"torch fp32", "torch bf16", "onnx fp32", "trt fp32"} <= set(what)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert all(line["device"] == device for line in gpu_lines["figures"])
    rows = what["torch fp32"]["bench"]["rows"]
    assert [row["artifact"] for row in rows] == ["dense", "pruned"]
    assert all(row["samples_ms"] and row["protocol"].startswith("paper-10/1/1") for row in rows)
    assert device == "cuda" or "not measured" in what["trt fp32"]["text"]


def test_our_export_is_compared_with_timms(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    assert speed.main(["dense", "--arch", TINY, "--batch", "1", "--runs", "1", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    (ours,) = (line for line in figures if "our ONNX over timm's own ONNX" in line["what"])
    assert ours["aim"] == [1.0, None] and len(ours["images_per_second"]) == 2


def test_an_export_in_a_process_of_its_own_reports_time_and_memory() -> None:
    line = processes.run_alone("export", processes.export_model, TINY, "onnx", ExportOptions())
    assert line["file_bytes"] > 1e6 and line["peak_gib"] >= line["loaded_gib"] > 0 and line["fold_seconds"] is None
    assert "failed" in processes.run_alone("nothing", processes.slice_model, "no_model")["text"]
