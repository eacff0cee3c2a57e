"""Exported files are asked what the model is asked: what agrees is verified, what does not is moved away."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damage import carry

from vitcompress.cli import main
from vitcompress.errors import DeviceError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import Runner, open_runner
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar
from vitcompress.io.checks import Check
from vitcompress.io.progress import Progress
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.cost import count_cost
from vitcompress.models.create import create_model
from vitcompress.pipeline.export_folder import export_folder, settle
from vitcompress.plan import Plan
from vitcompress.surgery import apply_to_copy
from vitcompress.verify import outputs, quarantine

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 3, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose logits differ enough for answers to be told apart."""
    plan = Plan(ARCH, ARGS, removed={"blocks.1.attn": "drop"})
    model = apply_to_copy(create_model(ARCH, ARGS), plan)
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(30)
    write_model(tmp_path / "run", model, plan)
    return tmp_path / "run"


def test_asking_a_model_leaves_it_in_its_own_precision() -> None:
    model = create_model(ARCH, ARGS).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert outputs.model_answers(model, IMAGES).dtype == torch.float32
    after = model.state_dict()
    assert all(tensor.dtype == torch.float64 and torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("onnx", ExportOptions(precision="fp16", islands=("norm", "softmax", "head"))),
        ("onnx", ExportOptions(uint8=True)),
        ("openvino", ExportOptions(uint8=True)),
    ],
)
def test_what_answers_as_the_model_is_verified(folder: Path, format: str, options: ExportOptions) -> None:
    settled = settle(folder, export_folder(folder, format, options=options))
    assert settled.verdict == "passed", settled.checks
    name = settled.path.name
    answers = {f"agreement.{name}.{kind}" for kind in ("flips", "kl", "cosine", "error")}
    asked = answers | {f"weights.{name}", f"weights.{name}.bytes"}
    assert asked <= {check.name for check in settled.checks} == {c.name for c in settled.checks if "." in c.name}
    sidecar = read_sidecar(settled.path) or {}
    assert sidecar["verified"] is True and sidecar["verification"]["verdict"] == "passed"
    assert {check["name"] for check in sidecar["verification"]["checks"]} == {check.name for check in settled.checks}
    ledger = json.loads((folder / "verify.json").read_text())
    assert asked | {"weights"} <= {check["name"] for check in ledger["checks"]}
    (entry,) = ledger["weights"]["files"]
    assert (entry["file"], entry["bytes"]) == (name, sidecar["bytes"])


def test_what_does_not_is_moved_away(folder: Path) -> None:
    done = export_folder(folder, "openvino")
    model = load_model(folder)
    with torch.no_grad():
        model.get_submodule("head").bias[0] += 3.0
    write_model(folder, model, Plan.from_json((folder / "plan.json").read_text()))
    settled = settle(folder, done)
    assert settled.verdict == "failed" and settled.path == folder / "failed" / "model.xml"
    assert not list(folder.glob("model.xml*")) and not (folder / "model.bin").exists()
    assert {p.name for p in (folder / "failed").iterdir()} == {"model.xml", "model.bin", "model.xml.json"}
    assert (read_sidecar(settled.path) or {})["verified"] is False
    assert json.loads((folder / "verify.json").read_text())["passed"] is False


def test_what_answers_as_the_model_and_carries_a_weight_that_is_not_its_own_is_moved_away(folder: Path) -> None:
    done = export_folder(folder)
    assert settle(folder, done).verdict == "passed"
    carry(done.path)
    settled = settle(folder, done)
    failed = {check.name for check in settled.checks if check.verdict == "failed"}
    assert (settled.verdict, failed) == ("failed", {"weights.model.onnx", "weights.model.onnx.bytes"})
    assert "left_over" in settled.reason
    assert settled.path == folder / "failed" / "model.onnx" and not list(folder.glob("model.onnx*"))
    sidecar = read_sidecar(settled.path) or {}
    assert (sidecar["verified"], sidecar["verification"]["verdict"]) == (False, "failed")
    ledger = json.loads((folder / "verify.json").read_text())
    assert {c["name"] for c in ledger["checks"] if not c["passed"]} == failed and ledger["passed"] is False


