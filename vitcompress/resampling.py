"""Which tensors of a checkpoint timm has resampled for a model of another input, patch or window size."""

from collections.abc import Iterator, Mapping
from math import isqrt
from pathlib import Path

from torch import nn

from vitcompress import models
from vitcompress.io.tensors import load_tensors

Shape = tuple[int, ...]
POSITIONS, TABLE, PATCH = "pos_embed", "relative_position_bias_table", "patch_embed.proj.weight"


def resampled(model: nn.Module, arch: str, weights: str | Path) -> list[str]:
    """One sentence for each change of grid by which `weights` (as of `models.create`) became those of `model`.

    Raises:
        WeightsError: as `models.create`.
    """
    if str(weights) == "random":
        return []
    given = models.outline(arch).state_dict() if str(weights) == "hub" else load_tensors(Path(weights))
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    before = {name: tuple(given[name].shape) for name in own if name in given}
    found: dict[str, list[str]] = {}
    for name, change in _changes(model, own, before):
        found.setdefault(change, []).append(name)
    return [
        f"timm resampled {names[0]}{f' and {len(names) - 1} more like it' if len(names) > 1 else ''} {change}"
        for change, names in found.items()
    ]


def _changes(model: nn.Module, own: Mapping[str, Shape], before: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Name and change of each resampled tensor."""
    for name, old in before.items():
        new = own[name]
        if name == POSITIONS and old[1] != new[1]:
            grid = tuple(model.patch_embed.grid_size)  # type: ignore[union-attr, arg-type]
            prefix = new[1] - grid[0] * grid[1]  # class token and registers, which keep theirs
            yield name, f"from {_square(old[1] - prefix)} to {_sides(grid)} patches"
        elif name.endswith(TABLE) and old[0] != new[0]:
            yield name, f"from windows of {_window(old[0])} to {_window(new[0])}"
        elif name == PATCH and old[-2:] != new[-2:]:
            yield name, f"from patches of {_sides(old[-2:])} to {_sides(new[-2:])} pixels"


def _sides(sides: Shape) -> str:
    return " x ".join(map(str, sides))


def _square(count: int) -> str:
    """The sides of a square grid of so many; their number where it is none."""
    side = isqrt(count)
    return _sides((side, side)) if side * side == count else str(count)


def _window(rows: int) -> str:
    """The sides of the square window that has so many relative positions, (2 w - 1)^2; their number where none has."""
    side = isqrt(rows)
    return _sides(((side + 1) // 2,) * 2) if side * side == rows else f"{rows} relative positions"
