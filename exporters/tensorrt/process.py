"""The process of one engine, as seen by the process that uses it, and the messages between both.

A message is one line of JSON, then as many bytes as it states. `worker` runs inside the process, and with it a file
that may be malicious: messages are only data, without pickle, and their sizes are limited.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

import vitcompress
from vitcompress.errors import ArtifactError, DeviceError, VitcompressError

MAX_LINE = 1 << 24  # the inspector output of a large engine has a few megabytes
MAX_BYTES = 1 << 34
EXIT_SECONDS = 10.0  # how long the process may take to end by itself
# The environment variables that the process inherits: none with credentials or settings of other programs.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "TEMP", "SYSTEMROOT", "LANG")
INHERITED_PREFIXES = ("CUDA_", "NVIDIA_", "VIRTUAL_ENV", "CONDA_")
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
MACHINE_HINT = (
    "an engine runs in a process of its own: the GPU needs free memory, and a compute mode that lets several processes "
    "use it (`nvidia-smi -q -d COMPUTE,MEMORY`); `vitcompress doctor` tests the driver"
)
KINDS: dict[str, tuple[type[VitcompressError], str]] = {  # of errors in the process
    "engine": (ArtifactError, "export it again on this machine, with the installed version of the library"),
    "machine": (DeviceError, MACHINE_HINT),
}


class EngineProcess:
    """One engine in a process of its own.

    Raises ArtifactError for an engine that cannot be run, DeviceError for too little memory or too old a driver, and
    VitcompressError for a call that failed or a process that has ended.
    """

    def __init__(self, path: Path, **settings: object) -> None:
        """settings: the other arguments of `worker.Engine`."""
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitcompress.exporters.tensorrt.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        self.pid = self._process.pid
        try:
            self.facts, _ = self._request({"path": str(path.resolve()), **settings})
        except BaseException:
            self.close()
            raise

    def _request(self, request: dict[str, object], data: bytes = b"") -> tuple[dict[str, Any], bytearray]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, request, data)
            answer, payload = receive(self._process.stdout)
        except (OSError, EOFError, ValueError):
            code = self._process.poll()
            message = f"the process that ran {self._path} has ended{'' if code is None else f' (exit code {code})'}"
            raise VitcompressError(message, hint="the engine may be damaged, or the GPU out of memory") from None
        if "error" in answer:
            kind, hint = KINDS.get(answer.get("kind", ""), (VitcompressError, None))
            raise kind(f"{self._path} cannot be run: {answer['error']}", hint=hint)
        return answer, payload

    def bind(self, slot: int, images: np.ndarray) -> None:
        self._request({"do": "bind", "slot": slot, "shape": list(images.shape)}, images.tobytes())

    def logits(self, slot: int) -> Tensor:
        answer, data = self._request({"do": "run", "slot": slot})
        return torch.frombuffer(data, dtype=torch.float32).reshape(answer["shape"])

    def timed(self, slot: int, runs: int) -> tuple[list[float], float]:
        answer, _ = self._request({"do": "timed", "slot": slot, "runs": runs})
        return [float(value) for value in answer["times_ms"]], float(answer["wall_ms"])

    def layers(self) -> str:
        return self._request({"do": "layers"})[1].decode()

    def close(self) -> None:
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(OSError):  # the process may have ended already
                pipe.close()  # the process ends when it has no more requests to read
        try:
            self._process.wait(timeout=EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    prefixed = {k for k in os.environ if k.startswith(INHERITED_PREFIXES) and not SECRET.search(k)}
    inherited = {k: v for k, v in os.environ.items() if k in {*INHERITED, *prefixed}}
    package = str(Path(vitcompress.__file__).resolve().parent.parent)
    return {**inherited, "PYTHONPATH": os.pathsep.join([package, *filter(None, sys.path)])}


def send(pipe: IO[bytes], message: dict[str, object], data: bytes = b"") -> None:
    """Raises BrokenPipeError if the other end is closed."""
    pipe.write(json.dumps({**message, "bytes": len(data)}).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytearray]:
    """The next message and its bytes. Raises EOFError if the other end is closed, ValueError if it is not a message."""
    if not (line := pipe.readline(MAX_LINE)):
        raise EOFError
    message = json.loads(line)
    count = message.pop("bytes", None) if isinstance(message, dict) else None
    if not isinstance(count, int) or not 0 <= count <= MAX_BYTES:
        raise ValueError("not a message")
    data = bytearray(count)
    if pipe.readinto(data) < count:  # type: ignore[attr-defined]
        raise EOFError
    return message, data
