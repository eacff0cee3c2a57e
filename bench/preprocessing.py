"""How images are prepared for a file that does not say how: as the user says, the rest by timm's defaults.

A file that takes bytes normalises them itself, so that only size, interpolation and crop are open.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from timm.data import resolve_data_config

from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters.runtimes import Runner
from vitcompress.models.create import InputConfig

NO_NORMALISATION = {"mean": 0.0, "std": 1.0}
CHANNELS = (1, 3)  # of images that can be read from a data set


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

    For bytes mean is 0 and std is 1: images are pixels from 0 to 1, of which `byte_input.to_bytes` makes bytes.

    Raises:
        ArtifactError: neither the artifact nor `given` tells mean and std, or they tell different things; or bytes with
            channels that do not come last.
        InputError: as many values as the images have no channels, or a std that is not above 0.
    """
    told = {name: value for name, value in asdict(given).items() if value is not None}
    for name in {"mean", "std"} & told.keys():
        told[name] = _per_channel(runner, name, told[name])
    if runner.input is not None:
        _check_same(runner.name, runner.input, told)
        return runner.input, ""
    if takes_plain_bytes(runner):
        _check_channels_last(runner)
        return _resolved(runner, told, NO_NORMALISATION)
    if not {"mean", "std"} <= told.keys():
        raise ArtifactError(
            f"{runner.name} does not say how its images are prepared (mean, std, crop)",
            hint="tell it with --mean and --std, export it with vitcompress, or evaluate the run folder",
        )
    return _resolved(runner, told, {})


def takes_plain_bytes(runner: Runner) -> bool:
    """Whether `runner` takes bytes, and does not say how it normalises them."""
    return runner.input is None and runner.describe().get("input_type") == "uint8"


def _resolved(runner: Runner, told: dict[str, Any], itself: Mapping[str, float]) -> tuple[InputConfig, str]:
    """What is told, with timm's values for the rest. itself: what the artifact does, whatever is told of it."""
    channels = runner.input_size[0]
    of_file = {name: (value,) * channels for name, value in itself.items()}
    found = resolve_data_config({"input_size": runner.input_size, **told, **of_file})
    idle = [f"--{name}" for name in told if name in itself]
    used = {name: value for name, value in told.items() if name not in itself}
    rest = [field.name for field in fields(Preparation) if field.name not in {*told, *itself}]
    said = [
        f"{runner.name} does not say how its images are prepared",
        "it takes bytes, and so normalises them itself" if itself else "",
        f"{' and '.join(idle)} did not touch it" if idle else "",
        f"told: {_words(used)}" if used else "",
        f"assumed, as timm does: {_words({name: found[name] for name in rest})}" if rest else "",
    ]
    size = found.pop("input_size")
    return InputConfig(size=size, **found), "; ".join(part for part in said if part)


def _check_channels_last(runner: Runner) -> None:
    channels, height, width = runner.input_size
    if channels not in CHANNELS:
        raise ArtifactError(
            f"{runner.name} takes bytes of {height} x {width} x {channels}, which with channels last are no images",
            hint="give a file that takes batch x height x width x channels (a Transpose in front of this one does it)",
        )


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
