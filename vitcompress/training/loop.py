"""One training loop for everything that learns: dense models, fast fine-tunes, score searches, recovery.

A training keeps its state in a folder of its own, written whole at the end of every epoch. Killed at any moment and
started again it continues after the last finished epoch. Every epoch begins by seeding all generators from (seed,
label, epoch, rank): an epoch's randomness depends on nothing that ran before it, so no generator's state needs to be
kept, and on the CPU the resumed run is the uninterrupted one bit for bit.
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
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import EvalLoader, Images, TrainLoader
from vitcompress.training.log import Board, RunLog
from vitcompress.training.losses import both_heads, inner, objective, student_of
from vitcompress.training.metrics import Accuracy, evaluate
from vitcompress.training.optimizer import make_optimizer
from vitcompress.training.options import TrainOptions, TrainResult
from vitcompress.training.trainer import Learner, TrainingContext, TrainingControls, TrainingJob, part_of

_EVAL_BATCH = 128  # images per process at least; without gradients this is small


def train(
    module: nn.Module,
    train_set: Images,
    heldout_set: Images | None,
    options: TrainOptions,
    at: TrainingContext,
    controls: TrainingControls | None = None,
) -> TrainResult:
    """Train `module` in place and leave it in eval mode with the weights that were kept.

    Args:
        module: a timm model, or a wrapper that holds one as `.model` (DDP wraps the outer one).
        heldout_set: judged after epochs; None or empty for no judgement.

    Raises:
        InputError: options that contradict the data, the model, the processes or an earlier state in `at.folder`.
        VitcompressError: the loss is no longer finite.
    """
    controls = controls or TrainingControls()
    check_options(options, train_set, heldout_set, at.runtime)
    module.to(at.runtime.device)
    loss = objective(module, options.loss, teacher=controls.teacher, input=at.input, device=at.runtime.device)
    student = student_of(module, options.distillation, controls.teacher)
    with both_heads(module), drop_path(module, options.drop_path):
        result = _run(TrainingJob(student, options, at, controls, loss, len(train_set)), train_set, heldout_set)
    module.eval()
    return result


def _run(job: TrainingJob, train_set: Images, heldout_set: Images | None) -> TrainResult:
    state = job.runtime.broadcast(load_state(job.at.folder) if job.runtime.is_main else None)
    if state is not None and state.data["made_with"] != job.fingerprint:
        raise OutputError(
            f"{job.at.folder} holds the training of other settings", hint="use another folder, or --fresh"
        )
    if state is not None and state.data["finished"]:
        return _finished(job, state)
    heldout = _heldout_loader(job, heldout_set)
    if job.options.epochs == 0:
        untrained = None if heldout is None else _judge(job, job.module, heldout)
        return TrainResult([], untrained, None, "raw", -1)
    at, augmentation = job.at, job.options.augmentation
    loader = TrainLoader(train_set, at.input, augmentation, job.micro_batch, at.seed, at.runtime)
    loader.set_classes(int(getattr(inner(job.module), "num_classes", 0)) or int(train_set.labels.max()) + 1)
    learner = Learner(job, len(loader) // job.options.accumulate)
    if learner.steps == 0:
        raise InputError(
            f"batch_size {job.options.batch_size} is more than the {len(train_set)} training images",
            hint="lower batch_size or give more images",
        )
    if state is not None:
        learner.restore(state)
    return _epochs(job, learner, loader, heldout)


def _epochs(job: TrainingJob, learner: Learner, loader: TrainLoader, heldout: EvalLoader | None) -> TrainResult:
    """All epochs that are left."""
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
    job: TrainingJob, learner: Learner, loader: TrainLoader, heldout: EvalLoader | None, number: int
) -> dict[str, Any]:
    """Train, judge and save one epoch; its record."""
    began = time.perf_counter()
    loss = learner.epoch(number, loader)
    record = {"epoch": number, "loss": loss, "lr": max(group["lr"] for group in learner.optimizer.param_groups)}
    record |= _judgement(job, learner, heldout, number)
    record["seconds"] = round(time.perf_counter() - began, 3)
    _end_epoch(job, learner, record)
    return record


def _end_epoch(job: TrainingJob, learner: Learner, record: dict[str, Any]) -> None:
    """Let the caller change gates, remember the weights to keep, and save; the last epoch saves only those."""
    number = record["epoch"]
    if job.controls.after_epoch:
        job.controls.after_epoch(number)
        learner.sync_ema()
    learner.history.append(record)
    last = number + 1 == job.options.epochs
    _choose(job, learner, record, last)
    tensors, data = learner.state()
    if last:
        tensors = {f"module.{name}": value for name, value in learner.best.items()}
        data |= {"finished": True, "numbers": {}, "groups": [], "scaler": {}}
        job.module.load_state_dict(learner.best)
    if job.runtime.is_main:
        save_state(job.at.folder, number, tensors, data)


def _choose(job: TrainingJob, learner: Learner, record: Mapping[str, Any], last: bool) -> None:
    """Keep this epoch's weights when it is the one that `select` wants, the raw ones unless the EMA is better."""
    ema = record.get("ema", {}).get("correct", -1)
    raw = record.get("heldout", {}).get("correct", -1)
    score = max(ema, raw)
    wanted = score > learner.best_of.get("score", -1) if job.options.select == "best" else last
    if not wanted:
        return
    chosen = learner.ema.module if learner.ema and ema > raw else job.module
    learner.best = {name: value.detach().clone() for name, value in chosen.state_dict().items()}
    learner.best_of = {"score": score, "epoch": record["epoch"], "chosen": "ema" if ema > raw else "raw"}


