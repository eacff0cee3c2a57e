"""Verify, export, measure, evaluate and show what runs wrote; and what this machine can do."""

from glob import escape
from pathlib import Path
from shutil import rmtree
from typing import Any

import click

from vitcompress.cli import options as opt
from vitcompress.cli.common import common_options, print_result, report_failure, show_progress
from vitcompress.cli.options import FILE, FOLDER, PATH
from vitcompress.errors import InputError, MissingExtraError, OutputError


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@opt.flag("--require-verified", "Exit code 1 if a check cannot run on this machine.")
@opt.flag("--adopt", "Write a manifest for a DIR without one if no check fails.")
@opt.require_signed_option
@common_options
def verify(folder: Path, require_verified: bool, adopt: bool) -> int:
    """Re-run every check on a run folder.

    Files against manifest.json, accuracy counts, folds, slices, weights, and every exported file: its tensors and its
    outputs. Checks that cannot run on this machine are reported as `not run`, never as passed. Exit code 1 if a check
    fails.
    """
    with show_progress() as progress:
        from vitcompress.cli.output import tables
        from vitcompress.io.manifest import REMEDY
        from vitcompress.pipeline.folder import claim_run, dense_folder_to_verify
        from vitcompress.pipeline.report import refresh_reports
        from vitcompress.verify.folder import verify_folder

        progress.stage(f"Verify {folder}")
        with claim_run(folder, progress):
            verification = verify_folder(folder, None, dense_folder_to_verify(folder), progress, adopt=adopt)
            refresh_reports([folder], progress)
    print_result({"weights": {"tensors": [], "files": []}, **verification.to_dict()}, tables.print_verification)
    due = [check for check in verification.checks if check.applies]
    failed, not_run = ([c.name for c in due if c.verdict == what] for what in ("failed", "not_run"))
    if changed := [name for name in failed if name.startswith("manifest.")]:
        return report_failure(f"files that are not as they were written: {len(changed)}", REMEDY)
    if not failed and not_run and require_verified:
        return report_failure(f"checks that could not run here: {', '.join(not_run)}")
    return 0 if verification.passed else 1


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@opt.option("--format", "onnx (default), openvino, trt or trt-rtx.", str.lower, "FORMAT")
@opt.export_options
@opt.option("--out -o", "File to write (default: in DIR).", FILE)
@opt.flag("--dense", "Export the model before pruning, to compare with.")
@opt.option("--data", "Folder of the run's images, if they have moved (int8, fp8, --islands auto).", FOLDER)
@opt.flag("--require-verified", "Exit code 1 if the file cannot be verified on this machine.")
@opt.option("--sign", "Sign the file with this private key, unless a check fails.", opt.KEY, "KEY")
@common_options
def export(
    folder: Path,
    format: str | None,
    out: Path | None,
    dense: bool,
    data: Path | None,
    require_verified: bool,
    **options: Any,
) -> int:
    """Export a finished run folder again.

    In another format or precision, or on the target machine. The weights and outputs of the file are compared with the
    model; a file that fails is moved to the folder `failed`. The report of the folder lists the file. --precision
    fastest measures fp32, bf16, int8 and int8+bf16 in ONNX Runtime and OpenVINO, or in --format.
    """
    with show_progress() as progress:
        from vitcompress.cli.output import tables
        from vitcompress.exporters.options import ExportOptions
        from vitcompress.io.manifest import record_changes
        from vitcompress.io.validation import options_of
        from vitcompress.pipeline import export_folder as exports
        from vitcompress.pipeline.folder import UNFINISHED, claim_run
        from vitcompress.pipeline.report import refresh_reports

        key, fastest = options.pop("sign"), options["precision"] == exports.FASTEST
        stated = {name: value for name, value in options.items() if value not in (None, (), exports.FASTEST)}
        settings, candidates = options_of(ExportOptions, stated, "export"), list[Any]()
        if fastest:
            best, candidates = exports.choose_fastest(
                folder, format, settings, out=out, dense=dense, progress=progress, data=data
            )
            format, settings = best.format, exports.options_for(settings, best)
        with claim_run(folder, progress):
            done = exports.export_folder(
                folder, format or "onnx", options=settings, out=out, dense=dense, data=data, progress=progress
            )
            for left in filter(Path.is_dir, done.path.parent.glob(f".{escape(done.path.name)}{UNFINISHED[1:]}")):
                rmtree(left)  # by an export of this file that was killed
            with record_changes(folder):
                outcome = exports.verify_export(folder, done, progress, dense=dense)
            refresh_reports([folder], progress)
        failed = [check["detail"] for check in done.build.get("truth", ()) if check["verdict"] == "failed"]
        if key and outcome.verdict != "failed" and not failed:
            progress.note(f"signature: {exports.sign_artifact(done.path, key)}")
    about = {"folder": str(outcome.path.parent), "candidates": list(map(vars, candidates))}
    result = {**about, **done.to_dict(), **outcome.to_dict()}
    print_result({**result, **({"verdict": "failed", "verified": False} if failed else {})}, tables.print_export)
    file = done.path.name
    if outcome.verdict == "failed":
        hint = "name more layers in --islands than the search chose" if done.islands_search else None
        return report_failure(f"{file} does not match the model, see {outcome.path}: {outcome.reason}", hint)
    if failed:
        return report_failure(f"{file} was not built as requested: {failed[0]}")
    if outcome.verdict == "not_run" and require_verified:
        return report_failure(f"{file} could not be verified here: {outcome.reason}")
    return 0


