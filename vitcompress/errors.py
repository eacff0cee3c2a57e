"""All exceptions that vitcompress raises on purpose."""

import difflib
import re
from collections.abc import Iterable

# Errors of libraries that are about this machine, whatever it runs.
OUT_OF_MEMORY = re.compile("out of memory|allocate memory|not be allocated|enough (free )?memory|bad_alloc", re.I)
GPU_ERROR = re.compile(r"CUDA error|CUDA driver|NVIDIA driver|CUBLAS_STATUS|CUDNN_STATUS|NCCL", re.IGNORECASE)
LONGEST_LINE = 600  # characters of a message; a name from a file may be longer
# Characters that a terminal acts on (C0, C1, directions of text) or cannot print -> text, as in \x1b.
CONTROLS = (*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F))
ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*CONTROLS, *range(0x2066, 0x206A), *range(0xD800, 0xE000))}


def printable(text: str, longest: int | None = None) -> str:
    """`text` without control characters: names of files, classes and modules may contain any. longest: of a line."""
    lines = text.translate(ESCAPES).split("\n")
    return "\n".join(line if longest is None or len(line) <= longest else f"{line[:longest]}..." for line in lines)


class VitcompressError(Exception):
    """The message states the value and what is allowed; `hint` is the next step, also shown below a traceback."""

    exit_code = 1  # of the command line

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = printable(message, LONGEST_LINE)
        self.hint = hint and printable(hint, LONGEST_LINE)
        super().__init__(self.message)
        if self.hint:
            self.add_note(self.hint)

    def __reduce__(self) -> tuple[object, ...]:  # for processes; subclasses take other arguments than `args`
        return type(self).__new__, (type(self), *self.args), vars(self)

    def sentence(self, separator: str = "; ") -> str:
        """The message and, if there is one, the hint in one line."""
        return f"{self.message}{separator}{self.hint}" if self.hint else self.message


class CheckFailedError(VitcompressError):
    """The work was done, but a check or a limit failed."""


class InputError(VitcompressError):
    """Invalid input, so that nothing was written; or an output that cannot be written."""

    exit_code = 2


class RecipeError(InputError):
    """An invalid recipe. problems: one line each."""

    def __init__(self, source: str, problems: Iterable[str], *, hint: str | None = None) -> None:
        self.problems = tuple(printable(problem, LONGEST_LINE) for problem in problems)
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


def lines_of(error: BaseException) -> list[str]:
    """The lines of the error's message, or its class if it has none."""
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def first_line(error: BaseException) -> str:
    return lines_of(error)[0]


def close_matches(word: str, choices: Iterable[str]) -> list[str]:
    """Up to three `choices`, in any case: those that start with `word`, of equal initials (`wd`), and similar ones."""
    word, names = word.lower(), {choice.lower(): choice for choice in choices}
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in (word, *names)}
    short = [name for name in names if word and (name.startswith(word) or word == initials[name])]
    short += [name for name in names if name == initials[word]]
    return [names[name] for name in dict.fromkeys((*short, *difflib.get_close_matches(word, names, cutoff=0.5)))][:3]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`", did you mean x?"` if one of `choices` is similar to `word`, else an empty string."""
    close = close_matches(word, choices)
    return f", did you mean {close[0]}?" if close else ""
