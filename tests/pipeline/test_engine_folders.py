"""Run folders with an engine: checks without running it, failures, and invalid options."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_runs
from click.testing import CliRunner

from vitcompress import surgery
from vitcompress.cli import main
from vitcompress.errors import InputError
from vitcompress.exporters.options import ExportOptions
from vitcompress.exporters.precision import HALF
from vitcompress.exporters.runtimes import EXPORTERS
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar
from vitcompress.exporters.tensorrt import runner
from vitcompress.io.checks import Check
from vitcompress.io.files import file_sha256
from vitcompress.io.tensors import tensor_bytes
from vitcompress.models.checkpoint import read_plan, write_model
from vitcompress.models.create import create_model
from vitcompress.pipeline import job
from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.export_folder import _describe_other, export_folder, verify_export
from vitcompress.pipeline.run import run_recipe
from vitcompress.plan import Plan
from vitcompress.surgery.shapes import PlannedTensor
from vitcompress.verify.engine import _folded_check
from vitcompress.verify.folder import verify_folder

pytest.importorskip("tensorrt_rtx", reason="no such library for this platform")
TENSORRT_RTX = EXPORTERS["trt-rtx"]
ENGINE = "model-fp16.rtx.engine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder with an engine in it that the command line has exported."""
    arch = "vit_tiny_patch16_224"
    args = {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
    }
    plan, run = Plan(arch, args, removed={"blocks.1.attn": "drop"}), tmp_path_factory.mktemp("run") / "run"
    write_model(run, surgery.apply_to_copy(create_model(arch, args), plan), plan)
    words = ["export", str(run), "--format", "trt-rtx", "--precision", "fp16", "--sm", "89", "--batch", "1:2:4"]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["path"], result["verified"], result["build"]["sm"]) == ("model-fp16.rtx.engine", False, [89])
    if TENSORRT_RTX.cannot_run():
        commands = {check["command"] for check in result["checks"] if check["verdict"] == "not_run"}
        assert result["verdict"] == "not_run" and commands == {f"vitcompress verify {run}"}
    return run


def test_an_engine_is_verified_without_running_it(folder: Path) -> None:
    checks = {check.name: check for check in verify_folder(folder).checks}
    names = {f"{ENGINE}.{kind}" for kind in ("file", "metadata", "source", "source.idle", "source.file")}
    names |= {f"agreement.{ENGINE}.onnx.error", f"weights.{ENGINE}.onnx"}
    assert {name for name in names if checks[name].verdict != "passed"} == set()


