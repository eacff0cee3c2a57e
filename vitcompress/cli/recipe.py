"""Run a recipe or a study; list and explain recipes."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vitcompress import recipes as shipped
from vitcompress.cli import options as opt
from vitcompress.cli.common import check_files, common_options, print_result, report_failure, show_progress
from vitcompress.errors import InputError, OutputError
from vitcompress.io.run_folder import RunFolder


@click.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=opt.complete_names(shipped.names))
@opt.option("--out -o", "Run folder (default: runs/NAME).", opt.FOLDER)
@opt.option("--export", "onnx, openvino, trt, trt-rtx or several: onnx,trt.", opt.parse_formats, "FORMATS", **opt.PARTS)
@opt.option("--data", "Folder of images (PATH/train/CLASS, PATH/val/CLASS).", metavar="PATH")
@opt.option(
    "--weights",
    "Weights of the dense model: a checkpoint or Hugging Face folder, random, hub (timm's), or train ([dense]).",
    metavar="PATH|random|hub|train",
)
@opt.option("--model", "timm architecture, instead of the recipe's and its arguments.", metavar="NAME")
@opt.option("--classes", "File of class names, one per line.", opt.FILE)
@opt.set_option
@opt.option("--device", "cpu, cuda, cuda:1, mps (default: the recipe's, else the best one).", str.lower, "DEVICE")
@opt.dry_run_option
@opt.flag("--structure-only", "No training and no scoring: cost and speed of a structure of the same size.")
@opt.flag("--control", "Also train the dense model as long, with the same teacher and options, and compare.")
@opt.max_drop_option
@opt.preprocessing_options
@opt.option("--expect", "Stop if the dense model's top-1 is worse than this.", click.FloatRange(1, 100), "PERCENT")
@opt.flag("--check", "With --dry-run: load and evaluate the dense model, as a run does. --expect implies it.")
@opt.flag("--require-verified", "Exit code 1 unless every exported file was run here.")
@opt.flag("--fresh", "Start over instead of continuing.")
@common_options
def recipe(
    source: str,
    model: str | None,
    set: tuple[str, ...],
    dry_run: bool,
    check: bool,
    max_drop: float | None,
    require_verified: bool,
    **options: Any,
) -> int:
    """Run a recipe, or continue an interrupted run.

    Trains the dense model if necessary, prunes, fine-tunes, folds, exports, verifies, evaluates and measures. The same
    command continues a run that was stopped.
    """
    if max_drop is not None and options["structure_only"]:
        raise InputError("--max-drop needs accuracies, --structure-only measures none", hint="leave one of them out")
    if check and not dry_run:
        raise InputError("--check is for dry runs, and this is none", hint="add --dry-run, or use --expect")
    with show_progress() as progress:
        from vitcompress.recipe.load import load_recipe

        loaded = load_recipe(source, set, model, weights := options.pop("weights"))  # before slow imports
        finished = RunFolder(options["out"] or Path("runs", loaded.name)).report.is_file()
        if not (dry_run or finished):  # a dry run lists all that is missing, a finished run may not need it
            check_files(options | {"weights": weights})
        from vitcompress.bench.report.run import list_run_drops, summary_table
        from vitcompress.cli.output import tables, terminal
        from vitcompress.models.preprocessing import Preprocessing
        from vitcompress.pipeline.dry_run import dry_run_recipe
        from vitcompress.pipeline.job import RunOptions
        from vitcompress.pipeline.run import run_recipe

        check = check or options["expect"] is not None
        settings = RunOptions(preprocessing=opt.take(options, Preprocessing), **options)
        if dry_run:
            plan = dry_run_recipe(loaded, settings, check=check)
        else:
            try:
                result = run_recipe(loaded, settings, progress)
            except OutputError:  # of a finished run in the folder: a file that does not exist explains the difference
                check_files(options | {"weights": weights})
                raise
    if dry_run:
        return _print_dry_run(plan, tables.print_dry_run, plan.failed)

    def draw(_: object) -> None:
        terminal.print_table(summary_table(result.report))
        terminal.print_text(f"all results: {result.folder}/report.md")

    drops = list_run_drops(result.folder.name, result.report, max_drop) if result.report else []
    limits = {"passed": result.passed and not drops, "max_drop": max_drop, "drops": drops}
    verify = f"vitcompress verify {shlex.quote(str(result.folder))}"
    failed = [] if result.passed else [f"a check failed: `{verify}` shows which"]
    data = {"folder": str(result.folder), **limits, **result.report}
    if code := print_result(data, draw, "\n".join([*failed, *drops])):
        return code
    if pending := result.pending:
        names, commands = (", ".join(dict.fromkeys(str(one[key]) for one in pending)) for key in ("name", "command"))
        if require_verified:
            return report_failure(f"not run here: {names}", f"run on the target: {commands}")
        terminal.print_line(f"warning: not run here: {names}; on the target: {commands}")
    return 0


def _print_dry_run(plan: Any, draw: Callable[[Any], None], failure: str | None = None) -> int:
    """Print the result of a dry run. Returns the exit code of a run: 2 if something is missing."""
    return print_result(plan, draw, failure) or (InputError.exit_code if plan.missing else 0)


@click.group("recipes", invoke_without_command=True)
@opt.flag("--count", "Compare published parameters and MACs with those counted here.")
@common_options
@click.pass_context
def recipes(ctx: click.Context, count: bool) -> int:
    """List the recipes; subcommands print one, its keys, or a schema."""
    if ctx.invoked_subcommand is not None:
        return 0
    if not count:
        from vitcompress.cli.output.terminal import print_pairs
        from vitcompress.methods.options import ABLATION_NAMES

        def draw(summaries: dict[str, str]) -> None:
            print_pairs(sorted(summaries.items(), key=lambda pair: bool(shipped.methods(pair[0]) & {*ABLATION_NAMES})))

        return print_result(shipped.summaries(), draw)
    with show_progress() as progress:
        from vitcompress.cli.output import tables
        from vitcompress.pipeline.dry_run import compare_sizes

        sizes = compare_sizes(shipped.names(), progress)
    return print_result(sizes, tables.print_counts)


@recipes.command()
@click.argument("name", shell_complete=opt.complete_names(lambda: (*shipped.names(), *shipped.study_names())))
@common_options
def show(name: str) -> int:
    """Print the TOML of a recipe or study, to read or to copy."""
    from vitcompress.cli.output import terminal

    text = shipped.study_text(name) if name in shipped.study_names() else shipped.text(name)
    return print_result({"name": name, "toml": text}, lambda _: terminal.print_document(text, "toml"))


def _recipes_and_methods() -> tuple[str, ...]:
    from vitcompress.io.plugins import plugin_names
    from vitcompress.methods.options import OPTIONS

    return (*shipped.names(), *OPTIONS, *plugin_names("methods"))


@recipes.command()
@click.argument("source", metavar="NAME|FILE|METHOD", shell_complete=opt.complete_names(_recipes_and_methods))
@opt.flag("--all", "For a method: also the keys of the other tables of a recipe.")
@common_options
def keys(source: str, all: bool) -> int:
    """List all keys of a recipe, or those of a method.

    With type, default, description and the recipe's value. Keys are the same in TOML and with --set.
    """
    with show_progress() as progress:
        from vitcompress.cli.output.terminal import print_pairs
        from vitcompress.recipe.keys import Key, keys_of

        listed = keys_of(source, all)
        if not listed:
            progress.note(f"{source} has no options; --all lists the keys of the other tables of a recipe")

    def describe(key: Key) -> str:
        """Description, type, default, and the recipe's value if it differs."""
        default, here = ("not set" if one is None else json.dumps(one, default=str) for one in (key.default, key.value))
        default = "required" if key.required else f"default {default}"
        return f"{key.about}\n  {key.type}; {default}" + f"; here {here}" * (key.value not in (None, key.default))

    return print_result(listed, lambda rows: print_pairs((key.key, describe(key)) for key in rows))


