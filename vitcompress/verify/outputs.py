"""Does an exported file answer as the model does? Asked of the runtime that will serve it, on images without labels.

The model in fp32 is held against the file at batch 1, 3 and, for engines and the ONNX files beneath them, the best and
the largest batch of their range (else all images at once). One number a precision, its share d, limits how far answers
may move:

- error: the largest difference of a logit, over the largest logit, is at most d;
- cosine: 1 - cos of the logits is at most d^2 / 2, which a relative error of d in the logits makes of it;
- kl: KL(model || file) of every image is at most 2 d^2 nats, so that no probability moves by more than d (Pinsker's
  inequality: total variation <= sqrt(KL / 2));
- flips: another top-1 answer only where the two best logits are closer than twice the error allowed, and not certainly
  (Wilson's 95 % interval) in more than a share d of the images.

d is 0.1 % in fp32, whose own rounding lies far below, 1 % with eleven significant bits (tf32, fp16) and, as roundings
are eight times as large with eight bits, 8 % in bf16.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcompress.errors import DeviceError, MissingExtraError, VitcompressError
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.rounded import rounded_answers
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.runner import Runner
from vitcompress.exporters.runtimes import RUNNERS, open_runner
from vitcompress.exporters.sidecar import exported_files, input_of, read_sidecar
from vitcompress.exporters.uint8 import from_bytes, to_bytes
from vitcompress.io.checks import Check, compared, largest_difference
from vitcompress.io.files import decoded
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import PLAN, load_model
from vitcompress.models.cost import count_cost
from vitcompress.models.create import InputConfig
from vitcompress.training.metrics import wilson


def agreement_check(name: str, expected: Tensor, got: Tensor, tolerance: float) -> Check:
    """Top-1 answers of two sets of logits, (images, classes), that may be apart by `tolerance`.

    An answer may change only where the two best logits are so close that the tolerance explains it; any other change
    fails. The detail gives the share of changed answers with Wilson's 95 % interval.
    """
    best = expected.double().topk(min(2, expected.shape[1])).values
    changed = expected.argmax(1) != got.argmax(1)
    unexplained = changed & ((best[:, 0] - best[:, -1]) > 2 * tolerance)
    if not torch.isfinite(got).all():
        return Check(name, "failed", float("nan"), 0.0, "answers are not finite")
    count, total = int(changed.sum()), len(changed)
    low, high = wilson(count, total)
    detail = f"{count} of {total} top-1 answers differ (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    if count:
        detail += f", {count - int(unexplained.sum())} of them within rounding"
    return Check(name, "failed" if unexplained.any() else "passed", float(unexplained.sum()), 0.0, detail)


Answers = Callable[[Tensor], Tensor]  # normalised images -> logits
SHARES = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2}
PREFIX = "agreement."
SMALL = (1, 3)
PART = 16  # images at a time through the model in torch
WORK = 5 * 10**12  # multiply-accumulates of one call on the CPU at most; 256 images in DeiT-B are 4.5e12, and take 7 GB


@dataclass(frozen=True)
class Agreement:
    """How far two sets of logits, (images, classes), are apart; `error` is relative to the largest logit."""

    images: int
    flips: int
    unexplained: int
    kl: float
    cosine: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share of flips."""
        return wilson(self.flips, self.images)


def compare(expected: Tensor, got: Tensor, share: float, asked: Tensor | None = None) -> Agreement:
    """What lies between logits `expected` and `got`; flips are explained where `share` allows that error.

    asked: the image of each row, (rows,); one that is asked at several batch sizes counts once, and as flipped where
    any of its answers is. None: every row is an image of its own.
    """
    image = torch.arange(len(expected)) if asked is None else asked
    exact, found = expected.double(), got.double()
    scale = float(exact.abs().max()) or 1.0  # of a model that answers 0 to everything: nothing to be relative to
    best = exact.topk(min(2, exact.shape[1])).values
    flipped = exact.argmax(1) != found.argmax(1)
    unexplained = flipped & (best[:, 0] - best[:, -1] > 2 * share * scale)
    kl = F.kl_div(found.log_softmax(1), exact.log_softmax(1), reduction="none", log_target=True).sum(1)
    return Agreement(
        _different(image),
        _different(image[flipped]),
        _different(image[unexplained]),
        float(kl.max()),
        float(torch.where((exact == found).all(1), 1.0, F.cosine_similarity(exact, found, eps=1e-300)).min()),
        largest_difference(exact, found) / scale,
    )


