"""Transfer entropy against its definition, computed from all features at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from method_world import context, model
from torch import Tensor, nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.methods import depth
from vitcompress.methods.base import Context
from vitcompress.methods.calibration import calibration_images, training_subset
from vitcompress.methods.options import DepthOptions, EntropyOptions
from vitcompress.methods.transfer_entropy import deviation, entropies, greedy, measure, weighted_sums
from vitcompress.surgery.gates import GatedModel

BUDGET = DepthOptions(pruned_layers=2)
OPTIONS = EntropyOptions(images=30, resamples=8)
# Both sides add the same few hundred terms of order 1 to 10 in float64, in another order.
EXACT = 1e-10


@pytest.fixture
def world(tmp_path: Path) -> tuple[nn.Module, Context]:
    vit = model()
    return vit, context(tmp_path, vit)


def logits_of(vit: nn.Module, about: Context) -> Tensor:
    """(images, classes) of the same images, one batch after the other."""
    loader = calibration_images(about, OPTIONS.images)
    with torch.no_grad():
        return torch.cat([vit.eval()(batch) for batch, _ in loader])


def entropy_of(vit: nn.Module, about: Context) -> float:
    """The definition: one standard deviation per channel over all images."""
    return float(np.log(np.std(logits_of(vit, about).double().numpy(), axis=0)).sum())


def without(vit: nn.Module, about: Context, attentions: list[int], activations: list[int]) -> nn.Module:
    removed: dict[depth.Kind, list[int]] = {"attention": attentions, "activation": activations}
    return surgery.apply_to_copy(vit, depth.plan_layers(vit, about.plan, removed, BUDGET))


def gated(vit: nn.Module, about: Context) -> GatedModel:
    return depth.gate_layers(vit, about, depth.all_layers(vit, about.family), BUDGET)


def test_streaming_equals_all_features_at_once(world: tuple[nn.Module, Context]) -> None:
    vit, about = world
    values, accuracies, images = entropies(gated(vit, about), [()], about, OPTIONS)
    assert float(values[0, 0]) == pytest.approx(entropy_of(vit, about), abs=EXACT)
    assert (images, values.shape) == (30, (1, 1 + OPTIONS.resamples))
    right = logits_of(vit, about).argmax(dim=1).numpy() == training_subset(about, 10).labels
    assert float(accuracies[0]) == pytest.approx(100 * right.mean())


def test_outputs_of_tokens_are_rejected(tmp_path: Path) -> None:
    vit = model(global_pool="")
    about = context(tmp_path, vit)
    with pytest.raises(InputError, match=r"outputs \(5, 3\) for an image, not one logit per class"):
        entropies(gated(vit, about), [()], about, OPTIONS)


@pytest.mark.parametrize("sizes", [(7, 1, 40, 2), (50,), (1,) * 50])
def test_deviations_do_not_depend_on_batches_and_survive_a_large_mean(sizes: tuple[int, ...]) -> None:
    features = 1e6 + 1e-2 * np.random.default_rng(0).normal(size=(50, 4))
    weights = np.concatenate([np.ones((1, 50)), np.random.default_rng(1).poisson(1.0, (3, 50))]).astype(np.float64)
    center, total, start = torch.from_numpy(features[: sizes[0]].mean(0)), torch.zeros(()), 0
    for size in sizes:
        rows = slice(start, start + size)
        part = weighted_sums(torch.from_numpy(features[rows]), torch.from_numpy(weights[:, rows]), center)
        total, start = total + part, start + size
    expected = [np.sqrt(np.cov(features.T, fweights=w.astype(int), ddof=0).diagonal()) for w in weights]
    # Each feature carries a rounding of 1e6 * 2^-53, which is 1e-8 of its deviation; a sum of squares about zero would
    # lose 1e12 * 2^-53 = 1e-4 against a variance of 1e-4.
    np.testing.assert_allclose(deviation(total).numpy(), np.stack(expected), rtol=1e-6)


def test_transfer_entropy_is_the_difference_that_surgery_makes(world: tuple[nn.Module, Context]) -> None:
    vit, about = world
    sites = depth.all_layers(vit, about.family)
    result = measure(gated(vit, about), sites, about, OPTIONS)
    dense = entropy_of(vit, about)
    for row in result["rows"]:
        lists = ([row["index"]], []) if row["kind"] == "attention" else ([], [row["index"]])
        expected = dense - entropy_of(without(vit, about, *lists), about)
        # The edited model adds the same float32 numbers, some in another order: 1e-5 of a logit, over its deviation.
        assert row["transfer_entropy"] == pytest.approx(expected, abs=1e-4)
        assert abs(expected) > 1e-3, "the layer changes the entropy"
    lowest = min(result["rows"], key=lambda row: row["transfer_entropy"])
    assert result["chosen"] == lowest["site"]
    whole, one = entropies(gated(vit, about), [(), (sites[0].name,)], about, OPTIONS)[0]
    drawn = (whole - one)[1:].numpy()
    assert 0 < result["rows"][0]["deviation"] == pytest.approx(np.std(drawn, ddof=1))


def test_sign(world: tuple[nn.Module, Context]) -> None:
    vit, about = world
    sites = depth.layers(vit, about.family)["attention"]
    both = {
        sign: measure(gated(vit, about), sites, about, EntropyOptions(30, sign, 4))["rows"]
        for sign in ("signed", "abs")
    }
    assert [row["score"] for row in both["abs"]] == [abs(row["score"]) for row in both["signed"]]


def test_greedy_skips_the_whole_set_together(world: tuple[nn.Module, Context]) -> None:
    vit, about = world
    sites = depth.layers(vit, about.family)["attention"]
    tables = greedy(gated(vit, about), sites, 2, about, OPTIONS)
    first = next(site.index for site in sites if site.name == tables[0]["chosen"])
    assert [len(one["rows"]) for one in tables] == [3, 2]
    assert tables[0]["entropy"] == tables[1]["entropy"], "always against the dense model"
    dense = entropy_of(vit, about)
    for row in tables[1]["rows"]:
        joint = dense - entropy_of(without(vit, about, [first, row["index"]], []), about)
        assert row["transfer_entropy"] == pytest.approx(joint, abs=1e-4)


def test_a_channel_that_never_varies_is_clamped(world: tuple[nn.Module, Context]) -> None:
    vit, about = world
    with torch.no_grad():
        vit.get_parameter("head.weight")[1] = 0
    values, *_ = entropies(gated(vit, about), [()], about, OPTIONS)
    assert values.isfinite().all()
