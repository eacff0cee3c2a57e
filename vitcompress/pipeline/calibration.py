"""The ranges of a model in int8 or fp8, measured once on images of the training data and kept in the run folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import cast

from torch import nn

from vitcompress.errors import InputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.quantize.calibrate import calibrate
from vitcompress.exporters.quantize.graph import EightBits
from vitcompress.io.files import read_json, write_json
from vitcompress.io.manifest import record_changes
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.models.create import input_config
from vitcompress.recipe.load import load_recipe_of_run
from vitcompress.training.data import open_data
from vitcompress.training.datasets import Images
from vitcompress.training.metrics import calibration_images
from vitcompress.verify.weights import tensor_bytes

FEW_IMAGES = 16


@dataclass
class Calibration:
    """Called with the ONNX file of `model` in fp32, returns its ranges (`ModelInfo.calibrate`).

    training: images of the training data; None: those of the run in `folder`. files: the folder that keeps the ranges,
    if it has a plan.
    """

    model: nn.Module
    options: ExportOptions
    files: RunFolder
    training: Images | None = None
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    ranges: Mapping[str, float] | None = None

    def __call__(self, source: Path) -> Mapping[str, float]:
        """Raises InputError without images, and like `calibrate`."""
        if self.ranges is None:
            self.ranges = self._measure(source)
        return self.ranges

    def _measure(self, source: Path) -> Mapping[str, float]:
        if self.training is None:
            self._open_run()
        assert self.training is not None
        count = min(self.options.calibration, len(self.training))
        if count < FEW_IMAGES:
            self.progress.note(f"calibration on {count} images: the values of others may exceed these ranges")
        images = calibration_images(self.training, input_config(self.model), count, self.seed)
        precision, method = cast(EightBits, self.options.precision), self.options.calibration_method
        key = sha256(f"{precision} {method}".encode())
        for tensor in (images, *self.model.state_dict().values()):
            key.update(tensor_bytes(tensor))
        cache = self.files.ranges / f"{key.hexdigest()[:32]}.json"
        if cache.is_file():
            return dict(read_json(cache))
        ranges = calibrate(source, images, precision, method)
        if self.files.plan.is_file():
            with record_changes(self.files.path):
                write_json(cache, ranges)
        return ranges

    def _open_run(self) -> None:
        if not self.files.recipe.is_file():
            raise InputError(
                f"{self.options.precision} needs images of the training data, and {self.files.path} records none",
                hint="export a run folder, or pass data to vitcompress.export",
            )
        recipe = load_recipe_of_run(self.files.recipe)
        self.training, self.seed = open_data(recipe.data, recipe.run.seed).train, recipe.run.seed
