"""Matplotlib figures: made where matplotlib is installed, and never left half-written."""

from pathlib import Path
from typing import Any

from vitcompress.errors import InputError, MissingExtraError
from vitcompress.io.files import write

FORMATS = (".png", ".svg", ".pdf")
# Told apart by colour-blind readers, too (Okabe & Ito 2008, "Color Universal Design", without black and pale yellow);
# curves differ in their marks as well, for prints without colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKS = "osD^vPX<>hp"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plots", need="a plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_path(path: Path) -> None:
    """Raise InputError for a name that says no format in which a figure can be written."""
    if path.suffix not in FORMATS:
        raise InputError(f"a plot cannot be written to {path}", hint=f"use a file ending in {', '.join(FORMATS)}")


def save(figure: Any, path: Path) -> Path:
    """Write `figure` as its name says, and return the path. Raises InputError for a format that there is not."""
    check_path(path)
    write(path, lambda beside: figure.savefig(beside, format=path.suffix[1:], dpi=150))
    return path
