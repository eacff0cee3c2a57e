"""`vitcompress study`: methods side by side on one data set."""

from pathlib import Path
from typing import Any

import click

from vitcompress import recipes
from vitcompress.cli.common import answer, common, foreseen, working
from vitcompress.cli.options import completed, words
from vitcompress.cli.output.tables import print_study, print_study_outlook


@click.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=completed(recipes.study_names))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: runs/study-NAME).")
@click.option("--seeds", type=int, default=3, show_default=True, help="How many seeds every row is run with: 0, 1, ...")
@click.option("--jobs", type=int, default=1, show_default=True, help="Runs at a time.")
@click.option("--rows", callback=words, metavar="NAMES", help="Only these rows, as in hetdpt_5,random_5.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting: --set base.dense.epochs=10")
@click.option(
    "--speed",
    type=click.Choice(["now", "later", "again"]),
    default="now",
    show_default=True,
    help="Measure speed when all is trained, leave it for another call, or measure anew.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be done; write nothing. Exit 2 where a run would refuse what was given.",
)
@common
def study(
    source: str,
    sets: tuple[str, ...],
    rows: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> int:
    """Train methods side by side, several seeds, and compare them.

    Every row of the study with every seed is an ordinary run. The same command continues a study that was stopped.
    """
    with working(debug) as progress:
        from vitcompress.exporters import EXPORTERS
        from vitcompress.pipeline.study import results, run, spec

        loaded = spec.load_study(source, sets, rows, formats=EXPORTERS)
        settings = run.StudyOptions(**options)
        found = run.dry_run_study(loaded, settings, progress) if dry_run else run.run_study(loaded, settings, progress)
    if dry_run:
        return foreseen(found, as_json, print_study_outlook)
    tables = (results.table(found), results.pair_table(found))
    return answer(found, as_json, lambda _: print_study(tables, found))
