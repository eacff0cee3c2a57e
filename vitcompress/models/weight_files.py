"""Read weights in the formats that training scripts and hubs write, with what the files state about the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from vitcompress.io.tensors import checkpoint_part, load_tensors


@dataclass(frozen=True)
class WeightFile:
    """Weights with timm's names.

    stated: arguments of timm.create_model, preprocessing and `model`, a name of timm, that `stated_in` contains.
    part: the key of a training checkpoint that the weights are from.
    """

    path: Path
    tensors: Mapping[str, Tensor] = field(repr=False)
    stated: Mapping[str, object] = field(default_factory=dict)
    stated_in: str = ""
    class_names: tuple[str, ...] = ()
    part: str | None = None


def open_weights(weights: str | Path) -> WeightFile:
    """The weights at `weights`. Raises WeightsError if there are none."""
    path = Path(weights)
    return WeightFile(path, load_tensors(path), part=checkpoint_part(path))
