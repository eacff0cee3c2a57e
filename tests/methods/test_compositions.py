"""All pairs and triples of methods: the composed plan rebuilds the model that the steps produce one after the other."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from contracts import assert_same, build, contract, images, logits
from method_rows import ROWS
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.families import family_of
from vitcompress.methods.table import METHODS
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.plan import Plan

# Methods with equal options have equal structures, which are tested once.
OPTIONS = {name: row.composed or row.options for name, row in ROWS.items()}
Result = tuple[Plan, nn.Module]


def apply_methods(results: Iterable[Result]) -> Iterator[Result]:
    """The distinct plans after one more step of every method that supports the structure, and their models."""
    known = set()
    for plan, model in results:
        for name, method in METHODS.items():
            try:
                delta = method.structure(model, family_of(model), plan, OPTIONS[name])
            except InputError:
                continue
            composed = plan.then(delta)
            if composed.digest not in known:
                known.add(composed.digest)
                yield composed, surgery.apply_to_copy(model, delta)


@pytest.mark.parametrize(
    ("variant", "steps"),
    [("layer_scale", 3), ("swiglu", 2), ("split_swiglu", 2), ("dinov3", 2), ("swin", 2), ("pvt", 3)],
)
def test_composed_plans_rebuild_the_model(variant: str, steps: int, tmp_path: Path) -> None:
    assert set(OPTIONS) == set(METHODS)
    x, results = images(variant), [(contract(variant, depth=3).plan, build(variant, depth=3))]
    for _ in range(steps):
        results = list(apply_methods(results))
        for plan, model in results:
            write_model(tmp_path, model, plan)
            assert_same(logits(load_model(tmp_path), x), logits(model, x))
    assert {bool(plan.kept) and bool(plan.removed) for plan, _ in results} == {True, False}
