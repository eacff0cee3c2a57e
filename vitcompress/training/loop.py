"""One training loop for dense models, fast fine-tuning, score searches and recovery.

A training writes its state to its own folder at the end of every epoch. A killed training continues after the last
finished epoch. Every epoch starts by seeding all generators from (seed, label, epoch, rank), so no generator state is
saved, and on the CPU a resumed training equals an uninterrupted one bit for bit.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from timm.layers import DropPath
from timm.layers import drop_path as stochastic_depth
from torch import Tensor, nn

from vitcompress.errors import InputError, OutputError
from vitcompress.io.training_state import State, load_state, save_state
from vitcompress.training.datasets import Images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import BatchLoader, EvalLoader, TrainLoader
from vitcompress.training.log import Board, RunLog
from vitcompress.training.losses import both_heads, inner, objective, student_of
from vitcompress.training.metrics import Accuracy, evaluate
from vitcompress.training.optimizer import make_optimizer
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import Learner, TrainingContext, TrainingControls, TrainingJob, part_of

_EVAL_BATCH = 128  # images per process at least; without gradients this is small


def train(
    module: nn.Module,
    train_set: Images | BatchLoader,
    heldout_set: Images | BatchLoader | None,
    options: TrainOptions,
    at: TrainingContext,
    controls: TrainingControls | None = None,
) -> TrainResult:
    """Train `module` in place; it ends in eval mode with the selected weights.

    Args:
        module: a timm model, or a wrapper with one as `.model` (DDP wraps the outer one).
        train_set: labelled images, or the user's own batches.
        heldout_set: evaluated after epochs; None or empty for none.

    Raises:
        InputError: options that contradict the data, the model, the processes or an earlier state in `at.folder`.
        VitcompressError: the loss is no longer finite.
    """
    controls = controls or TrainingControls()
    check_options(options, train_set, heldout_set, at.runtime)
    module.to(at.runtime.device)
    loss = objective(module, options.loss, teacher=controls.teacher, input=at.input, device=at.runtime.device)
    student = student_of(module, options.distillation, controls.teacher, at.seed)
    with both_heads(module), drop_path(module, options.drop_path):
        result = _run(TrainingJob(student, options, at, controls, loss, len(train_set)), train_set, heldout_set)
    module.eval()
    return result


def _run(job: TrainingJob, train_set: Images | BatchLoader, heldout_set: Images | BatchLoader | None) -> TrainResult:
    state = job.runtime.broadcast(load_state(job.at.folder) if job.runtime.is_main else None)
    if state is not None and state.data["made_with"] != job.fingerprint:
        raise OutputError(
            f"{job.at.folder} contains a training with other settings", hint="use another folder, or --fresh"
        )
    if state is not None and state.data["finished"]:
        return _finished(job, state)
    heldout = _heldout_loader(job, heldout_set)
    if job.options.epochs == 0:
        untrained = None if heldout is None else _evaluate(job, job.module, heldout)
        return TrainResult([], untrained, None, "raw", -1)
    loader = _train_loader(job, train_set)
    learner = Learner(job, len(loader) // job.options.accumulate)
    if learner.steps == 0:
        raise InputError(
            f"batch_size {job.options.batch_size} is more than the {len(train_set)} training images",
            hint="lower batch_size or use more images",
        )
    if state is not None:
        learner.restore(state)
    return _epochs(job, learner, loader, heldout)


def _train_loader(job: TrainingJob, train_set: Images | BatchLoader) -> TrainLoader | BatchLoader:
    if isinstance(train_set, BatchLoader):
        return train_set
    at, classes = job.at, int(getattr(inner(job.module), "num_classes", 0))
    return TrainLoader(
        train_set, at.input, job.options.augmentation, job.micro_batch, at.seed, at.runtime, classes or None
    )


def _epochs(
    job: TrainingJob, learner: Learner, loader: TrainLoader | BatchLoader, heldout: EvalLoader | BatchLoader | None
) -> TrainResult:
    """Train the remaining epochs."""
    at, log = job.at, RunLog.beside(job.at.folder)
    stage, first = log.stage_of(at.folder, at.label), len(learner.history)
    if job.runtime.is_main:
        log.sync(stage, learner.history)
        epochs, steps = job.options.epochs, learner.steps
        at.progress.update(at.label, first * steps, epochs * steps, f"epoch {first + 1}/{epochs}")  # starts the clock
    with closing(log.tensorboard(stage, first) if job.runtime.is_main else Board(None, 0)) as board:
        for number in range(first, job.options.epochs):
            record = _epoch(job, learner, loader, heldout, number)
            if job.runtime.is_main:
                log.append(stage, record)
                board.add(record)
    return _result(learner.history, learner.best_of)


def _epoch(
    job: TrainingJob,
    learner: Learner,
    loader: TrainLoader | BatchLoader,
    heldout: EvalLoader | BatchLoader | None,
    number: int,
) -> dict[str, Any]:
    """Train, evaluate and save one epoch; return its record."""
    began = time.perf_counter()
    loss = learner.epoch(number, loader)
    record = {"epoch": number, "loss": loss, "lr": max(group["lr"] for group in learner.optimizer.param_groups)}
    record |= _heldout_accuracy(job, learner, heldout, number)
    record["seconds"] = round(time.perf_counter() - began, 3)
    _end_epoch(job, learner, record)
    return record


def _end_epoch(job: TrainingJob, learner: Learner, record: dict[str, Any]) -> None:
    """Call `after_epoch`, select weights, and save the state; the last epoch saves the selected weights only."""
    number = record["epoch"]
    if job.controls.after_epoch:
        job.controls.after_epoch(number)
        learner.sync_ema()
    learner.history.append(record)
    last = number + 1 == job.options.epochs
    _select(job, learner, record, last)
    tensors, data = learner.state()
    if last:
        tensors = {f"module.{name}": value for name, value in learner.best.items()}
        data |= {"finished": True, "numbers": {}, "groups": [], "scaler": {}}
        job.module.load_state_dict(learner.best)
    if job.runtime.is_main:
        save_state(job.at.folder, number, tensors, data)


def _select(job: TrainingJob, learner: Learner, record: Mapping[str, Any], last: bool) -> None:
    """Keep this epoch's weights if `select` calls for it: the raw ones, or their average (EMA) if that is better."""
    ema = record.get("ema", {}).get("correct", -1)
    raw = record.get("heldout", {}).get("correct", -1)
    score = max(ema, raw)
    is_selected = score > learner.best_of.get("score", -1) if job.options.select == "best" else last
    if not is_selected:
        return
    chosen = learner.ema.module if learner.ema and ema > raw else job.module
    learner.best = {name: value.detach().clone() for name, value in chosen.state_dict().items()}
    learner.best_of = {"score": score, "epoch": record["epoch"], "chosen": "ema" if ema > raw else "raw"}


