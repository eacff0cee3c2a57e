"""Compare the outputs of an exported file with those of its model, in the runtime that serves the file.

The expected logits are those of the model in float64. The file runs at batch 1, 2, 3, 5 and, for engines and the ONNX
files that they are built from, at the best and the largest batch of their range (otherwise with all images at once).
One number d for each precision, its share, limits how much the logits may change:

- error: the largest difference of a logit, divided by the largest logit, is at most d. In fp32 on the CPU it is at most
  what rounding explains (`tolerance.rounding_limit`), which is far less;
- cosine: 1 - cos of the logits x of an image is at most d^2 / 2, the effect of a relative error of d in the logits, or
  what rounding explains, if that is more, as on images whose logits are all small: errors of a norm r turn x by an
  angle whose sine is at most r / |x|, and by any angle if r is more than |x|;
- kl: KL(model || file) of every image is at most 2 d^2 nats, so that no probability changes by more than d (Pinsker's
  inequality: total variation <= sqrt(KL / 2)); or what rounding explains on the images of `Original.rounding`, if that
  is more, as for logits so large that their roundings are not small beside 1 (`tolerance.rounding_limit`);
- flips: the top-1 class changes only between near ties: where the two best logits differ by at most 2 e, for the
  rounding error e of a logit in this precision (`tolerance.rounding_limit`; in fp32 on the CPU the error allowed). Each
  of the two may be off by e, so that such a change says nothing about the file. It is counted, and does not fail:
  damage that hides there still has to pass the limits above.

d is 0.1 % in fp32, 1 % with eleven significant bits (tf32, fp16) and, as roundings are eight times as large with eight
bits, 8 % in bf16. In int8 half a step is 2^-8 of the largest value, as a rounding of bf16 is, so that d is 8 % too. In
fp8 roundings of Gaussian values are three times as large as in int8 with a range of four standard deviations (2.6 % of
one and 0.9 %): d is 24 %. The error is also limited by what the file's steps explain (`tolerance.quantization_limit`).

saturation: an ONNX file in int8 is also computed with exact integer products. Processors without VNNI may add them in
16 bits; served and exact logits must not differ by more than half of what int8 itself changes. emulation: nor may exact
logits (without them, in OpenVINO and in fp8, the served ones) and those of the model in torch with the same roundings,
in the root mean square. Sums in torch are rounded differently, so that some values round to the next step, and in a
deep model many: a difference of twice what a change of the images by some roundings of fp32 makes in torch is allowed.

unrounded: files in half precision are also computed in fp32, and compared with the model with their stored tensors and
the limits of fp32: a wrong operation that changes the logits by less than d does not hide behind roundings.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitcompress.errors import DeviceError, MissingExtraError, VitcompressError
from vitcompress.exporters.onnx import file
from vitcompress.exporters.onnx.rounded import open_changed, rounded_logits, unsigned_integers
from vitcompress.exporters.openvino.export import OPENVINO
from vitcompress.exporters.openvino.runner import DEFAULT, HINT
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.quantize.emulate import EightBitProducts, stored_tensors
from vitcompress.exporters.quantize.graph import Quantization, read_quantization
from vitcompress.exporters.quantize.smooth import rescale
from vitcompress.exporters.runtimes import Runner, open_runner
from vitcompress.exporters.sidecar import read_input, read_sidecar
from vitcompress.exporters.uint8 import build_deployed, from_bytes, to_bytes
from vitcompress.io.checks import Check, largest_difference, limit_check
from vitcompress.io.files import decode_json_values
from vitcompress.io.hardware import slow_reason
from vitcompress.io.text import format_shape
from vitcompress.models.cost import count_cost
from vitcompress.models.create import InputConfig, create_on_meta
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor, planned_tensors
from vitcompress.training.metrics import kl_divergence, wilson
from vitcompress.verify import tolerance

# The type whose roundings a precision has: tf32 is as precise as fp16.
TYPES = {"fp32": torch.float32, "tf32": torch.float16, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARES = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2, "int8": 8e-2, "fp8": 24e-2}
WIDE = {"fp16": "fp32", "bf16": "fp32", "int8+bf16": "int8"}  # without roundings to half precision
MOST_SATURATION = 0.5
REMEDY = "; products of 8 bits may saturate on this processor: use --weight-bits 7"
ROUNDINGS = 2.0**-20  # relative error of sums and elementary functions in fp32: some units in the last place
AGREEMENT = "agreement."  # what the names of these checks begin with
BATCHES = (1, 2, 3, 5)
RANKED = 64  # images that are ranked by their rounding errors in torch
Calls = Sequence[tuple[Tensor, Tensor]]  # of each call the indices of its images, and their logits
Kind = str | Quantization  # a precision, or what a file computes in eight bits
LARGEST_BATCH = 256  # of files without a range
WORK = 5 * 10**12  # multiply-accumulates of one call on the CPU at most; 256 images in DeiT-B are 4.5e12, and take 7 GB


@dataclass(frozen=True)
class Comparison:
    """The difference of two sets of logits.

    images: number of different images. flips: images with another top-1 class; unexplained: those of them whose two
    best logits differ by more than rounding explains. kl: of the worst image. cosine: of the image that is nearest to
    its limit; cosine_limit: that limit of 1 - cos. error: relative to the largest logit.
    """

    images: int
    flips: int
    unexplained: int
    kl: float
    cosine: float
    cosine_limit: float
    error: float

    def describe_flips(self) -> str:
        low, high = (f"{100 * end:.1f}" for end in wilson(self.flips, self.images))
        text = f"agrees with the model: {self.images - self.unexplained:,} of {self.images:,} images"
        near = f"{self.flips - self.unexplained} of them between near ties, which rounding explains"
        counts = f"{self.flips} in another class, 95 % interval {low} to {high} %; {near}"
        return f"{text} ({counts})" if self.flips else text


def compare(expected: Tensor, outputs: Tensor, limits: "Limits", image: Tensor | None = None) -> Comparison:
    """Compare two sets of logits, (rows, classes).

    image: the image of each row, (rows,): an image that was evaluated at several batch sizes counts once, as a flip if
    any of its rows is one. None: each row is an image.
    """
    numbers = torch.arange(len(expected)) if image is None else image
    exact, outputs = expected.double(), outputs.double()
    scale = largest_logit(exact)
    best = two_best(exact)
    flipped = exact.argmax(1) != outputs.argmax(1)
    unexplained = flipped & (best[:, 0] - best[:, -1] > 2 * limits.logit * scale)
    cosine = torch.where((exact == outputs).all(1), 1.0, F.cosine_similarity(exact, outputs, eps=1e-300))
    explained = limits.norm * scale / exact.norm(dim=1).clamp(min=1e-300)  # the sine of the angle; 1: any angle
    turns = torch.where(explained < 1, 1 - (1 - explained**2).clamp(min=0).sqrt(), 2.0).clamp(min=limits.share**2 / 2)
    nearest = ((1 - cosine) / turns).argmax()
    total, flips, wrong = (len(torch.unique(n)) for n in (numbers, numbers[flipped], numbers[unexplained]))
    error = largest_difference(exact, outputs) / scale
    kl = kl_divergence(exact, outputs)
    return Comparison(total, flips, wrong, float(kl.max()), float(cosine[nearest]), float(turns[nearest]), error)


def two_best(logits: Tensor) -> Tensor:
    """The two largest logits of each row, (rows, 2), the largest first; of one class only that, (rows, 1)."""
    return logits.topk(min(2, logits.shape[1])).values


def largest_logit(logits: Tensor) -> float:
    """The largest magnitude; 1 if all logits are 0, as those of a model whose head is not trained yet."""
    return float(logits.abs().max()) or 1.0


@dataclass(frozen=True)
class Limits:
    """How much the logits of a file may change.

    share: d of the module's docstring. error: relative to the largest logit, at most d. logit, norm, kl: what rounding
    explains: the error of a logit and the norm of the errors of an image, relative to the largest logit, and the KL
    divergence.
    """

    share: float
    error: float
    logit: float = 0.0
    norm: float = 0.0
    kl: float = 0.0


def comparison_checks(comparison: Comparison, limits: Limits, name: str, source: str) -> list[Check]:
    """The four checks of one comparison. source: what was compared."""
    kl = max(2 * limits.share**2, limits.kl)
    rows = (
        ("flips", float(comparison.unexplained), 0.0, comparison.describe_flips()),
        ("kl", comparison.kl, kl, "largest KL divergence of an image, nats"),
        ("cosine", 1 - comparison.cosine, comparison.cosine_limit, "1 - cosine of the logits of an image"),
        ("error", comparison.error, limits.error, "largest difference over the largest logit"),
    )
    return [limit_check(f"{name}.{kind}", value, limit, f"{what}; {source}") for kind, value, limit, what in rows]


def agreement_check(name: str, expected: Tensor, outputs: Tensor, tolerance: float) -> Check:
    """Compare the top-1 classes of two sets of logits, (images, classes), which may differ by `tolerance`.

    A class may change only where the two best logits are so close that the tolerance explains it.
    """
    if not torch.isfinite(outputs).all():
        return Check(name, "failed", float("nan"), 0.0, "outputs are not finite")
    comparison = compare(expected, outputs, Limits(1.0, 1.0, tolerance / largest_logit(expected)))
    return limit_check(name, float(comparison.unexplained), 0.0, comparison.describe_flips())


@dataclass(frozen=True)
class Original:
    """The model that exported files are compared with.

    images: (count, channels, height, width), normalized. real: they are not noise. command: verifies on the target a
    file that cannot run here; None: in the folder of the file. trust: open files that contain executable code.
    """

    model: nn.Module
    images: Tensor
    real: bool = True
    command: str | None = None
    trust: bool = False

    @cached_property
    def exact(self) -> Callable[[Tensor], Tensor]:
        """`tolerance.exact_logits` of the model; images that were evaluated before cost nothing."""
        return cache(partial(tolerance.exact_logits, self.model))

    @cached_property
    def rounding(self) -> Callable[[Tensor, Kind], tolerance.Rounding]:
        """`tolerance.rounding_limit` or `quantization_limit`, on the images whose two best logits are closest.

        In floating point every second image is one whose logits the model itself rounds most: errors differ by image.
        """

        def limit(images: Tensor, precision: Kind) -> tolerance.Rounding:
            exact = self.exact(images)
            order = two_best(exact).diff(dim=1).sum(1).argsort(descending=True)
            if isinstance(precision, Quantization):
                return tolerance.quantization_limit(rescale(self.model, precision.factors), images[order], precision)
            errors = (tolerance.model_logits(self.model, images[:RANKED]) - exact[:RANKED]).abs().amax(1)
            order = torch.stack([errors.argsort(descending=True), order[: len(errors)]], 1).flatten()
            return tolerance.rounding_limit(self.model, images[order[: tolerance.BATCH]], TYPES[precision])

        return cache(limit)

    @cached_property
    def rounded_to_bytes(self) -> Callable[[InputConfig], Tensor]:
        """The images, rounded to the bytes that a file with this preprocessing takes."""
        return cache(lambda input: from_bytes(to_bytes(self.images, input), input))

    def not_run(self, name: str, path: Path, detail: str) -> Check:
        """The check `name` of the file `path`, which needs another machine or package."""
        command = self.command or f"vitcompress verify {shlex.quote(str(path.parent.absolute()))}"
        return Check(name, "not_run", detail=detail, command=command)


@dataclass(frozen=True)
class PlannedOriginal(Original):
    """An original with its plan, the weights before folding where the run keeps them, and the classes if known."""

    plan: Plan = field(kw_only=True)
    unfolded: Path | None = None
    classes: tuple[str, ...] | None = None

    @cached_property
    def rows(self) -> tuple[PlannedTensor, ...]:
        return planned_tensors(create_on_meta(self.plan.arch, self.plan.arch_args), self.plan)


def output_checks(path: Path, original: Original, device: str | None = None) -> list[Check]:
    """Compare the outputs of the exported file `path` with those of its model.

    A file that this machine cannot run is `not_run`, with the reason and the command for the target. ONNX files in half
    precision are evaluated again by `rounded_checks`. device: None is the one that the file is for, else the CPU.
    """
    name = f"{AGREEMENT}{path.name}"
    try:
        # ONNX Runtime has no kernels for bf16 on the CPU.
        gpu = "cuda" if _metadata(path).get("precision") == "bf16" and torch.cuda.is_available() else None
        with closing(open_runner(path, device=device or gpu, trust=original.trust)) as runner:
            checks = _runner_checks(path, original, runner)
        if path.suffix == OPENVINO.file_suffix:
            checks[0] = _add_default(checks[0], path, original)
            checks += _widened_checks(path, original)
    except (DeviceError, MissingExtraError) as error:
        checks = [original.not_run(name, path, f"{error.message}; {error.hint or 'run the command on the target'}")]
    except VitcompressError as error:
        return [Check(name, "failed", detail=error.message)]
    if device:
        return checks
    return [*checks, *rounded_checks(path, original), *rounded_checks(path, original, rounded=False)]


def _add_default(flips: Check, path: Path, original: Original) -> Check:
    """`flips` with the result of a run in the precision that OpenVINO chooses without a hint, as information.

    The runner and the code in the report set the recorded precision; other programs may not.
    """
    with closing(open_runner(path, precision=DEFAULT)) as runner:
        used = runner.describe()["precision"]
        if f"; {used} in " in flips.detail:
            return flips
        checks = _runner_checks(path, original, runner)
    worst = next((check for check in checks if check.verdict == "failed"), checks[-1])
    values = "" if worst.value is None else f" {worst.value:.2g}, limit {worst.tolerance:.2g}"
    where = "within" if worst.verdict == "passed" else "note: beyond"
    text = f"without {HINT} it runs in {used} here, {where} the limits of {used}"
    return replace(flips, detail=f"{flips.detail}; {text} ({worst.detail.partition(';')[0]}{values})")


def _widened_checks(path: Path, original: Original) -> list[Check]:
    """Run an OpenVINO file in half precision, whose tensors are in fp32 or int8, in fp32."""
    if (precision := WIDE.get(str(read_sidecar(path).get("precision")))) is None:
        return []
    with closing(open_runner(path, precision=precision)) as runner:
        checks = _runner_checks(path, original, runner)
    return [replace(check, name=check.name.replace(path.name, f"{path.name}.unrounded", 1)) for check in checks]


def _metadata(path: Path) -> Mapping[str, Any]:
    """The metadata inside an ONNX file; nothing for other files."""
    return decode_json_values(file.metadata(file.read_onnx(path))) if path.suffix == ".onnx" else {}


def _runner_checks(path: Path, original: Original, runner: Runner) -> list[Check]:
    about = runner.describe()
    stated, on_cpu = str(about["precision"]), about["device"] == "cpu"
    precision = stated if stated in SHARES else "fp32"
    settings = read_quantization(_metadata(path) or decode_json_values(read_sidecar(path).get("metadata", {})))
    preprocessing = runner.input if about.get("input_type") == "uint8" else None
    images = original.rounded_to_bytes(preprocessing) if preprocessing else original.images
    batches = _batches(path, original, runner)
    calls = [(rows, runner(images[rows]).flatten(1)) for rows in _rows(batches, len(images))]
    if settings:
        limits = _limits(original, images, [settings, "bf16"] if stated.endswith("+bf16") else [settings])
    else:
        # A file that takes bytes rounds the normalized images once more: as in a second evaluation.
        evaluations = 1 + bool(preprocessing) if precision == "fp32" and on_cpu else 0
        limits = _limits(original, images, [precision], evaluations)
    source = f"{stated} in {about['runtime']} on {about['device']}, batch {', '.join(map(str, batches))}"
    checks = _call_checks(path.name, original, images, calls, limits, source)
    if settings and precision == "int8" and on_cpu:
        checks += _arithmetic_checks(path, original, images, calls, settings)
    return checks


@torch.no_grad()
def _arithmetic_checks(
    path: Path, original: Original, images: Tensor, calls: Calls, settings: Quantization
) -> Iterator[Check]:
    """Compare the outputs of `calls` with those of exact integer products: in an ONNX file with the same kernels.

    In fp8, and of other formats, `calls` are exact themselves.
    """
    rows, served = (torch.cat(parts) for parts in zip(*calls, strict=True))
    exact, name = served.double(), "served"
    if on_integers := path.suffix == ".onnx" and settings.precision == "int8":
        content, name = unsigned_integers(file.read_onnx(path)).SerializeToString(), "exact"
        call = open_changed(path, content, optimize=True)
        exact = torch.cat([call(images[part])[0].flatten(1).double() for part, _ in calls])
    changes = exact - original.exact(images)[rows]

    def ratio(difference: Tensor, norm: float) -> float:
        return float(difference.norm(p=norm) / (changes.norm(p=norm) or 1.0))

    def check(kind: str, value: float, limit: float, what: str) -> Check:
        remedy = REMEDY if settings.weight_bits == 8 and slow_reason("int8") else ""
        detail = f"{what} / |{name} - model| of the logits{remedy}"
        return limit_check(f"{AGREEMENT}{path.name}.{kind}", value, limit, detail)

    if on_integers:
        yield check("saturation", ratio(served.double() - exact, math.inf), MOST_SATURATION, "largest |served - exact|")
    model = rescale(original.model, settings.factors)
    stored = stored_tensors(model, settings)
    signs = torch.randint(2, images.shape, generator=torch.Generator().manual_seed(0), dtype=images.dtype) * 2 - 1

    def emulate(x: Tensor) -> Tensor:
        parts = torch.split(x, tolerance.BATCH)
        return torch.cat([functional_call(model, stored, (part,)).flatten(1).double() for part in parts])[rows]

    with EightBitProducts(model, settings):
        emulated, moved = emulate(images), emulate(images * (1 + ROUNDINGS * signs))
    limit = max(MOST_SATURATION, 2 * ratio(moved - emulated, 2))
    yield check("emulation", ratio(emulated - exact, 2), limit, f"root mean square |emulated - {name}|")


def _limits(original: Original, images: Tensor, kinds: Sequence[Kind], evaluations: int = 0) -> Limits:
    """The limits of a file.

    kinds: what rounds, independently, so that variances add. evaluations: number of those whose rounding limits the
    error; in eight bits it always does. 0: the share of the precision does.
    """
    eight_bits = any(isinstance(kind, Quantization) for kind in kinds)
    roundings, times = [original.rounding(images, kind) for kind in kinds], max(evaluations, 1)
    share = math.hypot(*(SHARES[kind if isinstance(kind, str) else kind.precision] for kind in kinds))
    unit = times**0.5 / largest_logit(original.exact(images))
    logit, norm = (unit * math.hypot(*(getattr(one, name) for one in roundings)) for name in ("logit", "norm"))
    error = min(share, logit) if evaluations or eight_bits else share
    return Limits(share, error, logit, norm, times * sum(one.kl for one in roundings))


def _call_checks(
    name: str, original: Original, images: Tensor, calls: Calls, limits: Limits, source: str
) -> list[Check]:
    """Compare the outputs of `calls` on `images` with those of the model."""
    name, source = f"{AGREEMENT}{name}", source if original.real else f"{source}, on noise"
    exact = original.exact(images)
    for rows, logits in calls:
        if logits.shape != exact[rows].shape:
            shapes = f"{format_shape(logits.shape)}, those of the model {format_shape(exact[rows].shape)}"
            return [Check(name, "failed", detail=f"the outputs have the shape {shapes}; {source}")]
        if not torch.isfinite(logits).all():
            return [Check(name, "failed", detail=f"outputs at batch {len(logits)} are not finite; {source}")]
    rows, logits = (torch.cat(parts) for parts in zip(*calls, strict=True))
    return comparison_checks(compare(exact[rows], logits, limits, rows), limits, name, source)


def _batches(path: Path, original: Original, runner: Runner) -> tuple[int, ...]:
    """`BATCHES`, and the best and the largest of the file's range; `LARGEST_BATCH` if the file has no range.

    An ONNX file that an engine was built from has the range of the engine, limited to what the CPU computes in minutes.
    """
    most = min(len(original.images), LARGEST_BATCH)
    batch_range = runner.batch_range
    if batch_range is None and (built := read_sidecar(path).get("build", {}).get("batch")):
        limit = max(WORK // count_cost(original.model, runner.input_size).macs, 1)
        batch_range = [min(images, limit) for images in built]
    low, best, high = batch_range or (1, most, most)
    return tuple(sorted({min(max(size, low), high) for size in (*BATCHES, best, high)}))


def _rows(batches: Sequence[int], images: int) -> list[Tensor]:
    """Indices of the images of each call: every batch from the first image on, then the images that were not used."""
    most = max(batches)
    starts = [(0, size) for size in batches] + [(start, most) for start in range(most, images, most)]
    return [torch.arange(start, start + size) % images for start, size in starts]


def rounded_checks(path: Path, original: Original, *, rounded: bool = True) -> list[Check]:
    """Compare the outputs of an ONNX file in half precision, on the CPU with every result rounded to that precision.

    A GPU rounds every result; ONNX Runtime on the CPU, without kernels for half precision, does not. This is a proxy
    for the hardware that such files are for. Other files have no such checks.

    rounded: False computes in fp32, and compares with the model with the tensors of the file, in half precision only.
    """
    metadata, name = _metadata(path), f"{path.name}.{'rounded' if rounded else 'unrounded'}"
    precision, uint8 = str(metadata.get("precision")), metadata.get("input") == "uint8"
    input, possible = read_input(str(path), metadata), (*HALF, "fp8") if rounded else HALF
    if precision not in possible or input is None:
        return []
    images = original.rounded_to_bytes(input) if uint8 else original.images
    try:
        kind, evaluations, scalars = read_quantization(metadata) or precision, 0, None
        if not rounded:
            layers, images = metadata.get("islands"), images[: tolerance.BATCH]
            islands = tuple(layers) if isinstance(layers, list) else ()
            model = build_deployed(original.model, input, precision, islands, uint8=False).float()
            original, kind, evaluations = replace(original, model=model, images=images), "fp32", 2 + uint8
            with _Scalars() as record:
                tolerance.model_logits(model, images[:1])
            scalars = record.found
        calls = [(torch.arange(len(images)), rounded_logits(path, images, scalars).flatten(1))]
    except VitcompressError as error:
        return [Check(f"{AGREEMENT}{name}", "failed", detail=error.message)]
    how = "every result rounded to {}, a proxy for the GPU" if rounded else "only tensors rounded to {}"
    source = f"{how.format(precision)}, in onnxruntime on cpu"
    checks = _call_checks(name, original, images, calls, _limits(original, images, [kind], evaluations), source)
    if isinstance(kind, Quantization):
        checks += _arithmetic_checks(path, original, images, calls, kind)
    return checks


class _Scalars(TorchFunctionMode):
    """Records the numbers that torch computes with while it is active. A file in half precision rounds them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[float]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.update(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, float))
        if func is F.scaled_dot_product_attention:
            self.found.add(args[0].shape[-1] ** -0.5)
        return func(*args, **(kwargs or {}))
