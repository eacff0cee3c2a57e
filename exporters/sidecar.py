"""The sidecar `<file>.json` of an exported file, and the only code that reads it.

People edit such files, and other versions write them: a missing key or another type is an error here.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vitcompress.errors import ArtifactError
from vitcompress.io.checks import Check
from vitcompress.io.files import decode_json_values, file_sha256, find_changed_files, lock_file, read_json, write_json
from vitcompress.io.manifest import check_unchanged
from vitcompress.io.validation import validate
from vitcompress.models.create import InputConfig

FORMAT = 1
DENSE = "dense"  # start of the names of the dense model's files
MOST_PROBLEMS = 3  # in one message; the others are counted
REMEDY = "export the file again, or copy its sidecar again"
INPUT = frozenset({"size", "mean", "std", "interpolation", "crop_pct", "crop_mode"})  # metadata of preprocessing


def _check_name(name: str) -> str:
    if Path(name).name != name or "\\" in name or len(name.encode()) > 255:  # bytes, more than file systems allow
        raise ValueError("expected the name of a file beside it")
    return name


class _Table(BaseModel):
    """Other versions may write further keys."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Build(_Table):
    """Keys that not all runtimes have may be missing, but have one type."""

    runtime: str | None = None
    runtime_version: str | None = None
    sm: list[int] | None = None
    batch: Annotated[list[int], Field(min_length=3, max_length=3)] | None = None
    tf32: bool | None = None
    optimization_level: int | None = None
    hardware_compatible: str | None = None
    version_compatible: bool = False
    truth: list[Check] = []


class _Verification(_Table):
    verdict: str
    checks: list[Check]


class _Search(_Table):
    judge: str
    proxy: bool
    tries: list[dict[str, object]]
    chosen: list[str] | None


class Sidecar(_Table):
    """Required keys of a sidecar; see `exporters.base.Exported`."""

    sidecar_format: Literal[1]
    path: str
    format: str
    precision: str
    sha256: str
    bytes: int
    files: dict[Annotated[str, AfterValidator(_check_name)], str]
    opset: int
    opset_reason: str
    metadata: dict[str, str]
    source: dict[str, str]
    build: _Build
    verified: bool
    speed: dict[str, object] = {}  # missing in files of earlier versions
    islands_search: _Search | Annotated[dict[str, object], Field(max_length=0)]
    verification: _Verification | None = None


def sidecar_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def read_sidecar(path: Path) -> dict[str, Any]:
    """The sidecar of the exported file `path`; empty if it has none.

    Raises ArtifactError if it is not JSON, has a missing or wrong key, or describes another file.
    """
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        return {}
    data, problems = read_json(sidecar), list[str]()
    if validate(Sidecar, data, "", problems) is None:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
        raise _unusable(sidecar, "; ".join([*(" ".join(line.split()) for line in problems[:MOST_PROBLEMS]), *more]))
    if path.name not in data["files"]:
        names = ", ".join(data["files"])
        raise _unusable(sidecar, f"{path.name} is missing from its files ({names}); a renamed file needs its old name")
    return dict(data)


def usable_sidecar(path: Path) -> dict[str, Any]:
    """Like `read_sidecar`, but empty if the sidecar cannot be used; `verify` reports that as a failed check."""
    with suppress(ArtifactError):
        return read_sidecar(path)
    return {}


def _unusable(sidecar: Path, reason: str) -> ArtifactError:
    return ArtifactError(f"{sidecar} cannot be used: {reason}", hint=REMEDY)


def amend_sidecar(path: Path, **fields: Any) -> None:
    """Add `fields`, such as `verified=True`, to the sidecar of `path`, which must exist."""
    with lock_file(path.parent):
        write_json(sidecar_path(path), {**read_sidecar(path), **fields})


def find_mismatches(path: Path) -> list[str]:
    """Differences between `path` and its sidecar, a sentence each. An unusable sidecar is one, too."""
    try:
        return [*find_changed_files(sidecar_path(path)).values()] if read_sidecar(path) else []
    except ArtifactError as error:
        return [error.message]


def check_sha256(path: Path) -> str:
    """SHA-256 of `path`. Raises ArtifactError if its sidecar describes other files, was changed, or cannot be used."""
    check_unchanged(path.parent, sidecar_path(path))  # the sidecar has the hash of `path`
    if read_sidecar(path) and (wrong := [*find_changed_files(sidecar_path(path)).values()]):
        message = f"{path} is not trusted, because {sidecar_path(path).name} does not match it: {wrong[0]}"
        hint = "one of them was replaced; export again, or remove the .json to use the file as it is"
        raise ArtifactError(message, hint=hint)
    return file_sha256(path)


def read_input(name: str, metadata: Mapping[str, Any], size: tuple[int, int, int] | None = None) -> InputConfig | None:
    """The preprocessing for the model in the file `name`, from its decoded metadata; None if these do not state it.

    size: (channels, height, width) of the file's input, if known; it replaces the recorded one. Raises ArtifactError
    for a value of another type.
    """
    if not set(metadata) >= INPUT:
        return None
    values = {key: metadata[key] for key in INPUT} | ({} if size is None else {"size": size})
    try:
        config = TypeAdapter(InputConfig).validate_python(values)
        wrong = next((key for key in ("mean", "std") if len(getattr(config, key)) != config.size[0]), None)
    except ValidationError as error:
        wrong = str(error.errors()[0]["loc"][0])
    if wrong is None:
        return config
    message = f"the metadata of {name} cannot be used: {wrong} is {metadata[wrong]!r}"
    raise ArtifactError(message, hint="export it again")


def read_classes(path: Path) -> tuple[str, ...]:
    """The class names of an exported file; empty if it has no sidecar: exporters then number the classes."""
    names = decode_json_values(read_sidecar(path).get("metadata", {})).get("classes", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unusable(sidecar_path(path), f"classes is {names!r}, expected a list of names")
    return tuple(names)
