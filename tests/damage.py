"""What is done to exported files, for tests: as by a faulty exporter or a person with an editor."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from vitcompress.checkpoint import file_sha256
from vitcompress.exporters.artifact import amend_sidecar


def carry(path: Path) -> None:
    """Let the ONNX file `path` hold a weight that its graph does not read; its sidecar vouches for that."""
    stored = onnx.load(str(path))
    stored.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(0).random((48, 16)), "left_over"))
    onnx.save(stored, str(path))
    amend_sidecar(path, files={path.name: file_sha256(path)})
