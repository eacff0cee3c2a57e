"""Check an ONNX file without running it: is it well-formed, and does its graph have the structure of the model?"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
from torch import nn

from vitcompress.errors import ArtifactError, first_line
from vitcompress.exporters.onnx import file
from vitcompress.families import family_of
from vitcompress.io.checks import Check, problem_check
from vitcompress.io.files import decode_json_values


def checker_check(path: Path, name: str) -> Check:
    """onnx.checker, with shape inference."""
    problems = []
    try:
        file.read_onnx(path)  # fails for external data outside the folder of the file
        onnx.checker.check_model(str(path), full_check=True)
    except (ArtifactError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        problems = [first_line(error)]
    return problem_check(f"{name}.checker", problems, "onnx.checker, with shape inference")


def graph_checks(model: nn.Module, digest: str, path: Path, name: str) -> list[Check]:
    """Check that the graph has no idle node, all weights in their sliced or folded sizes, and no removed layer.

    digest: of the plan that the file must name.

    Raises:
        ArtifactError: not an ONNX file, or one with unsafe external data.
    """
    facts = file.graph_facts(path)
    idle = [*facts.no_work, *(f"{node} (times zero)" for node in facts.zero_products)]
    recorded = decode_json_values(facts.metadata).get("plan_sha256")
    other = [] if recorded == digest else [f"the file names {str(recorded)[:12]}, plan.json is {digest[:12]}"]
    return [
        problem_check(f"{name}.idle", idle, "no Identity, no Dropout, no product with zero"),
        problem_check(f"{name}.shapes", _wrong_weights(model, facts), "all weights have their sizes in torch"),
        problem_check(f"{name}.layers", _wrong_counts(model, facts), "as many attentions, GELUs and norms as in torch"),
        problem_check(f"{name}.plan", other, f"plan {digest[:12]}"),
    ]


def _wrong_weights(model: nn.Module, facts: file.Facts) -> Iterator[str]:
    """Sizes of weights that the file has more or less often than the model."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    expected = Counter(file.weight_key(tuple(layer.weight.shape)) for layer in layers)
    actual = Counter(facts.weights)
    for sizes in sorted({*expected, *actual}, key=str):
        if expected[sizes] != actual[sizes]:
            yield f"{'x'.join(map(str, sizes))}: {actual[sizes]} in the file, {expected[sizes]} in torch"


def _wrong_counts(model: nn.Module, facts: file.Facts) -> Iterator[str]:
    nodes = Counter(facts.operators)
    attentions = {space.attention for space in family_of(model).spaces(model) if space.attention}
    for kind, expected, actual in (
        ("attentions", len(attentions), nodes["Softmax"] + nodes["Attention"]),
        ("GELUs", sum(isinstance(m, nn.GELU) for m in model.modules()), nodes["Gelu"]),
        ("LayerNorms", sum(isinstance(m, nn.LayerNorm) for m in model.modules()), nodes["LayerNormalization"]),
    ):
        if expected != actual:
            yield f"{kind}: {actual} in the file, {expected} in torch"
