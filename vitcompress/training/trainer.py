"""One training: its settings, timm's optimizer, and its state, saved to tensors and plain data and restored."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitcompress.errors import DataError, InputError, VitcompressError
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import tensors_digest
from vitcompress.io.training_state import State
from vitcompress.models.create import InputConfig
from vitcompress.training.distributed import Runtime, derived_seed
from vitcompress.training.loaders import EVAL_BATCH, BatchLoader, EvalLoader, TrainData, TrainLoader
from vitcompress.training.losses import Objective, inner
from vitcompress.training.options import EpochRecord, TrainOptions

_STEPS_BETWEEN_CHECKS = 50  # reading the loss makes the host wait for the device


class StepHooks(Protocol):
    """Callbacks around every optimizer step, with JSON data for the resume state."""

    def before_step(self, epoch: int, step: int, steps: int, backward: Callable[[], object]) -> None:
        """Called before step `step` of `steps` in epoch `epoch` (all from 0). It may change gates and hooks on modules.

        backward() computes in `.grad` the gradients of the step's first batch, averaged over ranks, times a loss scale.
        They are dropped afterwards.
        """

    def before_update(self) -> None:
        """Called with the step's gradients in `.grad`, before clipping; they may be changed."""

    def after_update(self) -> None:
        """Called after the weights have changed."""

    def state(self) -> Any:
        """Return JSON data for `restore`."""

    def restore(self, data: Any) -> None:
        """Continue from `data`."""


@dataclass(frozen=True)
class TrainingContext:
    """Where a training runs, and what identifies it.

    input: preprocessing of the model. folder: of its state only. label: shown in progress, part of the seed.
    """

    input: InputConfig
    runtime: Runtime
    folder: Path
    label: str
    seed: int
    progress: Progress


@dataclass(frozen=True)
class TrainingControls:
    """Optional parts of a training.

    teacher: for distillation; must take the same images. lr_scale: factor of the peak learning rate at a fractional
    epoch, instead of the schedule. after_epoch: called on every rank with the epoch's number (from 0) after it was
    evaluated and before its state is saved; it may change gates. parameter_groups: of the optimizer; by default timm's,
    without decay for vectors and scalars. hooks: called around every optimizer step.
    """

    teacher: nn.Module | None = None
    lr_scale: Callable[[float], float] | None = None
    after_epoch: Callable[[int], None] | None = None
    parameter_groups: Sequence[dict[str, Any]] | None = None
    hooks: StepHooks | None = None


@dataclass(frozen=True)
class TrainingJob:
    """The constant part of one training."""

    module: nn.Module
    options: TrainOptions
    at: TrainingContext
    controls: TrainingControls
    loss: Objective
    train_set: TrainData
    heldout_set: TrainData | None

    @cached_property
    def fingerprint(self) -> dict[str, object]:
        """What a state in the folder must have been trained with."""
        options, teacher = json.loads(json.dumps(asdict(self.options))), self.controls.teacher
        images = {"images": len(self.train_set), "files": getattr(self.train_set, "digest", "")}
        weights = None if teacher is None else tensors_digest(teacher.state_dict().values())
        return {"label": self.at.label, "seed": self.at.seed, **images, "teacher": weights, "options": options}

    @cached_property
    def heldout(self) -> EvalLoader | BatchLoader | None:
        if isinstance(self.heldout_set, BatchLoader | None):
            return self.heldout_set
        return EvalLoader(self.heldout_set, self.at.input, EVAL_BATCH, self.at.runtime)


