"""Latencies of candidates, measured while a step plans and kept in its folder, so that a killed run can resume.

Latencies of another machine, another version of a runtime or another number of threads are not comparable: if a run
continues there, they stay in the folder, and candidates are measured anew.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from vitcompress.errors import PlanError
from vitcompress.io.files import read_json
from vitcompress.io.text import describe_differences
from vitcompress.methods.base import Clock, Context
from vitcompress.methods.width import CandidateClock
from vitcompress.plan import Plan


def kept_clock(context: Context, clock: Clock, runtime: str) -> CandidateClock:
    """Milliseconds of candidates on `runtime`, measured by `clock` once per plan and machine."""
    here = context.runtime.broadcast(dict(context.measured_on()) if context.runtime.is_main else None)
    key = _key(here)
    if context.runtime.is_main and (other := other_machine(context.folder, runtime, here)):
        context.progress.note(f"latencies on {runtime} are measured anew: those kept were taken elsewhere ({other})")
    context.memo(f"measured-on-{runtime}-{key}", lambda: here)

    known: dict[str, float] = {}

    def latency(build: Callable[[], nn.Module], delta: Plan, undisturbed: bool) -> float:
        def measure() -> float:
            ms = (clock.undisturbed if undisturbed else clock.median)(build(), runtime)
            context.progress.note(f"a candidate takes {ms:.4g} ms on {runtime}")  # dozens of them can take long
            return ms

        name = f"latency-{runtime}-{key}-{delta.digest[:16]}{'-undisturbed' if undisturbed else ''}"
        if name not in known:
            known[name] = float(context.memo(name, measure))
        return known[name]

    return latency


@contextmanager
def forget_if_rejected(context: Context, runtime: str) -> Iterator[None]:
    """On a PlanError delete the latencies on `runtime`: other load on the machine may have increased them, and the next
    attempt must measure anew.
    """
    try:
        yield
    except PlanError:
        if context.runtime.is_main:
            for path in context.folder.glob(f"latency-{runtime}-*.json"):
                path.unlink()
        raise


def other_machine(folder: Path, runtime: str, here: Mapping[str, object]) -> str:
    """How machine and settings of the latencies in `folder` differ from `here`; empty if they do not."""
    paths = sorted(folder.glob(f"measured-on-{runtime}-*.json"), key=lambda path: path.stat().st_mtime)
    if not paths or any(path.stem.endswith(_key(here)) for path in paths):
        return ""
    return "; ".join(describe_differences(read_json(paths[-1]), here))


def _key(here: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
