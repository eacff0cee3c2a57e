"""The interface of an exporter, and the record of an exported file that its sidecar stores."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Required, TypedDict

import numpy as np
from torch import nn

from vitcompress.errors import InputError, OutputError
from vitcompress.exporters.options import ONLY_EIGHT_BITS, ExportOptions
from vitcompress.exporters.precision import expand_layers
from vitcompress.exporters.runner import Runner, RunnerOptions
from vitcompress.exporters.sidecar import FORMAT, sidecar_path, usable_sidecar
from vitcompress.families import family_of
from vitcompress.io.files import changing, convert_write_errors, file_sha256, write_file, write_json
from vitcompress.io.hardware import package_versions
from vitcompress.io.text import describe_value
from vitcompress.models.create import InputConfig

# Whether a file takes uint8 images -> what its metadata state about the form of images.
IMAGE_FORMS: dict[bool | None, dict[str, str]] = {
    False: {"input": "float32", "layout": "NCHW", "normalization": "by the caller"},
    True: {"input": "uint8", "layout": "NHWC", "normalization": "in front"},
}


@dataclass(frozen=True)
class Exported:
    """An exported file. Its sidecar stores these fields.

    files: SHA-256 of the file and of its data files, by name; `bytes` is their total size.
    opset, opset_reason: ONNX operator set of the file or its source, and the reason for it.
    metadata: what users of the file need, from `describe_file` (classes, preprocessing, plan hash, versions).
    source: name and SHA-256 of the ONNX file that it was built from.
    build: runtime and version, compute capabilities, batch range and flags of the build.
    verified: whether its outputs were compared with those of the model and agree.
    islands_search: the sets of fp32 layers that a search tried, how it compared outputs, and the chosen set.
    speed: ratio of an int8 file over the same model in fp32 on the machine that wrote it.
    """

    path: Path
    format: str
    precision: str
    sha256: str
    bytes: int
    files: dict[str, str]
    opset: int
    opset_reason: str
    metadata: dict[str, str]
    source: dict[str, str] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    verified: bool = False
    islands_search: dict[str, object] = field(default_factory=dict)
    speed: dict[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.path.name}


class ModelInfo(TypedDict, total=False):
    """What an export needs beside the module: preprocessing, class names (default: numbers) and hash of the plan.

    calibrate(path): the ranges of a model in eight bits (`quantize.graph.Quantization`), from its ONNX file in fp32.
    factors: of `quantize.smooth`; the file in fp32 has them already.
    traces: filled by exports, so that further files of the same model need no trace of torch.
    """

    input: Required[InputConfig]
    classes: Sequence[str]
    plan_digest: str
    calibrate: Callable[[Path], Mapping[str, float]]
    factors: Mapping[str, Sequence[int]]
    traces: dict[Any, Any]


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    size: bytes of its values. place: where they are; tensors with equal places share them.
    read(): the values as bytes, in C order; raises ArtifactError if the file is damaged.
    index: whether its type is one that graphs index and select with (int32, int64, bool), or it is the scale of a
        quantized tensor. Integers of other types may be quantized weights.
    dequantized(): of a quantized tensor, the values that it represents, and half the distances to the next ones.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    place: Hashable
    read: Callable[[], bytes]
    index: bool
    dequantized: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None


@dataclass(frozen=True)
class Contents:
    """The tensors of a file, which are read without running anything, one at a time.

    size: bytes of the file and of its data files. uint8: whether it takes uint8 images; None if unknown.
    metadata: what the file states about its model, as JSON text; `precision` is that of the tensors, `opset` of ONNX.
    lists: names of node attributes with more numbers than any setting needs, in which weights could be hidden.
    """

    tensors: tuple[Stored, ...]
    size: int
    metadata: Mapping[str, str]
    lists: tuple[str, ...] = ()
    uint8: bool | None = None


@dataclass(frozen=True)
class Exporter:
    """One target format: how its files are written, run and verified.

    export(model, path, *, options, progress, **ModelInfo): writes the file and its sidecar, or leaves nothing behind.
    suffix: of the files, such as `.rtx.engine`. Its last part, `file_suffix`, selects the runner of a file.
    runner: opens a file of the format as a `Runner`.
    uses: names of the `ExportOptions` that the format supports.
    check_options(options): raises InputError for unsupported values of these options.
    unavailable(): why this machine cannot write the format, or None.
    cannot_run(): why this machine cannot run files of the format, or None.
    contents(path): reads all tensors of a file, for the weight check; None if the file format does not allow that.
    equal_widths(options): whether all heads need equal numbers of channels in q/k and in v.
    other_suffixes: further suffixes of files that `runner` opens.
    eight_bits_only: those of `uses` that have an effect in int8 and fp8 only.
    """

    name: str
    suffix: str
    export: Callable[..., Exported]
    runner: Callable[[Path, RunnerOptions], Runner]
    uses: frozenset[str]
    check_options: Callable[[ExportOptions], None]
    unavailable: Callable[[], str | None]
    cannot_run: Callable[[], str | None]
    contents: Callable[[Path], Contents] | None = None
    equal_widths: Callable[[ExportOptions], bool] = lambda options: False
    other_suffixes: tuple[str, ...] = ()
    eight_bits_only: frozenset[str] = frozenset()

    @property
    def file_suffix(self) -> str:
        return f".{self.suffix.rpartition('.')[2]}"

    def check_path(self, path: Path) -> None:
        """Raise InputError for a name that runners would open as a file of another format."""
        if path.suffix != self.file_suffix:
            message = f"{path} cannot be a file of the format {self.name}, whose names end in {self.file_suffix}"
            other = path.parent / f"{path.stem or 'model'}{self.suffix}"  # a folder such as `.` has no name
            raise InputError(message, hint=f"--out {other}, or another --format")

    def supported(self, options: ExportOptions) -> frozenset[str]:
        """Names of the options that the format supports in the precision of `options`."""
        return self.uses if options.eight_bits else self.uses - self.eight_bits_only

    def check(self, options: ExportOptions) -> None:
        """Raise InputError for options that the format does not support, before any work."""
        supported = self.supported(options)
        for name in options.changed():
            if name not in supported:
                value = describe_value(getattr(options, name))
                message = f"{name} is {value}, but the format {self.name} has no such option in {options.precision}"
                possible = supported if options.eight_bits else supported.difference(ONLY_EIGHT_BITS)
                raise InputError(message, hint=f"omit it; {self.name} supports {', '.join(sorted(possible))}")
        low, best, high = options.batch
        if not low <= best <= high:
            message = f"the batch range {low}:{best}:{high} is not in ascending order (minimum, optimal, maximum)"
            raise InputError(message, hint="for example --batch 1:256:256")
        self.check_options(options)

    def check_model(self, model: nn.Module, options: ExportOptions) -> None:
        """Raise InputError if the format does not support the shapes of `model` with these options."""
        if not self.equal_widths(options) or not (unequal := unequal_widths(model)):
            return
        attention, (qk, v) = next(iter(unequal.items()))
        others = f" (as in {len(unequal)} attentions)" if len(unequal) > 1 else ""
        widths = f"each head of {attention} has {qk} channels in q and k and {v} in v{others}"
        limit = f"opset 23 exports one Attention node, for which {self.name} supports equal widths only"
        hint = "omit the opset, or use --opset 20 (22 for bf16), which decomposes attention and supports any width"
        raise InputError(f"{widths}; {limit}", hint=hint)


def describe_file(model: nn.Module, options: ExportOptions, about: ModelInfo) -> dict[str, str]:
    """The metadata of a file, each value as JSON text, with every fp32 layer. Without names, classes are numbered."""
    labels = {
        "classes": list(about.get("classes", ())) or list(map(str, range(getattr(model, "num_classes", 0)))),
        **vars(about["input"]),
        "versions": package_versions(("vitcompress", "torch", "timm", "onnx", "onnxscript")),
        "plan_sha256": about.get("plan_digest", ""),
        "precision": options.precision,
        "islands": list(expand_layers(model, options.islands)) if options.islands else [],
        **IMAGE_FORMS[options.uint8],
    }
    return {key: json.dumps(value) for key, value in labels.items()}


def write_with_data(path: Path, write: Callable[[Path], None], stale: Iterable[Path] = ()) -> tuple[str, ...]:
    """Write a file and its data files in a folder beside `path`, then move first the data into place, last a sidecar.

    write(target): writes a file with the name of `path`, and any others beside it. Returns the names of both.
    stale: files that are removed before the new ones are moved into place, as is all data of the replaced file.
    """
    listed = (name for name in usable_sidecar(path).get("files", ()) if name.startswith(f"{path.name}."))  # its data
    old = sidecar_path(path), *stale, *map(path.with_name, listed)  # the first one describes the file that is replaced
    for place in (path, *old):
        if place.is_dir():
            raise OutputError(f"{place} cannot be written: it is a folder", hint="choose another file with --out")
    with convert_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as folder:
            target = Path(folder) / path.name
            write(target)
            sidecar = sidecar_path(target)
            data = sorted({*target.parent.iterdir()} - {target, sidecar})
            for place in old:
                changing.get()(place)
                place.unlink(missing_ok=True)
            for file in (*data, target, *([sidecar] if sidecar.exists() else [])):
                write_file(path.parent / file.name, file.replace)
    return path.name, *(file.name for file in data)


def record_export(path: Path, files: Iterable[str], source: Exported | None = None, **fields: Any) -> Exported:
    """Write the sidecar of the file `path`.

    files: names of it and of its data files. source: the ONNX file that it was built from. fields: of `Exported`.
    """
    if source is not None:
        about = {"name": source.path.name, "sha256": source.sha256}
        shared = {"opset": source.opset, "opset_reason": source.opset_reason, "metadata": source.metadata}
        fields = {"source": about, **shared, **fields}
    hashes = {name: file_sha256(path.parent / name) for name in files}
    size = sum((path.parent / name).stat().st_size for name in hashes)
    return write_sidecar(Exported(path=path, sha256=hashes[path.name], bytes=size, files=hashes, **fields))


def write_sidecar(exported: Exported) -> Exported:
    write_json(sidecar_path(exported.path), {"sidecar_format": FORMAT, **exported.to_dict()})
    return exported


def unequal_widths(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Attention -> channels of each head in q/k and in v, where these differ and no padding is used."""
    widths: dict[str, dict[str, int]] = {}
    for space in family_of(model).spaces(model):
        if space.attention and not getattr(model.get_submodule(space.attention), "padded", False):
            widths.setdefault(space.attention, {})[space.kind] = space.size // space.heads
    return {name: (kinds["qk"], kinds["v"]) for name, kinds in widths.items() if len(set(kinds.values())) > 1}
