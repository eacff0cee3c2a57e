"""Latencies of candidates, measured while a step plans and kept in its folder, so that a run can be continued.

Where a run goes on elsewhere (another machine, another version of a runtime, another number of threads), earlier times
are not comparable: they stay in the folder, and candidates are measured anew.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.io.files import read_json
from vitcompress.io.text import describe_differences
from vitcompress.methods.base import Clock, Context
from vitcompress.methods.width import CandidateClock, LazyModel
from vitcompress.plan import Plan


def kept(context: Context, measure: Clock, runtime: str) -> CandidateClock:
    """Milliseconds of candidates on `runtime`, measured by `measure` once per plan and machine."""
    here = context.runtime.broadcast(dict(context.measured_on()) if context.runtime.is_main else None)
    key = _key(here)
    if context.runtime.is_main and (other := elsewhere(context.folder, runtime, here)):
        context.progress.note(f"latencies on {runtime} are measured anew: those kept were taken elsewhere ({other})")
    context.memo(f"measured-on-{runtime}-{key}", lambda: here)

    def measured(ask: Callable[[nn.Module, str], float], made: LazyModel) -> float:
        found = ask(made(), runtime)
        context.progress.note(f"a candidate takes {found:.4g} ms on {runtime}")  # dozens of them can take long
        return found

    def told(ask: Callable[[nn.Module, str], float], suffix: str, made: LazyModel, delta: Plan) -> float:
        name = f"latency-{runtime}-{key}-{delta.digest[:16]}{suffix}"
        return float(context.memo(name, partial(measured, ask, made)))

    return CandidateClock(partial(told, measure.median, ""), partial(told, measure.undisturbed, "-undisturbed"))


@contextmanager
def unless_refused(context: Context, runtime: str) -> Iterator[None]:
    """Forget what was measured on `runtime` when the step is refused for it: the times may have been disturbed by other
    load, and the next attempt measures anew.
    """
    try:
        yield
    except PlanError:
        if context.runtime.is_main:
            for path in context.folder.glob(f"latency-{runtime}-*.json"):
                path.unlink()
        raise


def once(measure: Clock, runtime: str) -> CandidateClock:
    """As `kept`, before the step has a folder: nothing is kept."""
    return CandidateClock(
        lambda made, delta: measure.median(made(), runtime), lambda made, delta: measure.undisturbed(made(), runtime)
    )


def elsewhere(folder: Path, runtime: str, here: Mapping[str, Any]) -> str:
    """How machine and settings of the times kept for `runtime` differ from `here`; empty where they do not."""
    paths = sorted(folder.glob(f"measured-on-{runtime}-*.json"), key=lambda path: path.stat().st_mtime)
    if not paths or any(path.stem.endswith(_key(here)) for path in paths):
        return ""
    return "; ".join(describe_differences(read_json(paths[-1]), here))


def _key(here: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