@click.command()
@click.argument("key", type=FILE, metavar="KEY")
@common_options
def keygen(key: Path) -> int:
    """Write a private key to KEY and its public key to KEY.pub, as `ssh-keygen -t ed25519` does."""
    from vitcompress.io.signature import generate_key

    return print_result({"key": str(key), "public": generate_key(key)}, lambda data: click.echo(data["public"]))


@click.command()
@click.argument("artifact", type=PATH, metavar="FILE|DIR")
@opt.option("--key", "Private ed25519 key, of keygen or ssh-keygen.", opt.KEY, "KEY", required=True)
@common_options
def sign(artifact: Path, key: Any) -> int:
    """Sign an exported file or a run folder.

    Writes the signature beside the file or into the folder. It is invalid after any change, so sign last.
    """
    with show_progress():
        from vitcompress.pipeline.export_folder import sign_artifact

        signature = str(sign_artifact(artifact, key))
    return print_result({"artifact": str(artifact), "signature": signature}, lambda data: click.echo(data["signature"]))


@click.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@opt.option(
    "--protocol",
    "paper (10 warm-up, 100 runs, batch 256), or robust (warm-up until times settle, 100 runs and 10 s or more).",
    default="robust",
    show_default=True,
)
@opt.option("--batch", "Images per run; several: 1,8,64,256.", opt.parse_batches, "N,N,...", **opt.PARTS)
@opt.option("--warmup", "Runs before the measurement (default: the protocol's).", click.IntRange(0, opt.MOST))
@opt.option("--runs", "Timed runs per artifact (robust: at least).", click.IntRange(1, opt.MOST))
@opt.option(
    "--fail-under",
    "Exit code 1 if the lower bound of the 95 % interval of any speed-up over the first artifact is below R.",
    click.FloatRange(0, min_open=True),
    "R",
)
@opt.precision_option("the file's, fp32 in torch", "fp32", "tf32", "fp16", "bf16")
@opt.flag("--compile", "Use torch.compile for run folders and timm models.")
@opt.option("--variants", "Settings to measure torch models with, as in fp32,fp16+compile.", str, "LIST|all")
@opt.flag("--cuda-graph", "Replay each run from a CUDA graph (GPU only).")
@opt.flag("--memory", "Measure the CPU memory of each artifact (some seconds each).")
@opt.flag("--transfers", "Include the copies of images to the device and of logits back.")
@opt.flag("--notes", "Print all warnings, and what the protocol does not cover.")
@opt.runner_options
@opt.require_signed_option
@common_options
def bench(artifacts: tuple[str, ...], notes: bool, **options: Any) -> int:
    """Measure artifacts interleaved and compare them with the first one.

    Artifacts are run folders, .onnx, .xml and .engine files, timm:NAME, and timm-onnx:NAME (the file that timm itself
    exports). NAME may have arguments, as in vit_tiny_patch16_224?img_size=48; timm-onnx:FILE.toml is the dense model
    of a recipe.
    """
    with show_progress() as progress:
        from vitcompress.bench import suite
        from vitcompress.bench.report.measurements import bench_table
        from vitcompress.cli.output import tables
        from vitcompress.exporters.runtimes import RunnerOptions
        from vitcompress.io.validation import options_of
        from vitcompress.pipeline.report import record_bench

        settings = options_of(suite.BenchOptions, {"runner": opt.take(options, RunnerOptions), **options}, "bench")
        result = suite.run(artifacts, settings, progress)
        measured, table = result.to_dict(), bench_table([result.to_dict()])
        record_bench(artifacts, measured, progress)
    return print_result(measured, lambda _: tables.print_bench(measured, table, notes=notes), result.failure())


