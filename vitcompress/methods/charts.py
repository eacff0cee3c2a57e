"""Curves of what a method measured, as plain data, so that they can be drawn without knowing the method."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One curve. gone: whether each point belongs to something that was removed. mark: a short word at the last point.
    group: what curves of one colour have in common; the name where that is empty.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    gone: Sequence[bool] = ()
    mark: str = ""
    group: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves on common axes. log: of the vertical axis. by_depth: one line per block, in forward order. level: a
    threshold, told as `level_name`.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: bool = False
    by_depth: bool = False
    level: float | None = None
    level_name: str = ""


def ranked(name: str, scores: Sequence[float], kept: Sequence[int]) -> Line:
    """Scores from the highest on, over the share of channels that score higher; what is not in `kept` is gone."""
    order = sorted(range(len(scores)), key=lambda channel: -scores[channel])
    stay = set(kept)
    share = [rank / max(1, len(order) - 1) for rank in range(len(order))]
    return Line(name, share, [scores[c] for c in order], [c not in stay for c in order])