def _heldout_accuracy(
    job: TrainingJob, learner: Learner, heldout: EvalLoader | BatchLoader | None, number: int
) -> dict[str, Any]:
    """Held-out accuracy of the raw weights and of their average, in epochs that `evaluate_every` selects."""
    every = job.options.evaluate_every
    due = number + 1 == job.options.epochs or (every and (number + 1) % every == 0)
    if heldout is None or not due:
        return {}
    record = {"heldout": asdict(_evaluate(job, job.module, heldout))}
    if learner.ema:
        record["ema"] = asdict(_evaluate(job, learner.ema.module, heldout))
    return record


def _evaluate(job: TrainingJob, module: nn.Module, heldout: EvalLoader | BatchLoader) -> Accuracy:
    """Accuracy of `module` in eval mode, computed in the precision of the training."""
    module.eval()
    with job.runtime.autocast():
        return evaluate(module, heldout, job.runtime)


def _finished(job: TrainingJob, state: State) -> TrainResult:
    """Load the selected weights of a training that has ended."""
    job.module.load_state_dict(part_of(state.tensors, "module."))
    if job.hooks:
        job.hooks.restore(state.data["hooks"])
    if job.runtime.is_main:
        log = RunLog.beside(job.at.folder)
        log.sync(log.stage_of(job.at.folder, job.at.label), state.data["history"])
    return _result(state.data["history"], state.data["best_of"])


def _result(history: list[dict[str, Any]], best_of: Mapping[str, Any]) -> TrainResult:
    record = history[best_of["epoch"]]
    raw, ema = (Accuracy(**record[name]) if name in record else None for name in ("heldout", "ema"))
    return TrainResult(history, raw, ema, best_of["chosen"], best_of["epoch"])


def check_options(
    options: TrainOptions, train_set: Images | BatchLoader, heldout: Images | BatchLoader | None, runtime: Runtime
) -> None:
    """Reject options that would fail later, or silently.

    Raises:
        InputError: options that contradict the data, the processes, or each other.
    """
    share = runtime.share_of(options.batch_size)
    if share % options.accumulate:
        raise InputError(
            f"{share} images per process cannot be computed in {options.accumulate} equal parts",
            hint="use a batch_size that processes * accumulate divides",
        )
    if options.epochs and not isinstance(train_set, BatchLoader) and options.batch_size > len(train_set):
        raise InputError(
            f"batch_size {options.batch_size} is more than the {len(train_set)} training images",
            hint="lower batch_size or use more images",
        )
    if options.select == "best" and not heldout:
        raise InputError("select = 'best' needs held-out images and there are none", hint="set data.heldout above 0")
    make_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], options, torch.device("cpu"))


def _heldout_loader(job: TrainingJob, heldout_set: Images | BatchLoader | None) -> EvalLoader | BatchLoader | None:
    if not heldout_set:
        return None
    if isinstance(heldout_set, BatchLoader):
        return heldout_set
    return EvalLoader(heldout_set, job.at.input, max(_EVAL_BATCH, job.micro_batch), job.runtime)


@contextmanager
def drop_path(module: nn.Module, rate: float) -> Iterator[None]:
    """Stochastic depth (Huang et al., 2016): 0 in the first block, rising linearly to `rate` in the last.

    It acts on the modules that timm calls drop_path. They are not replaced, so hooks on them stay.
    """
    owners = [
        [child for name, child in owner.named_children() if name.startswith("drop_path")] for owner in module.modules()
    ]
    owners = [children for children in owners if children]
    handles: list[Any] = []
    before = [(child, child.drop_prob) for children in owners for child in children if isinstance(child, DropPath)]
    try:
        for depth, children in enumerate(owners):
            share = rate * depth / max(1, len(owners) - 1)
            for child in children:
                if isinstance(child, DropPath):
                    child.drop_prob = share
                elif share:  # before any other hook, which may replace the whole branch
                    handles.append(child.register_forward_hook(_DropPath(share), prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for child, value in before:
            child.drop_prob = value


class _DropPath:
    """A hook that drops a branch's output for a share of the images while training."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        dropped: Tensor = stochastic_depth(out, self.rate, module.training)
        return dropped