@click.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@opt.option("--data", "Images (PATH/val/CLASS); default: the run's test images.", metavar="PATH|digits|tinted")
@opt.option("--split", "Folder below PATH (default: val, validation or test).", metavar="NAME")
@opt.option("--batch", "Images per call.", click.IntRange(1, opt.MOST), default=64, show_default=True)
@opt.option("--workers", "Processes that load images.", click.IntRange(0, 1024), default=0, show_default=True)
@opt.option("--bench", "Output of `bench --json`, to show throughput from.", FILE)
@opt.preprocessing_options
@opt.max_drop_option
@opt.runner_options
@opt.require_signed_option
@common_options
def evaluate(artifacts: tuple[str, ...], max_drop: float | None, **options: Any) -> int:
    """Count top-1 and top-5 of artifacts, which are those of `vitcompress bench`.

    Several artifacts are compared with the first on the same images. Shows throughput too if the run folder has a
    benchmark of the file. --mean to --crop-mode set the preprocessing of files without metadata.
    """
    if max_drop is not None and len(artifacts) < 2:
        raise InputError("--max-drop compares with the first artifact, got only one", hint="give two or more")
    with show_progress() as progress:
        from vitcompress.bench import accuracy
        from vitcompress.bench.report.run import list_drops
        from vitcompress.cli.output import tables
        from vitcompress.exporters.runtimes import RunnerOptions
        from vitcompress.io.validation import options_of
        from vitcompress.models.preprocessing import Preprocessing
        from vitcompress.pipeline.report import record_accuracy

        parts = {"runner": opt.take(options, RunnerOptions), "preprocessing": opt.take(options, Preprocessing)}
        settings = options_of(accuracy.EvaluateOptions, {**parts, **options}, "evaluate")
        result = accuracy.run(artifacts, settings, progress)
        record_accuracy(artifacts, result, settings, progress)
        drops = list_drops(((f"{test['b']} against {test['a']}", test) for test in result["mcnemar"]), max_drop)
    limits = {"max_drop": max_drop, "drops": drops, "passed": not drops}
    return print_result({**result, **limits}, lambda _: tables.print_accuracy(result), "\n".join(drops))


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@opt.option("--plot", "File for a plot of accuracy against speed (default with several folders: comparison.png).", FILE)
@opt.option("--pictures", "Folder for plots of the layers and channels that each run chose, with their scores.", FOLDER)
@opt.option("--bench", "Output of `bench --json`, to take speeds from.", FILE)
@opt.option(
    "--sbom", "File for a software bill of materials (CycloneDX).", FILE, is_flag=False, flag_value="sbom.cdx.json"
)
@opt.max_drop_option
@opt.require_signed_option
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
        from vitcompress.cli.output import tables, terminal
        from vitcompress.io.files import write_text
        from vitcompress.pipeline.report import read_reports

        result = compare.compare_runs(read_reports(folders, files["bench"], progress))
        drops = [line for name, run in result["runs"].items() for line in reports.list_run_drops(name, run, max_drop)]
        result["plot"] = None
        if plot or (len(folders) > 1 and len(result["not_plotted"]) < len(result["runs"])):
            try:
                result["plot"] = str(compare.plot(result["runs"], plot or Path("comparison.png")))
                progress.note(f"plot: {result['plot']}")
            except (MissingExtraError, OutputError) as error:
                if plot:
                    raise
                progress.note(f"no plot: {error.sentence(': ')}")
        if pictures:
            from vitcompress.bench.plots.run import draw

            result["pictures"] = list(map(str, draw(folders, pictures)))
            progress.note(f"pictures: {', '.join(result['pictures'])}")
        if sbom:
            from vitcompress.bench.report.sbom import build_sbom

            write_text(sbom, build_sbom(Path(folders[0]), result["runs"][folders[0]]))
            progress.note(f"bill of materials: {sbom}")
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
