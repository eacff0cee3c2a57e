"""Exporting a run folder again, and what `doctor` says of this machine."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from whole_runs import RecordedProgress

from vitcompress import cli
from vitcompress.cli.output import tables
from vitcompress.errors import ArtifactError, InputError
from vitcompress.exporters import doctor
from vitcompress.exporters.base import Exported
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import read_classes
from vitcompress.exporters.tensorrt.flavours import RTX
from vitcompress.io import hardware
from vitcompress.io.files import lock_file
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import save_tensors
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import create_model, input_config
from vitcompress.pipeline import export_folder as exports
from vitcompress.pipeline.export_folder import export_folder, verify_export
from vitcompress.plan import Plan
from vitcompress.recipe.load import load_recipe
from vitcompress.surgery import apply_to_copy
from vitcompress.verify import folder as verify_module
from vitcompress.verify.folder import noise_images, verify_folder

ARCH = "vit_tiny_patch16_224"
ARGS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = Plan(ARCH, ARGS, removed={"blocks.1.attn": "drop"})
    write_model(tmp_path / "run", apply_to_copy(create_model(ARCH, ARGS), plan), plan)
    return tmp_path / "run"


TRACES: dict[Any, Any] = {}  # of the model of `folder`


def write_file(folder: Path, **arguments: Any) -> Exported:
    """`export_folder` of `folder`, whose model is traced once for all tests."""
    return export_folder(folder, traces=TRACES, **arguments)


def test_the_export_has_the_outputs_of_the_folder(folder: Path) -> None:
    done = export_folder(folder)
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    got = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    with torch.inference_mode():
        expected = load_model(folder)(images)
    # Float32 sums of at most 64 terms in 2 blocks: under 2**9 roundings of 2**-24 each, relative to the largest logit.
    torch.testing.assert_close(got, expected, rtol=0, atol=2.0**-15 * float(expected.abs().max()))
    assert json.loads(done.metadata["plan_sha256"]) == Plan.from_json((folder / "plan.json").read_text()).digest


def test_a_file_of_any_name_ends_the_check_that_none_was_exported(folder: Path) -> None:
    def recorded() -> set[str]:
        return {check["name"] for check in json.loads((folder / "verify.json").read_text())["checks"]}

    verify_folder(folder, noise_images(load_model(folder), Plan(ARCH, ARGS)))
    assert "onnx" in recorded()
    verify_export(folder, write_file(folder, out=folder / "m.onnx"))
    assert "onnx" not in recorded() and "onnx.m.file" in recorded()
    assert "onnx" not in {check.name for check in verify_folder(folder).checks}


def test_a_second_export_waits_until_the_first_one_is_verified(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, both, verify = list[str](), threading.Event(), exports.verify_export

    def write(*arguments: Any, **options: Any) -> Exported:
        events.append("export")
        if events.count("export") == 2:
            both.set()
        both.wait(0.5)  # for a second one that does not wait
        return write_file(folder)

    def check(*arguments: Any, **options: Any) -> exports.ExportOutcome:
        events.append("verify")
        return verify(*arguments, **options)

    def run(_: int) -> None:
        with suppress(SystemExit):
            cli.main(["export", str(folder), "-q", "--json"])

    monkeypatch.setattr(exports, "export_folder", write)
    monkeypatch.setattr(exports, "verify_export", check)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert events == ["export", "verify"] * 2


def test_verify_waits_for_an_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its result, without the new file, replaces that of the export in verify.json."""
    events, started = list[str](), threading.Event()

    def verify(*arguments: Any, **options: Any) -> Any:
        events.append("verify")
        started.set()
        return verify_folder(*arguments, **options)

    def run() -> None:
        with suppress(SystemExit):
            cli.main(["verify", str(folder), "-q", "--json"])

    monkeypatch.setattr(verify_module, "verify_folder", verify)
    with ThreadPoolExecutor(1) as pool, lock_file(folder / "plan.json"):
        pool.submit(run)
        started.wait(2)  # for one that does not wait
        events.append("export")
    assert events == ["export", "verify"]


