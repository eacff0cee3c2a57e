"""Malformed input of every format, through the real commands.

    python -m tests.campaigns.fuzz --cases 10000 [--jobs 2] [--seed 0] [--formats toml,plan] [--out FILE.json]

hypothesis generates the cases; each is a command in a folder of its own with a few changed files. Clean is a case that
ends in time, with exit code 0, 2, or 1 of a failed check, one short message, no traceback, no control characters, and
nothing written or removed unless it is the work of the command. Processes are forked from one that has imported
everything, and one that hangs or dies is a finding.
"""

import argparse
import collections
import contextlib
import copy
import gc
import io
import json
import math
import multiprocessing
import os
import pickle
import platform
import random
import re
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tomli_w
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from tests.helpers.whole_runs import SMALL as TRAINED
from tests.helpers.whole_runs import forked
from vitcompress import cli, recipes
from vitcompress.errors import ESCAPES
from vitcompress.io.hardware import package_versions
from vitcompress.io.tensors import load_tensors
from vitcompress.recipe.keys import keys_of

SMALL = re.sub(r"\[dense\].*?\n\n", "", TRAINED, flags=re.DOTALL).replace('weights = "train"', 'weights = "random"')
SMALL = SMALL.replace("runs = 3", 'runs = 3\nruntimes = ["onnxruntime"]')
SECONDS = 20  # of processor time for one case; the slowest needs 2
SLOW = ("doctor", "keygen", "sign")  # and those that write new files for any argument
PATIENCE = 180  # for a case that waits
GIBIBYTES = 3  # that one case may allocate
LONGEST_MESSAGE = 3000  # characters
WRITTEN = re.compile(r"verify\.json|report\.(json|md|html)|manifest\.json|bench\.json|state/(accuracy|mistakes)\.json")
NEW = re.compile(
    r"(.*/)?(out|model|dense)[^/]*\.(onnx|xml|bin|json|png)|.*/failed/.*|comparison\.png|[^/]+/[\w-]+\.png"
)
VALUE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, UnicodeEncodeError)
WEIGHTS = {  # cases per format of 100; those that run a model are slower
    **{"toml": 18, "set": 18, "plan": 12, "manifest": 6, "sidecar": 8, "report": 9, "safetensors": 6},
    **{"checkpoint": 5, "onnx": 6, "ir": 2, "engine": 3, "image": 2, "arguments": 5},
}
DEEP = 3000
TEXTS = (
    "",
    "x",
    "x" * 20_000,
    "a\0b",
    "\x1b[2J\x1b]0;t\a",
    "\u202egnp.exe\u2066",
    "../../etc/passwd",
    "/dev/zero",
    "$\\foo$",
)
TEXTS += ("<script>alert(1)</script>", "timm:x", "hf-hub:../x", "nan", "1e999", "\ud800", "\r\n\t\x85", "CON", "~")
NUMBERS = (-1, 0, 1, 2, 3, 7, 2**14 + 1, 100_000, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**20, 10**9, 10**400)
NUMBERS += (0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1.7e308, math.inf, -math.inf, math.nan)  # type: ignore[assignment]


@dataclass(frozen=True)
class Case:
    """A command in a copy of some files of the world, of which some are replaced. links: name -> target."""

    format: str
    arguments: tuple[str, ...]
    base: tuple[str, ...] = ()
    files: dict[str, bytes | None] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------- world


def build_world(folder: Path) -> None:
    """A finished run with its files in several formats, and the same without a manifest."""
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        Path("small.toml").write_text(SMALL)
        words = ["recipe", "small.toml", "--out", "run", "--export", "onnx,openvino"]
        done = CliRunner().invoke(cli.main, words)
        assert done.exit_code == 0, done.output
        shutil.copytree("run", "old")
        Path("old/manifest.json").unlink()
        for name in ("dense.onnx", "dense.xml", "dense.bin"):
            Path("old", name).unlink()
            Path("old", f"{name}.json").unlink(missing_ok=True)
        Path("m").mkdir()
        shutil.copy("run/plan.json", "m/plan.json")
        tensors = load_tensors(Path("run/model.safetensors"))
        Path("m/model.safetensors").write_bytes(save(tensors))  # without the hash of the plan
        Path("free").mkdir()  # exports without sidecars
        for name in ("model.onnx", "model.xml", "model.bin"):
            shutil.copy(f"run/{name}", f"free/{name}")
        dense = load_tensors(Path("run/state/dense/model.safetensors"))
        Path("w.safetensors").write_bytes(save(dense))
        torch.save({"model": dense, "args": argparse.Namespace(model="vit_tiny_patch16_224")}, "w.pth")
        for label in range(10):
            place = Path("images", "val", str(label))
            place.mkdir(parents=True)
            Image.fromarray(np.full((8, 8), 25 * label, np.uint8)).save(place / "0.png")