def test_what_cannot_run_here_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(folder), "--precision", "bf16", "--json"]
    for more, code in (([], 0), (["--require-verified"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(words + more)
        assert ended.value.code == code
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict"], found["verified"]) == ("not_run", False)
        assert "bf16" in found["checks"][0]["detail"] and found["checks"][0]["command"].startswith("vitcompress verify")
    assert (read_sidecar(folder / "model-bf16.onnx") or {})["verified"] is False
    with pytest.raises(DeviceError, match="bf16"):
        open_runner(folder / "model-bf16.onnx")


def test_on_a_gpu_it_is_asked_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that was printed would otherwise settle nothing: the CPU has no kernels on that machine either."""
    half, plain = (export_folder(folder, options=ExportOptions(precision=kind)).path for kind in ("bf16", "fp32"))
    asked: dict[str, str | None] = {}

    def remembered(path: Path, *, device: str | None) -> Runner:
        asked[path.name] = device
        raise DeviceError("not here")

    monkeypatch.setattr(outputs, "open_runner", remembered)
    model = load_model(folder)
    for gpu, device in ((False, None), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for path in (half, plain):
            assert outputs.file_checks(model, path, IMAGES)[0].verdict == "not_run"
        assert asked == {"model-bf16.onnx": device, "model.onnx": None}


def test_an_engine_is_verified_by_its_own_answers() -> None:
    """In bf16 the ONNX file beneath it may have no kernels elsewhere; one that answers wrongly fails the engine."""
    engine = Path("model.engine")
    for own, beneath, verdict in (
        ("passed", "not_run", "passed"),
        ("passed", "failed", "failed"),
        ("not_run", "passed", "not_run"),
    ):
        checks = [Check("agreement.model.engine.kl", own), Check("agreement.model.engine.onnx", beneath)]
        assert quarantine.record(engine, checks) == verdict
        assert quarantine.record(Path("model.engine.onnx"), checks[1:]) == beneath


def test_weights_alone_verify_no_file_and_can_fail_it() -> None:
    path, answers = Path("model.onnx"), Check("agreement.model.onnx.kl", "passed")
    for weights, asked, verdict in (
        ("passed", [], "not_run"),
        ("passed", [answers], "passed"),
        ("failed", [answers], "failed"),
        ("not_run", [answers], "passed"),
    ):
        assert quarantine.verdict(path, [Check("weights.model.onnx", weights), *asked]) == verdict


def test_checks_are_told_from_those_of_files_with_longer_names() -> None:
    path = Path("model.onnx")
    for name in ("agreement.model.onnx", "agreement.model.onnx.kl", "weights.model.onnx", "weights.model.onnx.bytes"):
        assert quarantine.is_about(path, name)
    for name in ("agreement.model.onnx2.kl", "weights.model.onnx_old", "onnx.model.onnx", "weights", "agreement.model"):
        assert not quarantine.is_about(path, name)


def test_what_a_run_could_not_export_fails_its_folder_until_it_is_there(folder: Path) -> None:
    quarantine.refuse(folder, {"model.onnx": "its answers were others"})
    found = {check.name: check for check in quarantine.verify(folder, IMAGES).checks}["export.model.onnx"]
    assert (found.verdict, found.detail) == ("failed", "its answers were others")
    export_folder(folder)
    again = quarantine.verify(folder, IMAGES)
    assert again.passed and "export.model.onnx" not in {check.name for check in again.checks}


def test_a_file_outside_of_its_run_folder_is_brought_there_to_be_verified(
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
    assert f"agreement.{out.name}" in {check.name for check in quarantine.verify(folder).checks}


def test_a_folder_is_checked_with_all_its_files(folder: Path) -> None:
    plain, openvino = export_folder(folder), export_folder(folder, "openvino")
    assert "runs everywhere" in plain.opset_reason and "OpenVINO" in openvino.opset_reason
    seen: list[tuple[str, int, int, str]] = []
    progress = Progress()
    progress.update = lambda label, done, total, text="": seen.append((label, done, total, text))  # type: ignore[method-assign]
    found = quarantine.verify(folder, IMAGES, progress=progress)
    files = [told for label, *told in seen if label == "files asked"]
    assert files == [[0, 2, "model.onnx"], [1, 2, "model.xml"], [2, 2, ""]]
    names = {check.name for check in found.checks if check.verdict == "passed"}
    assert {"agreement.model.onnx.flips", "agreement.model.xml.error"} <= names
    assert found.passed
    assert {"weights.model.onnx", "weights.model.xml.bytes"} <= names
    assert (read_sidecar(folder / "model.onnx") or {})["verified"] is True


def test_a_file_of_any_name_is_checked_with_its_folder(folder: Path) -> None:
    export_folder(folder, out=folder / "edge.onnx")
    (folder / "notes.onnx").write_bytes(b"nobody says that this is the model")
    asked = {"agreement.edge.onnx.error", "weights.edge.onnx"}
    found = quarantine.verify(folder, IMAGES)
    assert found.passed and asked <= {check.name for check in found.checks if check.verdict == "passed"}
    assert (read_sidecar(folder / "edge.onnx") or {})["verified"] is True
    carry(folder / "edge.onnx")
    failed = {check.name for check in quarantine.verify(folder, IMAGES).checks if check.verdict == "failed"}
    assert "weights.edge.onnx" in failed and not any("notes" in name for name in failed)


@pytest.mark.parametrize(("images", "most"), [(100, 16), (10, 10)])
def test_the_file_beneath_an_engine_is_asked_at_its_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, images: int, most: int
) -> None:
    path = export_folder(folder).path
    amend_sidecar(path, build={"batch": [2, 8, 16]})
    model = load_model(folder)
    monkeypatch.setattr(outputs, "WORK", images * count_cost(model, (3, 8, 8)).macs)
    checks = outputs.file_checks(model, path, IMAGES)
    ends = {(check.verdict, check.detail.split("on cpu, ")[1]) for check in checks}
    assert ends == {("passed", f"batch 2, 3, 8, {most}")}


def test_openvino_never_computes_in_another_precision(folder: Path) -> None:
    path = export_folder(folder, "openvino").path
    expected = load_model(folder)(IMAGES).detach()
    for precision, share in (("fp32", 1e-3), ("bf16", 8e-2), ("fp16", 1e-2)):
        try:
            runner = open_runner(path, precision=precision)
        except DeviceError as error:
            assert precision in error.message  # this processor has no such arithmetic
            continue
        assert runner.describe()["precision"] == precision
        error = outputs.compare(expected, runner(IMAGES), share).error
        assert error <= share and (precision == "fp32" or error > 1e-6)


SIGNALLED = """
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
def test_signals_are_heard_after_two_openvino_models(folder: Path) -> None:
    """Each core of OpenVINO brings a signal stack along; the first one's must not stay behind without its memory."""
    path = export_folder(folder, "openvino").path
    done = subprocess.run([sys.executable, "-c", SIGNALLED, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr
