"""Head regrouping: which channels of an attention are kept, and which new head each of them belongs to.

UP-ViT, "Pruning multi-head self-attention" (Table D10): from H heads to H', a new head consists of channels of H / H'
old ones. That changes the function, since the products of several old heads are then summed before the softmax.
"""

from collections.abc import Sequence

from vitcompress.errors import PlanError
from vitcompress.methods.options import Strategy


def least_first(scores: Sequence[float]) -> list[int]:
    """Channels from the least important to the most important; equal ones in ascending order."""
    return sorted(range(len(scores)), key=lambda channel: (scores[channel], channel))


def best(order: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` most important channels of `order` (least important first), in ascending order."""
    return tuple(sorted(order[len(order) - count :]))


def regroup(order: Sequence[int], heads: int, new_heads: int, width: int, strategy: Strategy) -> tuple[int, ...]:
    """The `width` channels to keep, one new head after the other.

    order: all channels, the least important first. heads, new_heads: before and after. strategy: `groups` forms each
    new head from the best channels of as many contiguous old heads (strategy 1 of the paper, its best); `across` takes
    the best of all heads and splits them into new heads in their order (2); `each` takes equally many of every old
    head (3). Raises PlanError for numbers that do not divide.
    """
    check_heads(len(order), heads, new_heads, width, strategy)
    parts = count_parts(heads, new_heads, strategy)
    size, share = len(order) // parts, width // parts
    chosen = ([c for c in order if c // size == part] for part in range(parts))
    return tuple(c for part in chosen for c in best(part, share))


def count_parts(heads: int, new_heads: int, strategy: Strategy) -> int:
    """The number of equal parts of the channels that each keep as many channels."""
    return {"groups": new_heads, "across": 1, "each": heads}[strategy]


def check_heads(size: int, heads: int, new_heads: int, width: int, strategy: Strategy) -> None:
    """Raise PlanError for numbers that the strategy cannot meet."""
    if heads % new_heads:
        raise PlanError(
            f"{heads} heads cannot become {new_heads}: each new head consists of the same number of old ones",
            hint=f"choose a number of heads that divides {heads}",
        )
    parts = heads if strategy == "each" else new_heads
    if width % parts or size % parts:
        raise PlanError(
            f"{width} of {size} attention channels do not divide into {parts} equal parts (heads = {strategy!r})",
            hint=f"choose an attention width that {parts} divides",
        )
