"""All checks of one exported file: its sidecar, its graph, its weights and its outputs; and what follows from them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx_ir.serde import SerdeError
from torch import nn

from vitcompress.errors import ArtifactError, InputError, MissingExtraError, OutputError, first_line
from vitcompress.exporters.base import IMAGE_FORMS, Contents
from vitcompress.exporters.onnx import file
from vitcompress.exporters.quantize.graph import find_wrong_steps, read_quantization
from vitcompress.exporters.runtimes import exporter_of
from vitcompress.exporters.sidecar import amend_sidecar, find_mismatches, read_sidecar, sidecar_path, usable_sidecar
from vitcompress.exporters.tensorrt.export import TENSORRT, source_path
from vitcompress.families import family_of
from vitcompress.io.checks import Check, Status, problem_check
from vitcompress.io.files import convert_write_errors, decode_json_values, read_record, signed_files, write_json
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import format_shape
from vitcompress.models.create import input_config, name_classes
from vitcompress.verify.engine import engine_checks
from vitcompress.verify.outputs import AGREEMENT, PlannedOriginal, output_checks
from vitcompress.verify.weights import WEIGHTS, FileTensors, compare_tensors

GELUS = {"GELU": "none", "GELUTanh": "tanh"}  # class of timm -> its form; those of torch state `approximate`
ENGINES = {TENSORRT.file_suffix, *TENSORRT.other_suffixes}


def check_file(path: Path, original: PlannedOriginal) -> tuple[list[Check], FileTensors | None]:
    """Compare the exported file `path` with its model. Files that cannot be read or run have failed checks.

    Returns the checks, and the tensors of the file where its format allows reading them.
    """
    name, checks, tensors = f"{WEIGHTS}.{path.name}", structure_checks(path, original), None
    try:
        contents = contents_of(path)
        checks.append(metadata_check(path, original, contents))
        if contents is not None:
            tensors = compare_tensors(original.model, contents, original.rows)
            checks.append(tensors.check(name))
    except MissingExtraError as error:
        checks.append(original.not_run(name, path, error.sentence()))
    except InputError as error:
        checks.append(Check(name, "failed", detail=error.message))
    if path.suffix in ENGINES:
        checks += engine_checks(path, original)
    return [*checks, *output_checks(path, original)], tensors


def contents_of(path: Path) -> Contents | None:
    """The tensors and metadata of a file; None if its format does not allow reading them.

    Raises InputError for a damaged or foreign file, and MissingExtraError if the format needs another package.
    """
    exporter = exporter_of(path)
    return None if exporter is None or exporter.contents is None else exporter.contents(path)


def metadata_check(path: Path, original: PlannedOriginal, contents: Contents | None) -> Check:
    """Compare what a file and its sidecar state with each other, and preprocessing, classes and plan with the run.

    contents: of the file; None for an engine, whose sidecar alone has them.
    """
    stated, recorded = dict[str, dict[str, Any]](), dict[str, Any]()  # metadata by name of the file; of the sidecar
    if sidecar := usable_sidecar(path):
        recorded = decode_json_values(sidecar["metadata"])
        recorded.pop("precision", None)
        if path.suffix == ".onnx":  # the contents of other formats have no opset, and the precision of their tensors
            recorded |= {key: sidecar[key] for key in ("opset", "precision")}
        stated[sidecar_path(path).name] = recorded
    if contents is not None:
        stated[path.name] = decode_json_values(contents.metadata)
    config, count = input_config(original.model), getattr(original.model, "num_classes", 0)
    expected = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(config).items()}
    plan, problems = original.plan, []
    unnamed = name_classes(plan, ())  # before `save_model` added the classes
    for source, values in stated.items():
        names = values.get("classes")
        if original.classes is not None:
            classes: object = list(original.classes)
        else:  # any names are accepted if their number is right
            classes = names if isinstance(names, list) and len(names) == count else f"{count} names"
        digest = unnamed.digest if values.get("plan_sha256") == unnamed.digest else plan.digest
        form = IMAGE_FORMS.get(contents.uint8, {}) if contents is not None and source == path.name else {}
        for key, value in (*{**recorded, **expected, "classes": classes, "plan_sha256": digest}.items(), *form.items()):
            if values.get(key) != value:
                problems.append(f"{key} is {values.get(key)!r:.60} in {source}, not {value!r:.60}")
    return problem_check(f"{file_label(path)}.metadata", problems, "preprocessing, classes, plan are those of the run")


def structure_checks(path: Path, original: PlannedOriginal | None) -> list[Check]:
    """Check the sidecar and, of an ONNX file, the graph. Without the model, only whether the graph is well-formed.

    Every exporter writes a sidecar. An engine is code, and is trusted only with it.
    """
    label, sidecar, problems = file_label(path), sidecar_path(path), find_mismatches(path)
    if not sidecar.is_file():
        reason = "the engine is not trusted" if path.suffix in ENGINES else "export the file again"
        problems = [f"{sidecar.name} is missing: {reason}"]
    checks = [problem_check(f"{label}.file", problems, f"sha256 of every file as in {sidecar.name}")]
    if path.suffix == ".onnx":
        checks.append(checker_check(path, label))
        if original is not None and checks[-1].verdict == "passed":  # other graphs may lack anything
            try:
                checks += graph_checks(original.model, path, label)
            except (InputError, ValueError, SerdeError) as error:  # onnx_ir reads fewer graphs than onnx.checker
                checks.append(Check(f"{label}.graph", "failed", detail=f"it cannot be read: {first_line(error)}"))
    return checks


def file_label(path: Path) -> str:
    """What the names of the checks of a file's structure begin with."""
    if path.suffix != ".onnx":
        return path.name
    if Path(path.stem).suffix in ENGINES:
        return f"{path.stem}.source"
    return "onnx" if path.stem == "model" else f"onnx.{path.stem}"


