"""An option that has no effect is an error, for every option of the width methods."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from contracts import build, contract
from method_world import context, model

from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.methods.latency import check_target
from vitcompress.methods.options import Alignment
from vitcompress.methods.table import METHODS

FINE = {"align": Alignment(residual=1, ffn=1, head_dim=1)}
BASE: dict[str, dict[str, Any]] = {
    "isomorphic": FINE,
    "sero": {"sparsity": 0.5, "epochs": 2},
    "upvit": {"target_args": {"embed_dim": 8, "num_heads": 1}},
}
# Options with an effect in every combination. A target is required for UP-ViT.
ALWAYS = {
    "isomorphic": {"keep_ratio", "keep_heads", "target", "scope", "criterion", "round_to"},
    "sero": {
        *(
            "target",
            "sparsity",
            "epochs",
            "warmup_epochs",
            "refresh",
            "lr",
            "layout",
            "threshold",
            "criterion",
            "weight_scale",
        ),
    },
    "upvit": {"target", "target_args"},
}
ONLY_BLOCKS, ONLY_FFNS = {"target_args": {"depth": 2}}, {"target_args": {"mlp_ratio": 2.0}}
SMALLER = {"target_args": {"embed_dim": 8, "num_heads": 1, "depth": 2}}
LATENCY = {"target": "latency", "amount": 1.0}
SCREENED = {"score": "screened"}
# method, option, options with which the value has an effect, options with which it has none
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("isomorphic", {"amount": 5e-3}, {"target": "params"}, {}),
    ("isomorphic", {"latency_on": "torch"}, LATENCY, {"target": "params", "amount": 5e-3}),
    ("isomorphic", FINE, {}, {"round_to": 2}),
    ("isomorphic", {"images": 24}, {}, {"criterion": "magnitude"}),
    ("isomorphic", {"images": 24}, {"criterion": "gradient"}, {"criterion": "random"}),
    ("isomorphic", {"keep_head_dim": 0.5}, {}, {"scope": "global"}),
    ("isomorphic", {"attention_scale": "reset"}, {}, {"keep_head_dim": 1.0}),
    ("sero", {"round_to": 2}, {}, {"layout": "ragged"}),
    ("sero", {"criterion_pass": "masked"}, {"criterion": "gradient_times_weight"}, {"criterion": "weight"}),
    ("sero", {"criterion_pass": "masked"}, {}, {"criterion": "random"}),
    ("upvit", {"heads": "across"}, {}, ONLY_FFNS),
    ("upvit", {"images": 24}, {}, {"score": "magnitude"}),
    ("upvit", {"images": 24}, {"score": "random", **SMALLER}, {"score": "random"}),
    ("upvit", {"reference": "current"}, {"target_args": {"depth": 1}}, ONLY_BLOCKS),
    ("upvit", {"score": "fisher"}, {}, ONLY_BLOCKS),
    ("upvit", {"screen": "images"}, SCREENED, {}),
    ("upvit", {"band": 0.25}, SCREENED, {"score": "fisher"}),
    ("upvit", {"screen_images": 12}, {**SCREENED, "screen": "images"}, SCREENED),
    ("upvit", {"directions": 1}, {"score": "fisher"}, {**SCREENED, "screen": "images"}),
    ("upvit", {"directions": 1}, SCREENED, {}),
    ("upvit", {"images_at_once": 64}, SCREENED, {"score": "fisher"}),
    ("upvit", {"images_at_once": 64}, {}, ONLY_BLOCKS),
    *(
        (method, {option: value}, LATENCY, {})
        for method in BASE
        for option, value in {"latency_on": "torch", "latency_batch": 2, "latency_threads": 2}.items()
    ),
    *((method, {"amount": 2.0}, {"target": "latency"}, {}) for method in BASE),
]


def structure(method: str, **options: Any) -> None:
    dense = model()
    base = context(Path(), dense).plan
    settings = METHODS[method].options(**options)
    check_target(settings)
    METHODS[method].structure(dense, family_of(dense), base, settings)


@pytest.mark.parametrize(("method", "option", "used", "unused"), CASES)
def test_options_without_effect_are_rejected(
    method: str, option: dict[str, Any], used: dict[str, Any], unused: dict[str, Any]
) -> None:
    base = {name: value for name, value in BASE[method].items() if not ("round_to" in unused and name == "align")}
    ((name, value),) = option.items()
    structure(method, **{**BASE[method], **used, **option})
    structure(method, **{**base, **unused})
    shown = "" if name == "align" else f" = {value!r}"  # a table is shown without its values
    with pytest.raises(PlanError) as caught:
        structure(method, **{**base, **unused, **option})
    assert caught.value.hint and str(caught.value).startswith(f"{name}{shown} has no effect: ")


def test_a_target_needs_an_amount() -> None:
    with pytest.raises(PlanError, match="amount is required with target = 'macs'"):
        check_target(METHODS["isomorphic"].options(target="macs"))


@pytest.mark.parametrize("method", BASE)
def test_every_option_has_a_case(method: str) -> None:
    cases = {name for row, option, _, _ in CASES if row == method for name in option}
    assert cases | ALWAYS[method] == {field.name for field in fields(METHODS[method].options)}
    assert not cases & ALWAYS[method]


def test_the_softmax_scale_of_heads_that_keep_their_width_cannot_be_reset() -> None:
    """Under a rotary embedding q and k lose whole heads only."""
    dense, row = build("rotary"), contract("rotary")
    options = METHODS["isomorphic"].options(attention_scale="reset", **FINE)
    with pytest.raises(PlanError, match="attention_scale = 'reset' has no effect: the heads of q and k keep their"):
        METHODS["isomorphic"].structure(dense, family_of(dense), row.plan, options)
