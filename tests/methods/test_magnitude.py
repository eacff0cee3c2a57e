"""Magnitude head pruning: the heads with the largest weights are kept, in q, k and v alike."""

from pathlib import Path

import pytest
import torch
from method_world import context, model

from vitcompress.errors import PlanError
from vitcompress.families import family_of
from vitcompress.methods import magnitude
from vitcompress.recipe.load import load_recipe


def test_the_heads_with_the_largest_weights_are_kept(tmp_path: Path) -> None:
    dense = model(num_heads=4)
    attention = dense.get_submodule("blocks.1.attn")
    with torch.no_grad():  # four channels per head
        attention.qkv.weight[32 + 4 : 32 + 8] *= 10  # v of head 1
        attention.proj.weight[:, 12:] *= 10  # outputs of head 3
        attention.qkv.weight[:4] *= 100  # q does not count
    delta = magnitude.plan(dense, context(tmp_path, dense), magnitude.Options())
    assert delta.kept["blocks.1.qk"] == delta.kept["blocks.1.v"] == (4, 5, 6, 7, 12, 13, 14, 15)
    assert delta.heads == {f"blocks.{block}.attn": 2 for block in range(3)}


@pytest.mark.parametrize(("share", "count"), [(0.1, 1), (0.3, 1), (0.7, 3)])
def test_at_least_one_head_is_kept(share: float, count: int) -> None:
    dense = model(num_heads=4)
    delta = magnitude.structure(
        dense, family_of(dense), context(Path(), dense).plan, magnitude.Options(keep_heads=share)
    )
    assert set(delta.heads.values()) == {count} and delta.kept["blocks.0.v"] == tuple(range(4 * count))


@pytest.mark.parametrize(("heads", "share", "hint"), [(2, 0.9, "lower keep_heads"), (1, 0.5, "use isomorphic")])
def test_a_share_that_removes_no_head_is_rejected(heads: int, share: float, hint: str) -> None:
    dense = model(num_heads=heads)
    with pytest.raises(PlanError, match=rf"keep_heads = {share} removes no head") as caught:
        magnitude.structure(dense, family_of(dense), context(Path(), dense).plan, magnitude.Options(keep_heads=share))
    assert hint in str(caught.value.hint)


def test_the_recipe_is_described() -> None:
    recipe = load_recipe("digits_magnitude")
    assert recipe.steps[0].options == magnitude.Options(keep_heads=0.5) and recipe.published is None