def test_class_names_stay_and_a_precision_gets_a_file_of_its_own(folder: Path) -> None:
    assert read_classes(folder / "model.onnx") == ()
    model = load_model(folder)
    about: Any = {"input": input_config(model), "traces": TRACES}
    export(model, folder / "model.onnx", classes=("ant", "bee", "cow"), **about)
    before = (folder / "model.onnx").read_bytes()
    done = write_file(folder, options=ExportOptions(precision="fp16"))
    assert done.path.name == "model-fp16.onnx" and (folder / "model.onnx").read_bytes() == before
    assert json.loads(done.metadata["classes"]) == ["ant", "bee", "cow"]


def test_an_export_beside_a_file_of_another_precision_or_input_gets_the_whole_label(folder: Path) -> None:
    """As a recipe with export.precision or export.uint8 writes model.onnx."""
    model = load_model(folder)
    for other in (ExportOptions(uint8=True), ExportOptions(precision="fp16")):
        export(model, folder / "model.onnx", input=input_config(model), options=other, traces=TRACES)
        before = (folder / "model.onnx").read_bytes()
        for _ in range(2):  # the second one replaces the first
            assert write_file(folder).path.name == "model-fp32-float32.onnx"
        assert (folder / "model.onnx").read_bytes() == before
    assert write_file(folder, options=ExportOptions(uint8=True)).path.name == "model-uint8.onnx"


def test_invalid_exports_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean onnx"):
        export_folder(folder, "onxx")
    with pytest.raises(InputError, match="sm is 80"):
        export_folder(folder, options=ExportOptions(sm=(80,)))
    with pytest.raises(InputError, match="name of a file of the dense model"):
        export_folder(folder, out=folder / "dense-2.onnx")
    with pytest.raises(ArtifactError):
        export_folder(tmp_path)
    assert not list(folder.glob("*.onnx"))


@pytest.mark.parametrize("name", ["state", "state/x", "failed", "tensorboard"])
def test_a_file_in_a_folder_of_the_run_itself_is_rejected(folder: Path, name: str) -> None:
    """A run removes these folders, and its manifest recorded the sidecar of the file alone."""
    with pytest.raises(InputError, match=f"is in {name.partition('/')[0]}, which belongs to the run"):
        export_folder(folder, out=folder / name / "m.onnx")


def test_a_note_states_that_a_file_in_a_subfolder_is_in_no_manifest(folder: Path, tmp_path: Path) -> None:
    for out, noted in ((folder / "deploy" / "m.onnx", True), (folder / "m.onnx", False), (tmp_path / "m.onnx", False)):
        progress = RecordedProgress()
        write_file(folder, out=out, progress=progress)
        assert any("is in a subfolder of the run" in note for note in progress.notes) is noted


def test_a_run_that_is_not_finished_is_not_exported(folder: Path) -> None:
    (folder / "recipe.toml").write_text("")
    with pytest.raises(ArtifactError, match="is not finished"):
        write_file(folder)
    (folder / "report.json").write_text("{}")
    assert write_file(folder).path.is_file()


def test_doctor_describes_this_machine() -> None:
    facts = doctor.examine()
    assert (
        facts["versions"]["torch"] == torch.__version__.split("+")[0] or facts["versions"]["torch"] == torch.__version__
    )
    if not torch.cuda.is_available():
        assert facts["devices"]["cuda"] is None
    assert {item["package"]: item["present"] for item in facts["optional"]}["sklearn"] is True
    targets = {row["target"]: row for row in facts["targets"]}
    assert set(EXPORTERS) < set(targets)
    for name in ("onnx", "onnxruntime CPUExecutionProvider", "torch cpu"):
        assert targets[name]["run"] is targets[name]["measure"] is None and targets[name]["version"]
    tensorrt = targets["onnxruntime TensorrtExecutionProvider"]
    assert tensorrt["run"] is None or "pip install" in tensorrt["run"] or "GPU" in tensorrt["run"]
    if not torch.cuda.is_available():
        assert targets["torch cuda"]["run"] and targets["onnxruntime CUDAExecutionProvider"]["run"]
    json.dumps(facts)


