"""Peak memory of an artifact on the CPU, measured in a process that opens and runs nothing else.

`python -m vitcompress.bench.memory` is that process: it reads a job as JSON from standard input, opens
the artifact, runs it twice and writes what it held as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitcompress.bench import machine
from vitcompress.bench.artifacts import open_all, synthetic_images
from vitcompress.errors import VitcompressError
from vitcompress.exporters.runner import RunnerOptions

RUNS = 2  # the first one may reserve more than it keeps


def memory_of(artifact: str, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    """`process_start_bytes`: the most that the process held before it opened the artifact: Python, libraries.

    `process_peak_bytes`: the most that it ever held, weights and `batch` images on their way included, and what is
    loaded only to open such an artifact, as OpenVINO is.

    Raises:
        VitcompressError: the process failed, as where there is not enough memory.
    """
    job = {"artifact": artifact, "variant": variant, "options": asdict(options), "batch": batch}
    words = [sys.executable, "-P", "-m", "vitcompress.bench.memory"]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = json.dumps(job, default=str)
    done = subprocess.run(words, input=given, env=around, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise VitcompressError(f"the memory of {artifact} cannot be measured: {said}", hint="leave --memory out")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _told(job: Mapping[str, Any]) -> dict[str, int | None]:
    cache = job["options"]["engine_cache"]
    options = RunnerOptions(**{**job["options"], "engine_cache": None if cache is None else Path(cache)})
    start = machine.peak_bytes()
    with ExitStack() as stack:
        (runner,) = open_all([job["artifact"]], options, job["variant"], stack)
        step = runner.bind(synthetic_images(runner.input_size, job["batch"], 0))
        for _ in range(RUNS):
            step()
        return {"process_start_bytes": start, "process_peak_bytes": machine.peak_bytes()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_told(json.load(sys.stdin))))
