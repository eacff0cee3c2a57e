"""One training loop for dense models, fast fine-tuning, score searches and recovery.

A training writes its state to its own folder at the end of every epoch. A killed training continues after the last
finished epoch. Every epoch starts by seeding all generators from (seed, label, epoch, rank), so no generator state is
saved, and on the CPU a resumed training equals an uninterrupted one bit for bit.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from timm.layers import DropPath
from timm.layers import drop_path as stochastic_depth
from torch import nn

from vitcompress.errors import InputError, OutputError
from vitcompress.io.training_state import load_state, save_state
from vitcompress.models.create import InputConfig
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import BatchLoader, TrainData, TrainLoader
from vitcompress.training.log import RunLog
from vitcompress.training.losses import Objective, both_heads, inner, student_of
from vitcompress.training.metrics import Accuracy, evaluate
from vitcompress.training.options import Augmentation, EpochRecord, TrainOptions, TrainResult
from vitcompress.training.trainer import Learner, TrainingContext, TrainingControls, TrainingJob, check_optimizer


def train(
    module: nn.Module,
    train_set: TrainData,
    heldout_set: TrainData | None,
    options: TrainOptions,
    at: TrainingContext,
    controls: TrainingControls | None = None,
) -> TrainResult:
    """Train `module` in place; it ends in eval mode with the selected weights, and without gradients.

    module: a timm model, or a wrapper with one as `.model` (DDP wraps the outer one). heldout_set: evaluated after
    epochs; None or empty for none. Raises InputError for options that contradict the data, the model, the processes or
    an earlier state in `at.folder`, and VitcompressError if the loss is no longer finite.
    """
    controls = controls or TrainingControls()
    check_options(options, train_set, heldout_set, at.input, at.runtime)
    module.to(at.runtime.device)
    loss = Objective(module, options, teacher=controls.teacher, input=at.input, device=at.runtime.device)
    student = student_of(module, options.distillation, controls.teacher, at.seed)
    with both_heads(module), drop_path(module, options.drop_path), ExitStack() as stack:
        stack.callback(module.train, inner(module).training)  # after Ctrl-C or an error
        stack.callback(module.zero_grad)  # the next loop may be the user's own
        result = _run(TrainingJob(student, options, at, controls, loss, train_set, heldout_set or None))
    module.eval()
    return result


def _run(job: TrainingJob) -> TrainResult:
    state = job.at.runtime.broadcast(load_state(job.at.folder) if job.at.runtime.is_main else None)
    if state is not None and state.data["made_with"] != job.fingerprint:
        message = f"{job.at.folder} contains a training with other settings, images or teacher"
        raise OutputError(message, hint="remove this folder, or use another one")
    if state is not None and state.data["finished"]:
        job.module.load_state_dict(state.part("module"))
        if job.controls.hooks:
            job.controls.hooks.restore(state.data["hooks"])
        if job.at.runtime.is_main:
            RunLog(job.at.folder, job.at.label).sync(state.data["history"])
        return _result(state.data["history"], state.data["best_of"])
    if job.options.epochs == 0:
        return TrainResult([], None if job.heldout is None else _evaluate(job, job.module), None, "raw", -1)
    learner = Learner(job)
    if state is not None:
        learner.restore(state)
    at, first, epochs, steps = job.at, len(learner.history), job.options.epochs, learner.steps
    with closing(RunLog(at.folder, at.label)) as log:
        if job.at.runtime.is_main:
            log.sync(learner.history)
            log.open_board(first)
            # Starts the clock of the display.
            at.progress.update(at.label, first * steps, epochs * steps, f"epoch {first + 1}/{epochs}")
        for number in range(first, epochs):
            record = _epoch(learner, number)
            if job.at.runtime.is_main:
                log.append(record)
    return _result(learner.history, learner.best_of)


def _epoch(learner: Learner, number: int) -> EpochRecord:
    """Train and evaluate one epoch, and save the state; return its record. The last one saves the selected weights."""
    began, job, every = time.perf_counter(), learner.job, learner.job.options.evaluate_every
    loss, last = learner.epoch(number), number + 1 == job.options.epochs
    record = EpochRecord(epoch=number, loss=loss, lr=max(group["lr"] for group in learner.optimizer.param_groups))
    if job.heldout is not None and (last or (every and (number + 1) % every == 0)):
        record["heldout"] = asdict(_evaluate(job, job.module))
        if learner.ema:
            record["ema"] = asdict(_evaluate(job, learner.ema.module))
    record["seconds"] = round(time.perf_counter() - began, 3)
    if job.controls.after_epoch:
        job.controls.after_epoch(number)
        if learner.ema:  # gates may have changed; every step copies buffers
            gates = {name: value for name, value in job.module.state_dict().items() if name.endswith("_extra_state")}
            learner.ema.module.load_state_dict(gates, strict=False)
    learner.history.append(record)
    # The raw weights, or their average (EMA) if that is better.
    ema, raw = record.get("ema", {}).get("correct", -1), record.get("heldout", {}).get("correct", -1)
    score = max(ema, raw)
    keep = last if job.options.select == "last" else score > learner.best_of.get("score", -1)
    if keep:
        chosen = learner.ema.module if learner.ema and ema > raw else job.module
        learner.best = {name: value.detach().clone() for name, value in chosen.state_dict().items()}
        learner.best_of = {"score": score, "epoch": number, "chosen": "ema" if ema > raw else "raw"}
    tensors, data = learner.state()
    if last:
        tensors = {f"module.{name}": value for name, value in learner.best.items()}
        data |= {"finished": True, "numbers": {}, "scaler": {}}
        job.module.load_state_dict(learner.best)
    if job.at.runtime.is_main:
        save_state(job.at.folder, tensors, data)
    return record


def _evaluate(job: TrainingJob, module: nn.Module) -> Accuracy:
    """Held-out accuracy of `module` in eval mode, computed in the precision of the training."""
    assert job.heldout is not None
    module.eval()
    with job.at.runtime.autocast():
        return evaluate(module, job.heldout, job.at.runtime)


def _result(history: list[EpochRecord], best_of: Mapping[str, Any]) -> TrainResult:
    record = history[best_of["epoch"]]
    raw, ema = (Accuracy(**record[name]) if name in record else None for name in ("heldout", "ema"))
    return TrainResult(history, raw, ema, best_of["chosen"], best_of["epoch"])


def check_options(
    options: TrainOptions, train_set: TrainData, heldout: TrainData | None, input: InputConfig, runtime: Runtime
) -> None:
    """Raise InputError for options that contradict the data, the processes, or each other. input: of the model."""
    if isinstance(train_set, BatchLoader):
        train_set.reject(
            augmentation=replace(options.augmentation, smoothing=0.0) != Augmentation(),
            batch_size=options.batch_size != TrainOptions.batch_size and options.lr_base is None,
            workers=runtime.workers > 0,
        )
        if len(train_set) < options.accumulate:
            message = f"accumulate {options.accumulate} is more than the {len(train_set)} batches of an epoch"
            raise InputError(message, hint="lower accumulate or pass more batches")
    elif options.batch_size % runtime.world_size:
        message = f"batch_size {options.batch_size} cannot be shared equally by {runtime.world_size} processes"
        raise InputError(message, hint=f"use a multiple of {runtime.world_size}")
    elif (share := options.batch_size // runtime.world_size) % options.accumulate:
        message = f"{share} images per process cannot be computed in {options.accumulate} equal parts"
        raise InputError(message, hint="use a batch_size that processes * accumulate divides")
    elif options.epochs:
        for name, reason in options.augmentation.unused.items():
            hint = "omit it, or change the option that makes it ineffective, as in augmentation.no_aug = false"
            raise InputError(f"augmentation.{name} has no effect: {reason}", hint=hint)
        # The loader checks the other ones; nothing is loaded here.
        on_cpu, size = replace(runtime, device=torch.device("cpu")), share // options.accumulate
        loader = TrainLoader(train_set, input, size, on_cpu, augmentation=options.augmentation, seed=0, classes=1)
        if len(loader) < options.accumulate:
            images = runtime.world_size * len(loader.sampler)
            message = f"batch_size {options.batch_size} is more than the {images} training images of an epoch"
            raise InputError(message, hint="lower batch_size or use more images")
    # Autocast mixes no two half precisions and leaves float64 alone; torch does not unscale gradients in float16.
    allowed = {torch.float32: ("none", "bf16", "fp16"), torch.bfloat16: ("none", "bf16")}
    if runtime.amp not in allowed.get(runtime.dtype, ("none",)):
        message = f"amp is {runtime.amp!r}, but the weights are {runtime.dtype}"
        raise InputError(message, hint="use amp='none', or train the model in float32, as in model.float()")
    if not heldout and (options.select == "best" or options.ema):  # of the weights and their average the best is kept
        name = "select = 'best'" if options.select == "best" else "ema"
        raise InputError(f"{name} needs held-out images and there are none", hint="set data.heldout, or pass val_data")
    check_optimizer(options)


@contextmanager
def drop_path(module: nn.Module, rate: float) -> Iterator[None]:
    """Stochastic depth (Huang et al., 2016): 0 in the first block, rising linearly to `rate` in the last.

    It acts on the modules that timm calls drop_path. They are not replaced, so hooks on them stay.
    """
    named = ([c for name, c in owner.named_children() if name.startswith("drop_path")] for owner in module.modules())
    owners = [children for children in named if children]
    with ExitStack() as stack:
        for depth, children in enumerate(owners):
            share = rate * depth / max(1, len(owners) - 1)
            for child in children:
                if isinstance(child, DropPath):
                    stack.callback(setattr, child, "drop_prob", child.drop_prob)
                    child.drop_prob = share
                elif share:  # before any other hook, which may replace the whole branch
                    hook = child.register_forward_hook(
                        lambda module, _, out, rate=share: stochastic_depth(out, rate, module.training), prepend=True
                    )
                    stack.callback(hook.remove)
        yield
