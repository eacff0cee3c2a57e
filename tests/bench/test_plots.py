"""Plots of the structure after a plan: their numbers, and their files."""

from pathlib import Path
from typing import Any

import pytest
from packages import write_package

from vitcompress import surgery
from vitcompress.bench.plots.run import charts_figure, draw, structure_figure
from vitcompress.bench.plots.structure import REPLACEMENTS, Layer, Structure, Width, describe_structure, width_table
from vitcompress.errors import InputError, PlanError
from vitcompress.io.files import write_json, write_text
from vitcompress.methods.base import Chart, Line, ranked
from vitcompress.models.create import create_model
from vitcompress.plan import ALLOWED, GATE_REPLACEMENTS, Plan

VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0}
SWIN = {
    "img_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "mlp_ratio": 2.0,
}
REMOVED = {"blocks.0.attn": "norm_identity", "blocks.1.attn": "drop", "blocks.1.mlp.act": "identity"}
KEPT = {
    "blocks.2.qk": (0, 4, 12, 15),
    "blocks.2.v": (0, 1, 12, 13),
    "blocks.0.mlp": tuple(range(8)),
    "residual": tuple(range(12)),
}


def plan() -> Plan:
    """A removed layer, a replaced one, a folded one, sliced widths, two of four heads."""
    heads = {"blocks.2.attn": 2}
    plan = Plan("vit_tiny_patch16_224", VIT, REMOVED, folded=("blocks.1.mlp",), kept=KEPT, heads=heads)
    surgery.apply_plan(create_model(plan.arch, plan.arch_args), plan)  # the plan is valid
    return plan


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def test_layers_and_widths_of_a_plan() -> None:
    structure = describe_structure(plan())
    kept, gone = Layer("kept"), Layer("removed")
    assert structure.layers["attention"] == [Layer("replaced", "norm"), gone, kept]
    assert structure.layers["activation"] == [kept, gone, kept]
    assert structure.layers["ffn"] == [kept, Layer("replaced", "linear"), kept]
    widths = structure.widths
    assert widths["residual"] == [Width(12, 16)] * 3 and structure.total("residual") == Width(12, 16)
    assert widths["heads"] == [Width(0, 4), Width(0, 4), Width(2, 4)]
    assert widths["qk"] == [Width(0, 16), Width(0, 16), Width(4, 16)] and structure.total("v") == Width(4, 48)
    assert widths["mlp"] == [Width(8, 32), Width(0, 32, linear=True), Width(32, 32)]
    assert structure.total("mlp") == Width(40, 64)


def test_every_replacement_has_a_description() -> None:
    assert set(REPLACEMENTS) == {*GATE_REPLACEMENTS, *(name for names in ALLOWED.values() for name in names)}


def test_widths_of_a_plan_as_a_table() -> None:
    table = width_table(plan())
    assert table is not None and table.columns == ["block", "residual", "heads", "q and k", "v", "FFN"]
    assert table.rows == [
        ["blocks.0", "12 of 16", "removed", "removed", "removed", "8 of 32"],
        ["blocks.1", "12 of 16", "removed", "removed", "removed", "linear"],
        ["blocks.2", "12 of 16", "2 of 4", "4 of 16", "4 of 16", "32"],
    ]
    assert width_table(Plan("vit_tiny_patch16_224", VIT, REMOVED)) is None


def test_a_plan_that_changes_nothing_keeps_all() -> None:
    structure = describe_structure(Plan("vit_tiny_patch16_224", VIT))
    assert {layer for row in structure.layers.values() for layer in row} == {Layer("kept")}
    totals = [structure.total(kind) for kind in structure.widths]
    assert totals and all(total.kept == total.dense > 0 for total in totals)


def test_stages_have_streams_of_their_own() -> None:
    kept = {"layers.1.residual": tuple(range(24)), "layers.1.blocks.0.mlp": tuple(range(16))}
    plan = Plan("swin_tiny_patch4_window7_224", SWIN, {"layers.0.blocks.1": "drop"}, kept=kept)
    structure = describe_structure(plan)
    assert structure.stage_starts == (0, 2) and structure.layers["ffn"] == [
        Layer("kept"),
        Layer("removed"),
        Layer("kept"),
    ]
    assert structure.widths["residual"] == [Width(16, 16), Width(16, 16), Width(24, 32)]
    assert structure.total("residual") == Width(40, 48)
    assert structure.total("mlp") == Width(32 + 0 + 16, 32 + 32 + 64)