# ----------------------------------------------------------------------------------------------------------- strategies


def nested(depth: int, *, table: bool = False) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value} if table else [value]
    return value


values = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from([True, False, None, [], {}, [[]], {"": 1}, [0], ["a"], {"a": 1}, [None], [1, 2, 3, 4]]),
    st.sampled_from([60, 200, 700]).map(nested),
    st.integers(60, 300).map(lambda depth: nested(depth, table=True)),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-3, 20), max_size=6),
    st.lists(st.sampled_from(TEXTS[:6]), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def edited(draw: Any, data: Any) -> Any:
    """`data` with one to three keys removed, added or of another value."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(list(places(data)) or [()]))
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        match draw(st.sampled_from(["value", "value", "value", "remove", "add", "name"])):
            case "value" if path:
                inner[path[-1]] = copy.deepcopy(draw(values))  # sampled ones are shared
            case "remove" if path:
                del inner[path[-1]]
            case "name" if path and isinstance(inner, dict):
                inner[draw(st.sampled_from(TEXTS) | st.text(max_size=8))] = inner.pop(path[-1])
            case _ if isinstance(inner, dict):
                inner[draw(st.sampled_from(TEXTS) | st.text(max_size=8))] = copy.deepcopy(draw(values))
    return data


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """`data` with bytes that are changed, cut off, inserted or repeated."""
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert", "repeat", "empty", "zeros", "head"])):
            case "flip":
                data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "insert":
                data = data[:at] + draw(st.binary(max_size=12)) + data[at:]
            case "repeat":
                data = data[:at] + data[at : at + 64] * draw(st.sampled_from([2, 50])) + data[at:]
            case "empty":
                data = draw(st.sampled_from([b"", b"\0", b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe"]))
            case "zeros":
                data = data[:at] + bytes(16) + data[at + 16 :]
            case "head":
                data = draw(st.binary(max_size=16)) + data[16:]
    return data


def huge_json() -> Any:
    return st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"[" * DEEP + b"]" * DEEP, b"1" * 5000, b"1e99999"])


def to_json(data: Any) -> bytes:
    try:
        return json.dumps(data).encode("utf-8", "surrogatepass")
    except VALUE_ERRORS:  # numbers of too many digits
        return b'{"a": ' + b"1" * 5000 + b"}"


def json_bytes(text: bytes) -> Any:
    return st.one_of(
        edited(json.loads(text)).map(to_json), edited(json.loads(text)).map(to_json), damaged(text), huge_json()
    )


def to_toml(data: Any) -> bytes | None:
    try:
        return tomli_w.dumps(data).encode()
    except (*VALUE_ERRORS, AttributeError):  # None, or other types that TOML lacks
        return None


def toml_text(value: Any) -> str:
    """`value` in TOML, or nearly."""
    try:
        return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    except VALUE_ERRORS:
        return "1" * 5000


RAW = [
    "[" * 20_000,
    "1" * 5000,
    "{a=" * 5000,
    "1e999",
    "0x" + "f" * 99,
    "2020-01-01",
    '"""',
    "'\x01'",
    "[1,",
    "nan",
    "=",
    "[[]]",
]
raw_values = st.one_of(values.map(toml_text), st.sampled_from(RAW), st.text(max_size=20))


class Content(bytes):
    """Bytes that hypothesis does not print."""

    def __repr__(self) -> str:
        return f"{len(self)} bytes"


