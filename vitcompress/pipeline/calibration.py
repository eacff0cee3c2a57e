"""The ranges of a model in int8 or fp8: measured once on training images, or trained, and kept in the run folder."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import Strict
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, InputError, OutputError
from vitcompress.exporters.onnx.export import measure_quantization
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import present_layers
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.quantize.emulate import QuantizedTraining
from vitcompress.exporters.quantize.graph import Form, Quantization
from vitcompress.exporters.quantize.smooth import Factors, measure_factors
from vitcompress.io.files import read_record, write_json
from vitcompress.io.manifest import check_unchanged, record_changes
from vitcompress.io.progress import SILENT, Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors, tensors_digest
from vitcompress.io.validation import check_record
from vitcompress.models.checkpoint import load_model_files, read_plan, write_model
from vitcompress.models.create import class_names_of, current_plan, input_config
from vitcompress.pipeline.dense import check_images, load_dense
from vitcompress.pipeline.folder import dense_folder_of_run
from vitcompress.pipeline.job import Job
from vitcompress.pipeline.training import teacher_for, train_model
from vitcompress.recipe.load import load_recipe_of_run
from vitcompress.training.data import open_data
from vitcompress.training.datasets import Images
from vitcompress.training.metrics import random_images
from vitcompress.training.trainer import TrainingControls

FEW_IMAGES = 16
Sizes = dict[str, Annotated[float, Strict(), Ge(0)]]


@dataclass
class Calibration:
    """Called with the ONNX file of `model` in fp32, returns its ranges (`ModelInfo.calibrate`).

    training: images of the training data; None: those of the run in `files`, which are in the folder `data` if it is
    set. files: the folder that keeps the ranges, if it has a plan: one file for each combination of model, plan, images
    and settings.
    """

    model: nn.Module
    options: ExportOptions
    files: RunFolder
    training: Images | None = None
    seed: int = 0
    progress: Progress = SILENT
    ranges: Mapping[str, float] | None = None
    data: Path | None = None

    @cached_property
    def factors(self) -> Factors:
        """Those of `quantize.smooth` that the file to calibrate has. Raises InputError without images."""
        return measure_factors(self.model, self._images) if self.options.smooth else {}

    def __call__(self, source: Path) -> Mapping[str, float]:
        """Raises InputError without images, and like `calibrate`."""
        if self.ranges is not None:
            return self.ranges
        precision, method = self.options.eight_bits or "int8", self.options.calibration_method
        trained = self.trained
        fixed = check_record(self.files.trained_ranges, trained.get("ranges"), Sizes) if trained else {}
        if fixed and self.factors:
            raise InputError("smooth would change layers whose ranges were trained", hint="omit smooth")
        images, plan = self._images, current_plan(self.model).digest  # models with equal weights may have other plans
        settings = f"{plan} {precision} {method}{self.factors or ''}{' uint8' * self.options.uint8}"
        cache = self.files.ranges / f"{model_digest(self.model, settings, images)}.json"
        check_unchanged(self.files.path, cache)
        known = dict[str, float]()
        with suppress(ArtifactError):  # a damaged file in a folder without a manifest
            known = read_record(cache, Sizes)
        self.ranges = known or calibrate(source, images, precision, method)
        if self.files.plan.is_file() and not known:
            try:
                with record_changes(self.files.path):
                    write_json(cache, self.ranges)
            except OutputError as error:  # a read-only folder can still be exported elsewhere
                self.progress.note(f"the ranges will be measured again by the next export: {error.message}")
        self.ranges = {**self.ranges, **fixed}  # layers that a training left in fp32 have none
        return self.ranges

    @cached_property
    def trained(self) -> dict[str, Any]:
        """`ranges` and `weight_bits` that the model was trained with in this precision; empty if it was not."""
        path = self.files.trained_ranges
        check_unchanged(self.files.path, path)
        record = read_record(path, dict[str, Any]) or {}
        return record if record.get("model") == model_digest(self.model, self.options.eight_bits or "int8") else {}

    @cached_property
    def _images(self) -> Tensor:
        images = self.sample(self.options.calibration)
        if len(images) < FEW_IMAGES:
            self.progress.note(f"calibration on {len(images)} images: the values of others may exceed these ranges")
        return images

    def sample(self, count: int) -> Tensor:
        """Up to `count` training images, (count, channels, height, width), normalized. Raises InputError without."""
        if self.training is None:
            if not self.files.recipe.is_file():
                message = f"{self.options.precision} needs training images, and {self.files.path} records none"
                raise InputError(message, hint="export a folder with a recipe.toml, or pass data to vitcompress.export")
            recipe = load_recipe_of_run(self.files.recipe)
            try:
                options = recipe.data.moved_to(str(self.data)) if self.data else recipe.data
                data = open_data(options, recipe.run.seed).reorder(class_names_of(self.model))
                check_images(dense_folder_of_run(self.files.path), data)
            except InputError as error:
                hint = "name the folder of the run's images in --data, or pass data to vitcompress.export in Python"
                hint = error.hint if self.data and error.hint else hint
                raise InputError(f"{self.options.precision} needs images: {error.message}", hint=hint) from None
            self.training, self.seed = data.train, recipe.run.seed
        return random_images(self.training, input_config(self.model), count, self.seed)


def model_digest(model: nn.Module, settings: str = "", *tensors: Tensor) -> str:
    """A hash of the weights of `model`, and of settings and tensors that belong to them."""
    return tensors_digest([*tensors, *model.state_dict().values()], settings)


def train_quantized(job: Job) -> None:
    """With [quantize]: train the folded model in the int8 or fp8 of the exports, and save it in its place.

    The ranges that it was trained with are those of its exports.
    """
    table, options, files = job.recipe.quantize, job.recipe.export, job.files
    if not table.epochs or job.options.structure_only:
        return
    assert job.data is not None
    job.progress.stage(f"Train the folded model in {options.precision}")
    weights = files.unquantized if files.unquantized.is_file() else files.weights
    model = job.runtime.broadcast(load_model_files(files.plan, weights) if job.runtime.is_main else None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = job.runtime.broadcast(_measure_settings(job, model) if job.runtime.is_main else None)
    module = QuantizedTraining(model, settings, learned=table.ranges == "learned")
    controls = TrainingControls(teacher_for(job, load_dense(job)))
    train_model(job, module, job.quantized_training, files.quantized_state, "quantized", files.quantized, controls)
    if job.runtime.is_main:
        save_tensors(files.unquantized, before, {"plan": read_plan(files.plan).digest})
        write_model(files.path, model, read_plan(files.plan))
        ranges = {name: value.item() for name, value in module.ranges().items()}
        record = {"model": model_digest(model, settings.precision), "weight_bits": settings.weight_bits}
        write_json(files.trained_ranges, {**record, "ranges": ranges})


def _measure_settings(job: Job, model: nn.Module) -> Quantization:
    """What the exports of `model` compute in eight bits."""
    options, seed = job.recipe.export, job.recipe.run.seed
    assert job.data is not None
    options = replace(options, islands=present_layers(model, options.islands))  # as exports, without removed ones
    measure = Calibration(model, options, job.files, job.data.train, seed, job.progress)
    form: Form = "int32_bias" if {"onnx", "openvino"} & set(options.formats) else "float_bias"
    return measure_quantization(model, options, form, input=job.input, calibrate=measure)
