"""TensorRT engines in both flavours: the model as ONNX, an engine built from it, and a sidecar that says what it is.

An engine holds nothing that a person can read, and running one is running code. What is known of it stands beside it:
`<engine>.json` (hashes, targets, versions, flags), `<engine>.onnx` (what it was built from), and where a GPU could be
asked, `<engine>.layers.json` (the layers as the library's inspector gives them).
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import onnx
import torch
from torch import nn

from vitcompress.errors import OutputError, VitcompressError
from vitcompress.exporters.base import About, Exported, Exporter, recorded, unfused, write_sidecar
from vitcompress.exporters.onnx import export as onnx_export
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.export import ATTENTION_NODE_FROM, ONNX
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runner import RunnerOptions
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.exporters.tensorrt.build import Built, build
from vitcompress.exporters.tensorrt.flavours import RTX, TRT, Flavour, capability, header_of, numbers
from vitcompress.exporters.tensorrt.layers import read, truth, untold
from vitcompress.exporters.tensorrt.runner import EngineRunner
from vitcompress.exporters.tensorrt.targets import cannot_run, options_of_onnx, refuse, targets_of, unavailable
from vitcompress.io.files import write_bytes, write_text, writing
from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig

COMMON = ONNX.uses | {"batch", "sm", "workspace", "keep_onnx"}
DECOMPOSED = (
    "decomposed attention, which TensorRT fuses in half precision where q/k and v are equally wide, and builds at any "
    "widths and in fp32; its Attention operator (TensorRT 10.14 on) wants equal widths and a fused kernel"
)
# They need a GPU, or parts that TensorRT for RTX leaves out; its engines are the same bytes at each optimization level.
ONLY_TRT = {"timing_cache", "hardware_compatible", "version_compatible", "optimization_level"}


def export(
    flavour: Flavour,
    model: nn.Module,
    path: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    **about: Unpack[About],
) -> Exported:
    """Write `model` as an engine to `path`. On failure, or when stopped, what stood there before still stands.

    Raises:
        InputError: options that are not offered, or a library or GPU that is not there.
        VitcompressError: the library refuses the graph or cannot build it.
        OutputError: the folder cannot be written, or the disk is full.
    """
    options, path = options or ExportOptions(), Path(path)
    refuse(flavour, options)
    targets = targets_of(flavour, options)
    _check_places(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as folder:
            staged = Path(folder) / path.name
            source = _source(model, source_path(staged), options, **about)
            built = build(flavour, source.path, _image(source, about["input"]), options, targets, progress)
            write_bytes(staged, built.data)
            built = replace(built, warnings=(*built.warnings, *unfused(model, options.precision)))
            done = _recorded(flavour, staged, source, built, options, targets)
            if cannot_run(flavour) is None and capability() in targets:
                done = _inspected(done, source, options)
            return _moved(done, path, source if options.keep_onnx else None)


def _check_places(path: Path) -> None:
    """Raise OutputError where a folder stands in the place of a file that is to be written."""
    for place in (path, *_companions(path)):
        if place.is_dir():
            raise OutputError(f"{place} cannot be written: it is a folder", hint="choose another file with --out")


def _source(model: nn.Module, path: Path, options: ExportOptions, **about: Unpack[About]) -> Exported:
    """The ONNX file that the engine is built from; its sidecar says at which batches its answers are compared."""
    found = onnx_export.export(
        model,
        path,
        options=options_of_onnx(options),
        lean=False,  # TensorRT's attention kernels are documented for the patterns that torch writes
        reason=DECOMPOSED,
        **about,
    )
    found = replace(found, build={"batch": list(options.batch)})
    write_sidecar(found)
    return found


def layers_path(engine: Path) -> Path:
    """`model.engine` -> `model.engine.layers.json`"""
    return engine.with_name(f"{engine.name}.layers.json")


def source_path(engine: Path) -> Path:
    """`model.engine` -> `model.engine.onnx`"""
    return engine.with_name(f"{engine.name}.onnx")


def _companions(path: Path) -> tuple[Path, ...]:
    """What may stand beside an engine, the sidecar first."""
    source = source_path(path)
    return sidecar_path(path), layers_path(path), source, sidecar_path(source)


def _image(source: Exported, input: InputConfig) -> tuple[int, ...]:
    """Shape of one image as the file takes it."""
    graph = onnx.load(str(source.path), load_external_data=False).graph
    return tuple(dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim[1:]) or input.size


def _recorded(
    flavour: Flavour, staged: Path, source: Exported, built: Built, options: ExportOptions, targets: Sequence[int]
) -> Exported:
    """Everything that is known of an engine."""
    version = str(flavour.load().__version__)
    return recorded(
        staged,
        [staged.name],
        format=flavour.name,
        precision=options.precision,
        opset=source.opset,
        opset_reason=source.opset_reason,
        metadata=source.metadata,
        source={"name": source.path.name, "sha256": source.sha256},
        build={
            "runtime": flavour.title,
            "runtime_version": version,
            "sm": list(targets),
            "sm_reason": _reason(flavour, options),
            "batch": list(options.batch),
            "tf32": options.precision == "tf32",
            "optimization_level": options.optimization_level,
            "workspace": options.workspace,
            "timing_cache": None if options.timing_cache is None else options.timing_cache.name,
            "hardware_compatible": options.hardware_compatible,
            "version_compatible": options.version_compatible,
            "gpu": torch.cuda.get_device_name() if flavour is TRT else None,
            "header": header_of(built.data),
            "seconds": round(built.seconds, 3),
            "warnings": [*built.warnings, *_doubts(flavour, built.data, version, targets)],
        },
    )


def _doubts(flavour: Flavour, data: bytes, version: str, targets: Sequence[int]) -> list[str]:
    """Where the header contradicts what was asked for, as sentences; only a hint, as the header is not documented."""
    found = header_of(data)
    known = ".".join(map(str, numbers(version)))
    expected = {"written_by": flavour.title, "version": known, "sm": sorted(targets) if flavour is RTX else None}
    return [
        f"the header says {key} {found[key]}, not {expected[key]}" for key in expected if found[key] != expected[key]
    ]


def _reason(flavour: Flavour, options: ExportOptions) -> str:
    if options.sm:
        return "asked for"
    return "default of TensorRT for RTX" if flavour is RTX else "the GPU that it was built on"


def _inspected(done: Exported, source: Exported, options: ExportOptions) -> Exported:
    """The engine's own account of its layers beside it, and what that says of the engine in the sidecar.

    An engine without such an account is no failure: a runtime that is part of the engine need not give one.
    """
    try:
        with closing(EngineRunner(done.path, RunnerOptions(trust=options.version_compatible))) as runner:
            account = runner.layers()
        layers = read(account)
    except VitcompressError as error:
        checks = untold(error.message)
    else:
        write_text(layers_path(done.path), account)
        nodes = file.facts(source.path).operators
        checks = truth(layers, options.precision, nodes.get("Softmax", 0) + nodes.get("Attention", 0))
    done = replace(done, build={**done.build, "truth": [check.as_data() for check in checks]})
    write_sidecar(done)
    return done


def _moved(done: Exported, path: Path, source: Exported | None) -> Exported:
    """Put what was staged into place, the sidecar last: an engine without one is not run."""
    staged = done.path.parent
    for old in _companions(path):
        old.unlink(missing_ok=True)
    names = [] if source is None else [*source.files, sidecar_path(source.path).name]
    names += [found.name] if (found := layers_path(done.path)).is_file() else []
    for name in (*names, path.name, sidecar_path(path).name):
        (staged / name).replace(path.parent / name)
    return replace(done, path=path)


def _exporter(flavour: Flavour, uses: frozenset[str]) -> Exporter:
    return Exporter(
        flavour.name,
        flavour.suffix,
        partial(export, flavour),
        uses,
        refuse=partial(refuse, flavour),
        unavailable=partial(unavailable, flavour),
        cannot_run=partial(cannot_run, flavour),
        equal_widths=lambda options: (options.opset or 0) >= ATTENTION_NODE_FROM,
    )


TENSORRT, TENSORRT_RTX = _exporter(TRT, COMMON | ONLY_TRT), _exporter(RTX, COMMON)
