"""Matplotlib figures: creation, shared styles, and saving. Matplotlib is optional."""

import textwrap
from pathlib import Path
from typing import Any

from vitcompress.errors import InputError, MissingExtraError
from vitcompress.io.files import write_file

FORMATS = (".png", ".svg", ".pdf")
# Distinguishable for color-blind readers (Okabe & Ito 2008, "Color Universal Design", without black and pale yellow;
# then four of Paul Tol's "muted"); curves also differ in their markers, for prints without color.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#882255", "#999933", "#332288", "#AA4499")
MARKS = "osD^vPX<>hp"


def new_figure(width: float, height: float) -> Any:
    """An empty figure; size in inches. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", need="a plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def wrap(text: str, inches: float) -> str:
    """`text` wrapped, else as it is: in matplotlib, `$` begins mathematics, and legends omit what begins with `_`."""
    lines = textwrap.fill(text, int(14 * inches)).replace("$", r"\$")  # 14 characters take an inch
    return f" {lines}" if lines.startswith("_") else lines


def save_figure(figure: Any, path: Path) -> Path:
    """Write `figure` in the format of the suffix, and return the path. Raises InputError for an unknown format."""
    if path.suffix not in FORMATS:
        raise InputError(f"a plot cannot be written to {path}", hint=f"use a file ending in {', '.join(FORMATS)}")
    write_file(path, lambda beside: figure.savefig(beside, format=path.suffix[1:], dpi=150))
    return path
