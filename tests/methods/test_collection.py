"""Step 1: which models are measured, in which order, and that a killed collection ends where an unbroken one does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from method_world import context, model
from test_search import Stop

from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.methods.hetdpt.collection import (
    Collector,
    Record,
    fast_options,
    gradient_disparity,
    removal_orders,
    rows,
)
from vitcompress.methods.options import AllocationOptions, CollectionOptions, EntropyOptions, HetdptOptions
from vitcompress.training.options import Augmentation, TrainOptions

TE = EntropyOptions(images=12, resamples=2)
FAST = CollectionOptions(epochs=1, images_per_class=8, lr=1e-3, interleaved=3)


def run(
    folder: Path, options: CollectionOptions = FAST, budget: int = 2, depth: int = 3, **changes: Any
) -> list[Record]:
    vit = model(depth)
    around = context(folder, vit, **changes)
    return Collector(vit, around, AllocationOptions(pruned_layers=budget, te=TE, collection=options)).run()


def test_the_published_points(tmp_path: Path) -> None:
    """12 blocks, budget 8, 3 + 3 interleaved: the 22 retained ratios of Table 10, from 21 rounds."""
    records = run(tmp_path, CollectionOptions(epochs=0), budget=8, depth=12)
    points = Counter((12 - len(r["attention"]), 12 - len(r["activation"])) for r in records)
    single = [(12 - n, 12) for n in range(9)] + [(12, 12 - n) for n in range(1, 9)]
    assert points == Counter([*single, (11, 11), (11, 10), (10, 10), (10, 9), (9, 9)])
    assert len(records) == 22
    first = next(r for r in records if r["key"] == "activation_01")
    second = next(r for r in records if r["key"] == "interleaved_02")
    assert second["activation"] == first["activation"], "the first interleaved round is not repeated"
    exact = rows(records, {"attention": 12, "activation": 12})
    assert {(round(a * 12, 9), round(t * 12, 9)) for a, t, _ in exact} == set(points)


def test_fast_trainings_are_those_of_the_released_scripts(tmp_path: Path) -> None:
    """AdamW at 5e-5 per 512 images, decay 0.05 for matrices only, no repeated views, whatever the recovery uses."""
    vit, views = model(), Augmentation(no_aug=False, mixup=0.8, repeats=3)
    recovery = TrainOptions(
        batch_size=4096, optimizer="sgd", lr=0.1, weight_decay=0.08, decay_all=True, drop_path=0.1, augmentation=views
    )
    around = context(tmp_path, vit, train=recovery)
    settings = fast_options(around, CollectionOptions(batch_size=1024), 10, 100_000)
    assert (settings.optimizer, settings.lr, settings.weight_decay, settings.decay_all) == ("adamw", 1e-4, 0.05, False)
    assert (settings.batch_size, settings.drop_path, settings.augmentation) == (1024, 0.1, replace(views, repeats=0))
    assert fast_options(around, CollectionOptions(), 10, 100_000).lr == pytest.approx(4e-4)  # 4096 images a batch
    assert fast_options(around, CollectionOptions(), 10, 100).batch_size == 100


@pytest.mark.parametrize(
    ("requested", "images", "batch", "parts"),
    [(None, 100_000, 4096, 8), (None, 100, 96, 8), (None, 10, 10, 5), (None, 3, 2, 1), (8, 100, 8, 4)],
)
def test_small_batches_of_fast_trainings_have_fewer_parts(
    requested: int | None, images: int, batch: int, parts: int, tmp_path: Path
) -> None:
    """Pairs of images are not split. The batch is neither larger than requested nor than the number of images."""
    around = context(tmp_path, model(), train=TrainOptions(batch_size=4096, accumulate=8))
    settings = fast_options(around, CollectionOptions(batch_size=requested), 10, images)
    assert (settings.batch_size, settings.accumulate) == (batch, parts)


def test_attention_first(tmp_path: Path) -> None:
    records = run(tmp_path, CollectionOptions(epochs=0, interleaved=2, order="attention_first"))
    assert [r["key"] for r in records if r["chain"] == "interleaved"] == ["interleaved_02"]
    (mixed,) = (r for r in records if r["chain"] == "interleaved")
    assert mixed["removed"].endswith("mlp.act")
    assert mixed["attention"] == next(r for r in records if r["key"] == "attention_01")["attention"]


def test_each_round_removes_the_lowest_transfer_entropy(tmp_path: Path) -> None:
    records = run(tmp_path)
    for record in records[1:]:
        table = read_json(tmp_path / f"te_{record['key']}.json")
        assert record["removed"] == min(table["rows"], key=lambda row: row["transfer_entropy"])["site"]
    orders = removal_orders(records)
    for kind in ("attention", "activation"):
        chain = [r for r in records if r["chain"] == kind]
        assert [r[kind] for r in chain] == [orders[kind][: n + 1] for n in range(len(chain))]
        assert len(orders[kind]) == 2, "one layer of a type stays"
    assert records[0]["chain"] == "dense"
    assert all(0 <= r["accuracy"] <= 100 for r in records)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "no resume state is left"


def test_training_changes_what_is_measured(tmp_path: Path) -> None:
    trained, untrained = run(tmp_path / "a"), run(tmp_path / "b", CollectionOptions(epochs=0, interleaved=3))
    assert [r["accuracy_before"] for r in untrained] == [r["accuracy"] for r in untrained]
    entropies = [read_json(tmp_path / name / "te_attention_02.json")["entropy"] for name in "ab"]
    assert entropies[0] != entropies[1], "the second round measures the fine-tuned model"
    assert len(trained) == len(untrained)


@pytest.mark.parametrize("after", [1, 4, 7, 10, 13])
def test_a_killed_collection_ends_where_an_unbroken_one_does(tmp_path: Path, after: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", progress=Stop(after))
    assert run(tmp_path / "killed") == whole
    tables = {path.name: read_json(path) for path in (tmp_path / "whole").glob("te_*.json")}
    assert {path.name: read_json(path) for path in (tmp_path / "killed").glob("te_*.json")} == tables


def test_run_again_computes_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run(tmp_path, progress=Stop(12)) == whole
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


class Looker(Progress):
    """Notes, whenever the interleaved chain shows a sign of life, whether the round it starts from is still kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[bool]()

    def update(self, label: str, done: int, total: int, text: str = "") -> None:
        if "interleaved" in label:
            self.seen.append(self.folder.is_dir())


def test_the_shared_round_is_kept_until_both_chains_are_done(tmp_path: Path) -> None:
    looker = Looker(tmp_path / "activation_01")
    run(tmp_path, progress=looker)
    assert len(looker.seen) > 3
    assert all(looker.seen)
    assert not looker.folder.exists()


def test_the_gradients_of_gates_are_those_of_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    vit, options = model(drop_path_rate=0.5), HetdptOptions(pruned_layers=2)
    options = replace(options, te=replace(options.te, images=24))
    about = context(tmp_path, vit)
    assert gradient_disparity(vit.train(), about, options) == gradient_disparity(vit.eval(), about, options)
