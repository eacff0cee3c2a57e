"""How images are brought to a file that does not say it: as the user tells in timm's terms, the rest as timm does."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from timm.data import resolve_data_config

from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.runtimes import Runner
from vitcompress.models import InputConfig


@dataclass(frozen=True)
class Preparation:
    """What is told; None is not told. mean, std: of pixels from 0 to 1, one value or one per channel. interpolation,
    crop_pct, crop_mode: timm's.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None


def prepared(runner: Runner, given: Preparation) -> tuple[InputConfig, str]:
    """How images are brought to `runner`, and where it does not say so itself a sentence on what was told and assumed.

    Raises:
        ArtifactError: neither the artifact nor `given` tells mean and std, or they tell different things.
        InputError: as many values as the images have no channels, or a std that is not above 0.
    """
    told = {name: value for name, value in asdict(given).items() if value is not None}
    for name in {"mean", "std"} & told.keys():
        told[name] = _per_channel(runner, name, told[name])
    if runner.input is not None:
        _check_same(runner.name, runner.input, told)
        return runner.input, ""
    if not {"mean", "std"} <= told.keys():
        raise ArtifactError(
            f"{runner.name} does not say how its images are prepared (mean, std, crop)",
            hint="tell it with --mean and --std, export it with vitcompress, or evaluate the run folder",
        )
    found = resolve_data_config({"input_size": runner.input_size, **told})
    assumed = {name: value for name in asdict(given) if name not in told for value in [found[name]]}
    size = found.pop("input_size")
    said = f"{runner.name} does not say how its images are prepared; told: {_words(told)}"
    return InputConfig(size=size, **found), f"{said}; assumed, as timm does: {_words(assumed)}" if assumed else said


def _per_channel(runner: Runner, name: str, values: tuple[float, ...]) -> tuple[float, ...]:
    channels = runner.input_size[0]
    if len(values) not in (1, channels):
        raise InputError(
            f"--{name} has {len(values)} values, the images of {runner.name} have {channels} channels",
            hint=f"give 1 value or {channels}",
        )
    if not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
        raise InputError(
            f"--{name} cannot be {_words({name: values})[len(name) + 1 :]}", hint="give numbers, a std above 0"
        )
    return values if len(values) == channels else values * channels


def _check_same(name: str, known: InputConfig, told: Mapping[str, Any]) -> None:
    """An artifact that says how its images are prepared was exported with what it says."""
    for key, value in told.items():
        own = getattr(known, key)
        same = own == value if isinstance(value, str) else all(map(math.isclose, _numbers(own), _numbers(value)))
        if not same:
            raise ArtifactError(
                f"{name} says {_words({key: own})}, not {_words({key: value})[len(key) + 1 :]}",
                hint=f"leave --{key.replace('_', '-')} out for it; what it says is what it was exported with",
            )


def _numbers(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _words(values: Mapping[str, Any]) -> str:
    """`mean 0.5,0.5,0.5, crop_pct 0.9`"""
    shown = {
        key: value if isinstance(value, str) else ",".join(f"{v:g}" for v in _numbers(value))
        for key, value in values.items()
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items())
