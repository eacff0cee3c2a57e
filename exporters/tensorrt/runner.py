"""Run TensorRT engines: only with a matching sidecar, and each in a process of its own."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from vitcompress.errors import ArtifactError, DeviceError
from vitcompress.exporters.calls import BoundCall
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import find_mismatches, read_sidecar, sidecar_path
from vitcompress.exporters.tensorrt.flavours import FLAVOURS, HEADER, RTX, Flavour, capability, numbers
from vitcompress.exporters.tensorrt.process import EngineProcess
from vitcompress.io import hardware
from vitcompress.io.files import decode_json_values, file_sha256, signed_files


class EngineRunner(Runner):
    """An engine on one GPU.

    Raises ArtifactError for one without a matching sidecar, DeviceError for another GPU, version or precision than it
    has, and for executable code in it that is not trusted.
    """

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        self._sidecar = read_trusted_sidecar(path, trust=options.trust)
        self._build = self._sidecar.get("build", {})
        self._flavour = _choose_flavour(path, self._sidecar)
        self._sha256 = signed_files.get().get(path.resolve()) or file_sha256(path)
        self._precision = self._sidecar.get("precision")
        super().__init__(str(path), options, self._flavour.title)
        if options.precision not in (None, self._precision):
            message = f"{path} was built in {self._precision or 'an unknown precision'}, not in {options.precision}"
            raise DeviceError(message, hint=f"export it with --precision {options.precision}")
        self.batch_range = self._build.get("batch")
        for images in options.batch or ():
            self._check_batch(images)
        self._index = _choose_gpu(path, options, self._build, self._flavour)
        host_code = bool(self._build.get("version_compatible"))
        if host_code and not options.trust:
            message = f"{path} is a version-compatible engine and contains executable code"
            raise DeviceError(message, hint="evaluate and bench load it with --trust")
        self._process = EngineProcess(
            path,
            sha256=self._sha256,
            flavour=self._flavour.name,
            index=self._index,
            cuda_graph=options.cuda_graph,
            transfers=options.transfers,
            host_code=host_code,
        )
        self.facts, self.layers = self._process.facts, self._process.layers
        self.batch_range = self.facts["batch"]
        labels = decode_json_values(self._sidecar.get("metadata", {}))
        self._set_input(self.facts["input_shape"][1:], labels, takes_bytes=self.facts["input_type"] == "UINT8")
        self._slots = count(1)

    def __call__(self, images: Tensor) -> Tensor:
        self._process.bind(0, self._prepare(images))
        return self._process.logits(0)

    def _bind(self, images: Tensor) -> BoundCall:
        slot = next(self._slots)
        self._process.bind(slot, self._prepare(images))
        timed = partial(self._process.timed, slot)
        call = BoundCall(partial(timed, 1))
        call.timed = timed  # in the process of the engine
        return call

    def _describe(self) -> dict[str, object]:
        return {
            "runtime": self._flavour.title,
            "runtime_version": self.facts["runtime_version"],
            "device": f"cuda:{self._index}",
            "device_name": self.facts["device_name"],
            "precision": self._precision or "as built",
            "tf32": self._build.get("tf32"),
            "cuda_graph": self._options.cuda_graph,
            "transfers": self._options.transfers,
            "graph_optimization": self._build.get("optimization_level"),
            "sm": self._build.get("sm"),
            "input_type": "uint8" if self.takes_bytes else "float32",
            "batch_range": self.facts["batch"],
            "verified": self._sidecar.get("verified"),
            "trusted_without_sidecar": not self._sidecar,
            "process": self._process.pid,
        }

    def close(self) -> None:
        super().close()
        self._process.close()


def read_trusted_sidecar(path: Path, *, trust: bool) -> dict[str, Any]:
    """The sidecar of an engine, if its hashes match the file. If they do not: {} with `trust`, else ArtifactError."""
    wrong = find_mismatches(path) if sidecar_path(path).is_file() else ["there is no such file"]
    if not wrong:
        return read_sidecar(path)
    if trust:
        return {}
    problem = f"{path} is not trusted, because {sidecar_path(path).name} does not match it: {wrong[0]}"
    message = f"{problem}; an engine can run any code that its author chose"
    raise ArtifactError(message, hint="export it again, or pass --trust if you trust its source")


def _choose_flavour(path: Path, sidecar: dict[str, Any]) -> Flavour:
    """The library that runs an engine, by its first bytes or else its sidecar, which must agree."""
    with path.open("rb") as file:
        header = file.read(HEADER)
    # The first bytes are only a hint, because the header is not documented.
    writer = next((flavour for flavour in FLAVOURS.values() if header.startswith(flavour.magic)), None)
    recorded = sidecar.get("format")
    flavour = writer or FLAVOURS.get(str(recorded))
    if len(header) < HEADER or flavour is None:
        raise ArtifactError(f"{path} is not a TensorRT engine: it starts with {header[:8]!r}", hint="export it again")
    if writer is not None and recorded not in (None, writer.name):
        message = f"{path} was written by {writer.title}, but its sidecar names {recorded}"
        raise ArtifactError(message, hint="export it again")
    build, installed = sidecar.get("build", {}), str(flavour.load().__version__)
    version = build.get("runtime_version")  # without a sidecar the library itself reports another version
    if version and numbers(str(version)) != numbers(installed) and not build.get("version_compatible"):
        message = f"{path} was built by {flavour.title} {version}, which the installed {installed} does not run"
        hint = f"export it again on this machine, or pip install {flavour.module.replace('_', '-')}=={version}"
        raise DeviceError(message, hint=hint)
    return flavour


def _choose_gpu(path: Path, options: RunnerOptions, build: dict[str, Any], flavour: Flavour) -> int:
    """Number of the GPU to run on, which must be one that the engine was built for."""
    kind, index = hardware.parse_device(options.device or "cuda")
    if kind != "cuda":
        raise DeviceError(f"{path} runs on a GPU, but the device is {options.device}", hint="use --device cuda")
    here = capability(index)
    if here is None:
        message = f"{path} runs on a CUDA GPU, and this machine has no cuda:{index}"
        raise DeviceError(message, hint="run it on the target")
    targets = build.get("sm")
    compatible = build.get("hardware_compatible") == "ampere+" and targets and min(here, *targets) >= 80
    if targets and here not in targets and not compatible:
        hint = f"export it again on this machine{' with --format trt' if flavour is RTX else ''}"
        if flavour is RTX and here in flavour.supported_targets():
            hint = f"export it with --sm {here}"
        message = f"{path} was built for compute capability {', '.join(map(str, targets))}, but this GPU has {here}"
        raise DeviceError(message, hint=hint)
    return index
