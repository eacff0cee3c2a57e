"""The training loop: what it optimizes, at which rate, and which weights it keeps."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from tiny_training import DEVICES, OPTIONS, fit, same, vit, weights
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vitcompress.errors import InputError, VitcompressError
from vitcompress.families import family_of
from vitcompress.io.training_state import load_state
from vitcompress.plan import Plan
from vitcompress.surgery.gates import GatedModel
from vitcompress.training.distributed import Runtime
from vitcompress.training.loop import drop_path
from vitcompress.training.options import Augmentation, TrainOptions
from vitcompress.training.trainer import lr_setter, make_optimizer

# ------------------------------------------------------------------------------------------------------------ learning


def test_it_learns(tmp_path: Path) -> None:
    model = vit()
    result = fit(model, tmp_path, dataclasses.replace(OPTIONS, epochs=12))
    assert result.history[-1]["loss"] < 0.3 < result.history[0]["loss"]
    assert result.accuracy is not None and result.accuracy.top1 > 0.9
    assert not model.training and all(record["seconds"] > 0 for record in result.history)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, augmentation=Augmentation(noise=0.3), drop_path=0.3)
    trained = []
    for number, seed in enumerate((0, 0, 1)):
        model = vit()
        fit(model, tmp_path / str(number), options, seed=seed)
        trained.append(weights(model))
    assert same(trained[0], trained[1]) and not same(trained[0], trained[2])


class InFloat64(nn.Module):
    """Computes in float64, so that the order of additions shows up only near 1e-16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: Tensor) -> Any:
        return self.model(x.double())


def test_accumulated_parts_equal_the_whole_batch(tmp_path: Path) -> None:
    trained = []
    for parts in (1, 4):
        model = vit()
        options = dataclasses.replace(OPTIONS, accumulate=parts, optimizer="sgd", lr=0.1, clip_grad=1.0)
        fit(InFloat64(model), tmp_path / str(parts), options)
        trained.append(weights(model))
    # Plain SGD with a clipped gradient moves by at most lr per step. The two ways add the same 8 images' gradients in
    # another order, an error of at most about 1000 additions * 2^-53 of that, in 12 steps that may each amplify what
    # they inherit by 1 + lr * curvature < 10: 12 * 0.1 * 1000 * 1.1e-16 * 10.
    tolerance = 2e-12
    assert all(float((trained[0][name] - trained[1][name]).abs().max()) < tolerance for name in trained[0])
    start = weights(vit().double())
    assert any(float((trained[0][name] - start[name]).abs().max()) > 1e-2 for name in start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_to_the_weights_of_the_cpu(tmp_path: Path) -> None:
    """In float64, with the bound of the test above: a GPU adds the same products in another order."""
    trained = []
    for device in ("cpu", "cuda"):
        model = vit().double()
        options = dataclasses.replace(OPTIONS, optimizer="sgd", lr=0.1, clip_grad=1.0)
        fit(model, tmp_path / device, options, runtime=Runtime(torch.device(device), dtype=torch.float64))
        trained.append({name: value.cpu() for name, value in weights(model).items()})
    assert all(float((trained[0][name] - trained[1][name]).abs().max()) < 2e-12 for name in trained[0])
    start = weights(vit().double())
    assert any(float((trained[0][name] - start[name]).abs().max()) > 1e-2 for name in start)


def test_parts_must_be_equal(tmp_path: Path) -> None:
    four = Runtime(torch.device("cpu"), world_size=4)
    with pytest.raises(InputError, match="8 images per process cannot be computed in 3 equal parts"):
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, accumulate=3))
    with pytest.raises(InputError, match="batch_size 10 cannot be shared equally by 4 processes"):
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, batch_size=10), runtime=four)
    with pytest.raises(InputError, match="batch_size 49 is more than the 48 training images"):
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, batch_size=49))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("device", DEVICES)
def test_mixed_precision_learns_too(tmp_path: Path, device: str, amp: Any) -> None:
    model = vit()
    result = fit(model, tmp_path, dataclasses.replace(OPTIONS, epochs=12), runtime=Runtime(torch.device(device), amp))
    assert result.history[-1]["loss"] < 0.5 < result.history[0]["loss"]
    assert next(model.parameters()).dtype == torch.float32


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path) -> None:
    with pytest.raises(VitcompressError, match=r"the loss became (nan|inf) in epoch") as caught:
        fit(vit(), tmp_path, dataclasses.replace(OPTIONS, optimizer="sgd", lr=1e9))
    assert str(caught.value.hint).startswith("check the images")
    assert load_state(tmp_path) is None or load_state(tmp_path).data["finished"] is False  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------- learning rates


