"""The process that an engine is run in, as seen by the one that asks; `tensorrt_worker` is what runs there."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vitcompress
from vitcompress.errors import ArtifactError, DeviceError, VitcompressError
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.tensorrt.flavours import Flavour
from vitcompress.exporters.tensorrt.messages import receive, send

PATIENCE = 10.0  # seconds that the process is given to end by itself
# What the process that runs an engine is given of this one's environment.
KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "TEMP", "SYSTEMROOT", "LANG")
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "VIRTUAL_ENV", "CONDA_")
NEEDS = (
    "an engine runs in a process of its own: see that others leave memory on the GPU, and that its compute mode lets "
    "several processes use it (`nvidia-smi -q -d COMPUTE,MEMORY`); `vitcompress doctor` tries the driver"
)
# What an answer says of an error -> what it is raised as.
KINDS: dict[str, type[VitcompressError]] = {"refused": ArtifactError, "machine": DeviceError}


class EngineProcess:
    """One engine in a process of its own.

    Raises:
        ArtifactError: the engine cannot be run.
        DeviceError: not on this machine, which has too little memory or too old a driver for it.
        VitcompressError: a call failed, or the process has ended.
    """

    def __init__(
        self, path: Path, sha256: str, flavour: Flavour, index: int, options: RunnerOptions, *, host_code: bool
    ) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitcompress.exporters.tensorrt.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        self.pid = self._process.pid
        opening = {"path": str(path.resolve()), "sha256": sha256, "flavour": flavour.name, "index": index}
        try:
            settings = {"cuda_graph": options.cuda_graph, "transfers": options.transfers}
            self.facts, _ = self._ask({**opening, **settings, "host_code": host_code})
        except BaseException:
            self.close()
            raise

    def _ask(self, request: dict[str, Any], data: bytes = b"") -> tuple[dict[str, Any], bytearray]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, request, data)
            answer, more = receive(self._process.stdout)
        except (OSError, EOFError, ValueError):
            code = self._process.poll()
            raise VitcompressError(
                f"the process that ran {self._path} has ended{'' if code is None else f' (exit code {code})'}",
                hint="the engine may be damaged, or the GPU out of memory",
            ) from None
        if "error" in answer:
            kind = KINDS.get(answer.get("kind", ""), VitcompressError)
            hint = NEEDS if kind is DeviceError else None
            raise kind(f"{self._path} cannot be run: {answer['error']}", hint=hint)
        return answer, more

    def bind(self, slot: int, images: np.ndarray) -> None:
        self._ask({"do": "bind", "slot": slot, "shape": list(images.shape)}, images.tobytes())

    def logits(self, slot: int) -> Tensor:
        answer, data = self._ask({"do": "run", "slot": slot})
        return torch.frombuffer(data, dtype=torch.float32).reshape(answer["shape"])

    def timed(self, slot: int, runs: int) -> tuple[list[float], float]:
        answer, _ = self._ask({"do": "time", "slot": slot, "runs": runs})
        return [float(value) for value in answer["times_ms"]], float(answer["wall_ms"])

    def layers(self) -> str:
        return self._ask({"do": "layers"})[1].decode()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # the process may have ended already
                if pipe is not None:
                    pipe.close()  # the process ends when it has no more requests to read
        try:
            self._process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """Variables that Python, its packages and the GPU are found by; no tokens, no settings of other programs."""
    kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith(KEPT_PREFIXES)}
    ours = str(Path(vitcompress.__file__).resolve().parent.parent)
    return {**kept, "PYTHONPATH": os.pathsep.join([ours, *filter(None, sys.path)])}
