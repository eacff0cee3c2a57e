"""The smallest run of every part of the campaign on a processor. No time is asserted."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.campaigns import speed
from vitcompress.bench import timing
from vitcompress.errors import OutputError
from vitcompress.families import family_of
from vitcompress.models.create import create_model

TINY = "test_vit"


def test_a_part_prints_and_writes_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "speed.json", ["--batch", "1", "--runs", "6", "--out", str(tmp_path / "speed.json")]
    monkeypatch.setattr(speed, "FILES", {"our ONNX": speed.FILES["our ONNX"]})
    monkeypatch.setattr(speed, "DENSE", (TINY,))
    assert speed.main(["dense", *options]) == 0
    written = json.loads(out.read_text())
    (line,) = written["figures"]
    assert line["what"] == f"{TINY}, our ONNX over timm's own ONNX"
    assert line["ci95"][0] <= line["ratio"] <= line["ci95"][1]
    assert [row["artifact"] for row in line["rows"]] == ["timm's own ONNX", "our ONNX"]
    assert all(row["samples_ms"] for row in line["rows"])
    assert written["settings"] == {"parts": ["dense"], "batch": 1, "runs": 6, "threads": None}
    assert written["machine"]["versions"]["torch"]
    assert f"{line['what']}: " in capsys.readouterr().out


def test_files_in_int8_are_measured_with_all_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "QUANTIZED", ("digits_magnitude",))
    monkeypatch.setitem(timing.PROTOCOLS, "robust", timing.Protocol("robust", min_seconds=0.1))
    monkeypatch.setattr(speed, "SERVED", {name: form for name, form in speed.SERVED.items() if form[0] == "onnx"})
    assert speed.main(["int8", "--runs", "6", "--out", str(tmp_path / "speed.json")]) == 0
    lines = json.loads((tmp_path / "speed.json").read_text())["figures"]
    files = ("dense, ONNX Runtime int8", "digits_magnitude, ONNX Runtime fp32", "digits_magnitude, ONNX Runtime int8")
    assert [line["what"] for line in lines] == [
        f"digits_magnitude: {file}, batch {batch}" for batch in (1, 8) for file in files
    ]
    for line in lines:
        medians = [[median(block) for block in line["samples_ms"][line[end]]] for end in ("a", "b")]
        assert len(medians[1]) >= 6 and line["a"] == "dense, ONNX Runtime fp32"
        assert line["ratio"] == pytest.approx(median(a / b for a, b in zip(*medians, strict=True)))
        assert line["macs_ratio"] > 1


def test_an_error_keeps_earlier_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: speed.Options) -> Iterator[dict[str, Any]]:
        yield {"what": "first", "ratio": 1.0, "ci95": [1.0, 1.0]}
        raise KeyboardInterrupt

    monkeypatch.setitem(speed.PARTS, "dense", broken)
    out = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        speed.main(["dense", "--out", str(out)])
    assert [figure["what"] for figure in json.loads(out.read_text())["figures"]] == ["first"]


def test_an_unwritable_file_fails_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.PARTS, "dense", lambda options: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        speed.main(["dense", "--out", str(tmp_path / "file" / "speed.json")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense", "--batch", "0"], "argument --batch: invalid positive value: '0'"),
        (["dense", "--runs", "0"], "argument --runs: invalid positive value: '0'"),
        (["dense", "--threads", "0"], "argument --threads: invalid positive value: '0'"),
        (["speeed"], "there is no part speeed"),
    ],
)
def test_nothing_is_measured_with_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speed.main(arguments)
    assert message in capsys.readouterr().err


def test_every_part_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in speed.PARTS)


def test_speed_is_compared_with_macs() -> None:
    args = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    dense, half = (create_model("vit_tiny_patch16_224", {**args, "mlp_ratio": ratio}) for ratio in (4.0, 1.0))
    line = speed.realised("a half", dense, half, speed.Options(batch=1, runs=2))
    assert line["what"] == "realised a half" and line["macs_ratio"] > 1.2
    assert line["ratio"] == pytest.approx(line["speedup"] / line["macs_ratio"])
    assert [row["artifact"] for row in line["rows"]] == ["dense", "a half"] and line["conditions"]
    assert speed.describe(line).endswith(f"times as fast at a MACs ratio of {line['macs_ratio']:.3f}")


def test_recipes_are_pruned_with_their_changes() -> None:
    dense, model = speed.prune_recipe("nose_deit_s_4")
    attentions = [[s for s in family_of(m).sites(m) if s.kind == "attention"] for m in (dense, model)]
    assert [len(sites) for sites in attentions] == [12, 8]
    name = "deit_iso_2_6g as released"
    sizes = [
        {space.name: space.size for space in family_of(model).spaces(model)}
        for _, model in (speed.prune_recipe("deit_iso_2_6g", changes) for changes in ((), speed.PRUNED[name]))
    ]
    assert sizes[0] != sizes[1] and any(size % 16 for size in sizes[1].values())


def test_padded_layouts_are_built_as_such() -> None:
    model = speed.keep_widths(create_model(TINY), 8, 16, 32, padded=True)
    assert all(block.attn.padded and block.attn.qk_dim < block.attn.v_dim for block in model.blocks)
