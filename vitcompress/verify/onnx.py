"""Is an ONNX file the model? Its answers, its graph, and the record beside it.

Nothing here uses the code that exports or serves models: files are asked through ONNX Runtime directly, on the CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from torch import Tensor, nn

from vitcompress.errors import ArtifactError, first_line
from vitcompress.exporters.onnx import file
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.sidecar import mismatches, sidecar_path
from vitcompress.exporters.uint8 import at_size, deployed, to_bytes
from vitcompress.families import family_of
from vitcompress.io.checks import Check, compared, largest_difference, listed
from vitcompress.io.files import decoded
from vitcompress.models.create import input_config
from vitcompress.verify.outputs import agreement_check
from vitcompress.verify.tolerance import reference

BATCHES = (1, 2, 5)
PART = 16  # images at a time
AGAIN = "export it again: `vitcompress export`"


def onnx_checks(model: nn.Module, path: Path, images: Tensor, name: str = "onnx") -> list[Check]:
    """Everything that can be asked about `path` being `model`, on `images`, (count, channels, height, width).

    Answers are compared with float64 at each batch size; half-precision files with the model in half precision.

    Raises:
        ArtifactError: not an ONNX file, one with unsafe external data, or one that cannot be asked what `model` can.
    """
    return [*_answer_checks(model, path, images, name), *structure_checks(model, path, name), *file_checks(path, name)]


def _answer_checks(model: nn.Module, path: Path, images: Tensor, name: str) -> Iterator[Check]:
    known = export_settings(path)
    if known["precision"] == "bf16":
        why = "ONNX Runtime has no bf16 convolution and matrix product on the CPU; run it on a GPU"
        yield Check(f"{name}.batch1", "not_run", detail=why, command=f"vitcompress verify {path.parent}")
        return
    stored = stored_module(model, known)
    images = to_bytes(images, input_config(model)) if known["uint8"] else images
    most = max(BATCHES)
    if len(images) < most:
        images = images.repeat(-(-most // len(images)), 1, 1, 1)
    truth = reference(stored, images[:most])
    session = _session(path, images[:1], truth.exact[:1])  # after the exact answers: two large models are enough
    for batch in BATCHES:
        difference = largest_difference(_logits(session, images[:batch]), truth.exact[:batch])
        detail = f"largest difference of the logits from float64, batch {batch}, {known['precision']}"
        yield compared(f"{name}.batch{batch}", difference, truth.tolerance, detail)
    expected = _in_parts(lambda part: _torch_logits(stored, part), images)
    got = _in_parts(lambda part: _logits(session, part), images)
    yield agreement_check(f"{name}.agreement", expected, got, truth.between)


def stored_module(model: nn.Module, known: Mapping[str, Any]) -> nn.Module:
    """What a file holds that was exported from `model` as `known` says: precision, islands and uint8."""
    if known["precision"] == "fp32" and not known["uint8"] and _dtype(model) == torch.float32:
        return at_size(model, input_config(model))
    islands = tuple(known["islands"])
    return deployed(model, input_config(model), known["precision"], islands, uint8=known["uint8"])


def export_settings(path: Path) -> dict[str, Any]:
    """What the metadata of a file says of how it was exported. Raises ArtifactError where another tool wrote it."""
    found = _metadata(path)
    settings = {
        "precision": found.get("precision", "fp32"),
        "islands": found.get("islands", []),
        "uint8": found.get("input") == "uint8",
    }
    if settings["precision"] not in ("fp32", *HALF) or not isinstance(settings["islands"], list):
        raise ArtifactError(f"the metadata of {path} is not vitcompress's", hint=AGAIN)
    return settings


def _metadata(path: Path) -> dict[str, Any]:
    return decoded(file.metadata(file.read(path)))


def structure_checks(model: nn.Module, path: Path, name: str = "onnx") -> list[Check]:
    """No idle node in the graph, every weight of its sliced or folded size, every removed layer gone."""
    found = file.facts(path)
    idle = [*found.no_work, *(f"{node} (times zero)" for node in found.zero_products)]
    return [
        listed(f"{name}.idle", idle, "no Identity, no Dropout, no product with zero"),
        listed(f"{name}.shapes", _wrong_weights(model, found), "every weight has the size it has in torch"),
        listed(f"{name}.layers", _wrong_counts(model, found), "as many attentions, GELUs and norms as in torch"),
    ]


def file_checks(path: Path, name: str = "onnx") -> list[Check]:
    """Is the file whole and well-formed, and the one that its sidecar describes?"""
    checks = [listed(f"{name}.checker", _checker_problem(path), "onnx.checker, with shape inference")]
    sidecar = sidecar_path(path)
    if sidecar.is_file():
        checks.append(listed(f"{name}.file", mismatches(path), f"sha256 of every file as in {sidecar.name}"))
    return checks


def plan_check(path: Path, digest: str, name: str = "onnx") -> Check:
    """Was the file exported from the plan with this digest?"""
    recorded = _metadata(path).get("plan_sha256")
    wrong = [] if recorded == digest else [f"the file carries {str(recorded)[:12]}, plan.json is {digest[:12]}"]
    return listed(f"{name}.plan", wrong, f"plan {digest[:12]}")


def _session(path: Path, image: Tensor, expected: Tensor) -> ort.InferenceSession:
    """ONNX Runtime with a file that takes `image` and answers in the shape of `expected`."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Threads that spin while they wait take the processor from whatever else wants it; nothing is timed here.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        sizes = _logits(session, image).shape
    except Exception as error:  # noqa: BLE001 - its own exception classes share no base but this one
        raise ArtifactError(f"ONNX Runtime cannot run {path}: {first_line(error)}", hint=AGAIN) from None
    if sizes != expected.shape:
        raise ArtifactError(f"{path} answers {tuple(sizes)}, the model {tuple(expected.shape)}", hint=AGAIN)
    return session


def _logits(session: ort.InferenceSession, images: Tensor) -> Tensor:
    given = images if images.dtype == torch.uint8 else images.float()
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: given.numpy()})[0])


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


@torch.no_grad()
def _torch_logits(model: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = model(images.to(_dtype(model))).float()
    return out


def _in_parts(answer: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.cat([answer(part) for part in torch.split(images, PART)])


def _wrong_weights(model: nn.Module, found: file.Facts) -> Iterator[str]:
    """Sizes of weights that the file has more or less often than the model."""
    kinds = (nn.Linear, nn.Conv2d)
    expected = Counter(file.weight_key(tuple(m.weight.shape)) for m in model.modules() if isinstance(m, kinds))
    actual = Counter(found.weights)
    for sizes in sorted({*expected, *actual}, key=str):
        if expected[sizes] != actual[sizes]:
            yield f"{'x'.join(map(str, sizes))}: {actual[sizes]} in the file, {expected[sizes]} in torch"


def _wrong_counts(model: nn.Module, found: file.Facts) -> Iterator[str]:
    nodes = Counter(found.operators)
    attentions = {space.attention for space in family_of(model).spaces(model) if space.attention}
    for what, expected, actual in (
        ("attentions", len(attentions), nodes["Softmax"] + nodes["Attention"]),
        ("GELUs", sum(isinstance(m, nn.GELU) for m in model.modules()), nodes["Gelu"]),
        ("LayerNorms", sum(isinstance(m, nn.LayerNorm) for m in model.modules()), nodes["LayerNormalization"]),
    ):
        if expected != actual:
            yield f"{what}: {actual} in the file, {expected} in torch"


def _checker_problem(path: Path) -> list[str]:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return [first_line(error)]
    return []
