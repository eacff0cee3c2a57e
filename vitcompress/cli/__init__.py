"""The command line: parse, call one public function, print. The only package that knows click.

Torch and everything that needs it is imported inside the commands: `--help` and shell completion answer at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitcompress import __version__, console, recipes
from vitcompress.cli.frame import Commands, answer, common, fell_short, working
from vitcompress.errors import MissingExtraError
from vitcompress.progress import Progress


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="vitcompress %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Prune, prove, export and measure timm Vision Transformers."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _recipe_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in recipes.names() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def _words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`onnx,trt` as a tuple."""
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


@main.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=_recipe_names)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder (default: runs/NAME).")
@click.option("--export", callback=_words, metavar="FORMATS", help="Formats to export, as in onnx,trt.")
@click.option("--data", metavar="PATH", help="Folder of images (PATH/train/CLASS, PATH/val/CLASS).")
@click.option("--weights", metavar="PATH|random|hub", help="Weights of the dense model, instead of the recipe's.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting: --set finetune.epochs=10")
@click.option(
    "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, mps (default: the recipe's, else the best there is)."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done and what is missing here; write nothing.")
@click.option(
    "--structure-only", is_flag=True, help="No training and no scoring: what would the result cost and how fast is it?"
)
@click.option("--fresh", is_flag=True, help="Start over instead of continuing.")
@common
def recipe(source: str, sets: tuple[str, ...], dry_run: bool, as_json: bool, debug: bool, **options: Any) -> int:
    """Run a recipe, or continue it.

    Trains the dense model if need be, prunes, recovers, folds, verifies, exports, measures and reports. The same
    command continues a run that was stopped, and says so when all is done.
    """
    with working(debug) as progress:
        from vitcompress import pipeline
        from vitcompress.bench import report as reports
        from vitcompress.exporters import EXPORTERS
        from vitcompress.recipe import load_recipe

        loaded = load_recipe(source, sets, formats=EXPORTERS)
        wishes = pipeline.RunOptions(**options)
        if dry_run:
            outlook = pipeline.dry_run(loaded, wishes)
        else:
            result = pipeline.run(loaded, wishes, progress)
    if dry_run:
        return answer(outlook, as_json, console.print_outlook)
    found = {"folder": str(result.folder), "passed": result.passed, **result.report}
    answer(found, as_json, lambda _: console.print_result(reports.summary_table(result.report), result.folder))
    return 0 if result.passed else fell_short("a check fell short", f"vitcompress verify {result.folder}", as_json)


@main.group("recipes", invoke_without_command=True)
@common
@click.pass_context
def recipes_(ctx: click.Context, as_json: bool, debug: bool) -> int:
    """List the recipes; `recipes show NAME` prints one."""
    if ctx.invoked_subcommand is None:
        answer(recipes.summaries(), as_json, console.print_recipes)
    return 0


@recipes_.command()
@click.argument("name", shell_complete=_recipe_names)
@common
def show(name: str, as_json: bool, debug: bool) -> int:
    """Print a recipe's TOML, to read or to save and change."""
    text = recipes.text(name)
    return answer({"name": name, "toml": text}, as_json, lambda _: console.print_toml(text))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@common
def verify(folder: Path, as_json: bool, debug: bool) -> int:
    """Check again everything that a run folder claims."""
    with working(debug):
        from vitcompress.verify import verify_folder

        found = verify_folder(folder)
    answer(found.as_data(), as_json, lambda data: console.print_checks(data["checks"]))
    return 0 if found.passed else 1


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--format", "name", default="onnx", show_default=True, metavar="FORMAT", help="Format to export to.")
@click.option("--precision", default="fp32", show_default=True, metavar="PRECISION", help="fp32 or fp16.")
@click.option("--opset", type=int, help="ONNX operator set (default: chosen and recorded with the reason).")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write (default: in DIR).")
@common
def export(folder: Path, as_json: bool, debug: bool, **options: Any) -> int:
    """Export a finished run folder again.

    In another format or precision, or on the machine that the format is made for.
    """
    with working(debug):
        from vitcompress.exporters.folder import export_folder

        done = export_folder(folder, **options)
    return answer({"folder": str(done.path.parent), **done.to_dict()}, as_json, console.print_export)


_device = click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda, cuda:1, mps.")
_provider = click.option("--provider", metavar="NAME", help="ONNX Runtime execution provider, by its full name.")
_threads = click.option("--threads", type=click.IntRange(1), help="CPU threads of one call (default: the runtime's).")


@main.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@click.option(
    "--protocol", default="robust", show_default=True, help="paper (10 warm-up, 100 runs, batch 256) or robust."
)
@click.option("--batch", type=click.IntRange(1), help="Images per run (default: the protocol's).")
@click.option("--warmup", type=click.IntRange(0), help="Runs before the measurement (default: the protocol's).")
@click.option("--runs", type=click.IntRange(1), help="Timed runs per artifact (default: the protocol's).")
@click.option(
    "--fail-under", type=float, metavar="R", help="Exit 1 unless every artifact is R times as fast as the first."
)
@click.option("--precision", metavar="PRECISION", help="fp32, tf32, fp16, bf16 (default: the file's, fp32 in torch).")
@click.option("--compile", is_flag=True, help="torch.compile (run folders and timm models).")
@_device
@_provider
@_threads
@common
def bench(
    artifacts: tuple[str, ...],
    as_json: bool,
    debug: bool,
    device: str,
    provider: str | None,
    precision: str | None,
    threads: int | None,
    compile: bool,
    **options: Any,
) -> int:
    """Measure artifacts in turns, dense against compressed.

    Run folders, .onnx files and timm:NAME; the first one is the base of all ratios.
    """
    with working(debug) as progress:
        from vitcompress.bench import report as reports
        from vitcompress.bench import suite
        from vitcompress.exporters.runtimes import RunnerOptions

        runner = RunnerOptions(device=device, provider=provider, precision=precision, threads=threads, compile=compile)
        found = suite.run(artifacts, suite.BenchOptions(runner=runner, **options), progress=progress)
        short = suite.gated(found)
    measured = found.as_data()
    answer(measured, as_json, lambda _: console.print_bench(measured, reports.bench_table([measured])))
    return 0 if short is None else fell_short(short, None, as_json)


@main.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@click.option("--data", metavar="PATH|digits", help="Images (PATH/val/CLASS); default: the run folder's own test data.")
@click.option("--split", metavar="NAME", help="Folder below PATH (default: val, validation or test).")
@click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Images per call.")
@click.option("--workers", type=click.IntRange(0), default=0, show_default=True, help="Processes that load images.")
@_device
@_provider
@_threads
@common
def evaluate(
    artifacts: tuple[str, ...],
    as_json: bool,
    debug: bool,
    device: str,
    provider: str | None,
    threads: int | None,
    **options: Any,
) -> int:
    """Top-1 and top-5 of artifacts, with counts.

    Several artifacts are compared with the first on the same images.
    """
    with working(debug) as progress:
        from vitcompress.bench import accuracy
        from vitcompress.exporters.runtimes import RunnerOptions

        runner = RunnerOptions(device=device, provider=provider, threads=threads)
        found = accuracy.run(artifacts, accuracy.EvaluateOptions(runner=runner, **options), progress)
    return answer(found, as_json, console.print_accuracy)


@main.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot accuracy against speed here (default with several folders: comparison.png).",
)
@common
def report(folders: tuple[str, ...], plot: Path | None, as_json: bool, debug: bool) -> int:
    """Show what runs found.

    One run folder as a page; several side by side and as a plot of accuracy against speed.
    """
    with working(debug) as progress:
        from vitcompress.bench import compare
        from vitcompress.bench import report as reports

        found = compare.run(folders)
        if plot or len(folders) > 1:
            found["plot"] = _plotted(lambda path: compare.plot(found["runs"], path), plot, progress)
        page = reports.markdown(found["runs"][folders[0]])
    draw = console.print_comparison if len(folders) > 1 else lambda _: console.print_markdown(page)
    return answer(found, as_json, draw)


def _plotted(draw: Callable[[Path], Path], wanted: Path | None, progress: Progress) -> str | None:
    """The plot's file. A plot that nobody asked for is left out where matplotlib is missing."""
    try:
        return str(draw(wanted or Path("comparison.png")))
    except MissingExtraError as error:
        if wanted:
            raise
        progress.note(f"{error.message}: {error.hint}")
        return None


@main.command()
@common
def doctor(as_json: bool, debug: bool) -> int:
    """Say what this machine can do, and what it lacks.

    What it can export, run and measure, and how to get the rest.
    """
    with working(debug):
        from vitcompress.exporters.doctor import examine

        found = examine()
    return answer(found, as_json, console.print_doctor)
