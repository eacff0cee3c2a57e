"""The speed script runs through at its smallest and writes what it measured. No time is asserted."""

import json
from pathlib import Path

import pytest

from vitcompress.bench.speed import __main__ as speed
from vitcompress.bench.speed import gates, parts

TINY = "test_vit"


def test_a_part_prints_and_writes_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert speed.main(["gates", "--arch", TINY, "--batch", "2", "--runs", "2", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [figure["what"] for figure in written["figures"]] == list(gates.AIMS)
    for figure in written["figures"]:
        assert figure["ci95"][0] <= figure["ratio"] <= figure["ci95"][1]
        assert [len(blocks) for blocks in figure["samples_ms"].values()] == [2, 2]
    assert written["settings"]["parts"] == ["gates"]
    assert written["machine"]["versions"]["torch"]
    assert "channel gates: " in capsys.readouterr().out


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        speed.main(["speeed"])
    assert caught.value.code == 2
    assert "there are gates, " in capsys.readouterr().err


def test_every_part_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in speed.PARTS)


def test_a_line_without_a_ratio_brings_its_own_words() -> None:
    assert parts.text({"what": "fold", "text": "0.5 s"}) == "fold: 0.5 s"
