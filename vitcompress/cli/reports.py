"""Show runs and what this machine can do."""

from pathlib import Path

import click

from vitcompress.cli.common import common_options, note_without_manifest, print_result, show_progress
from vitcompress.cli.options import FILE, FOLDER, max_drop_option, option, require_signed_option
from vitcompress.errors import InputError, MissingExtraError


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@option("--plot", "File for a plot of accuracy against speed (default with several folders: comparison.png).", FILE)
@option("--pictures", "Folder for plots of the layers and channels that each run chose, with their scores.", FOLDER)
@option("--bench", "Output of `bench --json`, to take speeds from.", FILE)
@option("--sbom", "File for a software bill of materials (CycloneDX).", FILE, is_flag=False, flag_value="sbom.cdx.json")
@max_drop_option
@require_signed_option
@common_options
def report(folders: tuple[str, ...], plot: Path | None, max_drop: float | None, **files: Path | None) -> int:
    """Show the results of runs.

    One run folder as a page; several side by side, with a plot of accuracy against speed. Updates the reports in the
    folders if their files have changed.
    """
    pictures, sbom = files["pictures"], files["sbom"]
    if sbom and len(folders) > 1:
        raise InputError(f"--sbom describes one run folder, got {len(folders)}", hint="give one")
    with show_progress() as progress:
        from vitcompress.bench.report import compare
        from vitcompress.bench.report import run as reports
        from vitcompress.bench.report.loss import list_run_drops
        from vitcompress.cli.output import tables, terminal
        from vitcompress.io.files import write_text
        from vitcompress.pipeline.report import read_reports

        note_without_manifest(folders, progress)
        result = compare.compare_runs(read_reports(folders, files["bench"], progress))
        drops = [line for name, run in result["runs"].items() for line in list_run_drops(name, run, max_drop)]
        result["plot"] = None
        if plot or (len(folders) > 1 and len(result["not_plotted"]) < len(result["runs"])):
            try:
                result["plot"] = str(compare.plot(result["runs"], plot or Path("comparison.png")))
            except MissingExtraError as error:
                if plot:
                    raise
                progress.note(f"no plot: {error.message}: {error.hint}")
        if pictures:
            from vitcompress.bench.plots.run import draw

            result["pictures"] = list(map(str, draw(folders, pictures)))
            progress.note(f"pictures: {', '.join(result['pictures'])}")
        if sbom:
            from vitcompress.bench.report.sbom import build_sbom

            write_text(sbom, build_sbom(Path(folders[0]), result["runs"][folders[0]]))
            progress.note(f"bill of materials: {sbom}")
        if result["plot"] and len(folders) == 1:
            progress.note(f"plot: {result['plot']}")
        page = reports.markdown(result["runs"][folders[0]])
    show = tables.print_comparison if len(folders) > 1 else lambda _: terminal.print_document(page, "markdown")
    return print_result({**result, "max_drop": max_drop, "drops": drops, "passed": not drops}, show, "\n".join(drops))


@click.command()
@common_options
def doctor() -> int:
    """Show what this machine can export, run and measure.

    And how to install what is missing for the rest.
    """
    with show_progress():
        from vitcompress.cli.output import tables
        from vitcompress.exporters.doctor import examine

        data = examine()
    return print_result(data, tables.print_doctor)