@pytest.mark.parametrize(
    ("damaged", "fails"),
    [
        ("model-fp16.rtx.engine", {f"{ENGINE}.file", f"agreement.{ENGINE}"}),
        ("model-fp16.rtx.engine.json", {f"{ENGINE}.file", f"agreement.{ENGINE}"}),
        ("model-fp16.rtx.engine.onnx.json", {f"{ENGINE}.source.file", f"agreement.{ENGINE}.onnx"}),
    ],
)
def test_a_damaged_engine_fails_verification(damaged: str, fails: set[str], folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run")
    if damaged.endswith(".engine.json"):
        (copy / damaged).unlink()
    elif damaged.endswith(".json"):
        known = json.loads((copy / damaged).read_text())
        (copy / damaged).write_text(json.dumps({**known, "files": dict.fromkeys(known["files"], "0" * 64)}))
    else:
        (copy / damaged).write_bytes((copy / damaged).read_bytes()[:-1])
    checks = verify_folder(copy).checks
    assert {c.name for c in checks if c.verdict == "failed"} == fails


def test_an_engine_of_another_source_fails_verification(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "run")
    amend_sidecar(copy / ENGINE, source={**read_sidecar(copy / ENGINE)["source"], "sha256": "0" * 64})
    checks = verify_folder(copy).checks
    assert {c.name for c in checks if c.verdict == "failed"} == {f"{ENGINE}.source"}


def output_check(folder: Path) -> tuple[str, str, str | None]:
    """Verdict, detail and command of the output check of the engine; the folder's other checks pass."""
    verification = verify_folder(folder)
    (check,) = (check for check in verification.checks if check.name == f"agreement.{ENGINE}")
    assert verification.passed == (check.verdict != "failed")
    return check.verdict, check.detail, check.command


def claim(engine: Path, **build: Any) -> None:
    """Change the build in the sidecar, which then has the hash of the present file."""
    known = read_sidecar(engine)
    amend_sidecar(engine, build={**known["build"], **build}, files={engine.name: file_sha256(engine)})


def test_an_engine_of_another_version_runs_on_the_target(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    claim(copy / ENGINE, runtime_version="1.4.0.9")
    verdict, detail, command = output_check(copy)
    assert (verdict, command) == ("not_run", f"vitcompress verify {copy}")
    assert "built by TensorRT for RTX 1.4.0.9" in detail and "pip install tensorrt-rtx==1.4.0.9" in detail
    known = read_sidecar(copy / ENGINE)
    assert known["verified"] is False and known["verification"]["verdict"] == "not_run"


def test_an_engine_for_another_gpu_runs_on_the_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    monkeypatch.setattr(runner, "capability", lambda index: 75)  # a Turing GPU, which no test machine has
    verdict, detail, command = output_check(copy)
    assert (verdict, command) == ("not_run", f"vitcompress verify {copy}")
    assert "built for compute capability 89, but this GPU has 75" in detail and "--sm 75" in detail


@pytest.mark.parametrize("foreign", ["of the other library", "no engine", "with another hash"])
def test_a_foreign_engine_fails(foreign: str, folder: Path, tmp_path: Path) -> None:
    """Also where it could not run anyway, and whatever its sidecar says of versions."""
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    engine = copy / ENGINE
    data = engine.read_bytes()
    engine.write_bytes({"of the other library": b"ftrt" + data[4:], "no engine": bytes(100)}.get(foreign, data + b"x"))
    if foreign != "with another hash":
        claim(engine, runtime_version="1.4.0.9")
        amend_sidecar(engine, format="trt-rtx" if foreign == "of the other library" else "")
    assert output_check(copy)[0] == "failed"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, str]:
    """The command of a recipe, its run folder, and what it printed."""
    place = tmp_path_factory.mktemp("recipe")
    (place / "small.toml").write_text(whole_runs.SMALL)
    words = ["recipe", str(place / "small.toml"), "--out", str(place / "run"), "--export", "trt-rtx"]
    words += ["--structure-only", "--weights", "random", "--set", "export.sm=[89]", "--set", 'bench.runtimes=["torch"]']
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return words, place / "run", done.stderr


@pytest.mark.skipif(TENSORRT_RTX.cannot_run() is None, reason="about machines that cannot run the engine")
def test_a_recipe_warns_of_checks_that_did_not_run_and_fails_only_if_they_are_required(
    small: tuple[list[str], Path, str],
) -> None:
    words, run, printed = small
    assert "warning: not run here: agreement.model.rtx.engine" in printed
    assert f"on the target: vitcompress verify {run}" in printed
    again = CliRunner().invoke(main, [*words, "--require-verified"])
    assert again.exit_code == 1 and "not run here: agreement.model.rtx.engine" in again.stderr
    assert json.loads((run / "verify.json").read_text())["passed"] is True
    for name in ("verify.json", "report.json", "report.md", "bench.json"):
        assert str(run) not in (run / name).read_text(), name
    assert json.loads((run / "model.rtx.engine.json").read_text())["verified"] is False


def test_a_folded_layer_is_in_the_engine_and_the_pair_is_not(
    small: tuple[list[str], Path, str], tmp_path: Path
) -> None:
    _, run, _ = small
    before = {check.name: check for check in verify_folder(run).checks}
    weights = before["weights.model.rtx.engine"]
    assert weights.verdict == "passed"
    assert weights.detail.startswith("1 of 1 folded layers are in the engine")
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "manifest.json").unlink()  # would report the changes below before all other checks
    shutil.copy(copy / "dense.rtx.engine", copy / "model.rtx.engine")  # untrained: it has the layers of the pair
    amend_sidecar(copy / "model.rtx.engine", files={"model.rtx.engine": file_sha256(copy / "model.rtx.engine")})
    after = {check.name: check for check in verify_folder(copy, adopt=True).checks}
    assert after["model.rtx.engine.file"].verdict == "passed"
    weights = after["weights.model.rtx.engine"]
    assert weights.verdict == "failed" and "mlp.fc1.weight was folded, but is in the engine" in weights.detail


