"""Peak memory of an artifact on the CPU, measured in a process of its own.

`python -m vitcompress.bench.memory` is that process: it reads a job as JSON from standard input, opens the artifact,
runs it twice, and writes its memory as JSON.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitcompress.bench import machine
from vitcompress.bench.artifacts import open_artifacts, synthetic_images
from vitcompress.errors import VitcompressError
from vitcompress.exporters.runner import RunnerOptions

RUNS = 2  # the first run may reserve more than is kept


def measure_memory(artifact: str, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    """Peak memory of a process that runs `batch` images through one artifact, in bytes.

    process_start_bytes: peak before the artifact was opened (Python and its libraries). process_peak_bytes: peak over
    the whole life of the process, with weights, images, and libraries such as OpenVINO that opening loads.

    Raises:
        VitcompressError: the process failed, for example because there is not enough memory.
    """
    job = {"artifact": artifact, "variant": variant, "options": asdict(options), "batch": batch}
    command = [sys.executable, "-P", "-m", "vitcompress.bench.memory"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    job_json = json.dumps(job, default=str)
    done = subprocess.run(command, input=job_json, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise VitcompressError(f"the memory of {artifact} cannot be measured: {reason}", hint="leave --memory out")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _run_job(artifact: str, variant: str | None, options: dict[str, Any], batch: int) -> dict[str, int | None]:
    cache = options["engine_cache"]
    settings = RunnerOptions(**{**options, "engine_cache": None if cache is None else Path(cache)})
    start = machine.peak_bytes()
    with ExitStack() as stack:
        (runner,) = open_artifacts([artifact], settings, variant, stack)
        step = runner.bind(synthetic_images(runner.input_size, batch, 0))
        for _ in range(RUNS):
            step()
        return {"process_start_bytes": start, "process_peak_bytes": machine.peak_bytes()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_job(**json.load(sys.stdin))))
