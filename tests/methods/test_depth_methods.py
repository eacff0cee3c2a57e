"""The methods that remove attentions and activations: their choices, and the errors of their options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from method_rows import OPTIONS, STEP_1, STEP_2, TE
from method_world import context, model
from pydantic import TypeAdapter, ValidationError

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import ablations, depth, nose
from vitcompress.methods.hetdpt import collection
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.report import report
from vitcompress.methods.options import (
    AllocationOptions,
    BypassOptions,
    CollectionOptions,
    DepthOptions,
    EntropyOptions,
    FixedOptions,
)
from vitcompress.methods.table import METHODS

DEPTH = [name for name, options in OPTIONS.items() if isinstance(options, BypassOptions)]
every_depth_method = pytest.mark.parametrize("name", DEPTH)


@every_depth_method
def test_two_layers_are_removed_and_drawn(name: str, tmp_path: Path) -> None:
    vit, method = model(), METHODS[name]
    plan = method.plan(vit, context(tmp_path, vit), OPTIONS[name])
    assert len(plan.removed) == 2
    kinds = {"nose": {"attn"}, "activation_only": {"act"}}.get(name)
    assert kinds is None or {site.rsplit(".", 1)[1] for site in plan.removed} == kinds
    charts = {chart.title.split(":")[0].split(" ")[0]: chart for chart in method.report(tmp_path).charts}
    assert set(charts) == {"hetdpt": {"HetDPT", "transfer"}, "random": set(), "fixed": set()}.get(name, set(charts))
    if "transfer" in charts:
        assert sum(sum(line.gone) for line in charts["transfer"].lines) == 2
    assert bool(method.estimate(vit, family_of(vit), OPTIONS[name])) == (name not in ("random", "fixed"))


@every_depth_method
def test_a_budget_larger_than_the_model(name: str) -> None:
    vit, method = model(), METHODS[name]
    options = method.options(attention=(0, 7)) if name == "fixed" else method.options(pruned_layers=5)
    with pytest.raises(PlanError) as caught:
        method.structure(vit, family_of(vit), context(Path(), vit).plan, options)
    assert any(word in str(caught.value) + str(caught.value.hint) for word in ("pruned_layers", "block 7"))


@every_depth_method
def test_wrong_options(name: str) -> None:
    check = TypeAdapter(METHODS[name].options)
    wrong = {"attention": [-1]} if name == "fixed" else {"pruned_layers": 0}
    for options in (wrong, {"pruned_layers": 2, "attention_bypass": "skip"}):
        with pytest.raises(ValidationError):
            check.validate_json(json.dumps(options))


PUBLISHED: dict[str, Any] = {"published_attention": (0, 2), "published_activation": (2,), "layers": "published"}


def test_published_layers_need_no_search(tmp_path: Path) -> None:
    vit = model()
    options = hetdpt.Options(
        pruned_layers=3, attention_bypass="norm_identity", both_pruned_output_act="gelu", **PUBLISHED
    )
    plan = hetdpt.HETDPT.plan(vit, context(tmp_path, vit), options)
    assert plan.removed == {
        "blocks.0.attn": "norm_identity",
        "blocks.2.attn": "norm_identity",
        "blocks.2.mlp.act": "identity",
    }
    assert plan.appended == {"blocks.2": "gelu"}
    assert read_json(tmp_path / "choice.json") == {"attention": [0, 2], "activation": [2], "both": [2]}
    assert hetdpt.estimate(vit, family_of(vit), options) == []


@pytest.mark.parametrize(
    ("count", "attention", "activation"),
    [(1, [], [5]), (2, [5], [5]), (5, [2, 8], [1, 5, 9]), (22, list(range(11)), list(range(11)))],
)
def test_unscored_layers_are_spread_and_the_last_of_each_type_stays(
    count: int, attention: list[int], activation: list[int]
) -> None:
    """Removing late attentions only would make an exported file faster than other layers do."""
    vit = model(depth=12)
    spread = depth.spread_layers(vit, family_of(vit), DepthOptions(pruned_layers=count))
    assert spread == {"attention": attention, "activation": activation}


@pytest.mark.parametrize("lists", [{}, {"published_attention": (0, 0), "published_activation": (2,)}])
def test_published_layers_must_match_the_budget(lists: Any, tmp_path: Path) -> None:
    vit = model()
    published = PUBLISHED | {"published_attention": (), "published_activation": ()} | lists
    with pytest.raises(PlanError, match="pruned_layers is 3"):
        hetdpt.HETDPT.plan(vit, context(tmp_path, vit), hetdpt.Options(pruned_layers=3, **published))


def test_an_example_replaces_the_search_in_a_structure(tmp_path: Path) -> None:
    vit = model()
    family, base = family_of(vit), context(tmp_path, vit).plan
    options = hetdpt.Options(pruned_layers=3, example_attention=(0,), example_activation=(1, 2))
    assert set(hetdpt.HETDPT.structure(vit, family, base, options).removed) == {
        "blocks.0.attn",
        "blocks.1.mlp.act",
        "blocks.2.mlp.act",
    }
    other = hetdpt.HETDPT.structure(vit, family, base, replace(options, example_attention=(1,)))
    assert "blocks.0.attn" not in other.removed
    with pytest.raises(PlanError, match=r"example_attention and .* name 3 different layers, pruned_layers is 2"):
        hetdpt.HETDPT.structure(vit, family, base, replace(options, pruned_layers=2))


def test_too_few_rounds_for_a_split() -> None:
    vit = model(6)
    base = context(Path(), vit).plan
    few = CollectionOptions(rounds=2)
    with pytest.raises(PlanError, match="rounds is 2"):
        hetdpt.HETDPT.structure(vit, family_of(vit), base, hetdpt.Options(pruned_layers=5, collection=few))
    every = hetdpt.Options(pruned_layers=5, collection=few, candidates="all")
    hetdpt.HETDPT.structure(vit, family_of(vit), base, every)


def test_too_few_rounds_for_the_predictor() -> None:
    """The dense model and one round of each type: found before they are trained."""
    vit, method = model(3), METHODS["hetdpt_no_step2"]
    base = context(Path(), vit).plan
    options = AllocationOptions(pruned_layers=1, min_pruned_per_type=0, collection=CollectionOptions(interleaved=0))
    with pytest.raises(PlanError, match="measures 3 models, and the accuracy predictor needs 4"):
        method.structure(vit, family_of(vit), base, options)
    method.structure(vit, family_of(vit), base, replace(options, collection=CollectionOptions(interleaved=2)))


@pytest.mark.parametrize(
    ("budget", "options", "rounds"),
    [(10, {}, 15), (3, {}, 11), (3, {"interleaved": 0}, 6), (9, {"rounds": 2, "interleaved": 3}, 6)],
)
def test_the_dry_run_counts_the_rounds_that_run(budget: int, options: Any, rounds: int, tmp_path: Path) -> None:
    """A budget of 10 on 6 blocks: 5 rounds per type, as one layer of each stays, and 5 interleaved ones."""
    vit = model(6)
    settings = CollectionOptions(epochs=0, **options)
    step_1 = AllocationOptions(pruned_layers=budget, te=TE, collection=settings)
    entropy, tuning = collection.estimate(vit, family_of(vit), step_1)
    collection.Collector(vit, context(tmp_path, vit), step_1).run()
    tables = [read_json(path) for path in tmp_path.glob("te_*.json")]
    assert tuning.rounds == len(tables) == rounds
    assert entropy.rounds == sum(len(table["rows"]) + 1 for table in tables)


def test_the_dry_run_counts_the_measurements_of_greedy_transfer_entropy(tmp_path: Path) -> None:
    vit = model(4)
    (row,) = nose.NOSE.estimate(vit, family_of(vit), nose.Options(pruned_layers=3, te=TE))
    nose.NOSE.plan(vit, context(tmp_path, vit), nose.Options(pruned_layers=3, te=TE))
    tables = read_json(tmp_path / "transfer_entropy.json")
    assert row.rounds == sum(len(table["rows"]) + 1 for table in tables) == 5 + 4 + 3
    assert (row.epochs, row.images) == (1, tables[0]["images"])


def test_hetdpt_respects_its_split_and_its_candidates(tmp_path: Path) -> None:
    vit = model(4)
    options = hetdpt.Options(pruned_layers=3, search=STEP_2, **STEP_1)
    plan = hetdpt.HETDPT.plan(vit, context(tmp_path, vit), options)
    allocation, choice = read_json(tmp_path / "allocation.json"), read_json(tmp_path / "choice.json")
    assert [len(choice["attention"]), len(choice["activation"])] == allocation["chosen"]
    assert min(allocation["chosen"]) >= 1
    for kind in ("attention", "activation"):
        assert set(choice[kind]) <= set(read_json(tmp_path / f"{kind}_03.json")[kind])
    assert len(plan.removed) == 3
    assert [(s["attention"], s["activation"]) for s in allocation["splits"]] == [(2, 1), (1, 2)]
    scores = next(chart for chart in report(tmp_path).charts if "learnable scores" in chart.title)
    assert {line.group for line in scores.lines} == {"attention", "activation"}
    ends = {line.mark for line in scores.lines if line.mark}
    assert ends == {str(number) for kind in ("attention", "activation") for number in choice[kind]}


def test_without_step_2_the_removal_order_decides(tmp_path: Path) -> None:
    vit = model(4)
    ablations.HETDPT_NO_STEP2.plan(vit, context(tmp_path, vit), AllocationOptions(pruned_layers=3, **STEP_1))
    allocation, choice = read_json(tmp_path / "allocation.json"), read_json(tmp_path / "choice.json")
    for kind, count in zip(("attention", "activation"), allocation["chosen"], strict=True):
        assert choice[kind] == sorted(read_json(tmp_path / f"{kind}_03.json")[kind][:count])


def test_static_transfer_entropy_takes_the_lowest_of_both_types(tmp_path: Path) -> None:
    vit = model()
    plan = METHODS["te_static"].plan(vit, context(tmp_path, vit), OPTIONS["te_static"])
    rows = sorted(read_json(tmp_path / "transfer_entropy.json")["rows"], key=lambda row: row["transfer_entropy"])
    assert len(rows) == 6
    assert set(plan.removed) == {row["site"] for row in rows[:2]}


@pytest.mark.parametrize("resamples", [0, 1, 2])
@pytest.mark.parametrize("name", ["nose", "activation_only", "te_static"])
def test_a_report_without_a_bootstrap(name: str, resamples: int, tmp_path: Path) -> None:
    """A deviation needs two resamples."""
    vit = model()
    options = replace(OPTIONS[name], te=EntropyOptions(images=12, resamples=resamples))
    METHODS[name].plan(vit, context(tmp_path, vit), options)
    (table,) = METHODS[name].report(tmp_path).tables
    assert all((row[3] == "") == (resamples < 2) for row in table.rows)


def test_random_layers_follow_the_seed(tmp_path: Path) -> None:
    vit = model(6)
    options = ablations.RandomOptions(pruned_layers=4, attention=3)

    def draw(seed: int, folder: str) -> Any:
        return ablations.RANDOM.plan(vit, context(tmp_path / folder, vit, seed=seed), options).removed

    draws = [draw(seed, str(seed)) for seed in range(5)]
    assert len({tuple(sorted(removed)) for removed in draws}) > 1
    assert all(sum(site.endswith("attn") for site in removed) == 3 for removed in draws)
    assert draw(2, "again") == draws[2]


@pytest.mark.parametrize(
    ("pick", "removed"),
    [
        ("first", {"blocks.0.attn", "blocks.0.mlp.act", "blocks.1.attn"}),
        ("last", {"blocks.2.mlp.act", "blocks.2.attn", "blocks.1.mlp.act"}),
    ],
)
def test_first_and_last_layers(pick: Any, removed: set[str], tmp_path: Path) -> None:
    vit = model()
    options = ablations.RandomOptions(pruned_layers=3, pick=pick)
    assert set(ablations.RANDOM.plan(vit, context(tmp_path, vit), options).removed) == removed


def test_dilution_follows_the_released_schedule() -> None:
    """400 epochs: 1 - e / 299 down to 0 at epoch 299, then 100 epochs without the layers."""
    strength = nose.dilute(nose.Options(pruned_layers=1), 400)
    assert [strength(e) for e in (0, 1, 150, 298, 299, 399)] == pytest.approx(
        [1, 1 - 1 / 299, 149 / 299, 1 / 299, 0, 0]
    )
    for epochs in (1, 2, 3, 10):
        values = [nose.dilute(nose.Options(pruned_layers=1), epochs)(e) for e in range(epochs + 1)]
        assert values == sorted(values, reverse=True)
        assert values[-1] == 0.0
        assert values[epochs - 1] == 0.0, "the last epoch would have layers that the deployed model lacks"


def test_nose_measures_dropped_and_deploys_doubled(tmp_path: Path) -> None:
    vit = model()
    plan = nose.NOSE.plan(vit, context(tmp_path, vit), OPTIONS["nose"])
    assert set(plan.removed.values()) == {"double"}
    first = read_json(tmp_path / "transfer_entropy.json")[0]
    other = tmp_path / "doubled"
    nose.NOSE.plan(vit, context(other, vit), replace(OPTIONS["nose"], te_bypass="double"))
    assert read_json(other / "transfer_entropy.json")[0]["rows"] != first["rows"]


def test_a_second_step_counts_the_layers_that_are_left(tmp_path: Path) -> None:
    """In dense numbers."""
    vit = model(4)
    around = context(tmp_path, vit)
    first = ablations.FIXED.plan(vit, around, FixedOptions(attention=(1,), activation=(1,)))
    pruned = surgery.apply_to_copy(vit, first)
    again = context(tmp_path / "second", pruned, plan=around.plan.then(first))
    second = METHODS["hetdpt"].plan(pruned, again, OPTIONS["hetdpt"])
    assert len(second.removed) == 2
    assert not set(second.removed) & set(first.removed)
    surgery.apply_to_copy(vit, around.plan.then(first).then(second))
