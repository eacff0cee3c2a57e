"""All pairs and triples of methods: the composed plan rebuilds the model that the steps produce one after the other."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts import assert_same, build, contract, images, logits
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.families import family_of
from vitcompress.methods import METHODS, ablations, auxiliary, isomorphic, magnitude, nose
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.sero import options as sero
from vitcompress.methods.upvit import options as upvit
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.plan import Plan

TWO = {"pruned_layers": 2}
ALIGNMENT = isomorphic.Alignment(residual=4, ffn=4, head_dim=1)
# Methods with equal options have equal structures, which are tested once.
OPTIONS: dict[str, Any] = {
    "hetdpt": hetdpt.Options(**TWO),
    "nose": nose.Options(pruned_layers=1),
    "activation_only": nose.ActivationOptions(pruned_layers=1),
    "te_static": ablations.StaticOptions(**TWO, attention_bypass="norm_identity", both_pruned_output_act="gelu"),
    "hetdpt_no_step2": hetdpt.AllocationOptions(**TWO),
    "hetdpt_no_step1": ablations.DirectOptions(**TWO),
    "random": ablations.RandomOptions(**TWO, pick="last"),
    "fixed": ablations.FixedOptions(attention=(1,), activation=(0,), gated_ffn="drop_ffn"),
    "isomorphic": isomorphic.Options(keep_ratio=0.75, keep_heads=0.75, keep_head_dim=0.75, align=ALIGNMENT),
    "magnitude": magnitude.Options(),
    "sero": sero.Options(sparsity=0.3, round_to=1, layout="padded"),
    "recover": auxiliary.RecoverOptions(epochs=1),
    "fold": auxiliary.FoldOptions(),
    "upvit": upvit.Options(target_args={"embed_dim": 12, "num_heads": 2, "depth": 2}),
}
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
    ("variant", "steps"), [("layer_scale", 3), ("swiglu", 2), ("dinov3", 2), ("swin", 2), ("pvt", 3)]
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
