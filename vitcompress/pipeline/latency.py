"""How long a model takes on a runtime: what a step that aims at a latency asks while it plans."""

import tempfile
from contextlib import closing
from copy import deepcopy
from pathlib import Path

from torch import nn

from vitcompress.bench import suite
from vitcompress.errors import InputError
from vitcompress.exporters.onnx_graph import ONNX
from vitcompress.exporters.runtimes import Runner, RunnerOptions, TorchRunner, open_runner
from vitcompress.pipeline.preflight import Job

WARMUP, RUNS = 10, 40  # of one candidate: dozens are measured, and the benchmark at the end looks closer


def latency_ms(job: Job, model: nn.Module, runtime: str) -> float:
    """Median milliseconds of one call on `runtime` (`onnxruntime` or `torch`), at the batch size of the recipe's
    [bench], on the run's device and in the precision of [export]; 1 where the recipe gives no batch size.

    Raises:
        InputError: a runtime that is not one of these.
    """
    options = suite.BenchOptions("paper", job.recipe.bench.batch or 1, WARMUP, RUNS, seed=job.recipe.run.seed)
    with tempfile.TemporaryDirectory() as folder, closing(_runner(job, model, runtime, Path(folder))) as runner:
        return float(suite.compare([runner], options).rows[0]["latency_ms"]["p50"])


def _runner(job: Job, model: nn.Module, runtime: str, folder: Path) -> Runner:
    wanted = job.recipe.export
    if runtime == "torch":
        options = RunnerOptions(str(job.runtime.device), precision=wanted.precision)
        return TorchRunner(deepcopy(model), options, name="candidate")
    if runtime == "onnxruntime":
        path = folder / "candidate.onnx"
        ONNX.export(deepcopy(model).cpu(), path, input=job.input, options=wanted.only(ONNX.uses))
        return open_runner(path, device=job.onnx_device)
    raise InputError(f"no runtime {runtime!r} to measure on", hint="use onnxruntime or torch")
