"""`vitcompress verify`, `export`, `bench` and `evaluate`: commands on finished models."""

from pathlib import Path
from typing import Any

import click

from vitcompress.cli.common import answer, common, fell_short, working
from vitcompress.cli.options import (
    PREPARATION,
    RUNNER,
    export_options,
    given,
    numbers,
    preparation_options,
    runner_options,
    taken,
)
from vitcompress.cli.output import tables


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@common
def verify(folder: Path, as_json: bool, debug: bool) -> int:
    """Check again everything that a run folder claims.

    Folding and slicing, the weights, every exported file and its answers; what cannot run on this machine is called
    not run, and does not pass. Exit 1 when a check fails.
    """
    with working(debug) as progress:
        from vitcompress.bench.report import files
        from vitcompress.bench.report import run as reports
        from vitcompress.pipeline.run import dense_of
        from vitcompress.verify import quarantine

        progress.stage(f"Verify {folder}")
        found = quarantine.verify(folder, dense=dense_of(folder), progress=progress)
        data = found.as_data()
        ways = files.weights(found.weights)
    said = [*files.bytes_of(found.weights), reports.verdicts(data)]
    answer(data, as_json, lambda _: tables.print_verification(data["checks"], ways, said))
    return 0 if found.passed else 1


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--format", "name", default="onnx", show_default=True, metavar="FORMAT", help="onnx, openvino, trt or trt-rtx."
)
@export_options
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write (default: in DIR).")
@click.option("--require-verified", is_flag=True, help="Exit 1 where the file cannot be checked on this machine.")
@common
def export(
    folder: Path, name: str, out: Path | None, require_verified: bool, as_json: bool, debug: bool, **options: Any
) -> int:
    """Export a finished run folder again.

    In another format or precision, or on the machine that the format is made for. The file is then held against the
    model, its weights and its answers; one that falls short is moved to the folder `failed`.
    """
    with working(debug) as progress:
        from vitcompress.exporters.options import ExportOptions
        from vitcompress.pipeline.export_folder import export_folder, settle

        done = export_folder(folder, name, options=ExportOptions(**given(options)), out=out, progress=progress)
        settled = settle(folder, done, progress)
    found = {"folder": str(settled.path.parent), **done.to_dict(), **settled.as_data()}
    answer(found, as_json, tables.print_export)
    if settled.verdict == "failed":
        return fell_short(
            f"{done.path.name} does not match the model, see {settled.path}: {settled.reason}", None, as_json
        )
    if wrong := [check["detail"] for check in done.build.get("truth", ()) if check["verdict"] == "failed"]:
        return fell_short(f"{done.path.name} is not what was asked for: {wrong[0]}", None, as_json)
    if settled.verdict == "not_run" and require_verified:
        return fell_short(f"{done.path.name} could not be checked here: {settled.reason}", settled.command, as_json)
    return 0


@click.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@click.option(
    "--protocol",
    default="robust",
    show_default=True,
    help="paper (10 warm-up, 100 runs, batch 256), or robust (warm-up until times settle, 100 runs and 10 s or more).",
)
@click.option("--batch", callback=numbers, metavar="N,N,...", help="Images per run; several are a sweep: 1,8,64,256.")
@click.option("--warmup", type=click.IntRange(0), help="Runs before the measurement (default: the protocol's).")
@click.option("--runs", type=click.IntRange(1), help="Timed runs per artifact (robust: at least).")
@click.option(
    "--fail-under",
    type=float,
    metavar="R",
    help="Exit 1 unless every artifact is R times as fast as the first, by the lower end of the 95 % interval.",
)
@click.option("--precision", metavar="PRECISION", help="fp32, tf32, fp16, bf16 (default: the file's, fp32 in torch).")
@click.option("--compile", is_flag=True, help="torch.compile (run folders and timm models).")
@click.option(
    "--variants",
    metavar="LIST|all",
    help="Measure torch models in several settings, as in fp32,fp16+compile,fp16+graph.",
)
@click.option("--cuda-graph", is_flag=True, help="Replay each run from a recorded CUDA graph (not on the CPU).")
@click.option(
    "--memory", is_flag=True, help="Measure what each artifact adds to memory on the CPU (some seconds each)."
)
@click.option("--transfers", is_flag=True, help="Time the copies of images to the device and of logits back, too.")
@runner_options
@common
def bench(artifacts: tuple[str, ...], as_json: bool, debug: bool, **options: Any) -> int:
    """Measure artifacts in turns, dense against compressed.

    Run folders, .onnx, .xml and .engine files, timm:NAME, and timm-onnx:NAME (the file that timm itself exports); the
    first one is the base of all ratios.
    """
    with working(debug) as progress:
        from vitcompress.bench import suite
        from vitcompress.bench.report import run as reports
        from vitcompress.exporters.runtimes import RunnerOptions

        runner = RunnerOptions(**taken(options, RUNNER))
        found = suite.run(artifacts, suite.BenchOptions(runner=runner, **options), progress=progress)
        short = found.failure()
    measured = found.as_data()
    table = reports.bench_table([measured])
    answer(measured, as_json, lambda _: tables.print_bench(measured, table))
    return 0 if short is None else fell_short(short, None, as_json)


@click.command()
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@click.option("--data", metavar="PATH|digits", help="Images (PATH/val/CLASS); default: the run folder's own test data.")
@click.option("--split", metavar="NAME", help="Folder below PATH (default: val, validation or test).")
@click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Images per call.")
@click.option("--workers", type=click.IntRange(0), default=0, show_default=True, help="Processes that load images.")
@click.option(
    "--bench", type=click.Path(path_type=Path, dir_okay=False), help="Output of `bench --json`, to take speeds from."
)
@preparation_options
@runner_options
@common
def evaluate(artifacts: tuple[str, ...], as_json: bool, debug: bool, **options: Any) -> int:
    """Top-1 and top-5 of artifacts, with counts.

    Several artifacts are compared with the first on the same images. Files that their run folder measured are told with
    their speed. --mean to --crop-mode are for files that do not say themselves how their images are prepared.
    """
    with working(debug) as progress:
        from vitcompress.bench import accuracy
        from vitcompress.bench.preprocessing import Preparation
        from vitcompress.exporters.runtimes import RunnerOptions

        runner = RunnerOptions(**taken(options, RUNNER))
        told = Preparation(**taken(options, PREPARATION))
        settings = accuracy.EvaluateOptions(runner=runner, preparation=told, **options)
        found = accuracy.run(artifacts, settings, progress)
    return answer(found, as_json, tables.print_accuracy)