def _different(images: Tensor) -> int:
    return len(set(images.tolist()))


def judged(found: Agreement, share: float, name: str, of: str) -> list[Check]:
    """The checks of one comparison. of: what was compared, in words."""
    low, high = found.interval
    flips = (
        f"{found.flips} of {found.images} top-1 answers differ (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    )
    if found.flips:
        flips += f", {found.flips - found.unexplained} of them between answers that were close anyway"
    counted = compared(f"{name}.flips", low, share, f"{flips}; {of}")
    return [
        replace(counted, verdict="failed") if found.unexplained else counted,
        compared(f"{name}.kl", found.kl, 2 * share**2, f"largest KL divergence of an image, nats; {of}"),
        compared(f"{name}.cosine", 1 - found.cosine, share**2 / 2, f"1 - smallest cosine of the logits; {of}"),
        compared(f"{name}.error", found.error, share, f"largest difference over the largest logit; {of}"),
    ]


def file_checks(
    model: nn.Module, path: Path, images: Tensor, *, real: bool = True, device: str | None = None
) -> list[Check]:
    """Whether the file `path` answers as `model` does on normalised `images`, (count, channels, height, width).

    What this machine cannot run is `not_run`, with the reason and the command for the target. ONNX files in half
    precision are asked once more by `rounded_checks`. real: whether the images are of the kind that the model is made
    for, and not noise. device: None is what the file is made for, else the CPU.
    """
    name = f"{PREFIX}{path.name}"
    expected = cache(partial(model_answers, model))
    try:
        with closing(open_runner(path, device=device or _device_of(path))) as runner:
            checks = _asked(expected, runner, name, images, _batches(model, path, runner, len(images)), real=real)
    except (DeviceError, MissingExtraError) as error:
        command = f"vitcompress verify {path.parent}"
        detail = f"{error.message}; {error.hint or 'run the command on the target'}"
        checks = [Check(name, "not_run", detail=detail, command=command)]
    except VitcompressError as error:
        return [Check(name, "failed", detail=error.message)]
    return checks if device else [*checks, *rounded_checks(expected, path, images, real=real)]


def _device_of(path: Path) -> str | None:
    """Where a file is asked that its runtime would not run by itself: bf16 has kernels in ONNX Runtime on GPUs only."""
    return "cuda" if _labels(path).get("precision") == "bf16" and torch.cuda.is_available() else None


def _labels(path: Path) -> dict[str, Any]:
    """What an ONNX file says of itself; nothing of other files."""
    return decoded(file.metadata(file.read(path))) if path.suffix == ".onnx" else {}


@torch.inference_mode()
def model_answers(model: nn.Module, images: Tensor) -> Tensor:
    """Logits in fp32, (count, classes). A `model` that is not in fp32 stays as it is, and a copy answers."""
    in_fp32 = {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model = (model if in_fp32 else deepcopy(model).float()).eval()
    return torch.cat([model(part) for part in torch.split(images, PART)])


def _asked(
    expected: Answers, runner: Runner, name: str, images: Tensor, batches: Sequence[int], *, real: bool
) -> list[Check]:
    about = runner.describe()
    share = SHARES.get(str(about["precision"]), SHARES["fp32"])
    if about.get("input_type") == "uint8" and runner.input is not None:
        images = _as_bytes(images, runner.input)
    asked = _portions(batches, len(images))
    answers = [runner(images[taken]) for taken in asked]
    what = f"{about['precision']} in {about['runtime']} on {about['device']}, batch {', '.join(map(str, batches))}"
    of = what if real else f"{what}, on noise"
    wrong = next((got for got in answers if not torch.isfinite(got).all()), None)
    if wrong is not None:
        return [Check(name, "failed", detail=f"answers at batch {len(wrong)} are not finite; {of}")]
    rows = torch.cat(asked)
    return judged(compare(expected(images)[rows], torch.cat(answers), share, rows), share, name, of)


def _as_bytes(images: Tensor, input: InputConfig) -> Tensor:
    """The normalised images that stand for the nearest bytes."""
    return from_bytes(to_bytes(images, input), input)


def _batches(model: nn.Module, path: Path, runner: Runner, images: int) -> tuple[int, ...]:
    """1, 3 and the best and the largest of a range; all images where there is no range."""
    low, best, high = runner.describe().get("batch_range") or _range_above(model, path, runner) or (1, images, images)
    return tuple(sorted({min(max(size, low), high) for size in (*SMALL, best, high)}))


def _range_above(model: nn.Module, path: Path, runner: Runner) -> tuple[int, ...] | None:
    """The range of the engine that was built from the ONNX file `path`, as far as the CPU gets through it in minutes.

    What is left out is asked of the engine, on its GPU.
    """
    built = (read_sidecar(path) or {}).get("build", {}).get("batch")
    if built is None:
        return None
    most = max(WORK // count_cost(model, runner.input_size).macs, 1)
    return tuple(min(images, most) for images in built)


def _portions(batches: Sequence[int], images: int) -> list[Tensor]:
    """Numbers of the images that are asked at once: each batch from the first image on, then those not asked yet."""
    most = max(batches)
    starts = [(0, size) for size in batches] + [(start, most) for start in range(most, images, most)]
    return [torch.arange(start, start + size) % images for start, size in starts]


def rounded_checks(expected: Answers, path: Path, images: Tensor, *, real: bool = True) -> list[Check]:
    """Whether an ONNX file in half precision still answers as it should where every result is rounded to that.

    A GPU rounds them; ONNX Runtime on the CPU, without kernels for half precision, does not. This is a proxy for the
    hardware that such files are for. Nothing is asked of other files. expected: images -> the model's answers.
    """
    known = _labels(path)
    precision, input = known.get("precision"), input_of(str(path), known)
    if precision not in HALF or input is None:
        return []
    name = f"{PREFIX}{path.name}.rounded"
    images = _as_bytes(images, input) if known.get("input") == "uint8" else images
    what = f"every result rounded to {precision} in onnxruntime on cpu, a proxy for the GPU"
    of = what if real else f"{what}, on noise"
    try:
        got = rounded_answers(path, images)
    except VitcompressError as error:
        return [Check(name, "failed", detail=error.message)]
    if not torch.isfinite(got).all():
        return [Check(name, "failed", detail=f"answers are not finite; {of}")]
    return judged(compare(expected(images), got, SHARES[precision]), SHARES[precision], name, of)


def verdict(checks: Iterable[Check]) -> str:
    """failed if any did, passed if all did, else not_run."""
    found = {check.verdict for check in checks}
    return "failed" if "failed" in found else ("passed" if found == {"passed"} else "not_run")


def folder_checks(
    folder: Path, images: Tensor, real: bool, dense: Path, progress: Progress | None = None
) -> Iterator[Check]:
    """`file_checks` of every exported file of a run folder.

    dense: folder of the model before pruning, which the files of its export are held against.
    """
    known = {stem: exported_files(folder, stem, RUNNERS) for stem in ("model", "dense")}
    done, total = 0, sum(map(len, known.values()))
    for stem, source in (("model", folder), ("dense", dense)):
        model: Any = None
        for path in known[stem]:
            (progress or Progress()).update("files asked", done, total, path.name)
            done += 1
            if model is None and not (source / PLAN).is_file():
                yield Check(
                    f"{PREFIX}{path.name}",
                    "not_run",
                    detail=f"its model is not here to be compared with: there is no {source}",
                )
                continue
            model = load_model(source) if model is None else model
            yield from file_checks(model, path, images, real=real)
    if total:
        (progress or Progress()).update("files asked", total, total)