def is_about(path: Path, name: str) -> bool:
    """Whether the check `name` is one of the file `path`, or of the outputs and weights of an engine's ONNX file."""
    own = f"{name}.".startswith((f"{AGREEMENT}{path.name}.", f"{WEIGHTS}.{path.name}."))
    return own or file_label(path) in (name, name.rpartition(".")[0])


def checker_check(path: Path, name: str) -> Check:
    """onnx.checker, with shape inference."""
    problems = []
    try:
        file.read_onnx(path)  # fails for external data outside the folder of the file
        onnx.checker.check_model(str(path), full_check=True)
    except (ArtifactError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        problems = [first_line(error)]
    return problem_check(f"{name}.checker", problems, "onnx.checker, with shape inference")


def graph_checks(model: nn.Module, path: Path, name: str) -> list[Check]:
    """Check that the graph has no node in `IDLE`, all weights in their sliced or folded sizes, and no removed layer.

    Raises ArtifactError for an unsafe file, or one of another format.
    """
    facts = file.graph_facts(path)
    # A model may have layers of zeros, as an empty branch of SERo that cannot be folded: `weights` compares them.
    factors = (p for name, p in model.named_parameters() if p.ndim > 1 or "gamma" in name)
    zeros = [f"{node} (times zero)" for node in facts.zero_products] if all(p.any() for p in factors) else []
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    sizes = Counter(format_shape(file.weight_key(layer.weight.shape)) for layer in layers)
    stored, nodes = Counter(map(format_shape, facts.weights)), facts.operators
    attentions = {space.attention for space in family_of(model).spaces(model) if space.attention}
    counts = {"attentions": (len(attentions), nodes["Softmax"] + nodes["Attention"])}  # in torch, in the file
    own = Counter(filter(None, map(_layer_name, model.modules())))
    counts |= {name: (own[name], facts.layers[name]) for name in own | facts.layers}
    shapes = {shape: (sizes[shape], stored[shape]) for shape in sizes | stored}
    problems = {
        "idle": ([*facts.no_work, *zeros], "no Identity, no Dropout, no product with zero"),
        "shapes": (_differences(shapes), "all weights have their sizes in torch"),
        "layers": (_differences(counts), "as many attentions, GELUs and norms as in torch, with their settings"),
    }
    if settings := read_quantization(decode_json_values(file.metadata(file.read_onnx(path)))):
        problems["steps"] = find_wrong_steps(path, settings), "inputs of products have the steps of their ranges"
    return [problem_check(f"{name}.{kind}", wrong, detail) for kind, (wrong, detail) in problems.items()]


def _layer_name(module: nn.Module) -> str | None:
    """The name that `file.Facts.layers` gives to a LayerNorm or a GELU, of torch or of timm."""
    if isinstance(module, nn.LayerNorm):
        return file.layer_name("LayerNormalization", module.eps)
    form = "none" if isinstance(module, nn.GELU) else GELUS.get(type(module).__name__)
    return file.layer_name("Gelu", getattr(module, "approximate", form)) if form else None


def _differences(counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """What the file has more or less often than the model."""
    return [f"{name}: {stored} in the file, {own} in torch" for name, (own, stored) in counts.items() if stored != own]


def file_status(path: Path, checks: Sequence[Check]) -> Status:
    """failed if any check failed, passed if all checks of the file's own outputs passed, otherwise not_run.

    The bytes of an engine may not show its weights, and the ONNX file that it was built from may need kernels that only
    the engine has, as for bf16.
    """
    if any(check.verdict == "failed" for check in checks):
        return "failed"
    own, source = (f"{AGREEMENT}{one.name}." for one in (path, source_path(path)))
    outputs = [c for c in checks if f"{c.name}.".startswith(own) and not f"{c.name}.".startswith(source)]
    return "passed" if outputs and all(check.verdict == "passed" for check in outputs) else "not_run"


def record_status(path: Path, checks: Sequence[Check]) -> None:
    """Write into the sidecar of `path`, if it has one that is not signed, its status and checks."""
    if read_sidecar(path) and not signed_files.get():
        verification = {"verdict": file_status(path, checks), "checks": [check.to_dict() for check in checks]}
        amend_sidecar(path, verified=verification["verdict"] == "passed", verification=verification)


def quarantine(path: Path) -> Path:
    """Move a file that failed, with its data files, sidecar and other companions, to the folder `failed` beside it.

    Raises OutputError if the files cannot be moved.
    """
    folder = RunFolder(path.parent).failed
    if folder.is_symlink():
        raise OutputError(f"{folder} is a link, so {path} is not moved there", hint="remove the link")
    files = [path.with_suffix(".bin").name] if path.suffix == ".xml" else []
    files = list(usable_sidecar(path).get("files", files))
    with convert_write_errors(folder):
        companions = (other.name for other in path.parent.iterdir() if other.name.startswith(f"{path.name}."))
        folder.mkdir(exist_ok=True)
        for name in dict.fromkeys((path.name, *files, *companions)):
            if (path.parent / name).is_file():
                (path.parent / name).replace(folder / name)
    return folder / path.name


def rejected_exports(folder: Path) -> dict[str, str]:
    """Names of the files that a run could not export, or moved away, and why."""
    return read_record(RunFolder(folder).rejected, dict[str, str]) or {}


def reject_export(folder: Path, name: str, reason: str) -> None:
    """Add a file to `rejected_exports`."""
    write_json(RunFolder(folder).rejected, {**rejected_exports(folder), name: reason})
