"""Exported files are compared with their model: a file that agrees is verified, one that does not is moved away."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import onnx
import pytest
import torch
from click.testing import CliRunner
from damage import add_unused_weight
from onnx import numpy_helper

import vitcompress as vc
from vitcompress import cli
from vitcompress.bench.report.snippet import snippet
from vitcompress.cli import main
from vitcompress.errors import DeviceError
from vitcompress.exporters.base import Exported
from vitcompress.exporters.openvino.runner import core
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import Runner, open_runner
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar
from vitcompress.io.checks import Check, Status
from vitcompress.io.files import file_sha256
from vitcompress.io.hardware import slow_reason
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model, input_config, plan_of
from vitcompress.pipeline.export_folder import export_folder, verify_export
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.verify import outputs
from vitcompress.verify.files import file_status, reject_export
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.outputs import (
    SHARES,
    Limits,
    Original,
    comparison_checks,
    output_checks,
    rounded_checks,
)
from vitcompress.verify.tolerance import Rounding

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 3, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose logits differ enough between classes."""
    plan = Plan(ARCH, ARGS, removed={"blocks.1.attn": "drop"})
    model = apply_to_copy(create_model(ARCH, ARGS), plan)
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(30)
    write_model(tmp_path / "run", model, plan)
    return tmp_path / "run"


TRACES: dict[Any, Any] = {}  # of the model of `folder`


def write_file(folder: Path, format: str = "onnx", **arguments: Any) -> Exported:
    """`export_folder` of `folder`, whose model is traced once for all tests."""
    return export_folder(folder, format, traces=TRACES, **arguments)


def test_evaluating_the_expected_outputs_does_not_change_the_model() -> None:
    model = create_model(ARCH, ARGS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    original = Original(model, IMAGES)
    exact = original.exact(IMAGES)
    assert exact.dtype == torch.float64 and original.exact(IMAGES) is exact
    after = model.state_dict()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, before[name]) for name, tensor in after.items())


def negate_head(graph: Any) -> None:
    weight = next(tensor for tensor in graph.initializer if tensor.dims == [4, 16] or tensor.dims == [16, 4])
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))


def scale_one_weight(graph: Any) -> None:
    weight = next(tensor for tensor in graph.initializer if list(tensor.dims) in ([16, 64], [64, 16]))
    values = numpy_helper.to_array(weight).copy()
    values[3, 5] += 1e-3
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


def another_epsilon(graph: Any) -> None:
    """Of every norm: 1.01e-6 instead of 1e-6."""
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            next(attribute for attribute in node.attribute if attribute.name == "epsilon").f = 1.01e-6


@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize("edit", [negate_head, scale_one_weight, another_epsilon])
def test_the_outputs_of_an_edited_fp32_file_exceed_what_rounding_explains(
    edit: Callable[[Any], None], uint8: bool, folder: Path
) -> None:
    """Although the last two edits change the logits by far less than the share of fp32, and the sidecar is correct."""
    path = write_file(folder, options=ExportOptions(uint8=uint8)).path
    original = Original(load_model(folder), IMAGES)
    before = {check.name: check for check in output_checks(path, original)}
    assert {check.verdict for check in before.values()} == {"passed"}
    tolerance = before[f"agreement.{path.name}.error"].tolerance
    assert tolerance is not None and tolerance < 1e-2 * SHARES["fp32"]
    model = onnx.load(str(path))
    edit(model.graph)
    onnx.save(model, str(path))
    amend_sidecar(path, files={path.name: file_sha256(path)})
    after = {check.name: check.verdict for check in output_checks(path, original)}
    assert after[f"agreement.{path.name}.error"] == "failed"
    assert (after[f"agreement.{path.name}.kl"] == "failed") is (edit is negate_head)


