"""The Python API: prune, train, fold, export, verify and measure a timm model in memory.

`import vitcompress as vc` provides these functions, with `load_model`, `save_model` and `count_cost`. Options of
methods, trainings, exports and benchmarks are keyword arguments: the keys of recipes, validated in the same way.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import nn

from vitcompress import surgery
from vitcompress.bench import suite
from vitcompress.bench.accuracy import compare_classes
from vitcompress.bench.artifacts import Artifact, open_artifact
from vitcompress.errors import InputError, PlanError
from vitcompress.exporters.base import Exporter
from vitcompress.exporters.options import ExportOptions, Positive
from vitcompress.exporters.runtimes import EXPORTERS, RunnerOptions, available_exporter
from vitcompress.families import copy_model, prepare_model, reject_wrapper, unwrap
from vitcompress.io.checks import Verification
from vitcompress.io.files import convert_write_errors, read_record, user_path, write_json
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import tensors_digest
from vitcompress.io.validation import options_of
from vitcompress.methods.base import AT_ONCE, Method, context_for, load_handed_over, reject_unused
from vitcompress.methods.latency import plan_step
from vitcompress.methods.table import find_method
from vitcompress.models import create
from vitcompress.models.checkpoint import load_model
from vitcompress.models.source import resolve_model
from vitcompress.pipeline.calibration import Calibration, model_digest
from vitcompress.pipeline.export import SCAN_IMAGES, write_export
from vitcompress.pipeline.folder import claim_run, dense_folder_to_verify
from vitcompress.pipeline.latency import LatencyClock, measured_on
from vitcompress.plan import AS_BEFORE, Plan
from vitcompress.training import distributed
from vitcompress.training.datasets import as_images
from vitcompress.training.loaders import BatchLoader, EvalLoader, open_source
from vitcompress.training.loop import check_options, train
from vitcompress.training.losses import FEATURES, check_outputs
from vitcompress.training.metrics import Accuracy, random_images
from vitcompress.training.metrics import evaluate as evaluate_loader
from vitcompress.training.options import Seed, TrainOptions, TrainResult, Workers
from vitcompress.training.trainer import TrainingContext, TrainingControls
from vitcompress.verify.folder import image_count, manifest_checks, noise_images, verify_folder
from vitcompress.verify.outputs import Original

Artifacts = Artifact | Annotated[Sequence[Artifact], MinLen(1)]


@torch.inference_mode(False)  # its weights can be trained, wherever it is created
def create_model(
    name: str, *, pretrained: bool = False, weights: str | Path | None = None, seed: Seed = 0, **args: Any
) -> nn.Module:
    """Create a timm model that can be pruned and saved, in eval mode.

    Args:
        pretrained: download timm's weights.
        weights: a checkpoint or Hugging Face folder to load instead; it also sets arguments that `args` leave open.
        seed: of random weights.
        args: of `timm.create_model`, such as `num_classes`, `img_size`, `depth`.

    Raises:
        InputError: timm has no such architecture, or it does not take these arguments.
        WeightsError: the weights cannot be loaded, or belong to another model.

    Example:
        >>> import vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
    """
    if pretrained and weights is not None:
        raise InputError("pretrained=True and weights exclude each other", hint="pass one of them")
    if weights is not None:  # they show what `args` leave open
        resolved = resolve_model(name, args, weights)
        return create.create_model(resolved.arch, resolved.arch_args, resolved.weights, seed=seed)
    return create.create_model(name, args, "hub" if pretrained else "random", seed=seed)


@torch.inference_mode(False)  # it computes gradients, also if the caller has disabled them
def plan(
    model: nn.Module,
    method: str | Method = "isomorphic",
    data: Any = None,
    *,
    device: str | torch.device = "auto",
    seed: Seed = 0,
    folder: str | Path | None = None,
    training: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """Choose what to remove from `model`; `prune` carries it out.

    It moves `model` to `device`. Methods that change weights leave the new ones in it: `sero` and `recover`, which
    train, mean gates of SwiGLU models (`gated_ffn`), and `attention_scale="reset"`. They have the names of
    `create_model` then, also in a model of timm itself. Pass a copy to keep the old ones.

    Args:
        data: labeled training images: a map-style data set of (image, class) pairs, or an iterable of (images, labels)
            batches, which is read into memory. Of every class of two or more images a tenth, at least one, is held out:
            it is neither scored nor trained on. Methods that rank by weights alone need none.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`, or a torch.device.
        folder: for measurements and training states, so that a stopped call with the same arguments can continue; None:
            a temporary folder. Data sets are compared by their labels and eight images, batches by 1000 images.
        training: fields of `TrainOptions` for methods that train. Those that only measure read its `batch_size` alone.
        progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.
        options: of the method (`vitcompress recipes keys NAME`), all with defaults; with `target="latency"` and
            `amount` in ms, the sizes are chosen by measurements on this machine.

    Raises:
        InputError: unknown method, options or model, missing data, or the `folder` of another call.
        PlanError: more than the model has.

    Example:
        >>> import vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> sorted(vc.plan(model, "magnitude", keep_heads=0.67).heads.values())
        [2, 2]
    """
    chosen = find_method(method)
    settings = options_of(chosen.options, options, f"method {chosen.name}")
    reject_unused(settings, {**AT_ONCE, **chosen.describe(settings).unused})
    if training and data is None:
        raise InputError("training has no effect: there are no images to train with", hint="omit it, or pass data")
    fields = {"progress": progress or SILENT, "train": options_of(TrainOptions, training or {}, "training")}
    base = context_for(model, data, folder=folder, device=device, seed=seed, **fields)  # owns the temporary folder
    clock = LatencyClock(base.input, base.runtime, base.progress)
    context = replace(base, latency=clock, measured_on=measured_on(base.runtime.device, None))
    call = {"method": chosen.name, "model": context.plan.digest, "seed": seed, "data": base.data.digest}
    call |= {"options": asdict(settings), "training": asdict(base.train)}
    if data is not None and (train_options := chosen.describe(settings).training):  # before a latency is measured
        check_options(train_options(base.train), base.data.train, base.data.heldout, base.input, base.runtime)
    with _recorded(context.folder / "call.json", call, model, "plan"), context.runtime.no_autocast():
        model.to(context.runtime.device)
        delta = plan_step(chosen, create.prepared(model), context, settings)
        load_handed_over(model, context.folder, context.plan, context.runtime)
    return replace(delta, follows=context.plan.kept_digests(delta))


@torch.inference_mode(False)  # the copy can be trained, wherever it is created
def prune(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply `plan` to a copy of `model`, whose attribute `plan` then describes the result.

    Hooks are copied, too, with the objects that their methods belong to.

    model: of `create_model`, `load_model`, `prune` or `timm.create_model`. plan: what to remove next. Channels are
    numbered as in `model`, sites and spaces have their dense names.

    Raises:
        PlanError: the plan does not fit the model.
        UnsupportedModelError: no family supports the model.
        InputError: the origin of the model is unknown, see `plan_of`.
    """
    own = create.plan_of(model)
    whole = own.then(create.with_arguments(plan, model, own))
    if any(plan.follows.get(space, digest) != digest for space, digest in own.kept_digests(plan).items()):
        raise PlanError("the plan counts the channels of a model that was pruned differently", hint=AS_BEFORE)
    pruned = surgery.apply_to_copy(model, plan)
    pruned.plan = whole  # type: ignore[assignment]
    return pruned


@torch.inference_mode(False)
def finetune(  # noqa: PLR0913 (each argument is public and has a default)
    model: nn.Module,
    train_data: Any,
    val_data: Any = None,
    *,
    teacher: nn.Module | None = None,
    device: str | torch.device = "auto",
    amp: distributed.Amp = "none",
    workers: Workers = 0,
    seed: Seed = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TrainResult:
    """Train `model` in place; it ends in eval mode with the selected weights, and without gradients.

    It seeds the random generators of Python, NumPy and torch, as `plan` does with methods that train. The rate of
    stochastic depth is that of the options, not of the model. The teacher moves to the device, and stays in eval mode.
    Under torchrun all processes must call it, with the same map-style data set.

    Args:
        train_data: a map-style data set of (image, class) pairs (PIL images, for `augmentation`, or normalized
            tensors), or an iterable with a length of (images, labels) batches; batches at the end that do not fill
            `accumulate` are left out.
        val_data: evaluated after epochs, of the same kinds.
        teacher: for distillation (default "soft"). If it has a `pretrained_cfg`, it gets images normalized for that.
        folder: of the training state: the same call continues a stopped training, or repeats a complete one. None: a
            temporary folder. Data sets are compared by their labels and eight images, batches only if they are a list.
        progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.
        options: fields of `TrainOptions`, such as `epochs`, `batch_size`, `lr`, `distillation`.

    Raises:
        InputError: options that contradict the data, the model or each other, or the `folder` of another call.
        VitcompressError: the loss is no longer finite.

    Example:
        >>> import torch, vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> batches = [(torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))]
        >>> len(vc.finetune(model, batches, epochs=2).history)
        2
    """
    reject_wrapper(model)
    for one in (model,) if teacher is None else (model, teacher):  # a compiled one has no truth value
        create.check_weights(one, one_type=True)
    settings = options_of(TrainOptions, options if teacher is None else {"distillation": "soft"} | options, "training")
    reject_unused(settings, settings.unused, InputError)
    with TemporaryDirectory(prefix="vitcompress-") as scratch, ExitStack() as stack:
        runtime = replace(distributed.start(device, amp, workers), dtype=next(model.parameters()).dtype)
        stack.callback(runtime.stop)
        state = user_path(folder or scratch)
        at = TrainingContext(create.input_config(model), runtime, state, "finetune", seed, progress or SILENT)
        heldout = None if val_data is None else open_source(val_data, runtime, model)
        source = open_source(train_data, runtime, model)
        call: dict[str, Any] = {"structure": tensors_digest((), str(getattr(model, "plan", model))), "amp": amp}
        call["val_data"] = heldout and [len(heldout), getattr(heldout, "digest", "")]
        call["frozen"] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        with _recorded(state / "model.json", call, model, "training"), runtime.no_autocast():
            if teacher is not None and settings.distillation in FEATURES:  # wrappers return logits only
                teacher = unwrap(teacher)
            return train(model, source, heldout, settings, at, TrainingControls(teacher=teacher))


@contextmanager
def _recorded(record: Path, call: Mapping[str, object], model: nn.Module, what: str) -> Iterator[None]:
    """Keep in `record` the call, and the weights of `model` before and after it. what: `plan` or `training`.

    Raises InputError if it has another call, or if `model` has other weights than these. A training that was stopped
    continues with any weights of this structure, such as a head that is initialized again: its state replaces them.
    """
    weights, call = model_digest(model), json.loads(json.dumps(call))  # as JSON stores it
    known = read_record(record, dict[str, Any]) or {**call, "weights": [weights]}
    before, *after = known.pop("weights", None) or [""]  # weights: before the call and, once it has ended, after it
    stopped = what == "training" and not after
    if known != call or not (stopped or weights in (before, *after)):
        message = f"{record.parent} contains a {what} of another model or call"
        raise InputError(message, hint="use another folder, or the model as it was before this call or after it")
    created = not (record.is_file() or torch.distributed.is_initialized())  # other processes may read it
    write_json(record, {**call, "weights": [before, *after]})
    try:
        yield
    except InputError:
        if created and [*record.parent.iterdir()] == [record]:  # nothing was measured or trained
            record.unlink()
        raise
    write_json(record, {**call, "weights": [before, model_digest(model)]})


@torch.inference_mode(False)
def fold(model: nn.Module) -> nn.Module:
    """Return a copy of a pruned model in which consecutive linear layers are multiplied into one, in float64.

    An FFN without its activation becomes one linear layer, if that is cheaper. Outputs stay the same up to rounding.

    Example:
        >>> import vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> small = vc.prune(model, vc.plan(model, "fixed", activation=[0]))
        >>> vc.fold(small).plan.folded
        ('blocks.0.mlp',)
    """
    plan = create.plan_of(model)
    copy = surgery.apply_to_copy(model, plan.delta())
    copy.plan, _ = surgery.fold_linears(copy, plan)  # type: ignore[assignment]
    return copy


def export(
    model: nn.Module,
    path: str | Path,
    *,
    format: str | Exporter | None = None,
    data: Any = None,
    class_names: Sequence[str] = (),
    seed: Seed = 0,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Write `model` to a file that a runtime can serve, with a sidecar `<file>.json`; return its path.

    Args:
        path: its suffix selects the format: `.onnx` or `.xml` (OpenVINO); `.engine` is that of two formats.
        format: `onnx`, `openvino`, `trt`, `trt-rtx`, or one of another package; needed for other suffixes.
        data: labeled images for the range scan of half precision, for `islands=("auto",)` and for the ranges of int8
            and fp8 (of the training data); None: random images, which int8 and fp8 reject.
        class_names: stored in the metadata. Beside a saved model, pass those of `save_model`: `verify` compares them.
        progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.
        options: fields of `ExportOptions`, such as `precision`, `batch`, `uint8`.

    Raises:
        InputError: unknown format or options, or the format does not support the model.
        PrecisionError: a value inside the model overflows fp16.

    Example:
        >>> import tempfile, vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10)
        >>> vc.export(model, tempfile.mkdtemp() + "/model.onnx").name
        'model.onnx'
    """
    path, progress = user_path(path), progress or SILENT
    fits = [name for name, e in EXPORTERS.items() if e.file_suffix == path.suffix]
    if format is None and len(fits) != 1:
        message = f"the suffix of {path.name} {'fits ' + ' and '.join(fits) if fits else 'is of no built-in format'}"
        raise InputError(message, hint=f"pass format, one of {', '.join(EXPORTERS)} or of another package")
    exporter = available_exporter(format or fits[0], hint="`vitcompress doctor` shows what is missing")
    settings = options_of(ExportOptions, options, f"format {exporter.name}")
    exporter.check(settings)
    exporter.check_path(path)
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    create.check_weights(model)
    # As `save_model` names the weights, without dropout, where images are: ranges and outputs are measured.
    model = prepare_model(copy_model(model)).cpu().eval()
    original, calibration = Original(model, noise_images(model, create.plan_of(model)), real=False), None
    if data is not None:
        source = as_images(data, create.input_config(model).size)
        original = Original(model, random_images(source, create.input_config(model), SCAN_IMAGES, seed))
        calibration = Calibration(model, settings, RunFolder.of(path), source, seed, progress)
    with torch.autocast("cpu", enabled=False):  # files compute in `precision`, also where another one is enabled
        return write_export(
            exporter, original, path, options=settings, classes=class_names, progress=progress, calibration=calibration
        ).path


def verify(folder: str | Path, data: Any = None, *, progress: Progress | None = None) -> Verification:
    """Repeat every check on a run folder or a saved model: `passed`, and `checks` with values and tolerances.

    data: labeled images to compare outputs on, which the folder keeps (sign it again); None: those that it has, else
        noise, on which int8 and fp8 may fail, as their ranges are those of images.
    progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.

    Raises:
        ArtifactError, PlanError, WeightsError: there is no model in the folder, or a file of it is damaged.
        OutputError: a run is working in the folder.
    """
    path, progress, images = user_path(folder), progress or SILENT, None
    with torch.autocast("cpu", enabled=False), claim_run(path, progress):  # as in `export`
        if data is not None and not any(check.verdict == "failed" for check in manifest_checks(RunFolder(path))):
            model = load_model(path)
            config, count = create.input_config(model), image_count(create.plan_of(model))
            images = random_images(as_images(data, config.size), config, count, 0)
        return verify_folder(path, images, dense_folder_to_verify(path), progress)


def evaluate(
    model: Artifact, data: Any, *, batch_size: Positive = 256, device: str | torch.device = "auto", workers: Workers = 0
) -> Accuracy:
    """Top-1 and top-5 accuracy with counts, of a model (in float32) or of an exported file.

    data: a map-style data set of (image, class) pairs, or an iterable of (images, labels) batches. If it has `classes`,
        as those of torchvision, they are compared with the names in a file. Under torchrun all processes must call
        `evaluate`, with the same map-style data set.

    Example:
        >>> import torch, vitcompress as vc
        >>> model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10)
        >>> vc.evaluate(model, [(torch.randn(4, 3, 32, 32), torch.arange(4))]).total
        4
    """
    names = getattr(data, "classes", None)
    if isinstance(model, nn.Module):
        check_outputs(model)
    elif isinstance(names, list | tuple) and names and (note := compare_classes(user_path(model), [*map(str, names)])):
        warnings.warn(f"{model}: {note}", stacklevel=3)
    with ExitStack() as stack:
        runtime = distributed.start(device, workers=workers)
        stack.callback(runtime.stop)
        chosen = device != "auto" or isinstance(model, nn.Module) or user_path(model).is_dir()
        options = RunnerOptions(device=str(runtime.device) if chosen else None)  # None: where the file runs
        runner = stack.enter_context(closing(open_artifact(model, options)))
        source = open_source(data, runtime, model, once=True)
        if isinstance(source, BatchLoader):
            source.reject(batch_size=batch_size != 256, workers=workers != 0)
            return evaluate_loader(runner.predict, source, runtime)
        if runner.input is None:
            raise InputError(f"{model} does not state its preprocessing", hint="pass batches of normalized images")
        return evaluate_loader(runner.predict, EvalLoader(source, runner.input, batch_size, runtime), runtime)


def bench(artifacts: Artifacts, *, progress: Progress | None = None, **options: Any) -> suite.Bench:
    """Measure models and files interleaved; the first one is the reference of all speed-ups.

    Args:
        artifacts: one or several: models in memory, run folders, exported files, `timm:NAME`, `timm-onnx:NAME`.
        progress: an object of a subclass of `vitcompress.io.progress.Progress`; None: silent.
        options: fields of `BenchOptions` (`batch`, `protocol`, `warmup`, `runs`, `variants`), or of `RunnerOptions`
            (`device`, `precision`, `threads`).

    Raises:
        InputError: options that are invalid, or that an artifact does not have.
        ArtifactError, DeviceError: an artifact cannot run; nothing is measured.

    Returns:
        Rows with samples, ratios with 95 % intervals and warnings; `print` shows a table.

    Example:
        >>> import vitcompress as vc
        >>> models = [vc.create_model("vit_tiny_patch16_224", img_size=32, depth=depth) for depth in (2, 1)]
        >>> len(vc.bench(models, batch=1, protocol="paper", warmup=1, runs=3).rows)
        2
    """
    artifacts = [artifacts] if isinstance(artifacts, Artifact) else artifacts
    own = {key: options.pop(key) for key in RunnerOptions.__dataclass_fields__ if key in options and key != "batch"}
    runner: RunnerOptions = options_of(RunnerOptions, own, "bench")
    settings = replace(options_of(suite.BenchOptions, options, "bench"), runner=runner)
    return suite.run(artifacts, settings, progress or SILENT)
