"""Every exporter on DeiT-B, each in a process of its own: seconds, peak memory and bytes; and folding before."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitcompress import recipes, surgery
from vitcompress.bench import machine
from vitcompress.bench.self.parts import Options, planned
from vitcompress.exporters import EXPORTERS
from vitcompress.exporters.options import ExportOptions
from vitcompress.models.create import create_model, input_config

NAME = "deit_b_hetdpt"


def run(options: Options) -> Iterator[dict[str, Any]]:
    """One line per format; of formats that this machine cannot write, why."""
    for name, exporter in EXPORTERS.items():
        if reason := exporter.unavailable():
            yield {"what": f"{name} of {NAME}", "text": f"not measured: {reason}"}
        else:
            yield exported(NAME if options.arch == Options.arch else options.arch, name, {})


def exported(name: str, form: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`here` in a process of its own; settings are fields of ExportOptions."""
    return alone("vitcompress.bench.self.exporters", name, form, json.dumps(settings))


def alone(module: str, *arguments: str) -> dict[str, Any]:
    """What `module`, run as a program of its own, says last (see `say`); its peak memory is its own then."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"what": " ".join((module.rpartition(".")[2], *arguments)), "text": f"failed: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(name: str, form: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peak memory (GiB) of exporting a model in this process.

    name: a recipe, whose pruning and folding is timed too, or a timm model.
    """
    model, plan = planned(name) if name in recipes.names() else (create_model(name), None)
    loaded, began = peak_gib(), time.perf_counter()
    if plan:
        surgery.apply_plan(model, plan)
        surgery.fold_linears(model, plan)
    folded = time.perf_counter()
    exporter = EXPORTERS[form]
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    options = ExportOptions(**given)
    exporter.check(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{exporter.suffix}"
        size = exporter.export(model, path, input=input_config(model), options=options).bytes
        exported = time.perf_counter()
    times = {"fold_seconds": folded - began if plan else None, "export_seconds": exported - folded}
    memory = {"loaded_gib": loaded, "peak_gib": peak_gib(), "file_bytes": size}
    said = f"{times['export_seconds']:.1f} s, peak {memory['peak_gib']:.2f} GiB, file {size / 1e6:.1f} MB"
    said = f"fold {times['fold_seconds']:.1f} s, export {said}" if plan else said
    about = {"what": f"{form} of {name}{_in_words(settings)}", "text": said, "settings": settings}
    return {**about, **times, **memory}


def _in_words(settings: dict[str, Any]) -> str:
    sm = f", sm {', '.join(map(str, settings['sm']))}" if "sm" in settings else ""
    return (f", {settings['precision']}" if "precision" in settings else "") + sm


def peak_gib() -> float:
    """Most memory that this process has held."""
    return (machine.peak_bytes() or 0) / 2**30


def say(found: dict[str, Any]) -> None:
    """Hand `found` to the process that waits for it."""
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    say(here(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