def _judgement(job: TrainingJob, learner: Learner, heldout: EvalLoader | None, number: int) -> dict[str, Any]:
    """Held-out accuracy of the raw weights, and of their average where there is one, when this epoch is due."""
    every = job.options.evaluate_every
    due = number + 1 == job.options.epochs or (every and (number + 1) % every == 0)
    if heldout is None or not due:
        return {}
    found = {"heldout": asdict(_judge(job, job.module, heldout))}
    if learner.ema:
        found["ema"] = asdict(_judge(job, learner.ema.module, heldout))
    return found


def _judge(job: TrainingJob, module: nn.Module, heldout: EvalLoader) -> Accuracy:
    """Accuracy of `module` in eval mode, computed in the precision of the training."""
    module.eval()
    with job.runtime.autocast():
        return evaluate(module, heldout, job.runtime)


def _finished(job: TrainingJob, state: State) -> TrainResult:
    """Only the kept weights are left to load."""
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


def check_options(options: TrainOptions, train_set: Images, heldout: Images | None, runtime: Runtime) -> None:
    """Refuse what would only fail later, or fail silently.

    Raises:
        InputError: options that contradict the data, the processes, or each other.
    """
    share = runtime.share_of(options.batch_size)
    if share % options.accumulate:
        raise InputError(
            f"{share} images per process cannot be computed in {options.accumulate} equal parts",
            hint="use a batch_size that processes * accumulate divides",
        )
    if options.epochs and options.batch_size > len(train_set):
        raise InputError(
            f"batch_size {options.batch_size} is more than the {len(train_set)} training images",
            hint="lower batch_size or give more images",
        )
    if options.select == "best" and not heldout:
        raise InputError("select = 'best' needs held-out images and there are none", hint="set data.heldout above 0")
    make_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], options, torch.device("cpu"))


def _heldout_loader(job: TrainingJob, heldout_set: Images | None) -> EvalLoader | None:
    if not heldout_set:
        return None
    return EvalLoader(heldout_set, job.at.input, max(_EVAL_BATCH, job.micro_batch), job.runtime)


@contextmanager
def drop_path(module: nn.Module, rate: float) -> Iterator[None]:
    """Stochastic depth (Huang et al., 2016), `rate` in the last block and linear from 0 at the first.

    The places are the modules that timm calls drop_path, in their order; they are not replaced, so hooks on them stay.
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
                elif share:  # before any other hook, which may stand for the whole branch
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
