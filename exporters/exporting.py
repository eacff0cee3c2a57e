"""Export for recipes and for `vitcompress export` alike: scan for what fp16 cannot hold, choose islands, write."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn

from vitcompress.errors import CheckFailedError
from vitcompress.exporters.base import About, Exported, Exporter, write_sidecar
from vitcompress.exporters.islands import Search, judge_of, search
from vitcompress.exporters.options import AUTO, ExportOptions
from vitcompress.exporters.ranges import Ranges, check_half, check_islands_help, scan
from vitcompress.io.files import write_json
from vitcompress.io.progress import Progress
from vitcompress.models.create import InputConfig
from vitcompress.verify.quarantine import FAILED


def export(
    exporter: Exporter,
    model: nn.Module,
    path: Path,
    images: Tensor,
    *,
    options: ExportOptions,
    real: bool = True,
    progress: Progress | None = None,
    **about: Unpack[About],
) -> Exported:
    """Write `model` in the format of `exporter`; for half precision, check the ranges inside it first.

    images: (count, channels, height, width), normalised; what is scanned and, for the islands `auto`, compared. real:
    whether they are of the kind that the model is made for, and not noise.

    Raises:
        PrecisionError: a result inside the model is too large for fp16; nothing was written.
        CheckFailedError: no set of islands makes the file agree. What was tried then lies in
            `failed/<name>.islands.json` beside `path`.
        InputError: the format cannot hold this model with these options; nothing was written.
        InputError, VitcompressError, OutputError: as the exporter.
    """
    exporter.check_model(model, options)
    found = None
    if AUTO in options.islands:
        found = _searched(exporter, model, images, options, about["input"], real=real, progress=progress)
        options = replace(options, islands=_chosen(found, options, path))
    elif options.precision == "fp16":
        check_half(model, images, options.islands, offer_islands="islands" in exporter.uses)
    done = exporter.export(model, path, options=options, progress=progress, **about)
    if found is not None:
        done = replace(done, islands_search=found.as_data())
        write_sidecar(done)
    return done


def _searched(
    exporter: Exporter,
    model: nn.Module,
    images: Tensor,
    options: ExportOptions,
    input: InputConfig,
    *,
    real: bool,
    progress: Progress | None,
) -> Search:
    fixed = tuple(name for name in options.islands if name != AUTO)
    ranges = scan(model, images) if options.precision == "fp16" else Ranges({}, {})
    check_islands_help(model, ranges, fixed)
    judge = judge_of(exporter, model, images, options, input, real=real)
    return search(model, judge, ranges, images, fixed=fixed, real=real, progress=progress)


def _chosen(found: Search, options: ExportOptions, path: Path) -> tuple[str, ...]:
    """The islands that were found. Where none were, write down all that was tried, and raise CheckFailedError."""
    if found.chosen is not None:
        return found.chosen
    account = path.parent / FAILED / f"{path.name}.islands.json"
    write_json(account, found.as_data())
    last = found.tries[-1]
    raise CheckFailedError(
        f"{path.name} in {options.precision} does not answer as the model does with any set of fp32 islands: "
        f"{len(found.tries)} were tried, the largest ({', '.join(last.islands)}) failed: {last.reason}",
        hint=f"use --precision {'bf16 or ' if options.precision == 'fp16' else ''}fp32; {account} tells of every set",
    )