def test_a_pool_follows_the_blocks() -> None:
    kept = {"attn_pool.mlp": tuple(range(8)), "attn_pool.v": (0, 4, 8, 12), "residual": tuple(range(12))}
    args = {**VIT, "global_pool": "map", "class_token": False}
    plan = Plan("vit_tiny_patch16_224", args, {"blocks.1.attn": "drop"}, kept=kept)
    structure, table = describe_structure(plan), width_table(plan)
    assert table is not None
    assert table.rows[-1] == ["attn_pool", "12 of 16", "4", "16", "4 of 16", "8 of 32"] and len(table.rows) == 4
    assert structure.stage_starts == (0,) and structure.total("residual") == Width(12, 16)
    assert structure.total("mlp") == Width(3 * 32 + 8, 4 * 32) and structure.layers["attention"][-1] is None
    figure = structure_figure(structure, "pooled")
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["0", "1", "2", "pool", "total"]
    assert "2/3" in texts(figure)


def test_the_figure_shows_what_is_kept() -> None:
    figure = structure_figure(describe_structure(plan()), "run")
    shown = texts(figure)
    assert {"norm", "linear", "1/3", "2/3", "75", "25", "50", "62"} <= set(shown)
    assert len(shown) > len(texts(structure_figure(Structure(("blocks.0",), (0,), {"ffn": [Layer("kept")]}, {}), "")))


def test_curves_are_strong_only_where_channels_are_kept() -> None:
    line = ranked("a", [1.0, 4.0, 2.0, 3.0], [1, 2])
    assert (line.x, line.y, line.gone) == ([0.0, 1 / 3, 2 / 3, 1.0], [4.0, 3.0, 2.0, 1.0], [False, True, False, True])
    chart = Chart("scores", "x", "y", [line, Line("b", [0, 1], [1, 2], mark="end")], log=True, level=2.0)
    (axes,) = charts_figure([chart], "all").axes
    strong, faint = axes.lines[1].get_ydata(), axes.lines[0].get_ydata()
    assert list(faint) == [4.0, 3.0, 2.0, 1.0] and [y == y for y in strong] == [True, False, True, False]
    assert axes.get_yscale() == "log" and [text.get_text() for text in axes.texts] == ["end"]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps by a method of another package, too, unless it is not installed."""
    own = "my-own = vitcompress.methods.isomorphic:ISOMORPHIC"
    monkeypatch.syspath_prepend(write_package(tmp_path / "site", "methods", own))
    run, rows = tmp_path / "run", [{"name": "residual", "kind": "residual", "kept": 1, "of": 2, "scores": [1.5, 0.5]}]
    write_text(run / "plan.json", plan().to_json())
    for step in ("step-0-isomorphic", "step-1-my-own", "step-2-removed"):
        write_json(run / "state" / step / "widths.json", {"rows": rows})
    paths = draw([run], tmp_path / "pictures")
    assert [path.name for path in paths] == ["run-structure.png", "run-step-0-isomorphic.png", "run-step-1-my-own.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    again = tmp_path / "other" / "run"
    write_text(again / "plan.json", plan().to_json())
    names = [path.name for path in draw([run, again], tmp_path / "both")]
    assert len(set(names)) == 4 and "other-run-structure.png" in names
    assert len(draw([run, str(run)], tmp_path / "once")) == 3
    runs = [tmp_path / name for name in ("x/b/c", "y/d/c", "b-c")]
    for other in runs:
        write_text(other / "plan.json", plan().to_json())
    names = [path.name for path in draw(runs, tmp_path / "joined")]
    assert names == ["b-c-structure.png", "d-c-structure.png", "b-c_2-structure.png"]


def test_a_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan\.json cannot be read"):
        draw([tmp_path], tmp_path / "pictures")
    assert issubclass(PlanError, InputError) and not (tmp_path / "pictures").exists()
