"""Verification checks and their results, as stored in verify.json."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from vitcompress.io.files import lock_file, read_record, write_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import few

Status = Literal["passed", "failed", "not_run"]


@dataclass(frozen=True)
class Check:
    """The result of one check: a value and its largest allowed value.

    command: for a check that cannot run on this machine, the command that runs it on the target.
    applies: False for a check that did not run because the model has nothing that it could check.
    """

    name: str
    verdict: Status
    value: float | None = None
    tolerance: float | None = None
    detail: str = ""
    command: str | None = None
    applies: bool = True

    def __str__(self) -> str:
        """`passed: fold.equivalence, 1.2e-07 of at most 1e-05: on 64 images`"""
        measured = self.value is not None and self.tolerance
        limit = f", {self.value:.2g} of at most {self.tolerance:.2g}" if measured else ""
        return f"{self.verdict.replace('_', ' ')}: {self.name}{limit}{': ' * bool(self.detail)}{self.detail}"

    def to_dict(self, folder: Path | None = None) -> dict[str, object]:
        """folder: its absolute path is called DIR in the texts, as in files that leave this machine."""
        data = {**asdict(self), "passed": self.verdict == "passed"}
        if folder is not None:
            name = str(folder.absolute())
            whole = rf"(?<![\w.-])({re.escape(shlex.quote(name))}|{re.escape(name)})(?![\w-]|\.\w)"  # not /run of /run2
            data |= {key: data[key] and re.sub(whole, "DIR", data[key]) for key in ("detail", "command")}
        for key in ("value", "tolerance"):
            if data[key] is not None and not math.isfinite(data[key]):  # JSON has no NaN and no infinity
                data |= {key: None, "detail": f"{data['detail']} ({key}: {data[key]})".strip()}
        return data


@dataclass(frozen=True)
class Verification:
    """All checks of one artifact. It passes if none failed and at least one ran.

    weights: all tensors of the plan, the weights and the exported files, see `verify.weights`.
    """

    checks: tuple[Check, ...]
    weights: Mapping[str, object] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))

    @property
    def passed(self) -> bool:
        return _passed(check.verdict for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self, folder: Path | None = None) -> dict[str, object]:
        data = {"passed": self.passed, "checks": [check.to_dict(folder) for check in self.checks]}
        return {**data, **({"weights": dict(self.weights)} if self.weights else {})}


def update_verification(folder: Path, verification: Verification, replaced: Callable[[str], bool]) -> None:
    """Add checks and weights to the folder's verify.json. replaced(name): whether to drop a check that is there."""
    path = RunFolder(folder).verification
    with lock_file(folder):
        known = read_record(path, Verification) or {}
        kept = [check for check in known.get("checks", []) if not replaced(str(check["name"]))]
        checks = [*kept, *(check.to_dict(folder) for check in verification.checks)]
        passed = _passed(str(check["verdict"]) for check in checks)
        write_json(path, {**known, **verification.to_dict(), "passed": passed, "checks": checks})


def _passed(verdicts: Iterable[str]) -> bool:
    distinct = set(verdicts)
    return "failed" not in distinct and "passed" in distinct


def limit_check(name: str, value: float, tolerance: float, detail: str = "") -> Check:
    """Passes if `value` is at most `tolerance`, so never for NaN."""
    return Check(name, "passed" if value <= tolerance else "failed", value, tolerance, detail)


def problem_check(name: str, problems: Iterable[str], detail: str) -> Check:
    """Passes without problems; otherwise the detail lists the first five."""
    wrong = list(problems)
    text = f"{len(wrong)} wrong: {few(wrong)}" if wrong else detail
    return Check(name, "failed" if wrong else "passed", float(len(wrong)), 0.0, text)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b| in float64; NaN if either contains NaN."""
    return float((a.double() - b.double()).abs().max())
