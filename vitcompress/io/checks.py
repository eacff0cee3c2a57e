"""One question, its answer and the limit it is held against: what verify.json is made of."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitcompress.io.files import lock_folder, read_json, write_json

LEDGER = "verify.json"
Status = Literal["passed", "failed", "not_run"]


@dataclass(frozen=True)
class Check:
    """`value` is held against `tolerance`; `command` runs on the target what cannot run here."""

    name: str
    verdict: Status
    value: float | None = None
    tolerance: float | None = None
    detail: str = ""
    command: str | None = None

    def to_dict(self) -> dict[str, Any]:
        data = {**asdict(self), "passed": self.verdict == "passed"}
        if self.value is not None and not math.isfinite(self.value):  # JSON has no NaN and no infinity
            data |= {"value": None, "detail": f"{self.detail} (value: {self.value})".strip()}
        return data


@dataclass(frozen=True)
class Verification:
    """All checks of one artifact. It passed when none failed and at least one was run.

    weights: every tensor from the plan to the files, see `verify_weights.table`.
    """

    checks: tuple[Check, ...]
    weights: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return _passed(check.verdict for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        data = {"passed": self.passed, "checks": [check.to_dict() for check in self.checks]}
        return {**data, "weights": dict(self.weights)} if self.weights else data

    def write(self, folder: Path) -> None:
        write_json(folder / LEDGER, self.to_dict())


def update_verification(folder: Path, found: Verification, replaced: Callable[[str], bool]) -> None:
    """Put the checks and weights of `found` in the place of those in the folder's verify.json.

    replaced: whether an older check, given its name, is not to stay.
    """
    with lock_folder(folder):
        known = read_json(folder / LEDGER) if (folder / LEDGER).is_file() else {}
        kept = [check for check in known.get("checks", []) if not replaced(str(check["name"]))]
        new = found.to_dict()
        data = [*kept, *new.pop("checks")]
        passed = _passed(check["verdict"] for check in data)
        write_json(folder / LEDGER, {**known, **new, "passed": passed, "checks": data})


def _passed(verdicts: Iterable[str]) -> bool:
    found = set(verdicts)
    return "failed" not in found and "passed" in found


def limit_check(name: str, value: float, tolerance: float, detail: str = "") -> Check:
    """Passed when `value` is at most `tolerance`; NaN never is."""
    return Check(name, "passed" if value <= tolerance else "failed", value, tolerance, detail)


def problem_check(name: str, wrong: Iterable[str], detail: str) -> Check:
    """Passed when nothing is wrong; else it fails, with the first few things that are."""
    found = list(wrong)
    text = detail if not found else f"{len(found)} wrong: {', '.join(found[:5])}{' ...' if len(found) > 5 else ''}"
    return Check(name, "failed" if found else "passed", float(len(found)), 0.0, text)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|, NaN when either holds one."""
    return float((a.double() - b.double()).abs().max())