def scale_one_layer(graph: Any) -> None:
    """By 0.995, without a change of its weight."""
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    node = next(node for node in graph.node if node.op_type in ("Gemm", "MatMul") and node.input[1] in kinds)
    kind, scaled = kinds[node.input[1]], f"{node.output[0]}.unscaled"
    factor = onnx.helper.make_tensor("less", kind, [], [0.995])
    product = onnx.helper.make_node("Mul", [scaled, "less"], [node.output[0]], "scaled")
    node.output[0] = scaled
    graph.initializer.append(factor)
    graph.node.insert(list(graph.node).index(node) + 1, product)


@pytest.mark.parametrize("uint8", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("edit", [scale_one_layer, another_epsilon])
def test_roundings_to_half_precision_hide_no_wrong_operation(
    edit: Callable[[Any], None], precision: Any, uint8: bool, folder: Path
) -> None:
    path = write_file(folder, options=ExportOptions(precision, islands=("softmax",), uint8=uint8)).path
    original = Original(load_model(folder), IMAGES)
    assert {check.verdict for check in rounded_checks(path, original, rounded=False)} == {"passed"}
    model = onnx.load(str(path))
    edit(model.graph)
    onnx.save(model, str(path))
    amend_sidecar(path, files={path.name: file_sha256(path)})
    failed = {check.name for check in output_checks(path, original) if check.verdict == "failed"}
    error = f"agreement.{path.name}.unrounded.error"
    assert error in failed and all(".unrounded." in name for name in failed)


@pytest.mark.skipif(bool(slow_reason("bf16")), reason="OpenVINO runs bf16 on processors that have it")
def test_roundings_in_openvino_hide_no_wrong_operation(folder: Path) -> None:
    path = write_file(folder, "openvino", options=ExportOptions("bf16")).path
    original = Original(load_model(folder), IMAGES)
    checks = {check.name: check.verdict for check in output_checks(path, original)}
    assert set(checks.values()) == {"passed"} and f"agreement.{path.name}.unrounded.error" in checks
    text = path.read_text()
    path.write_text(re.sub(' eps="[^"]*"', ' eps="2e-06"', text))  # instead of 1e-6
    assert path.read_text() != text
    amend_sidecar(path, files={file.name: file_sha256(file) for file in (path, path.with_suffix(".bin"))})
    failed = {check.name for check in output_checks(path, original) if check.verdict == "failed"}
    assert failed and all(".unrounded." in name for name in failed)


def test_a_graph_of_mixed_types_fails(folder: Path) -> None:
    path = write_file(folder, options=ExportOptions("bf16")).path
    model = onnx.load(str(path))
    next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 1).data_type = onnx.TensorProto.FLOAT16
    onnx.save(model, str(path))
    amend_sidecar(path, files={path.name: file_sha256(path)})
    failed = {check.name for check in output_checks(path, Original(load_model(folder), IMAGES))}
    assert failed >= {f"agreement.{path.name}.{kind}" for kind in ("rounded", "unrounded")}


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("onnx", ExportOptions(precision="fp16", islands=("norm", "softmax", "head"))),
        ("onnx", ExportOptions(uint8=True)),
        ("openvino", ExportOptions(uint8=True)),
    ],
)
def test_a_file_with_the_outputs_of_the_model_is_verified(folder: Path, format: str, options: ExportOptions) -> None:
    outcome = verify_export(folder, write_file(folder, format, options=options))
    assert outcome.verdict == "passed", outcome.checks
    name = outcome.path.name
    names = {f"agreement.{name}.{kind}" for kind in ("flips", "kl", "cosine", "error")} | {f"weights.{name}"}
    assert names <= {check.name for check in outcome.checks}
    sidecar = read_sidecar(outcome.path)
    assert sidecar["verified"] is True and sidecar["verification"]["verdict"] == "passed"
    assert {check["name"] for check in sidecar["verification"]["checks"]} == {check.name for check in outcome.checks}
    recorded = json.loads((folder / "verify.json").read_text())
    assert names | {"weights"} <= {check["name"] for check in recorded["checks"]}
    (entry,) = recorded["weights"]["files"]
    assert (entry["file"], entry["bytes"]) == (name, sidecar["bytes"])


