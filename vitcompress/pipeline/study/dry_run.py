"""What a study would do and what its rows cost, before anything is trained."""

from collections.abc import Sequence
from typing import Any

from vitcompress.bench import timing
from vitcompress.errors import InputError
from vitcompress.io.progress import Progress
from vitcompress.pipeline import job
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.study.runs import Run
from vitcompress.pipeline.study.spec import Study


def outlook(study: Study, runs: Sequence[Run], progress: Progress) -> dict[str, Any]:
    """Rows with the cost of a structure of their size (a method may choose one that costs more or less), the epochs of
    each, what this machine lacks, and notes.

    Raises:
        InputError: a row that cannot work, or a protocol that measures nothing.
    """
    table = study.speed
    timing.protocol(table.protocol, **table.changes)
    rows, missing, notes = [], dict[str, None](), dict[str, None]()
    first = _first_of_each_row(runs)
    for number, run in enumerate(first):
        progress.update("rows looked at", number, len(first), run.row.name)
        try:
            found = dry_run_recipe(run.recipe, job.RunOptions(out=run.folder))
        except InputError as error:
            raise InputError(f"row {run.row.name}: {error.message}", hint=error.hint) from None
        missing |= dict.fromkeys(found["missing"])
        notes |= dict.fromkeys(found["notes"])
        dense, compressed = (found["cost"][key] for key in ("dense", "compressed"))
        rows.append(
            {
                "row": run.row.name,
                "title": run.row.title,
                "epochs": study.epochs,
                "recovery": run.recipe.finetune.epochs,
                "params": compressed["params"],
                "macs": compressed["macs"],
                "macs_ratio": compressed["macs"] / dense["macs"],
            }
        )
    progress.update("rows looked at", len(first), len(first))
    return {"rows": rows, "missing": list(missing), "notes": list(notes)}


def _first_of_each_row(runs: Sequence[Run]) -> list[Run]:
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.row.name, run)
    return list(found.values())
