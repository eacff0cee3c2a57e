"""Run a study: a comparison of methods on the same data."""

from typing import Any

import click

from vitcompress import recipes as shipped
from vitcompress.cli.common import common_options, print_dry_run, print_result, show_progress
from vitcompress.cli.options import FOLDER, complete_names, dry_run_option, option, parse_words, set_option


@click.command()
@click.argument("source", metavar="[show] NAME|FILE", shell_complete=complete_names(shipped.study_names))
@click.argument("shown", metavar="", required=False, shell_complete=complete_names(shipped.study_names))
@option("--out -o", "Folder (default: runs/study-NAME).", FOLDER)
@option("--seeds", "Number of seeds per row: 0, 1, ...", int, default=3, show_default=True)
@option("--jobs", "Number of runs at a time.", int, default=1, show_default=True)
@option("--rows", "Only these rows, as in hetdpt_5,random_5.", metavar="NAMES", callback=parse_words)
@set_option
@option(
    "--speed",
    "Measure speed when everything is trained, leave it to another call, or repeat it.",
    click.Choice(["now", "later", "again"]),
    default="now",
    show_default=True,
)
@dry_run_option
@common_options
def study(
    source: str, shown: str | None, sets: tuple[str, ...], rows: tuple[str, ...], dry_run: bool, **options: Any
) -> int:
    """Train methods side by side with several seeds, and compare them.

    Every row of the study with every seed is an ordinary run. The same command continues a study that was stopped.
    `study show NAME` prints the TOML of a study, to read or to copy.
    """
    if source == "show":
        from vitcompress.cli.output.terminal import print_document

        text = shipped.study_text(shown or "")
        return print_result({"name": shown, "toml": text}, lambda _: print_document(text, "toml"))
    if shown is not None:
        raise click.UsageError(f"got two studies, {source} and {shown}; `study show NAME` prints one")
    with show_progress() as progress:
        from vitcompress.pipeline.study.spec import load_study

        loaded = load_study(source, sets, rows)  # reports mistakes before the imports below, which take seconds
        from vitcompress.cli.output import tables, terminal
        from vitcompress.pipeline.study.results import pair_table, row_table
        from vitcompress.pipeline.study.run import StudyOptions, dry_run_study, run_study

        settings = StudyOptions(**options)
        plan = dry_run_study(loaded, settings, progress) if dry_run else None
        if plan is None:
            result = run_study(loaded, settings, progress)
    if plan is not None:
        return print_dry_run(plan, tables.print_study_dry_run)

    def draw(_: object) -> None:
        terminal.print_table(row_table(result))
        terminal.print_table(pair_table(result))
        for warning in (result["speed"] or {}).get("warnings", ()):
            terminal.print_line(f"note: {warning}")

    return print_result(result, draw)
