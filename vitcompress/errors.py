"""Everything vitcompress raises on purpose.

VitcompressError            exit 1
├── CheckFailedError        exit 1: done, but a check or a gate fell short
└── InputError              exit 2: what the user gave is wrong; nothing was written
    ├── RecipeError         all mistakes of one recipe at once
    ├── UnsupportedModelError   a model of a kind no family covers
    ├── WeightsError        missing, truncated, pickled or foreign weights
    ├── DataError           missing or unusable images
    ├── PlanError           a plan that contradicts itself or its model
    ├── ArtifactError       a file that is not what its name says
    ├── MissingExtraError   an optional package that is not installed
    ├── PrecisionError      numbers that the precision asked for cannot hold
    ├── DeviceError         a device, provider or version of a runtime that is not there
    └── OutputError         a folder that cannot be written or holds something else
"""

import difflib
from collections.abc import Iterable


class VitcompressError(Exception):
    """A message with the value seen and what is allowed; `hint` is the next step."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckFailedError(VitcompressError):
    """The work was done, but a check or a gate fell short."""


class InputError(VitcompressError):
    """What the user gave cannot be used."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe with one or more mistakes; `problems` holds one line each."""

    def __init__(self, source: str, problems: Iterable[str], *, hint: str | None = None) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n  ".join([f"recipe {source} cannot be used ({count})", *self.problems]), hint=hint)


class UnsupportedModelError(InputError):
    """A model of a kind that no family covers."""


class WeightsError(InputError):
    """Weights that are missing, damaged, pickled, or of another model."""


class DataError(InputError):
    """Images that are missing or cannot be used."""


class PlanError(InputError):
    """A plan that contradicts itself or the model it is applied to."""


class ArtifactError(InputError):
    """A file that is not what its name or its sidecar says."""


class MissingExtraError(InputError):
    """An optional package that the request needs."""

    def __init__(self, package: str, extra: str, *, need: str) -> None:
        super().__init__(
            f"{need} needs the package {package}, which is not installed", hint=f"pip install 'vitcompress[{extra}]'"
        )


class PrecisionError(InputError):
    """Weights, or results inside the model, that the precision asked for cannot hold."""


class DeviceError(InputError):
    """A device, provider, precision or version of a runtime that this machine does not have."""


class OutputError(InputError):
    """A folder that cannot be written, or that holds something else."""


def first_line(error: BaseException) -> str:
    """What `error` says, without what follows on other lines; its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def close_matches(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """The `choices` most like `word`, best first."""
    return difflib.get_close_matches(word, list(choices), n=count, cutoff=0.5)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`", did you mean x?"` when one of `choices` is close to `word`, else an empty string."""
    close = close_matches(word, choices, count=1)
    return f", did you mean {close[0]}?" if close else ""
