"""ONNX files as runners."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitcompress.exporters.onnx.session import Session
from vitcompress.exporters.runner import (
    Bound,
    RunnerOptions,
    as_given,
    described,
    refuse_settings_of_others,
    some_bytes,
)
from vitcompress.exporters.sidecar import input_of
from vitcompress.models.create import InputConfig


class OnnxRunner:
    """An ONNX file in ONNX Runtime, on exactly the execution provider that was asked for."""

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        refuse_settings_of_others(options, "ONNX Runtime", path.name)
        self.name = str(path)
        self._session = Session(path, options)
        self._transfers = options.transfers and self._session.on_device
        self.input: InputConfig | None = input_of(self.name, self._session.metadata, self.input_size)

    @property
    def input_size(self) -> tuple[int, int, int]:
        return self._session.input_size

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self._session.run(self._fed(images))))

    def bind(self, images: Tensor) -> Bound:
        nameless = self._session.takes_bytes and self.input is None
        given = some_bytes(images) if nameless else self._fed(images)
        return self._session.bind_from_host(given) if self._transfers else self._session.bind(given)

    def _fed(self, images: Tensor) -> np.ndarray:
        return as_given(images, self.input, uint8=self._session.takes_bytes)

    def synchronize(self) -> None:
        self._session.synchronize()

    def describe(self) -> dict[str, Any]:
        return described(
            artifact=self.name,
            **self._session.describe(),
            input_type="uint8" if self._session.takes_bytes else "float32",
            transfers=self._transfers,
        )

    def close(self) -> None:
        self._session.close()