@recipes.command()
@common_options
def schema() -> int:
    """Print the JSON Schema of recipes, with which editors check and complete TOML.

    Includes the methods of other installed packages.
    """
    with show_progress():
        from vitcompress.cli.output import terminal
        from vitcompress.recipe.keys import recipe_schema

        data = recipe_schema()
    return print_result(data, terminal.print_json)


@click.command()
@click.argument("source", metavar="NAME|FILE", shell_complete=opt.complete_names(shipped.study_names))
@opt.option("--out -o", "Folder (default: runs/study-NAME).", opt.FOLDER)
@opt.option("--seeds", "Number of seeds per row: 0, 1, ...", click.IntRange(1, 1000), default=3, show_default=True)
@opt.option("--jobs", "Number of runs at a time.", click.IntRange(1, 1000), default=1, show_default=True)
@opt.option(
    "--rows", "Only these rows, also in the tables, as in hetdpt_5,random_5.", opt.parse_words, "NAMES", **opt.PARTS
)
@opt.set_option
@opt.option(
    "--speed",
    "Measure speed when everything is trained, leave it to another call, or repeat it.",
    click.Choice(["now", "later", "again"]),
    default="now",
    show_default=True,
)
@opt.dry_run_option
@common_options
def study(source: str, set: tuple[str, ...], rows: tuple[str, ...] | None, dry_run: bool, **options: Any) -> int:
    """Train methods side by side with several seeds, and compare them.

    Every row of the study with every seed is an ordinary run. The same command continues a study that was stopped.
    `vitcompress recipes show NAME` prints the TOML of a study.
    """
    with show_progress() as progress:
        from vitcompress.pipeline.study.spec import load_study

        loaded = load_study(source, set, rows or ())  # reports mistakes before the imports below, which take seconds
        from vitcompress.cli.output import tables, terminal
        from vitcompress.pipeline.study.results import pair_table, row_table
        from vitcompress.pipeline.study.run import StudyOptions, dry_run_study, run_study

        settings = StudyOptions(**options)
        if dry_run:
            plan = dry_run_study(loaded, settings, progress)
        else:
            result = run_study(loaded, settings, progress)
    if dry_run:
        return _print_dry_run(plan, tables.print_study_dry_run)

    def draw(_: object) -> None:
        terminal.print_table(row_table(result))
        terminal.print_table(pair_table(result))
        for warning in (result["speed"] or {}).get("warnings", ()):
            terminal.print_line(f"note: {warning}")

    return print_result(result, draw)