class Learner:
    """The changing part of one training: it can be saved as tensors and plain data, and restored."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.hooks, at, data = job, job.controls.hooks, job.at, job.train_set
        classes = int(getattr(inner(job.module), "num_classes", 0)) or None
        size = job.options.batch_size // (at.runtime.world_size * job.options.accumulate)  # of a forward pass
        own: Any = {"augmentation": job.options.augmentation, "seed": at.seed, "classes": classes}
        self.loader = data if isinstance(data, BatchLoader) else TrainLoader(data, at.input, size, at.runtime, **own)
        self.steps = len(self.loader) // job.options.accumulate  # of an epoch
        runtime, groups = at.runtime, job.controls.parameter_groups
        self.network: Any = runtime.wrap(job.module)
        self.optimizer = make_optimizer(job.module if groups is None else list(groups), job.options, runtime.device)
        self.set_lr = lr_setter(job.options, self.optimizer, self.steps, job.controls.lr_scale)
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.amp == "fp16")
        # Buffers are copied, not averaged: they are exact states (gates), not estimates.
        self.ema = ModelEmaV3(job.module, job.options.ema, exclude_buffers=True) if job.options.ema else None
        self.history: list[EpochRecord] = []
        self.best: dict[str, Tensor] = {}
        self.best_of: dict[str, Any] = {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name and JSON data that `restore` continues from."""
        optimizer = self.optimizer.state_dict()
        parts = {"module": self.job.module.state_dict(), "best": self.best}
        parts |= {"ema": self.ema.module.state_dict()} if self.ema else {}
        parts |= {f"optimizer.{number}": slots for number, slots in optimizer["state"].items()}
        parts |= {f"group.{number}": group for number, group in enumerate(optimizer["param_groups"])}
        named = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        return tensors, {
            "numbers": {name: value for name, value in named.items() if name not in tensors},
            "scaler": self.scaler.state_dict(),
            "history": self.history,
            "best_of": self.best_of,
            "finished": False,
            "made_with": self.job.fingerprint,
            **({"hooks": self.hooks.state()} if self.hooks else {}),
        }

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        self.job.module.load_state_dict(state.part("module"))
        if self.ema:
            self.ema.module.load_state_dict(state.part("ema"))
        self.best = state.part("best")
        numbers = {int(name.partition(".")[0]) for name in state.part("optimizer")}
        slots = {number: state.part(f"optimizer.{number}") for number in numbers}
        groups = self.optimizer.state_dict()["param_groups"]
        for number, group in enumerate(groups):  # some optimizers count their steps here
            for name, value in state.part(f"group.{number}").items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value  # a list in JSON
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        if self.scaler.is_enabled() and state.data["scaler"]:
            self.scaler.load_state_dict(state.data["scaler"])
        self.history, self.best_of = list(state.data["history"]), dict(state.data["best_of"])
        if self.hooks:
            self.hooks.restore(state.data["hooks"])

    def epoch(self, number: int) -> float:
        """Train one pass over the training set; return the mean loss over all images and ranks."""
        job, total = self.job, torch.zeros((), device=self.job.at.runtime.device)
        random_seed(derived_seed(job.at.seed, job.at.label, number, job.at.runtime.rank))
        if self.ema:  # it rounds averages in bf16 at random; the same in all processes
            self.ema._sr_generator.manual_seed(derived_seed(job.at.seed, job.at.label, number))
        self.loader.set_epoch(number)
        job.module.train()
        batches = iter(self.loader)
        for step in range(self.steps):
            self.set_lr(number * self.steps + step)
            total += self._step(number, step, batches)
            if (step + 1) % _STEPS_BETWEEN_CHECKS == 0 or step + 1 == self.steps:
                self._report(number, step + 1, float(total) / (step + 1))
        return float(job.at.runtime.all_sum(total)) / job.at.runtime.world_size / self.steps

    def _step(self, number: int, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Take one optimizer step on `accumulate` batches; return their mean loss."""
        job, parts, total = self.job, self.job.options.accumulate, torch.zeros((), device=self.job.at.runtime.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in range(parts):
            if (batch := next(batches, None)) is None:
                message = f"the data gave {step * parts + part} of {len(self.loader)} batches in epoch {number + 1}"
                raise DataError(message, hint="pass batches that every epoch can read, as many as their length states")
            images, targets = batch
            if not len(images):
                message = f"batch {step * parts + part} of epoch {number + 1} has no images"
                raise DataError(message, hint="leave empty batches out: there is no loss to take a step with")
            if part == 0 and self.hooks:
                self.hooks.before_step(number, step, self.steps, partial(self._backward, images, targets))
                self.optimizer.zero_grad(set_to_none=True)
            # Gradients are averaged over processes only with the last part of a step.
            skip_sync = part + 1 < parts and isinstance(self.network, DistributedDataParallel)
            with self.network.no_sync() if skip_sync else nullcontext():
                total += self._backward(images, targets, parts)
        if self.hooks:
            self.hooks.before_update()
        if job.options.clip_grad:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(job.module.parameters(), job.options.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.hooks:
            self.hooks.after_update()
        if self.ema:
            self.ema.update(job.module)
        return total

    def _backward(self, images: Tensor, targets: Tensor, parts: int = 1) -> Tensor:
        """Add the gradients of one of `parts` batches; return its share of the loss."""
        with self.job.at.runtime.autocast():
            loss = self.job.loss(self.network, images, targets) / parts
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _report(self, number: int, step: int, loss: float) -> None:
        """Show progress; raise VitcompressError if the loss is NaN or infinite."""
        job, epochs = self.job, self.job.options.epochs
        if not math.isfinite(loss):
            hint = "check the images for it; lower the learning rate, set clip_grad = 1.0, or use amp bf16 or none "
            hint += "(in Python with a copy of the model from before)"
            raise VitcompressError(f"{job.at.label}: the loss became {loss} in epoch {number + 1}", hint=hint)
        if job.at.runtime.is_main:
            text = f"epoch {number + 1}/{epochs}, loss {loss:.3f}"
            if known := [record for record in self.history if "heldout" in record]:
                accuracy, epoch = known[-1]["heldout"], known[-1]["epoch"] + 1
                text += f", held-out {100 * accuracy['correct'] / accuracy['total']:.1f} % after epoch {epoch}"
            job.at.progress.update(job.at.label, number * self.steps + step, epochs * self.steps, text)


def weight_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """timm's groups: vectors and the exceptions that its model names, without weight decay, then all others."""
    own: Any = getattr(inner(module), "no_weight_decay", set)
    exceptions = {f"{prefix}{name}" for name in own() for prefix in ("", "model.")}  # the name in a wrapper
    return list(param_groups_weight_decay(module, decay, no_weight_decay_list=exceptions))


def make_optimizer(
    parameters: nn.Module | Sequence[dict[str, Any]], options: TrainOptions, device: torch.device
) -> torch.optim.Optimizer:
    """Create timm's optimizer `options.optimizer`; Adam and AdamW run as one fused kernel.

    Raises InputError if timm has no such optimizer, it does not take these options, or a module is frozen as a whole.
    """
    if isinstance(parameters, nn.Module):
        if not (trained := [p for p in parameters.parameters() if p.requires_grad]):
            hint = "call requires_grad_(True) on the parts to train"
            raise InputError("no parameter of the model requires gradients, so nothing can be trained", hint=hint)
        if any(parameter.is_inference() for parameter in trained):
            message = "weights that were created in torch.inference_mode cannot be trained"
            raise InputError(message, hint="create the model outside of it, or train copy.deepcopy(model)")
        parameters = [{"params": trained}] if options.decay_all else weight_groups(parameters, options.weight_decay)
    extra: dict[str, Any] = {"lr": options.peak_lr, "weight_decay": options.weight_decay}
    extra |= {"betas": options.betas} if options.betas else {}
    if options.optimizer.lower() in ("adam", "adamw") and device.type in ("cpu", "cuda"):
        extra["fused"] = True
    try:
        return cast(torch.optim.Optimizer, create_optimizer_v2(parameters, options.optimizer, **extra))
    except (ValueError, TypeError, AssertionError) as error:
        message = f"optimizer {options.optimizer!r} cannot be created: {error}"
        raise InputError(message, hint="try adamw, sgd or lamb") from error


def check_optimizer(options: TrainOptions) -> None:
    """Raise InputError if `make_optimizer` does, or a training with the optimizer could not step or save its state."""
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer([{"params": [weight]}], options, torch.device("cpu"))
    weight.grad = torch.zeros_like(weight)
    try:
        with torch.compiler.set_stance("force_eager"):  # some compile their step, which takes a minute
            optimizer.step()
        state = optimizer.state_dict()
        values = (value for part in (*state["state"].values(), *state["param_groups"]) for value in part.values())
        json.dumps([value for value in values if not isinstance(value, Tensor)])
    except (TypeError, RuntimeError) as error:
        reason = "it needs second derivatives, or its state cannot be saved"
        raise InputError(f"optimizer {options.optimizer!r} is not supported: {reason}", hint="use adamw") from error


def lr_setter(
    options: TrainOptions, optimizer: torch.optim.Optimizer, steps: int, lr_scale: Callable[[float], float] | None
) -> Callable[[int], None]:
    """Return a function that sets all learning rates for an optimizer step, counted from the start of the training.

    steps: per epoch. lr_scale: share of the peak at a fractional epoch, instead of the schedule.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    if lr_scale is None:
        low = options.peak_lr if options.schedule == "constant" else min(options.min_lr, options.peak_lr)
        lowest = {"min_lr": low, "warmup_lr": min(options.warmup_lr, options.peak_lr)}
        epochs = {"num_epochs": options.epochs, "warmup_epochs": options.warmup_epochs, "updates_per_epoch": steps}
        scheduler, _ = create_scheduler_v2(optimizer, "cosine", step_on_epochs=False, **lowest, **epochs)
        return cast(Callable[[int], None], scheduler.step_update)

    def set_lr(step: int) -> None:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * lr_scale(step / steps)

    return set_lr
