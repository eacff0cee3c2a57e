"""What an exported file is made of, byte by byte: the tensors that it holds, and what is not a tensor.

Nothing is run, and one tensor at a time is read.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
from onnx import numpy_helper

from vitcompress.errors import ArtifactError
from vitcompress.exporters.onnx import file as onnx_file
from vitcompress.exporters.onnx.file import doc_bytes, external_files, location, long_lists

ALIGNED = 65536  # data files leave less than this between tensors, so that these can be mapped into memory
INDEX = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
IR_INDEX = ("i64", "i32", "boolean")
LONGEST = 64  # numbers that a node may be set with
Span = tuple[int, int]  # where a tensor's values begin in a file, and where they end


@dataclass(frozen=True)
class Stored:
    """One tensor in a file. size: bytes of its values. own: those of them that no tensor before it has; tensors of the
    same bytes may lie in one place. read: the values, in C order. index: of a type that graphs index and choose with;
    integers of other types may be quantised weights.

    `read` raises ArtifactError where the values are not whole.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    own: int
    read: Callable[[], bytes]
    index: bool


@dataclass(frozen=True)
class Contents:
    """The tensors of a file, and where its other bytes go.

    size: bytes of the file and its data files. graph: of nodes, names, metadata, and padding between tensors. lists:
    names of what in the graph is numbers too many to be settings of a node.
    """

    tensors: tuple[Stored, ...]
    size: int
    graph: int
    lists: tuple[str, ...] = ()


def contents(path: Path) -> Contents:
    """What the ONNX file or OpenVINO model `path` holds. Raises ArtifactError where it is neither, or damaged."""
    return _ir(path) if path.suffix == ".xml" else _onnx(path)


def _onnx(path: Path) -> Contents:
    model = onnx_file.read(path)
    model.DiscardUnknownFields()
    protos = [tensor for tensor in onnx_file.tensors(model) if tensor.ByteSize()]
    inside = sum(_payload(tensor) for tensor in protos if not location(tensor))
    graph = model.ByteSize() - inside - doc_bytes(model)
    size = path.stat().st_size
    own = dict[str, Iterator[int]]()
    for name in external_files(model):
        spans = [_span(tensor) for tensor in protos if location(tensor) == name]
        own[name] = iter(_own(spans))
        graph += _padding(spans)
        size += (path.parent / name).stat().st_size
    stored = tuple(_stored(tensor, own, path.parent) for tensor in protos)
    return Contents(stored, size, graph, long_lists(model, LONGEST))


def _stored(tensor: Any, own: Mapping[str, Iterator[int]], folder: Path) -> Stored:
    size, place = _payload(tensor), location(tensor)
    alone, read = next(own[place]) if place else size, partial(_values, tensor, folder)
    return Stored(tensor.name, tuple(tensor.dims), size, alone, read, tensor.data_type in INDEX)


def _payload(tensor: Any) -> int:
    """Bytes that a tensor's values take, in its file or in a data file."""
    if location(tensor):
        begin, end = _span(tensor)
        return end - begin
    if tensor.raw_data:
        return len(tensor.raw_data)
    without = onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, name=tensor.name)
    return int(tensor.ByteSize() - without.ByteSize())


def _values(tensor: Any, folder: Path) -> bytes:
    if tensor.raw_data:
        return bytes(tensor.raw_data)
    try:
        values: bytes = numpy_helper.to_array(tensor, base_dir=str(folder)).tobytes()
    except ValueError as error:
        raise _damaged(tensor.name, str(error)) from None
    return values


def _damaged(name: str, why: str) -> ArtifactError:
    return ArtifactError(f"the tensor {name} is not whole: {why}", hint="copy or export the file again")


def _span(tensor: Any) -> Span:
    known = {entry.key: entry.value for entry in tensor.external_data}
    try:
        begin = int(known.get("offset", 0))
        return begin, begin + int(known["length"])
    except (LookupError, ValueError):
        told = ", ".join(f"{key} {value}" for key, value in known.items())
        raise _damaged(tensor.name, f"its place in a data file is given as {told}") from None


def _own(spans: Iterable[Span]) -> list[int]:
    """Bytes of each span that lie in none of those before it."""
    found, taken = list[int](), list[Span]()
    for begin, end in spans:
        free, at = 0, begin
        for first, last in taken:
            free += max(0, min(first, end) - at)
            at = max(at, last)
        found.append(free + max(0, end - at))
        insort(taken, (begin, end))
    return found


def _padding(spans: Iterable[Span]) -> int:
    """Bytes that alignment leaves between tensors in a data file; larger gaps do not count."""
    ordered = sorted({(0, 0), *spans})
    gaps = [begin - end for (_, end), (begin, _) in pairwise(ordered)]
    return sum(gap for gap in gaps if 0 < gap < ALIGNED)


# ------------------------------------------------------------------------------------------------------------- OpenVINO


def ir_metadata(path: Path) -> dict[str, str]:
    """What we wrote into an OpenVINO model, for whoever uses it. Raises ArtifactError where it is none."""
    return {entry.tag: entry.get("value", "") for entry in _root(path).iterfind("rt_info/vitcompress/*")}


def _root(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise _not_whole(path, error) from None


def _not_whole(path: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{path} is not a whole OpenVINO model: {error}", hint="copy or export it again")


def _ir(path: Path) -> Contents:
    """An IR names its constants in the .xml, with the place of each in the .bin."""
    data, layers = path.with_suffix(".bin"), _root(path).iter("layer")
    try:
        known = [(layer.get("name", ""), layer.find("data")) for layer in layers if layer.get("type") == "Const"]
        places = [(name, data_of.attrib) for name, data_of in known if data_of is not None]
        spans = [(int(at["offset"]), int(at["offset"]) + int(at["size"])) for _, at in places]
        parts = zip(places, spans, _own(spans), strict=True)
        found = tuple(_constant(name, at, span, own, data) for (name, at), span, own in parts)
        size = path.stat().st_size + data.stat().st_size
    except (OSError, LookupError, ValueError) as error:
        raise _not_whole(path, error) from None
    return Contents(found, size, path.stat().st_size + _padding(spans))


def _constant(name: str, at: dict[str, str], span: Span, own: int, data: Path) -> Stored:
    size = span[1] - span[0]
    shape = tuple(int(length) for length in at["shape"].split(",") if length.strip())
    return Stored(name, shape, size, own, partial(_part, name, data, span[0], size), at["element_type"] in IR_INDEX)


def _part(name: str, path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        values = file.read(length)
    if len(values) != length:
        raise _damaged(name, f"{path.name} ends before its {length} bytes from {offset} on do")
    return values
