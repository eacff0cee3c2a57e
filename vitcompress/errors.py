"""All exceptions that vitcompress raises on purpose."""

import difflib
from collections.abc import Iterable


class VitcompressError(Exception):
    """The message states the value and what is allowed; `hint` is the next step. Exit code of the command line: 1."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckFailedError(VitcompressError):
    """The work was done, but a check or a limit failed."""


class InputError(VitcompressError):
    """Invalid input; nothing was written."""

    exit_code = 2


class RecipeError(InputError):
    """An invalid recipe. problems: one line each."""

    def __init__(self, source: str, problems: Iterable[str], *, hint: str | None = None) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n  ".join([f"recipe {source} cannot be used ({count})", *self.problems]), hint=hint)


class UnsupportedModelError(InputError):
    """A model that no family supports."""


class WeightsError(InputError):
    """Weights that are missing, damaged, pickled or of another model."""


class DataError(InputError):
    """Images that are missing or cannot be used."""


class PlanError(InputError):
    """A plan that contradicts itself or the model it is applied to."""


class ArtifactError(InputError):
    """A file whose content contradicts its name or its sidecar."""


class MissingExtraError(InputError):
    """An optional package that the request needs."""

    def __init__(self, package: str, extra: str, *, need: str) -> None:
        super().__init__(
            f"{need} needs the package {package}, which is not installed", hint=f"pip install 'vitcompress[{extra}]'"
        )


class PrecisionError(InputError):
    """Weights or activations that the requested precision cannot represent."""


class DeviceError(InputError):
    """A device, provider, precision or runtime version that this machine lacks."""


class OutputError(InputError):
    """A folder that cannot be written or belongs to something else."""


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its class if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def close_matches(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """The `choices` most similar to `word`, best first."""
    return difflib.get_close_matches(word, list(choices), n=count, cutoff=0.5)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`", did you mean x?"` if one of `choices` is similar to `word`, else an empty string."""
    close = close_matches(word, choices, count=1)
    return f", did you mean {close[0]}?" if close else ""
