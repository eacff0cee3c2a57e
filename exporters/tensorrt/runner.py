"""A TensorRT engine as a runner: opened only when its sidecar vouches for it, and run in a process of its own."""

from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError
from vitcompress.exporters.runner import RunnerOptions, as_given, check_batch, described, refuse_settings_of_others
from vitcompress.exporters.sidecar import input_of, mismatches, read_sidecar, sidecar_path
from vitcompress.exporters.tensorrt.flavours import (
    FLAVOURS,
    HEADER,
    RTX,
    Flavour,
    buildable,
    capability,
    header_of,
    kind_of,
    numbers,
)
from vitcompress.exporters.tensorrt.process import EngineProcess
from vitcompress.io.files import decoded, file_sha256

DANGER = "running an engine is running code that its author chose"


class EngineRunner:
    """An engine on one GPU.

    Raises:
        ArtifactError: not an engine, or one that nobody vouches for.
        DeviceError: it was built for another GPU, by another version than is here, or in another precision.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        self.name, self._options = str(path), options
        self._sidecar = vouched(path, trust=options.trust)
        self._build: dict[str, Any] = self._sidecar.get("build", {})
        self._flavour = _flavour(path, self._sidecar)
        self._sha256 = file_sha256(path)
        self._metadata = decoded(self._sidecar.get("metadata", {}))
        refuse_settings_of_others(options, self._flavour.title, path.name)
        _check_precision(path, options, self._sidecar)
        if built_for := self._build.get("batch"):
            for images in options.batch or ():
                check_batch(self.name, built_for, images)
        self._index = _gpu(path, options, self._sidecar, self._flavour)
        self._process = EngineProcess(
            path, self._sha256, self._flavour, self._index, options, host_code=self._needs_host_code()
        )
        self.facts = self._process.facts
        self.input = input_of(self.name, self._metadata)
        self._slots = count(1)

    def _needs_host_code(self) -> bool:
        carries = bool(self._build.get("version_compatible"))
        if carries and not self._options.trust:
            raise ArtifactError(
                f"{self.name} is version-compatible: it brings a runtime along, as code", hint="--trust lets it run"
            )
        return carries

    @property
    def input_size(self) -> tuple[int, int, int]:
        if self.input is not None:
            return self.input.size
        _, first, second, third = self.facts["input_shape"]
        return (third, first, second) if self._takes_bytes else (first, second, third)

    @property
    def _takes_bytes(self) -> bool:
        return bool(self.facts["input_type"] == "UINT8")

    def __call__(self, images: Tensor) -> Tensor:
        self._put(0, images)
        return self._process.logits(0)

    def bind(self, images: Tensor) -> "BoundEngine":
        slot = next(self._slots)
        self._put(slot, images)
        return BoundEngine(self._process, slot)

    def _put(self, slot: int, images: Tensor) -> None:
        check_batch(self.name, self.facts["batch"], len(images))
        self._process.bind(slot, as_given(images, self.input, uint8=self._takes_bytes))

    def synchronize(self) -> None:
        """Nothing: a call returns when its outputs are there."""

    def layers(self) -> str:
        """The engine's layers as the inspector's JSON."""
        return self._process.layers()

    def describe(self) -> dict[str, Any]:
        return described(
            artifact=self.name,
            sha256=self._sha256,
            runtime=self._flavour.title,
            runtime_version=self.facts["runtime_version"],
            device=f"cuda:{self._index}",
            device_name=self.facts["device_name"],
            precision=self._sidecar.get("precision", "as built"),
            tf32=self._build.get("tf32"),
            cuda_graph=self._options.cuda_graph,
            transfers=self._options.transfers,
            graph_optimization=self._build.get("optimization_level"),
            sm=self._build.get("sm"),
            input_type="uint8" if self._takes_bytes else "float32",
            batch_range=self.facts["batch"],
            verified=self._sidecar.get("verified"),
            trusted_without_sidecar=not self._sidecar,
            process=self._process.pid,
        )

    def close(self) -> None:
        self._process.close()


class BoundEngine:
    """One pass over images that lie on the GPU; `timed` runs it many times where the engine is."""

    def __init__(self, process: EngineProcess, slot: int) -> None:
        self._process, self._slot = process, slot

    def __call__(self) -> None:
        self._process.timed(self._slot, 1)

    def timed(self, runs: int) -> tuple[list[float], float]:
        """Milliseconds of each run, by CUDA events, and of all of them by the wall clock."""
        return self._process.timed(self._slot, runs)


def vouched(path: Path, *, trust: bool) -> dict[str, Any]:
    """The sidecar of an engine, if its hashes match the file; with `trust` {} where they do not."""
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", hint="`vitcompress export DIR --format trt` writes one")
    wrong = mismatches(path) if sidecar_path(path).is_file() else ["there is no such file"]
    if not wrong:
        return read_sidecar(path) or {}
    if trust:
        return {}
    raise ArtifactError(
        f"{path} is not vouched for by {sidecar_path(path).name}: {wrong[0]}; {DANGER}",
        hint="export it again, or give --trust if you know where it comes from",
    )


def _flavour(path: Path, sidecar: dict[str, Any]) -> Flavour:
    """Which library runs an engine, by its first bytes or else its sidecar; the two must agree."""
    with path.open("rb") as file:
        head = file.read(HEADER)
    written, claimed = kind_of(head), sidecar.get("format")
    found = written or FLAVOURS.get(str(claimed))
    if len(head) < HEADER or found is None:
        raise ArtifactError(f"{path} is not a TensorRT engine: it begins with {head[:8]!r}", hint="export it again")
    if written is not None and claimed not in (None, written.name):
        raise ArtifactError(
            f"{path} was written by {written.title}, its sidecar says {claimed}", hint="export it again"
        )
    _check_version(path, head, sidecar, found)
    return found


def _check_version(path: Path, head: bytes, sidecar: dict[str, Any], flavour: Flavour) -> None:
    """Engines run in the version that built them, unless they were made to run in later ones."""
    here = str(flavour.load().__version__)
    build = sidecar.get("build", {})
    made = build.get("runtime_version") or header_of(head)["version"]
    if numbers(str(made)) != numbers(here) and not build.get("version_compatible"):
        raise DeviceError(
            f"{path} was built by {flavour.title} {made}, here is {here}, which does not run it",
            hint=f"export it again on this machine, or pip install {flavour.module.replace('_', '-')}=={made}",
        )


def _check_precision(path: Path, options: RunnerOptions, sidecar: dict[str, Any]) -> None:
    stored = sidecar.get("precision")
    if options.precision not in (None, stored):
        raise DeviceError(
            f"{path} was built in {stored or 'a precision that is not recorded'}, {options.precision} was asked for",
            hint=f"export it with --precision {options.precision}",
        )


def _gpu(path: Path, options: RunnerOptions, sidecar: dict[str, Any], flavour: Flavour) -> int:
    """Number of the GPU to run on, which must be one that the engine was built for."""
    kind, _, number = (options.device or "cuda").partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise DeviceError(f"{path} is an engine for a GPU, {options.device} was asked for", hint="use --device cuda")
    index = int(number or 0)
    here = capability(index)
    if here is None:
        raise DeviceError(
            f"{path} runs on a CUDA GPU, and this machine has no {kind}:{index}", hint="run it on the target"
        )
    build = sidecar.get("build", {})
    targets = build.get("sm")
    if targets and here not in targets and not _reaches(here, build.get("hardware_compatible"), targets):
        listed = ", ".join(map(str, targets))
        raise DeviceError(
            f"{path} was built for compute capability {listed}, this GPU has {here}",
            hint=_way_to(here, flavour),
        )
    return index


def _way_to(here: int, flavour: Flavour) -> str:
    """How a GPU comes to an engine that it runs."""
    if flavour is RTX and here in buildable(flavour.load()):
        return f"export it with --sm {here}"
    return f"export it again on this machine{' with --format trt' if flavour is RTX else ''}"


def _reaches(here: int, compatible: str | None, targets: list[int]) -> bool:
    """Whether an engine was made to run on other GPUs, too."""
    return compatible == "ampere+" and here >= 80 and min(targets) >= 80
