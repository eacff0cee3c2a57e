"""Gradient disparity and recovery asymmetry, as rows and as curves."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from method_world import context, model
from torch.nn import functional

from vitcompress.bench.plots.figure import save_figure
from vitcompress.bench.plots.run import charts_figure
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import depth
from vitcompress.methods.calibration import calibration_images
from vitcompress.methods.hetdpt import collection
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.report import report
from vitcompress.methods.options import AllocationOptions, CollectionOptions, EntropyOptions, SearchOptions
from vitcompress.methods.table import METHODS

FAST = CollectionOptions(epochs=1, images_per_class=8)
BUDGET = AllocationOptions(pruned_layers=1, te=EntropyOptions(images=30), collection=FAST)


def test_gradient_is_what_closing_the_gate_a_little_does(tmp_path: Path) -> None:
    vit = model()
    about = context(tmp_path, vit)
    rows = collection.gradient_disparity(vit, about, BUDGET)
    assert [(row["kind"], row["index"]) for row in rows] == [
        (k, i) for k in ("attention", "activation") for i in range(3)
    ]
    assert all(row["magnitude"] * (1 + 1e-9) >= abs(row["mean"]) for row in rows)
    ((pixels, targets),) = calibration_images(about, 30)
    sites = depth.all_layers(vit, about.family)
    probe = depth.gate_layers(vit.double(), about, sites, BUDGET).eval()
    step = 1e-5
    for row in rows:
        losses = []
        for gate in (1.0, 1 - step, 1 - 2 * step):
            probe.set_gate(row["site"], gate)
            losses.append(float(functional.cross_entropy(probe(pixels.double()), targets).detach()))
        probe.set_gate(row["site"], 1.0)
        slope = (3 * losses[0] - 4 * losses[1] + losses[2]) / (2 * step)
        # The rows are computed in float32.
        assert row["mean"] == pytest.approx(slope, rel=1e-3, abs=1e-5)


def test_recovery_rows(tmp_path: Path) -> None:
    vit = model()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    about = context(tmp_path, vit)
    rows = collection.recovery_asymmetry(vit, about, BUDGET)
    assert [(row["kind"], row["index"]) for row in rows] == [
        (k, i) for k in ("attention", "activation") for i in range(3)
    ]
    assert all(0 <= row[state] <= 100 for row in rows for state in ("dense", "before", "after"))
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())


PUBLISHED = {"layers": "published", "published_attention": (0,), "published_activation": (1,)}


@pytest.mark.parametrize("layers", [{}, PUBLISHED], ids=["search", "published"])
def test_diagnostics_are_part_of_a_run_with_or_without_a_search(layers: Any, tmp_path: Path) -> None:
    vit = model()
    options = hetdpt.Options(
        pruned_layers=2,
        te=EntropyOptions(images=12, resamples=2),
        collection=FAST,
        diagnostics=True,
        search=SearchOptions(factor=0.25, images_per_class=8),
        **layers,
    )
    METHODS["hetdpt"].plan(vit, context(tmp_path, vit), options)
    gradients, recovery = (
        read_json(tmp_path / f"{name}.json") for name in ("gradient_disparity", "recovery_asymmetry")
    )
    curves = {chart.title.split(": ")[1].split(" (")[0]: chart for chart in report(tmp_path).charts[-2:]}
    disparity, asymmetry = curves["gradient disparity"], curves["recovery asymmetry"]
    assert disparity.log and [list(line.y) for line in disparity.lines] == [
        [row["magnitude"] for row in gradients if row["kind"] == kind] for kind in ("attention", "activation")
    ]
    assert [list(line.y) for line in asymmetry.lines] == [
        [row[state] for row in recovery if row["kind"] == kind]
        for kind in ("attention", "activation")
        for state in ("before", "after")
    ]
    assert [any(line.gone) for line in asymmetry.lines] == [True, False] * 2
    save_figure(charts_figure(list(curves.values()), "diagnostics"), tmp_path / "drawn" / "both.png")
    assert (tmp_path / "drawn" / "both.png").read_bytes().startswith(b"\x89PNG")
    shutil.rmtree(tmp_path / "drawn")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert any(row.rounds == 6 for row in hetdpt.estimate(vit, family_of(vit), options) if "alone" in row.title)
    assert hetdpt.describe(options).uses_heldout
    assert (tmp_path / "search.json").exists() == (not layers)