@pytest.mark.skipif(TENSORRT_RTX.cannot_run() is None, reason="about machines that cannot run the engine")
@pytest.mark.parametrize("name", ["m.engine", "m.rtx.engine"])
def test_a_required_check_that_did_not_run_fails(name: str, folder: Path, tmp_path: Path) -> None:
    words = ["export", str(folder), "--format", "trt-rtx", "--sm", "89", "--batch", "1:2:4"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / name), "--require-verified"])
    assert done.exit_code == 1 and "could not be verified here" in done.stderr and (tmp_path / name).is_file()


def test_an_engine_for_other_gpus_is_not_replaced(folder: Path) -> None:
    words = ["export", str(folder), "--format", "trt-rtx", "--precision", "fp16", "--out", str(folder / ENGINE), "--sm"]
    done = CliRunner().invoke(main, [*words, "120", "--json"])
    assert done.exit_code == 2 and "format, precision or input, or for other GPUs (trt-rtx, fp16, " in done.stdout


def test_a_file_is_that_of_its_format_and_its_set_of_gpus(folder: Path) -> None:
    options = ExportOptions(precision="fp16", sm=tuple(read_sidecar(folder / ENGINE)["build"]["sm"]) * 2)
    assert _describe_other(folder / ENGINE, "trt-rtx", options) is None
    assert str(_describe_other(folder / ENGINE, "trt", options)).startswith("trt-rtx, fp16, ")


