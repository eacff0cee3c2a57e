"""The record of an exported file, as its sidecar holds it, and the interface of an exporter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict, Unpack

from torch import nn

from vitcompress.errors import InputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.sidecar import FORMAT, sidecar_path
from vitcompress.families import Space, family_of
from vitcompress.io.files import file_sha256, write_json
from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig


@dataclass(frozen=True)
class Exported:
    """A file that a runtime can run. `files`: SHA-256 of it and of its data files; `bytes` counts all of them.

    metadata: what a user of the file must know (classes, pre-processing, plan hash, versions), each value JSON text.
    source: name and SHA-256 of the ONNX file that it was built from. build: what it was built with and for (runtime
    and version, compute capabilities, range of batches, flags). verified: its answers were held against the model's.
    islands_search: which sets of fp32 islands were tried, who judged them, and which was chosen.
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
    islands_search: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": self.path.name}


class About(TypedDict, total=False):
    """What users of a file must know of its model, beside what the model itself tells; it goes into the metadata.

    input: how images are brought to it. classes: their names; numbers where there are none. plan_digest: of its plan.
    """

    input: Required[InputConfig]
    classes: Sequence[str]
    plan_digest: str


class Export(Protocol):
    """Write `model` to `path` and its sidecar beside it; on failure, or when stopped, nothing is left behind."""

    def __call__(
        self,
        model: nn.Module,
        path: Path,
        *,
        options: ExportOptions | None = None,
        progress: Progress | None = None,
        **about: Unpack[About],
    ) -> Exported: ...


@dataclass(frozen=True)
class Exporter:
    """One target format.

    unavailable(): why this machine cannot write it, None when it can. cannot_run(): why this machine cannot run what is
    written, None when it can. uses: names of the options that mean something to the format. refuse(options): raises
    InputError for values of them that it does not offer. equal_widths(options): whether it takes no attention whose
    heads have more channels in q and k than in v, or fewer.
    """

    name: str
    suffix: str
    export: Export
    uses: frozenset[str]
    refuse: Callable[[ExportOptions], None]
    unavailable: Callable[[], str | None]
    cannot_run: Callable[[], str | None]
    equal_widths: Callable[[ExportOptions], bool] = lambda options: False

    def check(self, options: ExportOptions) -> None:
        """Raise InputError for options that the format does not offer, before any work."""
        for name in options.given():
            if name not in self.uses:
                value = getattr(options, name)
                shown = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(_plain(value))
                raise InputError(
                    f"{name} was given as {shown}, which means nothing to the format {self.name}",
                    hint=f"leave it out; {self.name} knows {', '.join(sorted(self.uses))}",
                )
        low, best, high = options.batch
        if not low <= best <= high:
            raise InputError(
                f"the batch range {low}:{best}:{high} is not in order: least, best, largest",
                hint="as in --batch 1:256:256",
            )
        self.refuse(options)

    def check_model(self, model: nn.Module, options: ExportOptions) -> None:
        """Raise InputError for a model that the format cannot hold with these options, which its shapes tell."""
        if self.equal_widths(options):
            check_equal(model, self.name)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def recorded(path: Path, files: Iterable[str], **known: Any) -> Exported:
    """What is known of the file `path`, in its sidecar too. files: names of it and of its data files."""
    hashes = {name: file_sha256(path.parent / name) for name in files}
    size = sum((path.parent / name).stat().st_size for name in hashes)
    done = Exported(path=path, sha256=hashes[path.name], bytes=size, files=hashes, **known)
    write_sidecar(done)
    return done


def write_sidecar(exported: Exported) -> None:
    write_json(sidecar_path(exported.path), {"sidecar_format": FORMAT, **exported.to_dict()})


DECOMPOSE = "leave the opset out, or give --opset 20 (22 in bf16), which decomposes attention and takes any width"


def apart(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Attention -> channels of each head in q and k, and in v, where those differ and nothing pads them."""
    own: dict[str, list[Space]] = {}
    for space in family_of(model).spaces(model):
        if space.attention and not getattr(model.get_submodule(space.attention), "padded", False):
            own.setdefault(space.attention, []).append(space)
    widths = {name: {space.kind: space.size // space.heads for space in spaces} for name, spaces in own.items()}
    return {name: (of["qk"], of["v"]) for name, of in widths.items() if len(set(of.values())) > 1}


def check_equal(model: nn.Module, name: str) -> None:
    """Raise InputError where `model` has heads that the format `name` does not take as one Attention node."""
    if not (found := apart(model)):
        return
    attention, (qk, v) = next(iter(found.items()))
    more = f" ({len(found)} attentions are of that kind)" if len(found) > 1 else ""
    raise InputError(
        f"the heads of {attention} have {qk} channels in q and k and {v} in v{more}; as one Attention node, which "
        f"opset 23 makes of them, {name} takes equal widths only",
        hint=DECOMPOSE,
    )


def unfused(model: nn.Module, precision: str) -> list[str]:
    """Why attentions of `model` cannot become one fused kernel, as a sentence; none in fp32, where none can."""
    names = list(apart(model)) if precision in HALF else []
    if not names:
        return []
    told = f"{len(names)} attention{'s' * (len(names) > 1)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    return [
        f"{told} with heads whose q and k are of another width than v, which TensorRT for RTX 1.7 does not fuse into "
        "one kernel; for engines prune with layout padded (SERo: --set step.0.layout=padded), or keep the width of "
        "heads (isomorphic, under a rotary embedding: --set step.0.keep_head_dim=1)"
    ]
