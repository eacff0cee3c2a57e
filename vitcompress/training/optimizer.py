"""timm's optimisers and learning rate schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from vitcompress.errors import InputError
from vitcompress.training.options import TrainOptions


def make_optimizer(
    parameters: nn.Module | Sequence[dict[str, Any]], options: TrainOptions, device: torch.device
) -> torch.optim.Optimizer:
    """Create timm's optimiser `options.optimizer`; Adam and AdamW run as one fused kernel.

    Raises InputError if timm has no such optimiser, or it does not take these options.
    """
    if options.decay_all and isinstance(parameters, nn.Module):  # timm groups the parameters of a model only
        parameters = [{"params": [p for p in parameters.parameters() if p.requires_grad]}]
    extra: dict[str, object] = {"betas": options.betas} if options.betas else {}
    if options.optimizer.lower() in ("adam", "adamw") and device.type in ("cpu", "cuda"):
        extra["fused"] = True
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            parameters, options.optimizer, lr=options.peak_lr, weight_decay=options.weight_decay, **extra
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise InputError(
            f"optimizer {options.optimizer!r} cannot be created: {error}", hint="try adamw, sgd or lamb"
        ) from error
    return optimizer


def lr_setter(
    options: TrainOptions, optimizer: torch.optim.Optimizer, steps: int, lr_scale: Callable[[float], float] | None
) -> Callable[[int], None]:
    """Return a function that sets all learning rates for an optimiser step, counted from the start of the training.

    steps: per epoch. lr_scale: share of the peak at a fractional epoch, instead of the schedule.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    if lr_scale is None and options.schedule == "cosine":
        lowest = {name: min(getattr(options, name), options.peak_lr) for name in ("min_lr", "warmup_lr")}
        epochs = {"num_epochs": options.epochs, "warmup_epochs": options.warmup_epochs, "updates_per_epoch": steps}
        scheduler, _ = create_scheduler_v2(optimizer, "cosine", step_on_epochs=False, **lowest, **epochs)
        cosine: Callable[[int], None] = scheduler.step_update
        return cosine

    def set_lr(step: int) -> None:
        epoch = step / steps
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * (lr_scale(epoch) if lr_scale else 1.0) * _warmup(options, epoch, peak)

    return set_lr


def _warmup(options: TrainOptions, epoch: float, peak: float) -> float:
    """Learning rate during warm-up, linear from warmup_lr to the peak, as a share of the peak."""
    if epoch >= options.warmup_epochs or not peak:
        return 1.0
    start = min(options.warmup_lr / peak, 1.0)
    return start + (1.0 - start) * epoch / options.warmup_epochs