class Formats:
    """One generator of cases per format, from the files of the world."""

    def __init__(self, world: Path) -> None:
        self.world = world
        self.keys = [key.key for key in keys_of("digits_hetdpt")]
        self.extra = [
            "step.0.method",
            "step.0.pruned_layers",
            "step.0.layers",
            "step",
            "model",
            "model.args",
            "published",
        ]
        self.extra += [f"model.args.{name}" for name in ("depth", "img_size", "patch_size", "embed_dim", "num_classes")]
        self.extra += [
            f"model.args.{name}" for name in ("num_heads", "mlp_ratio", "in_chans", "global_pool", "x", "drop_rate")
        ]

    def read(self, name: str) -> Content:
        return Content((self.world / name).read_bytes())

    def assignments(self) -> Any:
        known = st.sampled_from([*self.keys, *self.extra])
        keys = (
            known
            | known
            | known
            | st.text(max_size=12)
            | st.sampled_from(["a" * 5000, "step.99.x", "step[-1].x", ".", "a.b.c" * 3000])
        )
        return st.tuples(keys, raw_values).map("=".join)

    def dry(self) -> Any:
        return st.sampled_from([("--dry-run",), ("--dry-run", "--structure-only")])

    def toml(self) -> Any:
        text = self.read("small.toml")
        names = [name for name in recipes.names() if name.startswith("digits")]
        datas = [tomllib.loads(text.decode()), *(tomllib.loads(recipes.text(name)) for name in names)]
        pairs = st.tuples(st.sampled_from([*self.keys, *self.extra]), raw_values)
        lines = pairs.map(lambda pair: f"{text.decode()}\n[x]\n{pair[0]} = {pair[1]}\n".encode("utf-8", "replace"))
        whole = st.one_of(
            *(edited(data).map(to_toml).filter(bool) for data in datas),
            damaged(text),
            lines,
            st.sampled_from(RAW).map(str.encode),
        )
        study = tomllib.loads(recipes.study_text("digits"))
        study = {key: value[:2] if isinstance(value, list) else value for key, value in study.items()}  # rows
        studies = (edited(study).map(to_toml).filter(bool) | damaged(tomli_w.dumps(study).encode())).map(
            lambda data: Case("toml", ("study", "case.toml", "--dry-run"), (), {"case.toml": data})
        )
        recipe = st.tuples(whole, self.dry()).map(
            lambda drawn: Case("toml", ("recipe", "case.toml", *drawn[1]), (), {"case.toml": drawn[0]})
        )
        return st.integers(0, 9).flatmap(lambda n: studies if n == 0 else recipe)

    def set(self) -> Any:
        several = st.lists(self.assignments(), min_size=1, max_size=2)
        return st.tuples(several, self.dry()).map(
            lambda drawn: Case(
                "set",
                ("recipe", "small.toml", *drawn[1], *(word for one in drawn[0] for word in ("--set", one))),
                ("small.toml",),
            )
        )

    def plan(self) -> Any:
        base = json.loads(self.read("m/plan.json"))
        full = {
            **base,
            "kept": {"blocks.1.mlp": [0, 1, 2, 3]},
            "heads": {"blocks.1.attn": 1},
            "appended": {"blocks.0": "gelu"},
        }
        full |= {"folded": ["blocks.1.mlp"], "standard": {"arch": base["arch"], "args": base["arch_args"]}}
        args = st.tuples(
            st.sampled_from([*base["arch_args"], "class_token", "norm_layer", "block_fn", "checkpoint_path"]), values
        )
        one = args.map(lambda pair: to_json({**base, "arch_args": {**base["arch_args"], pair[0]: pair[1]}}))
        texts = json_bytes(self.read("m/plan.json")) | edited(full).map(to_json) | one
        words = st.sampled_from(
            [
                ("evaluate", "m", "--data", "digits"),
                ("bench", "m", "--batch", "1", "--runs", "1", "--protocol", "paper"),
                ("verify", "m"),
                ("export", "m"),
            ]
        )
        return st.tuples(texts, words).map(lambda drawn: Case("plan", drawn[1], ("m",), {"m/plan.json": drawn[0]}))

    def manifest(self) -> Any:
        def sign(data: Any) -> bytes:
            try:
                rest = {key: value for key, value in data.items() if key != "sha256"}
                return (
                    json.dumps({**rest, "sha256": sha256(json.dumps(rest).encode()).hexdigest()}, indent=1) + "\n"
                ).encode()
            except (*VALUE_ERRORS, AttributeError):
                return b"{}"

        text = self.read("run/manifest.json")
        words = st.sampled_from(
            [("verify", "run"), ("report", "run"), ("evaluate", "run"), ("evaluate", "run/model.onnx")]
        )
        texts = edited(json.loads(text)).map(sign) | json_bytes(text)
        return st.tuples(texts, words).map(
            lambda drawn: Case("manifest", drawn[1], ("run",), {"run/manifest.json": drawn[0]})
        )

    def sidecar(self) -> Any:
        commands = [
            ("evaluate", "old/model.onnx"),
            ("verify", "old"),
            ("report", "old"),
            ("bench", "old/model.onnx", "--runs", "1", "--protocol", "paper"),
        ]
        texts = json_bytes(self.read("old/model.onnx.json"))
        return st.tuples(texts, st.sampled_from(commands)).map(
            lambda drawn: Case("sidecar", drawn[1], ("old",), {"old/model.onnx.json": drawn[0]})
        )

    def report(self) -> Any:
        names = (
            "report.json",
            "bench.json",
            "verify.json",
            "state/accuracy.json",
            "state/mistakes.json",
            "recipe.toml",
        )
        commands = st.sampled_from(
            [("report", "old"), ("report", "old", "--pictures", "pictures"), ("verify", "old"), ("report", "old", "m")]
        )

        def of(name: str) -> Any:
            text = self.read(f"old/{name}")
            texts = damaged(text) if name.endswith("toml") else json_bytes(text)
            words = st.just(("report", "run", "--bench", "old/bench.json")) if name == "bench.json" else commands
            return st.tuples(texts, commands | words).map(
                lambda drawn: Case("report", drawn[1], ("old", "run", "m"), {f"old/{name}": drawn[0]})
            )

        return st.sampled_from(names).flatmap(of)

    def _weights(self, format: str, contents: Any, name: str) -> Any:
        words = [
            ("recipe", "small.toml", "--dry-run", "--weights", name),
            ("recipe", "small.toml", "--dry-run", "--weights", name, "--check"),
        ]
        return st.tuples(contents, st.sampled_from(words)).map(
            lambda drawn: Case(format, drawn[1], ("small.toml",), {name: drawn[0]})
        )

    def safetensors(self) -> Any:
        def of(name: str) -> Any:
            data = self.read(name)
            size = struct.unpack("<Q", data[:8])[0]
            header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
            types = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "I64", "I8", "BOOL", "U16", "F4", "X")

            def join(text: bytes) -> bytes:
                return struct.pack("<Q", len(text)) + text + rest

            def as_type(pair: tuple[str, str]) -> bytes:
                return join(
                    to_json(
                        {key: {**value, "dtype": pair[1]} if key == pair[0] else value for key, value in header.items()}
                    )
                )

            metadata = (
                edited({**header, "__metadata__": {"args": "x", "plan": "y", "classes": '["a"]'}})
                .map(to_json)
                .map(join)
            )
            typed = st.tuples(st.sampled_from(sorted(header)), st.sampled_from(types)).map(as_type)
            lengths = st.sampled_from([0, 1, 2**63, 2**40, len(data), size - 1]).map(
                lambda n: struct.pack("<Q", n % 2**64) + data[8:]
            )
            whole = st.sampled_from(
                [torch.complex64, torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool, torch.float64]
            ).map(lambda kind: save({key: value.to(kind) for key, value in self.tensors(name).items()}))
            values = st.sampled_from([math.nan, math.inf, 1e38]).map(
                lambda number: save({key: torch.full_like(value, number) for key, value in self.tensors(name).items()})
            )
            return edited(header).map(to_json).map(join) | metadata | typed | lengths | damaged(data) | whole | values

        words = st.sampled_from(
            [
                ("evaluate", "m", "--data", "digits"),
                ("bench", "m", "--runs", "1", "--protocol", "paper", "--batch", "1"),
                ("verify", "m"),
            ]
        )
        own = st.tuples(of("m/model.safetensors"), words).map(
            lambda drawn: Case("safetensors", drawn[1], ("m",), {"m/model.safetensors": drawn[0]})
        )
        return own | self._weights("safetensors", of("w.safetensors"), "w.safetensors")

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.world / name)

    def checkpoint(self) -> Any:
        tensors = self.tensors("w.safetensors")
        stated = [
            "model",
            "img_size",
            "patch_size",
            "num_heads",
            "mean",
            "std",
            "crop_pct",
            "num_classes",
            "class_names",
            "interpolation",
        ]
        stated += ["pretrained_cfg", "model_args", "label_names", "id2label", "class_to_idx", "in_chans", "input_size"]

        def dump(content: Any) -> bytes:
            buffer = io.BytesIO()
            try:
                torch.save(content, buffer)
            except (*VALUE_ERRORS, pickle.PicklingError, RuntimeError):
                return b""
            return buffer.getvalue()

        options = st.dictionaries(st.sampled_from(stated), values, min_size=1, max_size=3)
        contents = st.one_of(
            options.map(lambda args: {"model": tensors, "args": argparse.Namespace(**args)}),
            options.map(lambda args: {"state_dict": tensors, **args}),
            values,
            st.tuples(st.sampled_from(sorted(tensors)), values).map(
                lambda pair: {"model": {**tensors, pair[0]: pair[1]}}
            ),
            st.tuples(
                st.sampled_from(sorted(tensors)),
                st.sampled_from(["cut", "int", "complex", "nan", "sparse", "empty", "meta"]),
            ).map(lambda pair: {**tensors, pair[0]: odd_tensor(tensors[pair[0]], pair[1])}),
        )
        return self._weights("checkpoint", contents.map(dump) | damaged(self.read("w.pth")), "w.pth")

    def onnx(self) -> Any:
        data = self.read("free/model.onnx")
        model = onnx.load_from_string(data)
        metadata = [entry.key for entry in model.metadata_props]

        @st.composite
        def changed(draw: Any) -> bytes:
            other = copy.deepcopy(model)
            graph = other.graph
            number = draw(st.sampled_from([-1, 0, 1, 3, 2**31, 2**40, 2**62]))
            match draw(
                st.sampled_from(
                    [
                        "metadata",
                        "metadata",
                        "dim",
                        "symbol",
                        "external",
                        "initializer",
                        "op",
                        "opset",
                        "edge",
                        "attribute",
                        "type",
                        "drop",
                    ]
                )
            ):
                case "metadata":
                    entry = other.metadata_props[draw(st.integers(0, len(metadata) - 1))]
                    entry.value = draw(raw_values).encode("utf-8", "replace").decode()
                case "dim":
                    value = draw(st.sampled_from([*graph.input, *graph.output]))
                    draw(st.sampled_from(list(value.type.tensor_type.shape.dim))).dim_value = number
                case "symbol":
                    draw(st.sampled_from(list(graph.input[0].type.tensor_type.shape.dim))).dim_param = draw(
                        st.sampled_from(["b", "", "x" * 5000, "\x1b[2J"])
                    )
                case "external":
                    tensor = draw(st.sampled_from(list(graph.initializer)))
                    tensor.data_location = onnx.TensorProto.EXTERNAL
                    place = draw(
                        st.sampled_from(
                            [t for t in TEXTS if "\ud800" not in t]
                            + ["model.onnx", ".", "..", "x/" * 3000, "pipe.toml"]
                        )
                    )
                    entries = {
                        "location": place,
                        "offset": str(number),
                        "length": draw(st.sampled_from(["-1", "x", "9" * 30])),
                    }
                    for key, text in entries.items():
                        tensor.external_data.add(key=key, value=text)
                case "initializer":
                    tensor = draw(st.sampled_from(list(graph.initializer)))
                    if draw(st.booleans()):
                        tensor.dims[:] = [number, *tensor.dims[1:]]
                    else:
                        tensor.data_type = draw(st.integers(0, 40))
                case "op":
                    draw(st.sampled_from(list(graph.node))).op_type = draw(
                        st.sampled_from(["Loop", "If", "X", "", "Identity", "Resize", "Tile"])
                    )
                case "opset":
                    other.opset_import[0].version = draw(st.sampled_from([0, 1, 99, 2**40, -1]))
                case "edge":
                    node = draw(st.sampled_from(list(graph.node)))
                    node.input[:] = [
                        draw(st.sampled_from(["", "x", graph.output[0].name, *node.output])),
                        *node.input[1:],
                    ]
                case "attribute":
                    node = draw(st.sampled_from([n for n in graph.node if n.attribute]))
                    node.attribute[0].i, node.attribute[0].f = number, 1.0
                case "type":
                    graph.input[0].type.tensor_type.elem_type = draw(st.integers(0, 30))
                case "drop":
                    del graph.node[draw(st.integers(0, len(graph.node) - 1))]
            return other.SerializeToString()

        words = st.sampled_from(
            [
                ("evaluate", "model.onnx", "--data", "digits"),
                ("bench", "model.onnx", "--runs", "1", "--protocol", "paper", "--batch", "1"),
            ]
        ).map(lambda words: (words, "model.onnx"))
        words = words | words | st.just((("verify", "old"), "old/model.onnx"))
        return st.tuples(changed() | changed() | damaged(data), words).map(
            lambda drawn: Case("onnx", drawn[1][0], ("old",) if "/" in drawn[1][1] else (), {drawn[1][1]: drawn[0]})
        )

    def ir(self) -> Any:
        text, weights = self.read("free/model.xml"), self.read("free/model.bin")
        sizes = re.compile(rb"(<dim>|offset=\"|size=\"|shape=\"|value=\")([^<\"]*)")

        @st.composite
        def changed(draw: Any) -> bytes:
            match = draw(st.sampled_from(list(sizes.finditer(text))))
            value = draw(st.sampled_from([b"-1", b"0", b"9" * 30, b"x", b"", b"1e999", b"[" * 5000, b"2147483648"]))
            return text[: match.start(2)] + value + text[match.end(2) :]

        files = st.one_of(
            (changed() | damaged(text)).map(lambda data: {"model.xml": data, "model.bin": weights}),
            damaged(weights).map(lambda data: {"model.xml": text, "model.bin": data}),
        )
        words = st.sampled_from(
            [
                ("evaluate", "model.xml", "--data", "digits"),
                ("bench", "model.xml", "--runs", "1", "--protocol", "paper", "--batch", "1"),
            ]
        )
        return st.tuples(files, words).map(lambda drawn: Case("ir", drawn[1], (), drawn[0]))

    def engine(self) -> Any:
        heads = st.sampled_from([b"ftrt", b"ptrt", b"rtx", b"", b"\x08"]).map(lambda head: head + bytes(64))
        files = st.tuples(
            st.binary(max_size=80) | heads, json_bytes(self.read("old/model.onnx.json")) | st.just(None), st.booleans()
        )

        def case(drawn: Any) -> Case:
            (engine, sidecar, trust), command = drawn
            files = {"model.engine": engine, **({} if sidecar is None else {"model.engine.json": sidecar})}
            return Case("engine", (*command, *(("--trust",) if trust else ())), (), files)

        words = st.sampled_from(
            [("evaluate", "model.engine", "--data", "digits"), ("bench", "model.engine", "--protocol", "paper")]
        )
        return st.tuples(files, words).map(case)

    def image(self) -> Any:
        def encode(format: str, size: tuple[int, int] = (8, 8)) -> bytes:
            buffer = io.BytesIO()
            Image.fromarray(np.zeros(size, np.uint8)).save(buffer, format)
            return buffer.getvalue()

        kinds = [encode(name) for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
        header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR"
        bombs = st.tuples(st.sampled_from([0, 1, 2**16, 2**31 - 1]), st.integers(0, 20), st.integers(0, 7)).map(
            lambda drawn: header + struct.pack(">IIBBBBB", drawn[0], drawn[0], drawn[1], drawn[2], 0, 0, 0) + bytes(4)
        )
        others = st.sampled_from(
            [b"%!PS-Adobe-3.0\n", b"<svg/>", encode("PNG", (1, 4000)), encode("PNG", (3000, 3000))]
        )
        contents = st.sampled_from(kinds).flatmap(damaged) | bombs | others
        names = st.sampled_from(
            ["0.png", "x\x1b[2J.png", "b\u202egnp.png", "c.jpg", "d.tif", "e\n.png", "f" * 200 + ".png"]
        )
        commands = st.sampled_from(
            [("evaluate", "free/model.onnx", "--data", "images"), ("evaluate", "m", "--data", "images")]
        )
        return st.tuples(contents, names, commands).map(
            lambda drawn: Case("image", drawn[2], ("images", "free", "m"), {f"images/val/1/{drawn[1]}": drawn[0]})
        )

    def arguments(self) -> Any:
        tokens = st.sampled_from(
            [
                "run",
                "old",
                "m",
                "free/model.onnx",
                "free/model.xml",
                "small.toml",
                "images",
                "digits",
                "pipe.toml",
                "/dev/zero",
            ]
        )
        tokens = (
            tokens
            | tokens
            | st.sampled_from([t.replace("\ud800", "").replace("\0", "") for t in TEXTS])
            | st.sampled_from(
                [
                    "timm:vit_tiny_patch16_224?img_size=8&patch_size=99999",
                    "timm:vit_tiny_patch16_224?depth=99999",
                    "timm-onnx:x",
                ]
            )
        )
        numbers = st.sampled_from(
            [
                "-1",
                "0",
                "1",
                "2",
                "1.5",
                "nan",
                "inf",
                "1e999",
                "9" * 20,
                "9" * 5000,
                "x",
                "",
                "1,2,x",
                "1:2",
                "3:2:1",
                "0.5,0.5",
                "٣",
            ]
        )
        kept = st.sampled_from(["1", "0", "-1", "9" * 20, "x"])  # a larger number is a longer measurement
        named = {name: command for name, command in cli.main.commands.items() if name not in SLOW}

        @st.composite
        def words(draw: Any) -> Case:
            name = draw(st.sampled_from(list(named)))
            line = [name, *draw(st.lists(tokens, min_size=0, max_size=2))]
            line += ["--dry-run"] if name in ("recipe", "study") else []
            line += ["--runs", "1", "--protocol", "paper"] if name == "bench" else []
            known = [
                option
                for option in named[name].params
                if option.param_type_name == "option" and option.name not in ("debug", "count")
            ]
            for option in draw(st.lists(st.sampled_from(known), max_size=3)):
                line.append(option.opts[0])
                if not option.is_flag and draw(st.integers(0, 9)):
                    line.append(
                        draw(
                            kept
                            if option.opts[0] in ("--runs", "--warmup", "--seeds", "--jobs", "--workers")
                            else numbers | tokens
                        )
                    )
            return Case("arguments", tuple(line), ("run", "old", "m", "free", "small.toml", "images"))

        return words()


def odd_tensor(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "cut":
            return tensor.flatten()[:3]
        case "int":
            return tensor.to(torch.int64)
        case "complex":
            return tensor.to(torch.complex64)
        case "nan":
            return torch.full_like(tensor, math.nan)
        case "sparse":
            return tensor.to_sparse()
        case "meta":
            return tensor.to("meta")
        case _:
            return torch.empty(0)


def draw_cases(strategy: Any, wanted: int, number: int) -> list[Case]:
    cases: list[Case] = []

    @seed(number)
    @settings(
        max_examples=2 * wanted,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(strategy, st.booleans()))
    def collect(drawn: tuple[Case, bool]) -> None:
        case, as_json = drawn
        if len(cases) < wanted:
            cases.append(replace(case, arguments=(*case.arguments, *(("--json",) if as_json else ()))))

    collect()
    return cases


def generate(world: Path, count: int, number: int, only: Sequence[str] = ()) -> list[Case]:
    """About `count` cases, split over the formats by `WEIGHTS`. number: seed."""
    formats, cases = Formats(world), list[Case]()
    weights = {name: weight for name, weight in WEIGHTS.items() if name in (only or WEIGHTS)}
    for name, weight in weights.items():
        cases += draw_cases(getattr(formats, name)(), max(1, math.ceil(count * weight / sum(weights.values()))), number)
    random.Random(number).shuffle(cases)
    return cases[:count]


# -------------------------------------------------------------------------------------------------------------- running


def tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def prepare(case: Case, world: Path, folder: Path) -> None:
    folder.mkdir()
    for name in case.base:
        (shutil.copytree if (world / name).is_dir() else shutil.copy)(world / name, folder / name)
    for name, data in case.files.items():
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    for name, target in case.links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.toml")


def run_case(case: Case, world: Path, folder: Path) -> tuple[int, str, str | None]:
    """Exit code, message, and what is wrong with how the case ends, or None."""
    prepare(case, world, folder)
    before = tree(folder)
    with contextlib.chdir(folder):
        result = CliRunner().invoke(cli.main, list(case.arguments))
    message, code = result.stderr, result.exit_code
    if "--json" in case.arguments and code:
        with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError):  # or no message but checks
            data = json.loads(result.stdout)
            message = "\n".join((data["error"], data["hint"] or "") if "error" in data else data["missing"])
    problem = judge_output(case, code, message, result.stdout) or judge_files(code, before, tree(folder))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        problem = f"raises {type(result.exception).__name__}: {result.exception}"[:300]
    return code, message, problem


def judge_output(case: Case, code: int, message: str, stdout: str) -> str | None:
    text = message + stdout
    if bug := re.search(r"Traceback|unexpected \w+:|bug in", plain := " ".join(text.split())):
        return plain[max(0, bug.start() - 100) :][:300]
    if code not in (0, 1, 2):
        return f"exit code {code}"
    failed = case.arguments[0] in ("verify", "export") or {"--max-drop", "--fail-under", "--require-verified"} & {
        *case.arguments
    }
    if code == 1 and not failed and "are not finite" not in message:
        return f"exit code 1: {' '.join(message.split())[:300]}"
    if code == 2 and len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters: {' '.join(message.split())[:100]}"
    if strange := {c for c in text if ord(c) in ESCAPES}:
        return f"control characters {sorted(strange)!r} in {text[:200]!r}"
    return None


def judge_files(code: int, before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    if code == 2 and before != after:
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return f"exit code 2, but {names[0]} was changed"
    if gone := [name for name in before if name not in after and code != 1]:
        return f"{gone[0]} was removed"
    if edits := [
        name
        for name in before
        if after.get(name, before[name]) != before[name] and not (WRITTEN.search(name) or NEW.fullmatch(name))
    ]:
        return f"{edits[0]} was changed"
    if new := [name for name in after if name not in before and not (WRITTEN.search(name) or NEW.fullmatch(name))]:
        return f"{new[0]} was written"
    return None


def work(cases: Sequence[tuple[int, Case]], world: Path, folder: Path, pipe: int) -> None:
    """Run cases in this process, and write a line for each."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # of libraries
        os.dup2(null, descriptor)
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (used + (GIBIBYTES << 30),) * 2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for number, case in cases:
        place = folder / str(number)
        start = time.monotonic()
        try:
            code, message, problem = run_case(case, world, place)
        except BaseException as error:  # noqa: BLE001 - of the campaign itself
            code, message, problem = -1, "", f"the campaign failed: {type(error).__name__}: {error}"[:300]
        line = {
            "number": number,
            "code": code,
            "problem": problem,
            "seconds": time.monotonic() - start,
            "message": message[:300],
        }
        os.write(pipe, json.dumps(line).encode() + b"\n")
        if problem is None:
            shutil.rmtree(place, ignore_errors=True)


def cpu_seconds(process: int) -> float:
    """Processor time of a process; a busy machine does not add to it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_cases(cases: Sequence[Case], world: Path, folder: Path, seconds: float = math.inf) -> list[dict[str, Any]]:
    """One result per case, of those that fit in `seconds`. A process that hangs or dies ends only its own case."""
    results: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    while len(results) < len(cases) and time.monotonic() < end:
        first = len(results)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                work(list(enumerate(cases))[first:], world, folder, writer)
            finally:
                os._exit(0)
        os.close(writer)
        buffer, ended, used, last = b"", None, 0.0, time.monotonic()
        while ended is None and len(results) < len(cases) and time.monotonic() < end:
            if not select.select([reader], [], [], SECONDS)[0]:
                if cpu_seconds(child) - used > SECONDS or time.monotonic() - last > PATIENCE:
                    ended = f"no end after {SECONDS} s"
            elif not (data := os.read(reader, 1 << 16)):
                ended = "the process died"
            else:
                used, last = cpu_seconds(child), time.monotonic()
                *lines, buffer = (buffer + data).split(b"\n")
                results += map(json.loads, lines)
                report_findings(cases, results[-len(lines) :] if lines else [])
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if ended:
            signaled = f" of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) and "died" in str(ended) else ""
            results.append(
                {
                    "number": len(results),
                    "code": -1,
                    "problem": f"{ended}{signaled}",
                    "seconds": SECONDS,
                    "message": "",
                }
            )
            report_findings(cases, results[-1:])
    return results


def report_findings(cases: Sequence[Case], results: Sequence[dict[str, Any]]) -> None:
    for result in results:
        if result["problem"]:
            case = cases[result["number"]]
            print(f"{result['number']:>5} {case.format}: {describe(case)!r}\n      {result['problem']!r}", flush=True)


def describe(case: Case) -> str:
    return " ".join(word if len(word) < 200 else f"{word[:60]}...({len(word)})" for word in case.arguments)


def run_share(world: Path, folder: Path, end: float, share: tuple[int, int, Sequence[str]], output: Any) -> None:
    """Generate and run the cases of one process of the campaign, and send them with their results."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    cases = generate(world, *share)
    print(f"{len(cases)} cases in {folder.name}", flush=True)
    results = run_cases(cases, world, folder, end - time.monotonic())
    output.send(list(zip(cases, results, strict=False)))  # of those that were in time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further case starts")
    parser.add_argument("--jobs", type=int, default=1, help="processes that generate and run cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder that keeps the world and the cases that are not clean")
    options = parser.parse_args()
    start, jobs = time.monotonic(), options.jobs
    only = [name for name in options.formats.split(",") if name]
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        place.mkdir(exist_ok=True)
        world = place / "world"
        if not world.exists():  # in a process of its own: those that are forked from this one lack OpenVINO's threads
            assert forked(build_world, world) == 0
        gc.freeze()  # of which every collection in a forked process would make a copy
        context, pairs = multiprocessing.get_context("fork"), list[tuple[Case, dict[str, Any]]]()
        outputs = [context.Pipe(duplex=False) for _ in range(jobs)]
        for job, (_, output) in enumerate(outputs):
            share = (math.ceil(options.cases / jobs), options.seed * jobs + job, only)
            work = (world, place / f"cases-{job}", start + options.seconds, share, output)
            context.Process(target=run_share, args=work).start()
            output.close()  # so that the end of the process is the end of its results
        for reader, _ in outputs:
            pairs += reader.recv()
    cases, results = zip(*pairs, strict=True)
    findings = [(case, result) for case, result in pairs if result["problem"]]
    seconds = time.monotonic() - start
    by_format = {
        name: {
            "cases": sum(case.format == name for case in cases),
            "clean": sum(
                case.format == name and not result["problem"] for case, result in zip(cases, results, strict=True)
            ),
        }
        for name in WEIGHTS
    }
    codes = dict(collections.Counter(str(result["code"]) for result in results))
    record = {
        "command": f"python -m tests.campaigns.fuzz --cases {options.cases} --jobs {jobs} --seed {options.seed}",
        "hardware": f"CPU, {os.cpu_count()} cores ({platform.machine()}), shared with other work",
        "versions": package_versions(("vitcompress", "torch", "timm", "onnx", "onnxruntime", "openvino", "hypothesis")),
        "cases": len(cases),
        "clean": len(cases) - len(findings),
        "seed": options.seed,
        "seconds": round(seconds),
        "slowest_seconds": round(max(result["seconds"] for result in results), 1),
        "exit_codes": codes,
        "formats": by_format,
        "findings": [{"arguments": describe(case), **result} for case, result in findings],
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"exit codes {codes}, slowest {record['slowest_seconds']} s, all {seconds:.0f} s")
    print(f"{len(cases) - len(findings)} of {len(cases)} clean")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
