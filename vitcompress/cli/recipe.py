"""`vitcompress recipe` runs a recipe, `vitcompress recipes` lists and prints them."""

from pathlib import Path
from typing import Any, cast

import click

from vitcompress import recipes as shipped
from vitcompress.cli.common import common_options, print_dry_run, print_result, report_failure, show_progress
from vitcompress.cli.options import complete_names, parse_words

dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Print stages, cost and problems; write nothing. Exit code 2 if the run would be rejected.",
)
set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a setting, as in --set finetune.epochs=10; KEY= restores its default. Can be repeated.",
)


@click.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=complete_names(shipped.names))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Run folder (default: runs/NAME).")
@click.option(
    "--export",
    callback=parse_words,
    metavar="FORMATS",
    help="Formats to export: onnx, openvino, trt, trt-rtx, or several, as in onnx,trt.",
)
@click.option("--data", metavar="PATH", help="Folder of images (PATH/train/CLASS, PATH/val/CLASS).")
@click.option(
    "--weights",
    metavar="PATH|random|hub|train",
    help="Weights of the dense model: a .safetensors or .pth file, random, hub (timm's), or train (as in [dense]).",
)
@set_option
@click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, mps (default: the recipe's, else the best one).")
@dry_run_option
@click.option(
    "--structure-only",
    is_flag=True,
    help="No training and no scoring: cost and speed of a structure of the same size.",
)
@click.option("--require-verified", is_flag=True, help="Exit code 1 unless every exported file was run here.")
@click.option("--fresh", is_flag=True, help="Start over instead of continuing.")
@common_options
def recipe(
    source: str,
    sets: tuple[str, ...],
    dry_run: bool,
    require_verified: bool,
    as_json: bool,
    debug: bool,
    **options: Any,
) -> int:
    """Run a recipe, or continue an interrupted run.

    Trains the dense model if necessary, prunes, fine-tunes, folds, exports, verifies, evaluates and measures. The same
    command continues a run that was stopped.
    """
    if not source.endswith(".toml") and not Path(source).exists():
        shipped.text(source)  # reports an unknown name without importing torch
    with show_progress(debug) as progress:
        from vitcompress.bench.report import run as reports
        from vitcompress.bench.report.records import Report
        from vitcompress.cli.output import tables, terminal
        from vitcompress.exporters import EXPORTERS
        from vitcompress.pipeline.dry_run import dry_run_recipe
        from vitcompress.pipeline.job import RunOptions
        from vitcompress.pipeline.run import run_recipe
        from vitcompress.recipe.load import load_recipe

        loaded = load_recipe(source, sets, formats=EXPORTERS)
        settings = RunOptions(**options)
        if dry_run:
            plan = dry_run_recipe(loaded, settings)
        else:
            result = run_recipe(loaded, settings, progress)
    if dry_run:
        return print_dry_run(plan, as_json, tables.print_dry_run)
    report = cast(Report, result.report)
    data = {"folder": str(result.folder), "passed": result.passed, **report}
    print_result(data, as_json, lambda _: tables.print_run(reports.summary_table(report), f"{result.folder}/report.md"))
    if not result.passed:
        return report_failure("a check failed", f"`vitcompress verify {result.folder}` shows which", as_json)
    if pending := result.pending:
        names, commands = (", ".join(dict.fromkeys(check[key] for check in pending)) for key in ("name", "command"))
        if require_verified:
            return report_failure(f"not run here: {names}", f"run on the target: {commands}", as_json)
        terminal.print_line(f"warning: not run here: {names}; on the target: {commands}")
    return 0


@click.group("recipes", invoke_without_command=True)
@click.option("--count", is_flag=True, help="Compare published parameters and MACs with those counted here.")
@common_options
@click.pass_context
def recipes(ctx: click.Context, count: bool, as_json: bool, debug: bool) -> int:
    """List the recipes; subcommands print one, its keys, or a schema."""
    if ctx.invoked_subcommand is not None:
        return 0
    from vitcompress.cli.output import tables

    if not count:
        return print_result(shipped.summaries(), as_json, tables.print_recipes)
    with show_progress(debug) as progress:
        from vitcompress.pipeline.published import compare_sizes

        records = compare_sizes(shipped.names(), progress)
    return print_result(records, as_json, tables.print_counts)


@recipes.command()
@click.argument("name", shell_complete=complete_names(shipped.names))
@common_options
def show(name: str, as_json: bool, debug: bool) -> int:
    """Print the TOML of a recipe, to read or to copy."""
    from vitcompress.cli.output import terminal

    text = shipped.text(name)
    return print_result({"name": name, "toml": text}, as_json, lambda _: terminal.print_toml(text))


@recipes.command()
@click.argument("source", metavar="NAME|FILE|METHOD", shell_complete=complete_names(shipped.names))
@common_options
def keys(source: str, as_json: bool, debug: bool) -> int:
    """List all keys of a recipe or of a method.

    With type, default, description and the recipe's value. Keys are the same in TOML and with --set.
    """
    with show_progress(debug):
        from vitcompress.cli.output import tables
        from vitcompress.recipe.keys import keys_of

        data = [key.to_dict() for key in keys_of(source)]
    return print_result(data, as_json, tables.print_keys)


@recipes.command()
@common_options
def schema(as_json: bool, debug: bool) -> int:
    """Print the JSON Schema of recipes, with which editors check and complete TOML.

    Includes the methods of other installed packages.
    """
    with show_progress(debug):
        from vitcompress.cli.output import terminal
        from vitcompress.recipe.keys import recipe_schema

        data = recipe_schema()
    return print_result(data, as_json, terminal.print_json)
