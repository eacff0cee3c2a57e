"""Preprocessing of images as a user sets it, in recipes and on the command line."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le

from vitcompress.errors import InputError
from vitcompress.io.validation import Doc

Value = str | float | tuple[float, ...]
Filter = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
Crop = Literal["center", "squash", "border"]
_MEAN, _STD = "mean per channel, of pixels from 0 to 1", "standard deviation per channel"
_CROP = "side of the crop, as a share of the resized side"
_DEFAULT = "None: the value of the weights, or timm's default"


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How images become the input of a model, as in timm. None: not set. mean, std: one value, or one per channel."""

    mean: Annotated[tuple[float, ...] | None, Doc(f"{_MEAN}; {_DEFAULT}")] = None
    std: Annotated[tuple[Annotated[float, Gt(0)], ...] | None, Doc(f"{_STD}; {_DEFAULT}")] = None
    interpolation: Annotated[Filter | None, Doc(f"for resizing images; {_DEFAULT}")] = None
    crop_pct: Annotated[float | None, Gt(0), Le(1), Doc(f"{_CROP}; {_DEFAULT}")] = None
    crop_mode: Annotated[Crop | None, Doc(f"how images are cropped; {_DEFAULT}")] = None

    def changes(self) -> dict[str, Any]:
        """The values that are set."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}

    def changes_for(self, channels: int, images: str) -> dict[str, Value]:
        """`changes` with one mean and std per channel. images: what has these channels, for the error.

        Raises InputError if the number of values is neither 1 nor `channels`.
        """
        values = self.changes()
        for name in ("mean", "std"):
            if isinstance(numbers := values.get(name), tuple):
                if len(numbers) not in (1, channels):
                    problem = f"{name} has {len(numbers)} values, the images of {images} have {channels} channels"
                    raise InputError(problem, hint="give 1 value" + f" or {channels}" * (channels > 1))
                values[name] = numbers if len(numbers) == channels else numbers * channels
        return values


NAMES = tuple(field.name for field in fields(Preprocessing))