def test_doctor_reports_each_package_and_nothing_about_all(capsys: pytest.CaptureFixture[str]) -> None:
    facts = doctor.examine()
    facts["optional"] = [{**item, "present": item["package"] != "tensorboard"} for item in facts["optional"]]
    tables.print_doctor(facts)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "matplotlib (plots of reports and diagnostics): installed" in lines
    assert "tensorboard (training curves): pip install tensorboard" in lines
    assert not any("all optional" in line for line in lines)


def test_doctor_separates_what_is_missing_from_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == "openvino" else find_spec(name, *rest))
    tables.print_doctor(doctor.examine())
    lines = capsys.readouterr().out.splitlines()
    assert "    openvino: pip install 'vitcompress[openvino]'" in lines[lines.index("  openvino is not installed") :]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_lists_what_to_do_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    tables.print_doctor(doctor.examine())
    lines = capsys.readouterr().out.splitlines()
    assert "    torch cuda: built without CUDA, see pytorch.org" in lines
    assert "    trt-rtx: run it on the target" in lines or RTX.problem()


@pytest.mark.parametrize(
    ("cpu", "fast", "slow"),
    [
        ("flags : avx2 avx512f avx512_vnni avx512_bf16", {"fp32", "bf16", "int8", "int8+bf16"}, ""),
        ("flags : avx2", {"fp32"}, "int8: no VNNI"),
        ("flags : avx2 avx_vnni", {"fp32", "int8"}, "bf16: no BF16"),
        ("Features : asimddp", {"fp32", "int8"}, "int8+bf16: no BF16"),
        ("", {"fp32"}, "int8: the instruction sets of the processor are unknown here"),
    ],
)
def test_doctor_names_the_precisions_that_are_fast(
    cpu: str,
    fast: set[str],
    slow: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu.replace(" :", "\t:"))
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    facts = doctor.examine()
    assert {name for name, reason in facts["precisions"].items() if not reason} == fast
    tables.print_doctor(facts)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith(slow) for line in lines)


def test_int8_where_the_images_of_the_run_are_not_states_how_to_export(folder: Path) -> None:
    moved = ["data.source=imagefolder", f"data.path={folder / 'none'}"]
    (folder / "recipe.toml").write_text(load_recipe("digits_hetdpt", moved).to_toml())
    (folder / "report.json").write_text("{}")
    with pytest.raises(InputError, match=r"int8 needs images: .*none does not exist") as caught:
        write_file(folder, options=ExportOptions(precision="int8"))
    assert "in --data, or pass data to vitcompress.export" in str(caught.value.hint)


def test_int8_without_training_images_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match="needs training images, and"):
        write_file(folder, options=ExportOptions(precision="int8"))
    with pytest.raises(InputError, match=r"no layer 'blocks\.1\.attn'"):
        write_file(folder, options=ExportOptions(precision="int8", islands=("blocks.1.attn",)))
    assert not list(folder.glob("*.onnx*"))


@pytest.mark.parametrize("present", [True, False])
def test_fp32_layers_are_chosen_on_training_images_where_they_are(
    present: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test images that the folder keeps make no choices, unless nothing else is there, as a note states."""
    data = load_recipe("digits_hetdpt", [] if present else ["data.source=imagefolder", f"data.path={folder / 'none'}"])
    (folder / "recipe.toml").write_text(data.to_toml())
    (folder / "report.json").write_text("{}")
    tests = torch.full((70, 1, 8, 8), 0.5)
    save_tensors(RunFolder(folder).recorded_outputs, {"images": tests, "logits": torch.zeros(70, 3)})
    seen, progress = list[torch.Tensor](), RecordedProgress()
    monkeypatch.setattr(exports, "write_export", lambda exporter, original, *_, **__: seen.append(original.images))
    for islands in ("auto",), ("norm",):
        write_file(folder, options=ExportOptions(precision="fp16", islands=islands), progress=progress)
    auto, named = seen
    assert named.equal(tests[:64]) and auto.shape == named.shape and auto.equal(named) is not present
    assert ["chosen on test images: fp16 needs images" in note for note in progress.notes] == [True] * (not present)
