"""Studies: which differences count as real, and which rows are plotted together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitcompress.bench.plots import study
from vitcompress.bench.plots.structure import describe_structure
from vitcompress.pipeline.study import results
from vitcompress.plan import Plan


def test_holm_corrects_as_in_the_textbook() -> None:
    assert results.correct_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert results.correct_p_values([0.9, 0.8]) == [1.0, 1.0] and results.correct_p_values([]) == []


def rows_of(**macs: float) -> list[dict[str, Any]]:
    return [
        {"row": n, "curve": n[0], "macs": m, "macs_ratio": m, "against": ["b"] if n == "a1" else []}
        for n, m in macs.items()
    ]


def test_a_row_is_compared_with_the_nearest_of_a_curve() -> None:
    rng = np.random.default_rng(0)
    better = [rng.random(500) < 0.97 for _ in range(3)]
    worse = [mask & (rng.random(500) < 0.9) for mask in better]
    noise = [mask.copy() for mask in better]
    noise[1][:3] ^= True
    correct = {"a1": better, "b1": noise, "b2": worse}
    (near,) = results.compare_rows(rows_of(a1=0.5, b1=0.45, b2=0.3), correct)
    assert near["against"] == "b1" and near["verdict"] == "within noise"
    (far,) = results.compare_rows(rows_of(a1=0.4, b1=0.6, b2=0.3), correct)
    assert far["against"] == "b2" and far["verdict"] == "better" and far["only_against"] == 0
    assert far["mean"] == pytest.approx(np.mean([a.mean() - b.mean() for a, b in zip(better, worse, strict=True)]))
    assert far["p_value"] == far["p_holm"] < 1e-6
    correct["a1"] = [better[0], worse[1], better[2]]  # one seed has the other sign
    (mixed,) = results.compare_rows(rows_of(a1=0.4, b1=0.6, b2=0.3), correct)
    assert mixed["verdict"] == "within noise" and mixed["differences"][1] == 0


def test_a_comparison_counts_once_in_the_correction() -> None:
    """One that is listed twice, and one that both of its rows list."""
    rng = np.random.default_rng(0)
    counts = {"a1": 0.9, "b1": 0.87, "c1": 0.85}
    correct = {row: [rng.random(500) < share for _ in range(3)] for row, share in counts.items()}

    def compare(**against: list[str]) -> list[dict[str, Any]]:
        rows = [{**row, "against": against.get(row["curve"], [])} for row in rows_of(a1=0.5, b1=0.45, c1=0.3)]
        return results.compare_rows(rows, correct)

    once = compare(a=["b", "c"])
    assert compare(a=["b", "c", "b"]) == compare(a=["b", "c"], b=["a"]) == once


def test_equal_counts_have_no_negative_difference() -> None:
    """The mean of +3 and -3 images of 540 is -5.6e-17."""
    counts = {"a1": (300, 305), "b1": (297, 308)}
    correct = {row: [np.arange(540) < count for count in seeds] for row, seeds in counts.items()}
    rows = [{**row, "title": row["row"]} for row in rows_of(a1=0.5, b1=0.45)]
    pairs = results.compare_rows(rows, correct)
    assert pairs[0]["mean"] < 0 and pairs[0]["only_row"] == pairs[0]["only_against"] == 3
    assert results.pair_table({"rows": rows, "pairs": pairs}).rows[0][3] == "+0.0 ± 0.8"


def test_rows_are_plotted_with_the_method_that_they_are_compared_with() -> None:
    def row(name: str, curve: str, *against: str) -> dict[str, Any]:
        return {"row": name, "curve": curve, "against": list(against)}

    rows = [row("c", "Control"), row("a1", "A", "Control"), row("b", "B", "Control", "A"), row("x", "X", "A")]
    result = study.grouped([*rows, row("a2", "A", "Control")])
    assert {curve: [r["row"] for r in of] for curve, of in result.items()} == {"A": ["a1", "x", "a2"], "B": ["b"]}


def test_rows_that_are_compared_with_nothing_have_marks_of_their_own_and_a_short_axis_has_ticks() -> None:
    rows = [
        {**dict.fromkeys(("row", "title", "curve"), name), "against": against, "macs_ratio": 0.9, "speedup": speedup}
        for name, against, speedup in (("control", [], 1.0), ("plain", [], 1.4), ("own", ["plain", "control"], 1.2))
    ]
    rows = [{**row, "macs": 1} for row in rows]
    runs = [{"row": row["row"], "correct": correct, "total": 10} for row in rows for correct in (7, 8)]
    figure = study.accuracy_figure({"rows": rows, "runs": runs, "speed": True, "dense": {"top1_mean": 0.9}})
    for axes in figure.axes:
        assert axes.get_ylim()[0] < 70 and axes.get_ylim()[1] > 90, "all rows, and the dense model"
        marks = {bars.get_label(): bars.lines[0].get_marker() for bars in axes.containers}
        assert marks["control"] == "*" and len(set(marks.values())) == 3
        assert len(axes.get_xticks()) > 2


def test_only_rows_below_the_plot_are_named_at_its_edge() -> None:
    """The accuracy of the dense model may extend the axis to rows that are far below the others."""
    for dense, named in ((0.9, ["low"]), (0.55, [])):
        rows = [
            {**dict.fromkeys(("row", "title", "curve"), name), "against": [], "macs_ratio": 0.9, "macs": 1}
            for name in ("low", "a", "b", "c")
        ]
        runs = [{"row": row["row"], "correct": 6 if row["row"] == "low" else 9, "total": 10} for row in rows]
        figure = study.accuracy_figure({"rows": rows, "runs": runs, "speed": None, "dense": {"top1_mean": dense}})
        assert [text.get_text().partition(":")[0] for text in figure.axes[0].texts] == named


def test_methods_have_colors_of_their_own() -> None:
    names = [f"method {number}" for number in range(10)]
    rows = [{"row": "c", "curve": "c", "against": []}]
    rows += [{"row": name, "curve": name, "against": ["c"], "macs": 1} for name in names]
    colors = [style["color"] for style, _ in study._curves([{**row, "macs": 1, "title": "t"} for row in rows])]
    assert len(set(colors)) == len(names) + 1


def test_seeds_of_equal_accuracy_have_a_bar_without_a_length() -> None:
    """The mean of three times 529 of 540 images is rounded: it is larger than each of them."""
    row = {**dict.fromkeys(("row", "title", "curve"), "own"), "against": [], "macs_ratio": 0.9, "macs": 1}
    runs = [{"row": "own", "correct": 529, "total": 540}] * 3
    axes = study.accuracy_figure({"rows": [row], "runs": runs, "speed": None, "dense": {"top1_mean": 0.9}}).axes[0]
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert low == pytest.approx(high)


def test_every_curve_has_pictures_of_its_own(tmp_path: Path) -> None:
    """The names of these three have the same letters."""
    curves = ("A B", "a-b", "A.b!")
    rows = [
        {**dict.fromkeys(("row", "title", "curve"), name), "against": against, "macs": 1, "macs_ratio": 0.9}
        for name, against in (("control", []), *((curve, ["control"]) for curve in curves))
    ]
    edits = {"removed": {"blocks.0.attn": "drop"}, "folded": [], "heads": {}, "kept": {}}
    runs = [{"row": row["row"], "correct": 7, "total": 10, **edits} for row in rows]
    args = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = {"arch": "vit_tiny_patch16_224", "arch_args": args}
    whole = {"model": model, "rows": rows, "runs": runs, "speed": None, "dense": {"top1_mean": 0.9}}
    for name in ("gone-layers.png", "a_b-widths.png", "own.png"):
        (tmp_path / name).touch()
    paths = study.draw(whole, tmp_path)
    assert [path.name for path in paths] == ["accuracy.png", *(f"a_b{n}-layers.png" for n in ("", "_2", "_2_2"))]
    assert {*paths, tmp_path / "own.png"} == {*tmp_path.iterdir()}, "pictures of an earlier study are gone"


def test_the_legend_names_rows_as_they_are() -> None:
    """Mathematics of matplotlib, names that its legends omit, and the title of one of two rows for both."""
    named = (("_kept", [], "half"), ("_kept", [], "third"), ("$a_b$", ["_kept"], "x"), ("one", [], "$c$ alone"))
    costs = {"macs": 1, "macs_ratio": 0.9}
    rows = [{"row": t, "title": t, "curve": curve, "against": against, **costs} for curve, against, t in named]
    runs = [{"row": row["row"], "correct": 7, "total": 10} for row in rows]
    figure = study.accuracy_figure({"rows": rows, "runs": runs, "speed": None, "dense": {"top1_mean": 0.9}})
    labels = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert labels == ["dense", "_kept", r"\$a_b\$", r"\$c\$ alone"], "an escaped $ is one"


def test_long_titles_do_not_narrow_the_blocks() -> None:
    args = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    structure = describe_structure(Plan("vit_tiny_patch16_224", args, {"blocks.0.attn": "drop"}))

    def boxes(title: str) -> Any:
        figure = study.grid_figure({title: [structure] * 2}, "layers")
        figure.draw_without_rendering()
        titles = [axes._left_title.get_window_extent() for axes in figure.axes]
        assert titles[0].x1 < titles[1].x0 and titles[1].x1 <= figure.bbox.x1, "the titles do not overlap"
        return [axes.get_position().width for axes in figure.axes]

    assert boxes("a long title of a row, " * 5) == pytest.approx(boxes("short"), rel=0.01)
