"""Every method of the table plans on a tiny model; what it may not do, and what it must refuse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_world import context, model
from pydantic import TypeAdapter, ValidationError

from vitcompress import surgery
from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.io.files import read_json
from vitcompress.methods import METHODS, ablations, depth, nose
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.hetdpt.collection import CollectionOptions
from vitcompress.methods.hetdpt.search import SearchOptions
from vitcompress.methods.transfer_entropy import EntropyOptions

TE = EntropyOptions(images=12, resamples=2)
STEP_1: dict[str, Any] = {"te": TE, "collection": CollectionOptions(epochs=1, images_per_class=8, interleaved=2)}
STEP_2 = SearchOptions(factor=0.25, images_per_class=8)
# A missing row is a failure.
OPTIONS: dict[str, Any] = {
    "hetdpt": hetdpt.Options(pruned_layers=2, search=STEP_2, **STEP_1),
    "nose": nose.Options(pruned_layers=2, te=TE),
    "activation_only": nose.ActivationOptions(pruned_layers=2, te=TE),
    "te_static": ablations.StaticOptions(pruned_layers=2, te=TE),
    "hetdpt_no_step2": hetdpt.AllocationOptions(pruned_layers=2, **STEP_1),
    "hetdpt_no_step1": ablations.DirectOptions(pruned_layers=2, search=STEP_2),
    "random": ablations.RandomOptions(pruned_layers=2),
    "fixed": ablations.FixedOptions(attention=(0,), activation=(2,)),
}
# Methods that remove no layers, and the tests of their own that hold them to the same.
ELSEWHERE = {
    "isomorphic": "test_isomorphic",
    "recover": "test_auxiliary",
    "fold": "test_auxiliary",
    "upvit": "test_upvit",
    "sero": "test_sero",
}
every_method = pytest.mark.parametrize("name", OPTIONS)


def test_every_method_has_a_row_here() -> None:
    assert {*OPTIONS, *ELSEWHERE} == set(METHODS)
    assert all((Path(__file__).parent / f"{name}.py").is_file() for name in ELSEWHERE.values())


@every_method
def test_plan(name: str, tmp_path: Path) -> None:
    """The right number of layers, model untouched, test split unseen, and the same answer from what was kept."""
    made, method, options = model(), METHODS[name], OPTIONS[name]
    before = {key: value.clone() for key, value in made.state_dict().items()}
    found = method.plan(made, context(tmp_path, made), options)
    assert len(found.removed) == 2
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert not any(module._forward_hooks for module in made.modules())
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (surgery.apply_to_copy(made, found)(pixels) - made(pixels)).abs().max() > 1e-3
    assert method.plan(made, context(tmp_path, made), options) == found
    drawn = {chart.title.split(":")[0].split(" ")[0]: chart for chart in method.report(tmp_path).charts}
    assert set(drawn) == {"hetdpt": {"HetDPT", "transfer"}, "random": set(), "fixed": set()}.get(name, set(drawn))
    if "transfer" in drawn:  # the picture shows what went
        lines = drawn["transfer"].lines
        assert sum(sum(line.gone) for line in lines) == 2 and all(len(line.x) == len(line.y) > 0 for line in lines)
    kinds = {"nose": {"attn"}, "activation_only": {"act"}}.get(name)
    assert kinds is None or {site.rsplit(".", 1)[1] for site in found.removed} == kinds


@every_method
def test_structure_is_a_plan_of_the_same_size(name: str) -> None:
    made, method = model(), METHODS[name]
    found = method.structure(made, family_of(made), context(Path(), made).plan, OPTIONS[name])
    assert len(found.removed) == 2
    surgery.apply_to_copy(made, found)
    assert method.options is type(OPTIONS[name])
    assert all(
        stage.rounds >= 1 and stage.epochs >= 1 for stage in method.estimate(made, family_of(made), OPTIONS[name])
    )
    assert bool(method.estimate(made, family_of(made), OPTIONS[name])) == (name not in ("random", "fixed"))


@every_method
def test_a_budget_larger_than_the_model_is_refused(name: str) -> None:
    made, method = model(), METHODS[name]
    few = {"pruned_layers": 5} if name not in ("fixed",) else {"attention": (0, 7)}
    options = method.options(**few)
    with pytest.raises(PlanError) as caught:
        method.structure(made, family_of(made), context(Path(), made).plan, options)
    assert any(word in str(caught.value) + str(caught.value.hint) for word in ("pruned_layers", "block 7"))


@every_method
def test_options_are_checked(name: str) -> None:
    check = TypeAdapter(METHODS[name].options)
    wrong = {"attention": [-1]} if name == "fixed" else {"pruned_layers": 0}
    with pytest.raises(ValidationError):
        check.validate_json(json.dumps(wrong))
    with pytest.raises(ValidationError):
        check.validate_json(json.dumps({"pruned_layers": 2, "attention_bypass": "skip"}))
    assert check.validate_json(check.dump_json(OPTIONS[name])) == OPTIONS[name]


PUBLISHED: dict[str, Any] = {"published_attention": (0, 2), "published_activation": (2,), "layers": "published"}


def test_published_layers_need_no_search(tmp_path: Path) -> None:
    made = model()
    options = hetdpt.Options(
        pruned_layers=3, attention_bypass="norm_identity", both_pruned_output_act="gelu", **PUBLISHED
    )
    found = hetdpt.plan(made, context(tmp_path, made), options)
    assert found.removed == {
        "blocks.0.attn": "norm_identity",
        "blocks.2.attn": "norm_identity",
        "blocks.2.mlp.act": "identity",
    }
    assert found.appended == {"blocks.2": "gelu"}
    assert read_json(tmp_path / "choice.json") == {"attention": [0, 2], "activation": [2], "both": [2]}
    assert hetdpt.estimate(made, family_of(made), options) == []


@pytest.mark.parametrize(
    ("count", "attention", "activation"),
    [(1, [], [5]), (2, [5], [5]), (5, [2, 8], [1, 5, 9]), (22, list(range(11)), list(range(11)))],
)
def test_unscored_layers_are_spread_and_the_last_of_each_type_stays(
    count: int, attention: list[int], activation: list[int]
) -> None:
    """Late attentions alone would make an exported file faster than other layers do: see `depth.spread_layers`."""
    made = model(depth=12)
    found = depth.spread_layers(made, family_of(made), count)
    assert found == {"attention": attention, "activation": activation}


@pytest.mark.parametrize("lists", [{}, {"published_attention": (0, 0), "published_activation": (2,)}])
def test_published_layers_must_match_the_budget(lists: Any, tmp_path: Path) -> None:
    made = model()
    with pytest.raises(PlanError, match="pruned_layers is 3"):
        hetdpt.plan(
            made,
            context(tmp_path, made),
            hetdpt.Options(
                pruned_layers=3, **(PUBLISHED | {"published_attention": (), "published_activation": ()} | lists)
            ),
        )


def test_an_example_stands_for_the_search_before_it_is_made(tmp_path: Path) -> None:
    made = model()
    family, base = family_of(made), context(tmp_path, made).plan
    options = hetdpt.Options(pruned_layers=3, example_attention=(0,), example_activation=(1, 2))
    assert set(hetdpt.structure(made, family, base, options).removed) == {
        "blocks.0.attn",
        "blocks.1.mlp.act",
        "blocks.2.mlp.act",
    }
    assert "blocks.0.attn" not in hetdpt.structure(made, family, base, replace(options, example_attention=(1,))).removed
    with pytest.raises(PlanError, match=r"example_attention and .* name 3 different layers, pruned_layers is 2"):
        hetdpt.structure(made, family, base, replace(options, pruned_layers=2))


def test_too_few_rounds_for_a_split_are_refused() -> None:
    made = model(6)
    base = context(Path(), made).plan
    few = CollectionOptions(rounds=2)
    with pytest.raises(PlanError, match="rounds is 2"):
        hetdpt.structure(made, family_of(made), base, hetdpt.Options(pruned_layers=5, collection=few))
    hetdpt.structure(made, family_of(made), base, hetdpt.Options(pruned_layers=5, collection=few, candidates="all"))


def test_hetdpt_keeps_to_its_split_and_its_candidates(tmp_path: Path) -> None:
    made = model(4)
    options = hetdpt.Options(pruned_layers=3, search=STEP_2, **STEP_1)
    found = hetdpt.plan(made, context(tmp_path, made), options)
    allocation, choice = read_json(tmp_path / "allocation.json"), read_json(tmp_path / "choice.json")
    assert [len(choice["attention"]), len(choice["activation"])] == allocation["chosen"]
    assert min(allocation["chosen"]) >= 1
    for kind in ("attention", "activation"):
        assert set(choice[kind]) <= set(read_json(tmp_path / f"{kind}_03.json")[kind])
    assert len(found.removed) == 3
    assert [(s["attention"], s["activation"]) for s in allocation["splits"]] == [(2, 1), (1, 2)]


def test_without_step_2_the_removal_order_decides(tmp_path: Path) -> None:
    made = model(4)
    ablations.no_step2(made, context(tmp_path, made), hetdpt.AllocationOptions(pruned_layers=3, **STEP_1))
    allocation, choice = read_json(tmp_path / "allocation.json"), read_json(tmp_path / "choice.json")
    for kind, count in zip(("attention", "activation"), allocation["chosen"], strict=True):
        assert choice[kind] == sorted(read_json(tmp_path / f"{kind}_03.json")[kind][:count])


def test_static_transfer_entropy_takes_the_lowest_of_both_types(tmp_path: Path) -> None:
    made = model()
    found = METHODS["te_static"].plan(made, context(tmp_path, made), OPTIONS["te_static"])
    rows = sorted(read_json(tmp_path / "transfer_entropy.json")["rows"], key=lambda row: row["transfer_entropy"])
    assert len(rows) == 6
    assert set(found.removed) == {row["site"] for row in rows[:2]}


def test_random_layers_follow_the_seed(tmp_path: Path) -> None:
    made = model(6)
    options = ablations.RandomOptions(pruned_layers=4, attention=3)

    def drawn(seed: int) -> Any:
        return ablations.random(made, context(tmp_path / str(seed), made, seed=seed), options).removed

    draws = [drawn(seed) for seed in range(5)]
    assert len({tuple(sorted(draw)) for draw in draws}) > 1
    assert all(sum(site.endswith("attn") for site in draw) == 3 for draw in draws)
    assert ablations.random(made, context(tmp_path / "again", made, seed=2), options).removed == draws[2]


@pytest.mark.parametrize(
    ("pick", "removed"),
    [
        ("first", {"blocks.0.attn", "blocks.0.mlp.act", "blocks.1.attn"}),
        ("last", {"blocks.2.mlp.act", "blocks.2.attn", "blocks.1.mlp.act"}),
    ],
)
def test_first_and_last_layers(pick: Any, removed: set[str], tmp_path: Path) -> None:
    made = model()
    options = ablations.RandomOptions(pruned_layers=3, pick=pick)
    assert set(ablations.random(made, context(tmp_path, made), options).removed) == removed


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
        assert values[epochs - 1] == 0.0, "the last epoch would be judged with layers that the deployed model lacks"


def test_nose_measures_dropped_and_deploys_doubled(tmp_path: Path) -> None:
    made = model()
    found = nose.NOSE.plan(made, context(tmp_path, made), OPTIONS["nose"])
    assert set(found.removed.values()) == {"double"}
    first = read_json(tmp_path / "transfer_entropy.json")[0]
    other = tmp_path / "doubled"
    doubled = nose.Options(pruned_layers=2, te=TE, te_bypass="double")
    nose.NOSE.plan(made, context(other, made), doubled)
    assert read_json(other / "transfer_entropy.json")[0]["rows"] != first["rows"]


def test_a_second_step_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    """Depth pruning of an already pruned model counts only what is left, in dense numbers."""
    made = model(4)
    about = context(tmp_path, made)
    first = ablations.fixed(made, about, ablations.FixedOptions(attention=(1,), activation=(1,)))
    pruned = surgery.apply_to_copy(made, first)
    again = context(tmp_path / "second", pruned, plan=about.plan.then(first))
    second = METHODS["hetdpt"].plan(pruned, again, OPTIONS["hetdpt"])
    assert len(second.removed) == 2
    assert not set(second.removed) & set(first.removed)
    surgery.apply_to_copy(made, about.plan.then(first).then(second))
