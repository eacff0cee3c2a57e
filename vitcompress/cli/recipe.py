"""`vitcompress recipe` runs a recipe, `vitcompress recipes` lists and prints them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitcompress import recipes as shipped
from vitcompress.cli.common import answer, common, fell_short, foreseen, working
from vitcompress.cli.options import completed, words
from vitcompress.cli.output import tables, terminal

if TYPE_CHECKING:  # --help must not import torch
    from vitcompress.pipeline.run import RunResult


@click.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=completed(shipped.names))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder (default: runs/NAME).")
@click.option(
    "--export",
    callback=words,
    metavar="FORMATS",
    help="Formats to export: onnx, openvino, trt, trt-rtx, or several, as in onnx,trt.",
)
@click.option("--data", metavar="PATH", help="Folder of images (PATH/train/CLASS, PATH/val/CLASS).")
@click.option(
    "--weights",
    metavar="PATH|random|hub",
    help="Weights of the dense model: a .safetensors or .pth file, random, or hub (timm's, downloaded).",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting: --set finetune.epochs=10")
@click.option(
    "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, mps (default: the recipe's, else the best there is)."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be done; write nothing. Exit 2 where a run would refuse what was given.",
)
@click.option(
    "--structure-only", is_flag=True, help="No training and no scoring: what would the result cost and how fast is it?"
)
@click.option("--require-verified", is_flag=True, help="Exit 1 unless every exported file was run here, too.")
@click.option("--fresh", is_flag=True, help="Start over instead of continuing.")
@common
def recipe(
    source: str,
    sets: tuple[str, ...],
    dry_run: bool,
    require_verified: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> int:
    """Run a recipe, or continue it.

    Trains the dense model if need be, prunes, recovers, folds, exports, verifies, measures and reports. The same
    command continues a run that was stopped, and says so when all is done.
    """
    if not source.endswith(".toml") and not Path(source).exists():
        shipped.text(source)  # a name that there is not is told at once, without torch
    with working(debug) as progress:
        from vitcompress.exporters import EXPORTERS
        from vitcompress.pipeline import job
        from vitcompress.pipeline.dry_run import dry_run_recipe
        from vitcompress.pipeline.run import run_recipe
        from vitcompress.recipe.load import load_recipe

        loaded = load_recipe(source, sets, formats=EXPORTERS)
        settings = job.RunOptions(**options)
        if dry_run:
            outlook = dry_run_recipe(loaded, settings)
        else:
            result = run_recipe(loaded, settings, progress)
    if dry_run:
        return foreseen(outlook, as_json, tables.print_outlook)
    return _concluded(result, require_verified, as_json)


def _concluded(result: "RunResult", require_verified: bool, as_json: bool) -> int:
    """Show what a run came to; its exit code."""
    from vitcompress.bench.report import run as reports

    found = {"folder": str(result.folder), "passed": result.passed, **result.report}
    answer(found, as_json, lambda _: tables.print_result(reports.summary_table(result.report), result.folder))
    if not result.passed:
        return fell_short("a check fell short", f"vitcompress verify {result.folder}", as_json)
    if elsewhere := result.elsewhere:
        names, commands = (", ".join(dict.fromkeys(check[key] for check in elsewhere)) for key in ("name", "command"))
        if require_verified:
            return fell_short(f"not run here: {names}", commands, as_json)
        terminal.print_line(f"warning: not run here: {names}; on the target: {commands}")
    return 0


@click.group("recipes", invoke_without_command=True)
@click.option(
    "--count", is_flag=True, help="Published parameters and MACs beside those counted here (takes about half a minute)."
)
@common
@click.pass_context
def recipes(ctx: click.Context, count: bool, as_json: bool, debug: bool) -> int:
    """List the recipes; `recipes show NAME` prints one, `recipes keys NAME` what may be set in it."""
    if ctx.invoked_subcommand is not None:
        return 0
    if not count:
        return answer(shipped.summaries(), as_json, tables.print_recipes)
    with working(debug) as progress:
        from vitcompress.pipeline.published import compared

        found = compared(shipped.names(), progress)
    return answer(found, as_json, tables.print_counts)


@recipes.command()
@click.argument("name", shell_complete=completed(shipped.names))
@common
def show(name: str, as_json: bool, debug: bool) -> int:
    """Print a recipe's TOML, to read or to save and change."""
    text = shipped.text(name)
    return answer({"name": name, "toml": text}, as_json, lambda _: terminal.print_toml(text))


@recipes.command()
@click.argument("source", metavar="NAME|FILE|METHOD", shell_complete=completed(shipped.names))
@common
def keys(source: str, as_json: bool, debug: bool) -> int:
    """List all keys that a recipe takes, in its TOML and with --set.

    With type, default and what each one does: those of a recipe, with its own values, or of a method.
    """
    with working(debug):
        from vitcompress.recipe.keys import keys_of

        found = [key.to_dict() for key in keys_of(source)]
    return answer(found, as_json, tables.print_keys)
