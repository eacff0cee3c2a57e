"""The sidecar `<file>.json` of an exported file: where it lies, and the one place where it is read.

People edit such files, and other versions wrote them: what is read here has every key that other modules rely on, each
of the right type, or is reported as wrong.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vitcompress.errors import ArtifactError
from vitcompress.io.files import alone_in, decoded, differing, file_sha256, read_json, write_json
from vitcompress.io.validation import problems_of
from vitcompress.models.create import InputConfig

FORMAT = 1
DENSE = "dense"  # what the names of the dense model's files begin with
NAMED = 3  # problems, at most; the others are counted
AGAIN = "export the file again, or copy its sidecar again"
INPUT = frozenset({"size", "mean", "std", "interpolation", "crop_pct", "crop_mode"})  # metadata of pre-processing


def _plain(name: str) -> str:
    if Path(name).name != name or "\\" in name:
        raise ValueError("expected the name of a file beside it")
    return name


class _Table(BaseModel):
    """Other versions may write more keys than these."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Check(_Table):
    name: str
    verdict: Literal["passed", "failed", "not_run"]
    value: float | None = None
    tolerance: float | None = None
    detail: str = ""
    command: str | None = None


class _Build(_Table):
    """What differs between the runtimes may be missing, but is of one type where it is there."""

    runtime: str | None = None
    runtime_version: str | None = None
    sm: list[int] | None = None
    batch: Annotated[list[int], Field(min_length=3, max_length=3)] | None = None
    tf32: bool | None = None
    optimization_level: int | None = None
    hardware_compatible: str | None = None
    version_compatible: bool = False
    truth: list[_Check] = []


class _Source(_Table):
    name: str = ""
    sha256: str = ""


class _Verification(_Table):
    verdict: str
    checks: list[_Check]


class _Search(_Table):
    judge: str
    proxy: bool
    tries: list[dict[str, Any]]
    chosen: list[str] | None


class Sidecar(_Table):
    """What a sidecar must hold; see `exporters.artifact.Exported`."""

    sidecar_format: Literal[1]
    path: str
    format: str
    precision: str
    sha256: str
    bytes: int
    files: dict[Annotated[str, AfterValidator(_plain)], str]
    opset: int
    opset_reason: str
    metadata: dict[str, str]
    source: _Source
    build: _Build
    verified: bool
    islands_search: _Search | Annotated[dict[str, Any], Field(max_length=0)]
    verification: _Verification | None = None


def sidecar_path(path: Path) -> Path:
    """`model.onnx` -> `model.onnx.json`"""
    return path.with_name(f"{path.name}.json")


def exported_files(folder: Path, stem: str, suffixes: Collection[str]) -> list[Path]:
    """The exported files in a run folder that end in one of `suffixes`, of the deployed `model` or of the `dense` one.

    They are named after it; those of another name (`export --out`) are the deployed model's where they have a sidecar.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    if stem == DENSE:
        return [path for path in files if path.name.startswith(DENSE)]
    others = (path for path in files if not path.name.startswith(DENSE))
    return [path for path in others if path.name.startswith(stem) or sidecar_path(path).is_file()]


def read_sidecar(path: Path) -> dict[str, Any] | None:
    """What was recorded about the exported file `path`, None when nothing was.

    Raises:
        ArtifactError: the sidecar is not JSON, lacks a key or holds something else there, or tells of another file.
    """
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return None
    data = read_json(sidecar)
    try:
        Sidecar.model_validate(data)
    except ValidationError as error:
        wrong = [" ".join(line.split()) for line in problems_of(error, Sidecar)]
        told = "; ".join([*wrong[:NAMED], *([f"and {len(wrong) - NAMED} more"] if len(wrong) > NAMED else [])])
        raise ArtifactError(f"{sidecar} cannot be used: {told}", hint=AGAIN) from None
    if path.name not in data["files"]:
        raise ArtifactError(f"{sidecar} cannot be used: {path.name} is missing from its files", hint=AGAIN)
    return dict(data)


def amend_sidecar(path: Path, **known: Any) -> None:
    """Record more about the exported file `path`, such as `verified=True`. It must have a sidecar."""
    with alone_in(path.parent):
        write_json(sidecar_path(path), {**(read_sidecar(path) or {}), **known})


def mismatches(path: Path) -> list[str]:
    """What is wrong between `path` and its sidecar, a sentence each: the sidecar itself, or files that it describes."""
    try:
        return [] if read_sidecar(path) is None else differing(sidecar_path(path))
    except ArtifactError as error:
        return [error.message]


def checked_sha256(path: Path) -> str:
    """SHA-256 of `path`. Raises ArtifactError where its sidecar describes other files, or cannot be used."""
    if wrong := mismatches(path):
        raise ArtifactError(
            f"{path} is not vouched for by {sidecar_path(path).name}: {wrong[0]}",
            hint="one of them was replaced; export again, or remove the .json to use the file as it is",
        )
    return file_sha256(path)


def input_of(name: str, known: Mapping[str, Any], size: tuple[int, int, int] | None = None) -> InputConfig | None:
    """How images are brought to the model of the file `name`, from its `decoded` metadata; None where it does not say.

    size: (channels, height, width) of what the file takes, where that is known otherwise.

    Raises:
        ArtifactError: the metadata say something else there.
    """
    if not set(known) >= INPUT:
        return None
    told = {key: known[key] for key in INPUT} | ({} if size is None else {"size": size})
    try:
        found = TypeAdapter(InputConfig).validate_python(told)
    except ValidationError as error:
        raise _no_input(name, known, str(error.errors()[0]["loc"][0])) from None
    for key in ("mean", "std"):
        if len(getattr(found, key)) != found.size[0]:
            raise _no_input(name, known, key)
    return found


def _no_input(name: str, known: Mapping[str, Any], key: str) -> ArtifactError:
    return ArtifactError(f"the metadata of {name} cannot be used: {key} is {known[key]!r}", hint="export it again")


def class_names(path: Path) -> tuple[str, ...]:
    """The class names of an exported file; empty where it has no sidecar: exporters then number the classes."""
    found = decoded((read_sidecar(path) or {"metadata": {}})["metadata"]).get("classes", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ArtifactError(f"{sidecar_path(path)} cannot be used: classes is {found!r}, no list of names", hint=AGAIN)
    return tuple(found)
