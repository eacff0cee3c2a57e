"""Reading and writing: files are written beside their target and moved into place; safetensors and JSON only."""

from vitcompress.checkpoint.folders import (
    PLAN,
    WEIGHTS,
    first_mismatch,
    load,
    load_for,
    load_parts,
    load_strictly,
    read_plan,
    save,
    save_model,
)
from vitcompress.io.files import (
    alone_in,
    decoded,
    differing,
    file_sha256,
    read_json,
    write,
    write_bytes,
    write_json,
    write_text,
    writing,
)
from vitcompress.io.tensors import load_tensors, part_of, save_tensors
from vitcompress.io.training_state import State, load_state, save_state

__all__ = [
    "PLAN",
    "WEIGHTS",
    "State",
    "alone_in",
    "decoded",
    "differing",
    "file_sha256",
    "first_mismatch",
    "load",
    "load_for",
    "load_parts",
    "load_state",
    "load_strictly",
    "load_tensors",
    "part_of",
    "read_json",
    "read_plan",
    "save",
    "save_model",
    "save_state",
    "save_tensors",
    "write",
    "write_bytes",
    "write_json",
    "write_text",
    "writing",
]
