"""Compare an exported ONNX file with its model: outputs at batch 1, 2 and 5, and the structure of the graph."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from contracts import images
from torch import nn

from vitcompress.exporters.onnx.file import metadata, read_onnx
from vitcompress.exporters.runtimes import open_runner
from vitcompress.verify.files import checker_check, graph_checks
from vitcompress.verify.tolerance import exact_logits, rounding_limit
from vitcompress.verify.weights import exported_module


def failures(model: nn.Module, path: Path, variant: str = "plain") -> list[str]:
    """Names of the failed checks; outputs are compared with those of the exported module in float64."""
    return list(_failures(model, path, variant))


def _failures(model: nn.Module, path: Path, variant: str) -> Iterator[str]:
    x, labels = images(variant, count=5, dtype=torch.float32), metadata(read_onnx(path))
    stored = exported_module(model, labels)
    exact, limit = exact_logits(stored, x), rounding_limit(stored, x).logit
    with closing(open_runner(path)) as runner:
        for batch in (1, 2, 5):
            difference = (runner(x[:batch]).double() - exact[:batch]).abs().max()
            if not difference <= limit:
                yield f"onnx.batch{batch}"
    checks = [checker_check(path, "onnx"), *graph_checks(model, path, "onnx")]
    yield from (check.name for check in checks if check.verdict != "passed")
