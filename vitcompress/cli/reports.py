"""`vitcompress report` and `vitcompress doctor`."""

from collections.abc import Callable
from pathlib import Path

import click

from vitcompress.cli.common import answer, common, working
from vitcompress.cli.output import tables, terminal
from vitcompress.errors import MissingExtraError
from vitcompress.io.progress import Progress


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot accuracy against speed here (default with several folders: comparison.png).",
)
@click.option(
    "--pictures",
    type=click.Path(path_type=Path, file_okay=False),
    help="Draw into this folder which layers and channels each run chose, and by what scores.",
)
@common
def report(folders: tuple[str, ...], plot: Path | None, pictures: Path | None, as_json: bool, debug: bool) -> int:
    """Show what runs found.

    One run folder as a page; several side by side and as a plot of accuracy against speed. With --pictures, what each
    run chose.
    """
    with working(debug) as progress:
        from vitcompress.bench.report import compare
        from vitcompress.bench.report import run as reports

        found = compare.run(folders)
        wanted = plot or (len(folders) > 1 and compare.points(found["runs"]))
        found["plot"] = _plotted(lambda path: compare.plot(found["runs"], path), plot, progress) if wanted else None
        if pictures:
            from vitcompress.bench.plots.run import draw

            found["pictures"] = list(map(str, draw(folders, pictures)))
            progress.note(f"pictures: {', '.join(found['pictures'])}")
        if found["plot"] and len(folders) == 1:
            progress.note(f"plot: {found['plot']}")
        page = reports.markdown(found["runs"][folders[0]])
    show = tables.print_comparison if len(folders) > 1 else lambda _: terminal.print_markdown(page)
    return answer(found, as_json, show)


def _plotted(draw: Callable[[Path], Path], wanted: Path | None, progress: Progress) -> str | None:
    """The plot's file. A plot that nobody asked for is left out where matplotlib is missing."""
    try:
        return str(draw(wanted or Path("comparison.png")))
    except MissingExtraError as error:
        if wanted:
            raise
        progress.note(f"{error.message}: {error.hint}")
        return None


@click.command()
@common
def doctor(as_json: bool, debug: bool) -> int:
    """Say what this machine can do, and what it lacks.

    What it can export, run and measure, and how to get the rest.
    """
    with working(debug):
        from vitcompress.exporters.doctor import examine

        found = examine()
    return answer(found, as_json, tables.print_doctor)
