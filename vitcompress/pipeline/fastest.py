"""Choose the format and precision in which a model is the fastest on this machine."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from vitcompress.errors import CheckFailedError, InputError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.options import DEFAULTS, ONLY_EIGHT_BITS, ExportOptions, Precision
from vitcompress.exporters.runtimes import find_exporter, open_runner
from vitcompress.io.progress import Progress
from vitcompress.io.text import format_speedup
from vitcompress.pipeline.export import measure_quickly
from vitcompress.pipeline.export_folder import check_name, export_folder, verify_export

FASTEST = "fastest"
FORMATS = ("onnx", "openvino")
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8", "int8+bf16")


@dataclass
class Candidate:
    """result: `chosen`, or why not. ms: median time of the smallest batch. speedup: over the first measured one."""

    format: str
    precision: Precision
    result: str = "slower, not checked"
    ms: float | None = None
    speedup: str = ""


def options_for(options: ExportOptions, candidate: Candidate) -> ExportOptions:
    """`options` in the precision of `candidate`, without those that have no effect in it."""
    useless = set() if "int8" in candidate.precision else {*ONLY_EIGHT_BITS, "islands"}
    return replace(options.only(DEFAULTS.keys() - useless), precision=candidate.precision)


def list_candidates(format: str) -> Iterator[Candidate]:
    """The `format` in each precision that it has."""
    for precision in PRECISIONS:
        with suppress(InputError):
            find_exporter(format).check(ExportOptions(precision=precision))
            yield Candidate(format, precision)


def choose_fastest(
    folder: Path, form: str | None, options: ExportOptions, *, out: Path | None, dense: bool, progress: Progress
) -> tuple[Candidate, list[Candidate]]:
    """Measure `PRECISIONS` interleaved: the fastest one that passes its checks, and all, by speed.

    form: the format; None: those of `FORMATS` that `out`, the file to write, may have. Raises CheckFailedError if none
    passes, and the first InputError if none can be exported and run.
    """
    formats: tuple[str, ...] = (form,) if form else FORMATS
    if out:
        formats = tuple(name for name in formats if find_exporter(name).file_suffix == out.suffix) or formats
        check_name(find_exporter(formats[0]), folder, out, dense=dense)
    candidates = list(chain.from_iterable(map(list_candidates, formats)))
    exports, problem = list[tuple[Candidate, Exported]](), None
    write = partial(export_folder, folder, dense=dense, traces={})
    with TemporaryDirectory(prefix="vitcompress-") as temporary:
        for candidate in candidates:
            used = options_for(options, candidate)
            path = Path(temporary) / f"{candidate.format}{used.label}{find_exporter(candidate.format).file_suffix}"
            try:
                if reason := find_exporter(candidate.format).cannot_run():
                    raise InputError(f"{candidate.format} cannot run here: {reason}", hint="use another --format")
                progress.stage(f"Export {path.name}")
                exported = write(candidate.format, options=used, out=path)
                open_runner(path).close()  # not every machine runs what it can write
                exports.append((candidate, exported))
            except (InputError, CheckFailedError) as error:
                candidate.result, problem = error.message.replace(f"{path} ", ""), problem or error
        if problem and not exports:
            raise problem
        progress.stage(f"Measure {len(exports)} files interleaved")
        bench = measure_quickly([exported for _, exported in exports], progress)
        for text in bench.disturbed:
            progress.note(f"disturbed: {text}")
        for (candidate, _), row, ratio in zip(exports, bench.rows, (None, *bench.ratios), strict=True):
            candidate.ms, candidate.speedup = row["latency_ms"]["p50"], format_speedup(ratio) if ratio else "1"
        for candidate, exported in sorted(exports, key=lambda pair: pair[0].ms or 0):
            outcome = verify_export(folder, exported, progress, dense=dense)
            if outcome.verdict == "passed":
                candidate.result = "chosen"
                return candidate, sorted(candidates, key=lambda candidate: candidate.ms or math.inf)
            candidate.result = outcome.reason
    problems = "; ".join(f"{candidate.format} {candidate.precision}: {candidate.result}" for candidate, _ in exports)
    raise CheckFailedError(f"no file passes its checks: {problems}", hint="use --precision fp32")