def trains(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is the optimizer of a model, not the one with which `check_optimizer` takes a step."""
    return len(optimizer.param_groups) > 1


def rates(tmp_path: Path, options: TrainOptions, **more: Any) -> list[float]:
    """The learning rate of every optimizer step."""
    rates_seen: list[float] = []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        rates_seen.extend([optimizer.param_groups[0]["lr"]] * trains(optimizer))

    handle = register_optimizer_step_pre_hook(record)
    try:
        fit(vit(), tmp_path, options, **more)
    finally:
        handle.remove()
    return rates_seen


def test_cosine_with_warmup(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, epochs=4, warmup_epochs=1, lr=1e-2, warmup_lr=1e-4, min_lr=1e-3)
    rates_seen = rates(tmp_path, options)
    expected = [
        1e-4 + (1e-2 - 1e-4) * step / 6 if step < 6 else 1e-3 + (1e-2 - 1e-3) * (1 + math.cos(math.pi * step / 24)) / 2
        for step in range(24)
    ]
    assert rates_seen == pytest.approx(expected, rel=1e-12)


def test_constant_and_callers_own_schedule(tmp_path: Path) -> None:
    assert rates(tmp_path / "a", dataclasses.replace(OPTIONS, schedule="constant")) == [1e-2] * 12
    own = rates(tmp_path / "b", OPTIONS, lr_scale=lambda epoch: 1 / (1 + epoch))
    assert own == pytest.approx([1e-2 / (1 + step / 6) for step in range(12)], rel=1e-12)


def test_the_published_schedule() -> None:
    """The learning rates that HetDPT's log for DeiT-B prints; it steps after an epoch, so epoch e has ours of e - 1."""
    options = TrainOptions(epochs=400, lr=4e-4, min_lr=1e-5, warmup_epochs=10, warmup_lr=1e-6)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=options.peak_lr)
    set_lr = lr_setter(options, optimizer, 312, None)
    for epoch, printed in {
        1: 1e-6,
        2: 4.1e-5,
        11: 3.99e-4,
        100: 3.44e-4,
        200: 2.07e-4,
        300: 6.8e-5,
        350: 2.5e-5,
    }.items():
        set_lr((epoch - 1) * 312)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(printed, rel=0.02), epoch  # two printed digits


def test_learning_rate_per_512_images() -> None:
    assert TrainOptions(lr_base=5e-5, batch_size=4096).peak_lr == pytest.approx(4e-4)


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_is_of_matrices_or_of_everything(decay_all: bool) -> None:
    """Without a gradient, AdamW leaves 1 - lr * decay of what it decays."""
    model = vit()
    options = TrainOptions(lr=0.1, weight_decay=0.5, decay_all=decay_all)
    optimizer = make_optimizer(model, options, torch.device("cpu"))
    before = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            before[name] = parameter.fill_(1.0).clone()
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {name: float(parameter.detach().min()) for name, parameter in model.named_parameters()}
    bare = {"cls_token", "pos_embed", "norm.weight", "head.bias"}
    assert bare < set(left)
    assert [left[name] for name in sorted(bare)] == pytest.approx([0.95 if decay_all else 1.0] * len(bare))
    assert left["head.weight"] == pytest.approx(0.95)


def test_options_are_checked_by_their_annotations() -> None:
    adapter = TypeAdapter(TrainOptions)
    for name, value in {"epochs": -3, "batch_size": 0, "lr": -1, "ema": 1.0, "alpha": -0.5, "schedule": "step"}.items():
        with pytest.raises(ValidationError, match=name):
            adapter.validate_python({name: value})
    assert adapter.validate_python({"augmentation": {"noise": 0.5}}).augmentation.noise == 0.5


# -------------------------------------------------------------------------------------------------------- what is kept


def test_ema_is_the_average_and_is_evaluated_beside_the_raw_weights(tmp_path: Path) -> None:
    model, seen = vit(), list[Tensor]()
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.extend([model.get_parameter("head.weight").detach().clone()] * trains(optimizer))
    )
    average = model.get_parameter("head.weight").detach().clone()
    result = fit(model, tmp_path, dataclasses.replace(OPTIONS, ema=0.8, select="best", epochs=3))
    handle.remove()
    for value in seen[: (result.epoch + 1) * 6]:
        average = 0.8 * average + 0.2 * value
    assert result.raw is not None and result.ema is not None
    kept = average if result.chosen == "ema" else seen[(result.epoch + 1) * 6 - 1]
    assert torch.allclose(model.get_parameter("head.weight"), kept, rtol=1e-5, atol=1e-7)
    assert (result.chosen == "ema") == (result.ema.correct > result.raw.correct)