def has_half() -> bool:
    """Whether OpenVINO computes in fp16 on this processor."""
    return "FP16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"precision": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["model.onnx", "model.xml"])
def test_a_model_whose_outputs_are_tokens_is_verified(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = create_model(ARCH, {**ARGS, "num_classes": 0, "global_pool": ""})
    vc.save_model(model, tmp_path)
    vc.export(model, tmp_path / name, data=[(IMAGES, torch.zeros(len(IMAGES)).long())], **options)
    checks = vc.verify(tmp_path).checks
    own = {check.name: check.verdict for check in checks if name in check.name}
    if name == "model.xml" and options == {"precision": "fp16"} and not has_half():
        assert own.pop("agreement.model.xml") == "not_run"
    assert {*own.values()} == {"passed"}, checks
    vc.export(vc.prune(model, model.plan.delta(removed={"blocks.1.attn": "drop"})), tmp_path / name)
    assert not vc.verify(tmp_path).passed


def test_a_file_with_other_outputs_is_moved_away(folder: Path) -> None:
    done = write_file(folder, "openvino")
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("head").bias[0] += 3.0
    write_model(folder, model, Plan.from_json((folder / "plan.json").read_text()))
    outcome = verify_export(folder, done)
    assert outcome.verdict == "failed" and outcome.path == folder / "failed" / "model.xml"
    assert not list(folder.glob("model.xml*")) and not (folder / "model.bin").exists()
    assert {p.name for p in (folder / "failed").iterdir()} == {"model.xml", "model.bin", "model.xml.json"}
    assert read_sidecar(outcome.path)["verified"] is False
    recorded = json.loads((folder / "verify.json").read_text())
    assert not [check["name"] for check in recorded["checks"] if "model.xml" in check["name"]]


def test_a_file_with_a_weight_that_is_not_the_models_is_moved_away(folder: Path) -> None:
    done = write_file(folder)
    assert verify_export(folder, done).verdict == "passed"
    add_unused_weight(done.path)
    outcome = verify_export(folder, done)
    failed = {check.name for check in outcome.checks if check.verdict == "failed"}
    assert (outcome.verdict, failed) == ("failed", {"weights.model.onnx"})
    assert "left_over" in outcome.reason
    assert outcome.path == folder / "failed" / "model.onnx" and not list(folder.glob("model.onnx*"))
    sidecar = read_sidecar(outcome.path)
    assert (sidecar["verified"], sidecar["verification"]["verdict"]) == (False, "failed")
    recorded = json.loads((folder / "verify.json").read_text())  # has no checks of files that are not in the folder
    assert recorded["passed"] is True and recorded["weights"]["files"] == []
    assert not [c["name"] for c in recorded["checks"] if c["name"].startswith("onnx.") or "model.onnx" in c["name"]]


def test_a_file_that_cannot_run_here_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(folder), "--precision", "bf16", "--json"]
    for more, code in (([], 0), (["--require-verified"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(words + more)
        assert ended.value.code == code
        result = json.loads(capsys.readouterr().out)
        assert (result["verdict"], result["verified"]) == ("not_run", False)
        (check,) = (check for check in result["checks"] if check["verdict"] == "not_run")
        assert "bf16" in check["detail"] and check["command"].startswith("vitcompress verify")
    assert read_sidecar(folder / "model-bf16.onnx")["verified"] is False
    with pytest.raises(DeviceError, match="bf16"):
        open_runner(folder / "model-bf16.onnx")


def test_on_a_gpu_it_runs_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the printed command would be useless: the CPU of that machine has no kernels either."""
    half, plain = (write_file(folder, options=ExportOptions(precision=kind)).path for kind in ("bf16", "fp32"))
    devices: dict[str, str | None] = {}

    def recorded(path: Path, *, device: str | None, trust: bool) -> Runner:
        devices[path.name] = device
        raise DeviceError("not here")

    monkeypatch.setattr(outputs, "open_runner", recorded)
    original = Original(load_model(folder), IMAGES)
    for gpu, device in ((False, None), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for path in (half, plain):
            assert output_checks(path, original)[0].verdict == "not_run"
        assert devices == {"model-bf16.onnx": device, "model.onnx": None}


def test_an_engine_is_verified_by_its_own_outputs() -> None:
    """In bf16 its ONNX file may have no kernels elsewhere; wrong outputs of that file fail the engine."""
    engine = Path("model.engine")
    for own, source, verdict in (
        ("passed", "not_run", "passed"),
        ("passed", "failed", "failed"),
        ("not_run", "passed", "not_run"),
    ):
        checks = [Check("agreement.model.engine.kl", own), Check("agreement.model.engine.onnx", source)]
        assert file_status(engine, checks) == verdict
        assert file_status(Path("model.engine.onnx"), checks[1:]) == source


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "not_run"], "not_run"),
        (["passed", "not_run", "failed"], "failed"),
        (["failed"], "failed"),
        (["not_run"], "not_run"),
        ([], "not_run"),
    ],
)
def test_the_status_of_several_checks(verdicts: list[Status], expected: str) -> None:
    checks = [Check(f"agreement.model.onnx.{number}", verdict) for number, verdict in enumerate(verdicts)]
    assert file_status(Path("model.onnx"), checks) == expected


def test_weights_alone_verify_no_file_and_can_fail_it() -> None:
    path, kl = Path("model.onnx"), Check("agreement.model.onnx.kl", "passed")
    for weights, checks, verdict in (
        ("passed", [], "not_run"),
        ("passed", [kl], "passed"),
        ("failed", [kl], "failed"),
        ("not_run", [kl], "passed"),
    ):
        assert file_status(path, [Check("weights.model.onnx", weights), *checks]) == verdict


def test_an_export_replaces_the_failed_check_of_a_rejected_one(folder: Path) -> None:
    reject_export(folder, "model.onnx", "its outputs differ")
    assert CliRunner().invoke(cli.main, ["verify", str(folder)]).exit_code == 1
    assert CliRunner().invoke(cli.main, ["export", str(folder)]).exit_code == 0
    recorded = json.loads((folder / "verify.json").read_text())
    assert recorded["passed"] and "export.model.onnx" not in {check["name"] for check in recorded["checks"]}


def test_a_rejected_export_fails_its_folder_until_it_is_there(folder: Path) -> None:
    reject_export(folder, "model.onnx", "its outputs differ")
    check = {check.name: check for check in verify_folder(folder, IMAGES).checks}["export.model.onnx"]
    assert (check.verdict, check.detail) == ("failed", "its outputs differ")
    write_file(folder)
    again = verify_folder(folder, IMAGES)
    assert again.passed and "export.model.onnx" not in {check.name for check in again.checks}


def test_the_command_for_a_file_outside_of_its_run_folder_copies_and_verifies_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "else where" / "model-bf16.onnx"
    with pytest.raises(SystemExit):
        main(["export", str(folder), "--precision", "bf16", "--out", str(out), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    (command,) = {check["command"] for check in checks if check["verdict"] == "not_run"}
    copied, verified = command.split(" && ")
    subprocess.run(shlex.split(copied), check=True)
    assert verified == f"vitcompress verify {folder}"
    assert f"agreement.{out.name}" in {check.name for check in verify_folder(folder).checks}


def test_a_folder_is_checked_with_all_its_files(folder: Path) -> None:
    plain, openvino = write_file(folder), write_file(folder, "openvino")
    assert "runs everywhere" in plain.opset_reason and "OpenVINO" in openvino.opset_reason
    updates: list[tuple[str, int, int, str]] = []
    progress = Progress()
    progress.update = lambda label, done, total, text="": updates.append((label, done, total, text))  # type: ignore[method-assign]
    verification = verify_folder(folder, IMAGES, progress=progress)
    files = [update for label, *update in updates if label == "files checked"]
    assert files == [[0, 2, "model.onnx"], [1, 2, "model.xml"], [2, 2, ""]]
    names = {check.name for check in verification.checks if check.verdict == "passed"}
    assert {"agreement.model.onnx.flips", "agreement.model.xml.error"} <= names
    assert verification.passed
    assert {"weights.model.onnx", "weights.model.xml", "model.xml.file"} <= names
    assert read_sidecar(folder / "model.onnx")["verified"] is True


def test_a_file_of_any_name_is_checked_with_its_folder(folder: Path) -> None:
    write_file(folder, out=folder / "edge.onnx")
    (folder / "notes.onnx").write_bytes(b"not an export of this model")
    names = {"agreement.edge.onnx.error", "weights.edge.onnx", "onnx.edge.idle", "onnx.edge.file"}
    verification = verify_folder(folder, IMAGES)
    assert verification.passed and names <= {check.name for check in verification.checks if check.verdict == "passed"}
    assert read_sidecar(folder / "edge.onnx")["verified"] is True
    add_unused_weight(folder / "edge.onnx")
    failed = {check.name for check in verify_folder(folder, IMAGES).checks if check.verdict == "failed"}
    assert "weights.edge.onnx" in failed and not any("notes" in name for name in failed)


@pytest.mark.parametrize(("images", "most"), [(100, 16), (10, 10)])
def test_the_source_of_an_engine_runs_at_the_batches_of_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, images: int, most: int
) -> None:
    path = write_file(folder).path
    amend_sidecar(path, build={"batch": [2, 8, 16]})
    model = load_model(folder)
    monkeypatch.setattr(outputs, "WORK", images * count_cost(model, (3, 8, 8)).macs)
    checks = output_checks(path, Original(model, IMAGES))
    ends = {(check.verdict, check.detail.split("on cpu, ")[1]) for check in checks}
    assert ends == {("passed", f"batch 2, 3, 5, 8, {most}")}


def test_openvino_never_computes_in_another_precision(folder: Path) -> None:
    path = write_file(folder, "openvino").path
    expected = load_model(folder)(IMAGES).detach()
    for precision, share in (("fp32", 1e-3), ("bf16", 8e-2), ("fp16", 1e-2)):
        try:
            runner = open_runner(path, precision=precision)
        except DeviceError as error:
            assert precision in error.message  # this processor has no such arithmetic
            continue
        assert runner.describe()["precision"] == precision
        error = outputs.compare(expected, runner(IMAGES), Limits(share, share)).error
        assert error <= share and (precision == "fp32" or error > 1e-6)


def test_the_check_reports_the_precision_that_openvino_chooses(folder: Path) -> None:
    """On processors with bf16 that is bf16, also for an fp32 file, which its logits show."""
    done = write_file(folder, "openvino")
    assert done.build["settings"] == {"INFERENCE_PRECISION_HINT": "f32"}
    model = load_model(folder)
    used = open_runner(done.path, precision="default").describe()["precision"]
    flips = output_checks(done.path, Original(model, IMAGES))[0]
    assert flips.verdict == "passed"
    assert (f"it runs in {used} here, within the limits of {used}" in flips.detail) is (used != "fp32")
    with torch.no_grad():
        model.get_submodule("head").weight.neg_()
    wrong = output_checks(done.path, Original(model, IMAGES))[0]
    assert wrong.verdict == "failed" and (f"note: beyond the limits of {used}" in wrong.detail) is (used != "fp32")
    file = {"file": "model.xml", "format": "openvino", "precision": "fp32"}
    assert "'INFERENCE_PRECISION_HINT': 'f32'" in snippet(vars(input_config(model)), file).replace('"', "'")


SIGNALED = """
import signal, sys
from pathlib import Path
from vitcompress.exporters.openvino.runner import OpenVinoRunner
from vitcompress.exporters.runner import RunnerOptions

first, second = (OpenVinoRunner(Path(sys.argv[1]), RunnerOptions()) for _ in range(2))
first.close(), second.close()
del first, second
signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
signal.raise_signal(signal.SIGUSR1)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of POSIX")
def test_signals_arrive_after_two_openvino_models(folder: Path) -> None:
    """Each core of OpenVINO installs a signal stack; that of the first must not remain when its memory is released."""
    path = write_file(folder, "openvino").path
    done = subprocess.run([sys.executable, "-c", SIGNALED, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def test_rounding_replaces_the_limits_of_the_share_only_if_it_explains_more() -> None:
    """Errors of 0.6 of the norm of the logits turn them by an angle whose sine is 0.6, larger ones by any angle."""
    exact = torch.tensor([[1.0, 0.0]])
    for kl, norm, allowed in ((0.5, 0.6, (0.5, 0.2)), (0.5, 1.1, (0.5, 2.0)), (0.001, 0.01, (0.02, 0.005))):
        limits = Limits(0.1, 0.1, norm=norm, kl=kl)
        comparison = outputs.compare(exact, exact, limits)
        checks = {check.name: check.tolerance for check in comparison_checks(comparison, limits, "x", "s")}
        assert (checks["x.kl"], checks["x.cosine"]) == pytest.approx(allowed)


@pytest.mark.parametrize(("evaluations", "error", "kl"), [(0, 1e-3, 1.0), (1, 1e-3, 1.0), (2, 1e-3, 2.0)])
def test_the_error_is_at_most_the_share_and_evaluations_add(evaluations: int, error: float, kl: float) -> None:
    """Two evaluations in fp32, as of a file that takes bytes: their divergences add. The logits are large."""
    exact = torch.randn(5, 3, dtype=torch.float64)
    original: Any = Original(torch.nn.Identity(), torch.zeros(5, 1))
    vars(original).update(exact=lambda images: exact, rounding=lambda images, kind: Rounding(9.0, 0.0, 1.0))
    calls = [(torch.arange(5), exact.float())]
    limits = outputs._limits(original, original.images, ["fp32"], evaluations)
    checks = outputs._call_checks("x", original, original.images, calls, limits, "s")
    allowed = {check.name.rpartition(".")[2]: check.tolerance for check in checks}
    assert (allowed["error"], allowed["kl"]) == pytest.approx((error, kl))


def test_each_image_has_its_own_limit_of_the_angle() -> None:
    """Rounding explains any direction of logits that are all small, and no other direction of large ones."""
    small, large, limits = torch.tensor([1e-6, 0.0]), torch.tensor([0.0, 1.0]), Limits(1e-3, 1e-3, norm=1e-5)
    for turned, verdict in ((torch.stack([-small, large]), "passed"), (torch.stack([small, large.flip(0)]), "failed")):
        comparison = outputs.compare(torch.stack([small, large]), turned, limits)
        checks = {check.name: check.verdict for check in comparison_checks(comparison, limits, "x", "s")}
        assert checks["x.cosine"] == verdict


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_small_logits_of_one_image_do_not_fail_a_file_in_half_precision(folder: Path, precision: str) -> None:
    """Rounding turns its logits by a large angle, as those of a classifier of few classes that is undecided."""
    model = load_model(folder)
    with torch.no_grad():
        cast(Any, model).head.bias.sub_(0.999 * model(IMAGES)[0])
    write_model(folder.with_name("small"), model, plan_of(model))
    path = export_folder(folder.with_name("small"), options=ExportOptions(precision)).path
    checks = {check.name.rpartition(".rounded.")[2]: check for check in rounded_checks(path, Original(model, IMAGES))}
    assert {check.verdict for check in checks.values()} == {"passed"}
    assert checks["cosine"].value > SHARES[precision] ** 2 / 2
