"""Peak memory of an artifact on the CPU, measured in a process of its own."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context

from vitcompress.bench import machine
from vitcompress.bench.artifacts import open_artifacts, synthetic_images
from vitcompress.errors import VitcompressError, first_line
from vitcompress.exporters.runner import RunnerOptions

RUNS = 2  # the first run may reserve more than is kept


def measure_memory(artifact: str, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    """Peak memory of a process that runs `batch` images through one artifact, in bytes.

    process_start_bytes: peak before the artifact was opened (Python and its libraries). process_peak_bytes: peak over
    the whole life of the process, with weights, images, and libraries such as OpenVINO that opening loads.

    Raises:
        VitcompressError: the process failed, for example because there is not enough memory.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # a fork would start with this process's memory
        try:
            return pool.submit(_run_images, artifact, variant, options, batch).result()
        except Exception as error:  # whatever the process raised, or its end
            message = f"the memory of {artifact} cannot be measured: {first_line(error)}"
            raise VitcompressError(message, hint="leave --memory out") from error


def _run_images(artifact: str, variant: str | None, options: RunnerOptions, batch: int) -> dict[str, int | None]:
    start = machine.peak_bytes()
    with ExitStack() as stack:
        (runner,) = open_artifacts([artifact], options, variant, stack)
        step = runner.bind(synthetic_images(runner.input_size, batch, 0))
        for _ in range(RUNS):
            step()
        return {"process_start_bytes": start, "process_peak_bytes": machine.peak_bytes()}