def test_the_average_has_the_gates_that_were_set_between_epochs(tmp_path: Path) -> None:
    model = vit()
    gated = GatedModel(model, family_of(model), Plan("x", removed={"blocks.0.attn": "drop"}), {})

    def after_epoch(epoch: int) -> None:
        if epoch == 1:
            raise KeyboardInterrupt
        gated.set_gate("blocks.0.attn", 0.25)

    with pytest.raises(KeyboardInterrupt):
        fit(gated, tmp_path, dataclasses.replace(OPTIONS, ema=0.8, epochs=3), after_epoch=after_epoch)
    state = load_state(tmp_path)
    assert state is not None and len(state.data["history"]) == 1
    assert state.part("ema")["_extra_state"].tolist() == [0.25]


def test_best_keeps_the_best_epoch(tmp_path: Path) -> None:
    model, kept = vit(), []
    options = dataclasses.replace(OPTIONS, epochs=6, select="best", lr=3e-2)
    result = fit(model, tmp_path, options, after_epoch=lambda epoch: kept.append(weights(model)))
    scores = [record["heldout"]["correct"] for record in result.history]
    assert result.epoch == int(np.argmax(scores)) and same(weights(model), kept[result.epoch])
    for wrong in (options, dataclasses.replace(OPTIONS, ema=0.8)):  # of the weights and their average the best is kept
        with pytest.raises(InputError, match="needs held-out images"):
            fit(vit(), tmp_path / "none", wrong, heldout=None)


def test_zero_epochs_evaluate_the_model_as_it_is(tmp_path: Path) -> None:
    model = vit()
    before = weights(model)
    result = fit(model, tmp_path, dataclasses.replace(OPTIONS, epochs=0))
    assert same(before, weights(model)) and result.accuracy is not None and result.history == []


def test_evaluated_only_in_selected_epochs(tmp_path: Path) -> None:
    for every, due in ((0, [4]), (2, [1, 3, 4]), (1, [0, 1, 2, 3, 4])):
        result = fit(vit(), tmp_path / str(every), dataclasses.replace(OPTIONS, epochs=5, evaluate_every=every))
        assert [record["epoch"] for record in result.history if "heldout" in record] == due


# ---------------------------------------------------------------------------------------------------- stochastic depth


def test_drop_path_acts_while_it_lasts_and_leaves_nothing() -> None:
    model, images = vit().train(), torch.randn(64, 1, 4, 4)
    plain = model(images)
    before = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    with drop_path(model, 0.5):
        torch.manual_seed(0)
        dropped = (model(images) - plain).abs().amax(dim=1) > 1e-4
        assert torch.equal(model.eval()(images), plain)
    # Kept branches of the last block are doubled to keep the mean, so that no image passes unchanged.
    assert bool(dropped.all())
    assert torch.equal(model.train()(images), plain)
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == before


def test_drop_path_is_linear_in_depth() -> None:
    model = vit(depth=3).train()
    counts: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            counts[name] = int((out == 0).flatten(1).all(1).sum())

        return hook

    with drop_path(model, 0.4):
        for number in range(3):
            model.get_submodule(f"blocks.{number}.drop_path1").register_forward_hook(count(str(number)))
        torch.manual_seed(0)
        model(torch.randn(2000, 1, 4, 4))
    # binomial counts of 2000 draws, to five standard deviations
    for name, rate in (("0", 0.0), ("1", 0.2), ("2", 0.4)):
        assert abs(counts[name] - 2000 * rate) <= 5 * math.sqrt(2000 * rate * (1 - rate))


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_the_norm_of_all_gradients_is_clipped_without_the_loss_scale(amp: Any, tmp_path: Path) -> None:
    """One step of plain SGD moves all weights together by lr * clip_grad. fp16 has 11 bits: 1 % is more than enough."""
    model = vit()
    before = weights(model)
    options = dataclasses.replace(
        OPTIONS,
        epochs=1,
        batch_size=48,
        optimizer="momentum",
        lr=10.0,
        schedule="constant",
        weight_decay=0.0,
        clip_grad=1e-2,
    )
    fit(model, tmp_path, options, runtime=Runtime(torch.device("cpu"), amp))
    moved = torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()])
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-2)


def test_the_optimizer_has_the_configured_betas() -> None:
    optimizer = make_optimizer(vit(), TrainOptions(betas=(0.8, 0.9)), torch.device("cpu"))
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_no_rate_exceeds_the_peak(schedule: Any, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, lr=1e-4, min_lr=1e-2, warmup_lr=1e-3, warmup_epochs=1, schedule=schedule)
    assert rates(tmp_path, options) == pytest.approx([1e-4] * 12)


def test_of_equal_epochs_the_first_is_kept(tmp_path: Path) -> None:
    result = fit(vit(), tmp_path, dataclasses.replace(OPTIONS, epochs=3, lr=1e-12, min_lr=0.0, select="best"))
    assert len({record["heldout"]["correct"] for record in result.history}) == 1 and result.epoch == 0