def test_an_export_records_the_checks_of_the_inspector(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    exported = export_folder(copy, "trt-rtx", options=ExportOptions(precision="fp16", sm=(89,), batch=(1, 2, 4)))
    truth = [Check("engine.attention", "failed", detail="not fused").to_dict()]
    amend_sidecar(exported.path, build={**read_sidecar(exported.path)["build"], "truth": truth})
    verify_export(copy, exported)
    recorded = json.loads((copy / "verify.json").read_text())
    assert {c["name"]: c["verdict"] for c in recorded["checks"]}[f"{ENGINE}.attention"] == "failed"
    assert not recorded["passed"]


def test_checks_of_a_source_that_is_no_longer_kept_are_removed(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    words = ["export", str(copy), "--format", "trt-rtx", "--precision", "fp16", "--sm", "89", "--batch", "1:2:4"]
    for more, kept in ([], True), (["--no-onnx"], False):
        CliRunner().invoke(main, [*words, *more])
        checks = {check["name"]: check for check in json.loads((copy / "verify.json").read_text())["checks"]}
        assert (f"{ENGINE}.source.checker" in checks) is kept
    assert not checks[f"{ENGINE}.source"]["applies"], "no machine can run it"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--format", "trt-rtx", "--sm", "90"], "data center GPUs"),
        (["--format", "trt-rtx", "--sm", "ampere"], "expected compute capabilities"),
        (["--format", "trt-rtx", "--batch", "8:4:16"], "not in ascending order"),
        (["--format", "trt-rx"], "did you mean trt-rtx"),
        (["--format", "trt-rtx", "--precision", "fp8", "--sm", "80"], "fp8"),
        (["--format", "trt-rtx", "--timing-cache", "cache"], "timing_cache is cache"),
        (["--format", "trt-rtx", "--opset", "23"], "half precision only, but the precision is fp32"),
        (["--format", "onnx", "--sm", "89"], "the format onnx has no such option"),
    ],
)
def test_invalid_options_are_one_message_and_leave_nothing(words: list[str], says: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    done = CliRunner().invoke(main, ["export", str(folder), *words, "--json"])
    assert done.exit_code == 2 and says in json.loads(done.stdout)["error"] and sorted(folder.iterdir()) == before


def test_unequal_widths_in_one_attention_node_are_rejected_before_the_build(folder: Path, tmp_path: Path) -> None:
    plan = read_plan(folder / "plan.json")
    args, qk = plan.arch_args, "blocks.0.qk"
    narrow = replace(plan, kept={qk: tuple(range(0, 16, 2))})
    run = tmp_path / "run"
    write_model(run, surgery.apply_to_copy(create_model(plan.arch, args), narrow), narrow)
    words = ["export", str(run), "--precision", "fp16", "--opset", "23", "--json", "--format"]
    before = sorted(run.iterdir())
    done = CliRunner().invoke(main, [*words, "trt-rtx"])
    printed = json.loads(done.stdout)
    assert done.exit_code == 2 and sorted(run.iterdir()) == before
    assert printed["error"].startswith("each head of blocks.0.attn has 4 channels in q and k and 8 in v;")
    assert "--opset 20" in printed["hint"]
    assert CliRunner().invoke(main, [*words, "onnx"]).exit_code == 0, "ONNX takes any widths"


@pytest.mark.parametrize(
    ("step", "opset", "code"),
    [("", 23, 2), ('layout = "tied"', 23, 0), ('layout = "padded"', 23, 0), ("", 22, 0)],
)
def test_a_recipe_with_possibly_unequal_widths_is_rejected_before_the_training(
    step: str, opset: int, code: int, tmp_path: Path
) -> None:
    sero = whole_runs.with_steps(f'method = "sero"\nsparsity = 0.5\nepochs = 2\nround_to = 1\n{step}')
    text = f'{sero}\n[export]\nformats = ["trt-rtx"]\nprecision = "fp16"\nopset = {opset}\n'
    recipe = whole_runs.recipe(tmp_path, text=text)
    missing = dry_run_recipe(recipe, job.RunOptions(out=tmp_path / "run")).missing
    assert len(missing) == (1 if code else 0)
    if code:
        with pytest.raises(InputError, match="step 1, sero, may give q and k another width than v") as caught:
            run_recipe(recipe, job.RunOptions(out=tmp_path / "run"))
        assert "step.0.layout=tied" in str(caught.value.hint) and str(caught.value.hint) in missing[0]
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("precision", "stored"), [("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp32")]
)
def test_layers_of_a_folded_pair_are_recognized_in_the_types_of_the_engine(
    precision: str, stored: str, tmp_path: Path
) -> None:
    path, generator = tmp_path / "model.engine", torch.Generator().manual_seed(0)
    before = {f"mlp.fc{n}.weight": torch.randn(4, 4, generator=generator) for n in (1, 2)}
    model = torch.nn.ModuleDict({"mlp": torch.nn.Linear(4, 4)})
    row = PlannedTensor("mlp.weight", dict.fromkeys(before, (4, 4)), (4, 4), "folded")
    product, pair = model["mlp"].weight.detach(), before["mlp.fc2.weight"]
    for tensor, verdict in ((product, "passed"), (pair, "failed"), (pair.T, "failed"), (2 * pair, "not_run")):
        path.write_bytes(b"head" + tensor_bytes(tensor.to({**HALF, "fp32": torch.float32}[stored])))
        assert _folded_check(path, model, [row], before, precision).verdict == verdict
