"""Checks of folds and run folders pass for correct models, fail for the smallest mistakes, and are recorded."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner
from contracts import build, contract, every_variant, having, images, logits, sites_of
from damage import add_unused_weight
from layer_plans import depth_plan
from onnx import TensorProto, helper
from torch import nn

from vitcompress import cli, surgery
from vitcompress.errors import ArtifactError, WeightsError
from vitcompress.exporters.onnx.export import export
from vitcompress.exporters.sidecar import amend_sidecar, read_sidecar, sidecar_path
from vitcompress.families import family_of
from vitcompress.io.checks import Check
from vitcompress.io.files import file_sha256, write_text
from vitcompress.io.progress import Progress
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.checkpoint import load_model, write_model
from vitcompress.models.create import input_config
from vitcompress.plan import Plan
from vitcompress.verify.fold import _layer, fold_checks
from vitcompress.verify.folder import verify_folder
from vitcompress.verify.tolerance import fold_excess, model_logits, pair_limits, storage_limit


def folding(variant: str) -> tuple[nn.Module, nn.Module, Plan, Plan]:
    """Unfolded and folded model in float32, with their plans."""
    model = build(variant, dtype=torch.float32)
    base = contract(variant).plan
    plan = base.then(depth_plan(model, base, [1], having(model, "activation", [0, 1])))
    unfolded = surgery.apply_plan(model, plan)
    folded = deepcopy(unfolded)
    return unfolded, folded, plan, surgery.fold_linears(folded, plan)[0]


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in checks}


@every_variant
def test_every_fold_is_within_its_bound(variant: str) -> None:
    unfolded, folded, plan, after = folding(variant)
    checks = fold_checks(unfolded, folded, set(after.folded) - set(plan.folded), images(variant, dtype=torch.float32))
    assert {c.name: c.value for c in checks if c.verdict != "passed"} == {}
    ffns = {f"fold.{site.name}" for site in sites_of(folded, "ffn") if site.index < 2}
    expected = set() if family_of(folded).not_foldable(folded) else ffns
    assert {"fold", "fold.agreement", *expected} <= set(verdicts(checks))
    assert len(ffns) == 2
    own = [c for c in checks if c.name.startswith("fold.blocks") or c.name.startswith("fold.layers")]
    assert {c.tolerance for c in own} <= {1.0} and all(c.value and c.value > 0 for c in own)


def test_layer_scales_are_checked_with_the_layer_that_they_are_folded_into() -> None:
    unfolded, folded, _, after = folding("layer_scale")
    names = [c.name for c in fold_checks(unfolded, folded, after.folded, images("layer_scale", dtype=torch.float32))]
    assert "fold.blocks.0.attn.proj" in names
    assert "fold.blocks.0.mlp" in names


def test_a_fold_with_an_error_of_a_few_units_in_the_last_place_fails() -> None:
    """64 times what rounding explains."""
    unfolded, folded, _, after = folding("plain")
    with torch.no_grad():
        folded.get_submodule("blocks.0.mlp").weight[0] *= 1 + 64 * torch.finfo(torch.float32).eps
    checks = verdicts(fold_checks(unfolded, folded, after.folded, images("plain", dtype=torch.float32)))
    assert (checks["fold.blocks.0.mlp"], checks["fold.blocks.1.mlp"]) == ("failed", "passed")


def test_all_folds_together_are_allowed_their_rounding_alone() -> None:
    """Both models are evaluated in float64, so that only the rounding of the stored products is allowed."""
    unfolded, folded, _, after = folding("plain")
    x = images("plain", dtype=torch.float32)
    checks = {check.name: check for check in fold_checks(unfolded, folded, after.folded, x)}
    stored = storage_limit(folded, dict.fromkeys(after.folded, 1), x)
    assert checks["fold"].tolerance == pytest.approx(stored, rel=1e-6)  # the same draws; float64 adds 2**-29 of it
    assert checks["fold"].tolerance > stored


@pytest.mark.parametrize(
    ("name", "chain"), [("attn.proj", ["attn.proj", "ls1"]), ("mlp", ["mlp.fc1", "mlp.fc2", "ls2"])]
)
def test_each_fold_is_allowed_its_number_of_roundings(name: str, chain: list[str]) -> None:
    unfolded, folded, _, after = folding("layer_scale")
    x, block = images("layer_scale", dtype=torch.float32), unfolded.get_submodule("blocks.0")
    values = {check.name: check.value for check in fold_checks(unfolded, folded, after.folded, x)}
    layers, inputs = [_layer(unfolded.double(), f"blocks.0.{part}") for part in chain], list[torch.Tensor]()
    first = block.get_submodule(chain[0])
    first.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, -2)))
    logits(unfolded, x.double())
    _, quotient = fold_excess(layers, folded.get_submodule(f"blocks.0.{name}"), inputs[0], folds=len(chain) - 1)
    assert values[f"fold.blocks.0.{name}"] == quotient


def test_a_fold_that_changes_classes_fails_by_its_outputs_too() -> None:
    unfolded, folded, _, after = folding("plain")
    with torch.no_grad():
        folded.get_submodule("blocks.1.mlp").weight.neg_()
    x = images("plain", dtype=torch.float32, count=20)
    checks = {check.name: check for check in fold_checks(unfolded, folded, after.folded, x)}
    changed = int((logits(unfolded, x).argmax(1) != logits(folded, x).argmax(1)).sum())
    assert changed and checks["fold.agreement"].value == changed and checks["fold.agreement"].verdict == "failed"


def test_a_missing_bias_fails() -> None:
    unfolded, folded, _, after = folding("plain")
    with torch.no_grad():
        folded.get_submodule("blocks.1.mlp").bias.zero_()
    checks = verdicts(fold_checks(unfolded, folded, after.folded, images("plain", dtype=torch.float32)))
    assert (checks["fold.blocks.1.mlp"], checks["fold"]) == ("failed", "failed")


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a finished recipe."""
    folder = tmp_path_factory.mktemp("run")
    unfolded, folded, plan, after = folding("layer_scale")
    save_tensors(folder / "state/unfolded.safetensors", unfolded.state_dict(), {"plan": plan.digest})
    write_text(folder / "state/unfolded_plan.json", plan.to_json())
    write_model(folder, folded, after)
    dense, base = build("layer_scale", dtype=torch.float32), Plan(plan.arch, plan.arch_args)
    write_model(RunFolder(folder).dense, dense, base)
    for name, model, of in (("dense", dense, base), ("model", folded, after)):
        export(model, folder / f"{name}.onnx", input=input_config(model), plan_digest=of.digest)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_finished_folder_passes_and_its_checks_are_recorded(folder: Path) -> None:
    verification = verify_folder(folder, images("layer_scale", dtype=torch.float32))
    assert {c.name for c in verification.checks if c.verdict == "failed"} == set()
    assert verification.passed
    written = json.loads((folder / "verify.json").read_text())
    assert written == json.loads(json.dumps(verification.to_dict(folder)))
    names = [check["name"] for check in written["checks"]]
    assert all(any(topic in name for name in names) for topic in ("fold", "slice", "reload", "onnx"))
    assert {"value", "tolerance", "verdict", "passed"} <= set(written["checks"][0])


def test_progress_names_each_part_before_its_work_begins(folder: Path) -> None:
    """On large models each part takes minutes."""
    updates: list[tuple[str, int, int, str]] = []

    class Recorded(Progress):
        def update(self, label: str, done: int, total: int, text: str = "") -> None:
            updates.append((label, done, total, text))

    verify_folder(folder, progress=Recorded())
    parts = ["fold", "slice", "reload", "weights", ""]
    assert updates[:5] == [("model checked", done, 4, part) for done, part in enumerate(parts)]
    assert updates[5:7] == [("files checked", 0, 1, "model.onnx"), ("files checked", 1, 1, "")]
    label = "files of the dense model checked"
    assert updates[7:] == [(label, 0, 1, "dense.onnx"), (label, 1, 1, "")]
    (folder / "dense.onnx").unlink()
    (folder / "dense.onnx.json").unlink()
    updates.clear()
    verify_folder(folder, progress=Recorded())
    assert len(updates) == 7


def test_a_second_verification_uses_the_images_and_outputs_of_the_first(folder: Path) -> None:
    verify_folder(folder, images("layer_scale", dtype=torch.float32))
    again = verify_folder(folder)
    (recorded,) = (check for check in again.checks if check.name == "reload.recorded")
    assert recorded.verdict == "passed" and recorded.tolerance
    tensors = load_tensors(folder / "state/verify.safetensors")
    assert recorded.tolerance == pair_limits(load_model(folder), tensors["images"])[0]
    for part, verdict in ((0.9, "passed"), (1.1, "failed")):
        moved = tensors["logits"].clone()
        moved[-1, 0] += part * recorded.tolerance
        save_tensors(folder / "state/verify.safetensors", {**tensors, "logits": moved})
        assert verdicts(list(verify_folder(folder).checks))["reload.recorded"] == verdict
    others = verify_folder(folder, -tensors["images"])  # no outputs were recorded for them
    assert others.passed and "reload.recorded" not in verdicts(list(others.checks))


@pytest.mark.parametrize("folds", [True, False])
def test_without_the_unfolded_weights_no_fold_is_checked(folder: Path, folds: bool) -> None:
    (folder / "state/unfolded.safetensors").unlink()
    if not folds:
        write_model(folder, build("plain", dtype=torch.float32), contract("plain").plan)
    (check,) = (check for check in verify_folder(folder).checks if check.name.startswith("fold"))
    assert (check.name, check.verdict) == ("fold", "not_run")
    assert check.applies == folds
    assert check.detail == ("the unfolded weights are not in the folder" if folds else "nothing was folded")


def test_required_checks_are_those_that_apply(folder: Path) -> None:
    """The plan removes layers and no channels, so that there is nothing to compare slices with."""
    words = ["verify", str(folder), "--adopt", "--require-verified"]
    assert CliRunner().invoke(cli.main, words).exit_code == 0
    (check,) = (check for check in verify_folder(folder).checks if check.name == "slice")
    assert check.verdict == "not_run" and not check.applies
    (folder / "manifest.json").unlink()
    (folder / "state/unfolded.safetensors").unlink()
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 1 and "checks that could not run here: fold" in done.stderr


def test_without_images_noise_is_used(folder: Path) -> None:
    assert verify_folder(folder).passed


def test_another_model_instead_of_the_onnx_file_fails(folder: Path) -> None:
    (folder / "dense.onnx").replace(folder / "model.onnx")
    failing = {name for name, verdict in verdicts(list(verify_folder(folder).checks)).items() if verdict == "failed"}
    assert failing >= {"onnx.shapes", "onnx.layers", "onnx.file", "onnx.metadata", "agreement.model.onnx"}


@pytest.mark.parametrize(
    ("metadata", "size", "check"),
    [
        ({"author": "no JSON"}, 16, "agreement"),
        ({"precision": '"int4"'}, 8, "weights"),
        ({"islands": "7"}, 8, "weights"),
        ({}, 8, "agreement"),
    ],
)
@pytest.mark.parametrize("file", ["model.onnx", "dense.onnx"])
def test_a_file_of_another_tool_fails_and_replaces_older_results(
    file: str, metadata: dict[str, str], size: int, check: str, folder: Path
) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 3, size, size)) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "other", [x], [y])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    helper.set_model_props(model, metadata)
    onnx.save(model, folder / file)
    failed = {check.name for check in verify_folder(folder).checks if check.verdict == "failed"}
    assert f"{check}.{file}" in failed
    recorded = json.loads((folder / "verify.json").read_text())
    assert not recorded["passed"] and failed <= {one["name"] for one in recorded["checks"] if not one["passed"]}


def edit_metadata(path: Path, sidecar: str, **values: object) -> None:
    """Change metadata inside an ONNX file. sidecar: what becomes of it, `gone`, `redone` (the hash) or `rewritten`."""
    model = onnx.load(path)
    for entry in model.metadata_props:
        entry.value = json.dumps(values.get(entry.key, json.loads(entry.value)))
    onnx.save(model, path)
    if sidecar == "gone":
        sidecar_path(path).unlink()
        return
    known = read_sidecar(path)
    new = {"metadata": {**known["metadata"], **{k: json.dumps(v) for k, v in values.items()}}}
    digest = file_sha256(path)
    amend_sidecar(path, sha256=digest, files={path.name: digest}, **(new if sidecar == "rewritten" else {}))


@pytest.mark.parametrize("file", ["model.onnx", "dense.onnx"])
@pytest.mark.parametrize(
    ("sidecar", "key", "wrong"),
    [
        ("gone", "std", [0.9, 0.9, 0.9]),
        ("redone", "mean", [0.1, 0.2, 0.3]),
        ("rewritten", "crop_pct", 0.5),
        ("rewritten", "interpolation", "nearest"),
        ("rewritten", "size", [3, 16, 16]),
        ("rewritten", "classes", ["4", "3", "2", "1", "0"]),
        ("rewritten", "classes", ["0"]),
        ("rewritten", "classes", 7),
        ("rewritten", "input", "uint8"),
        ("rewritten", "layout", "NHWC"),
        ("rewritten", "normalization", "in front"),
    ],
)
def test_preprocessing_and_classes_of_a_file_are_those_of_the_run(
    sidecar: str, key: str, wrong: object, file: str, folder: Path
) -> None:
    """The file says how images are prepared to whoever serves it, with or without its sidecar."""
    names = [str(number) for number in range(5)]
    write_text(RunFolder(folder).report, json.dumps({"model": {"classes": names}}))
    edit_metadata(folder / file, sidecar, **{key: wrong})
    checks = {check.name: check for check in verify_folder(folder).checks}
    label = "onnx" if file == "model.onnx" else "onnx.dense"
    assert checks[f"{label}.metadata"].verdict == "failed"
    assert f"{key} is {wrong!r} in {file}, not" in checks[f"{label}.metadata"].detail
    assert checks[f"{label}.file"].verdict == ("failed" if sidecar == "gone" else "passed")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("layout", "NHWC", "layout is 'NCHW' in model.onnx, not 'NHWC'"),
        ("plan_sha256", "0" * 64, "plan_sha256 is '000"),
    ],
)
def test_a_sidecar_states_what_its_file_states(key: str, value: str, says: str, folder: Path) -> None:
    known = read_sidecar(folder / "model.onnx")
    amend_sidecar(folder / "model.onnx", metadata={**known["metadata"], key: json.dumps(value)})
    (failed,) = (check for check in verify_folder(folder).checks if check.verdict == "failed")
    assert failed.name == "onnx.metadata" and says in failed.detail


@pytest.mark.parametrize(("key", "value"), [("opset", 18), ("precision", "fp16")])
def test_a_sidecar_states_opset_and_precision_of_its_file(key: str, value: object, folder: Path) -> None:
    before = read_sidecar(folder / "model.onnx")[key]
    amend_sidecar(folder / "model.onnx", **{key: value})
    (failed,) = (check for check in verify_folder(folder).checks if check.verdict == "failed")
    assert failed.name == "onnx.metadata" and f"{key} is {before!r} in model.onnx, not {value!r}" in failed.detail


def test_an_engine_of_another_plan_fails(folder: Path) -> None:
    """Without a GPU nothing but its sidecar shows that it is of another run."""
    engine, known = folder / "model.engine", read_sidecar(folder / "model.onnx")
    engine.write_bytes(b"x")
    digest = file_sha256(engine)
    about = {"path": engine.name, "format": "trt", "sha256": digest, "files": {engine.name: digest}}
    for plan, verdict in ((known["metadata"]["plan_sha256"], "passed"), (json.dumps("0" * 64), "failed")):
        metadata = {**known["metadata"], "plan_sha256": plan}
        sidecar_path(engine).write_text(json.dumps({**known, **about, "metadata": metadata}))
        checks = {check.name: check.verdict for check in verify_folder(folder).checks}
        assert checks["model.engine.metadata"] == verdict


def test_a_file_without_a_sidecar_fails(folder: Path) -> None:
    sidecar_path(folder / "model.onnx").unlink()
    failed = [check for check in verify_folder(folder).checks if check.verdict == "failed"]
    assert [check.name for check in failed] == ["onnx.file"] and "model.onnx.json is missing" in failed[0].detail


def test_another_model_instead_of_the_dense_onnx_file_fails(folder: Path) -> None:
    shutil.copy(folder / "model.onnx", folder / "dense.onnx")
    failing = {name for name, verdict in verdicts(list(verify_folder(folder).checks)).items() if verdict == "failed"}
    assert failing >= {"onnx.dense.shapes", "onnx.dense.file", "onnx.dense.metadata", "agreement.dense.onnx"}
    assert not any("model.onnx" in name for name in failing)


def test_the_dense_onnx_file_is_compared_with_the_weights_of_the_dense_model(folder: Path) -> None:
    checks = verdicts(list(verify_folder(folder).checks))
    assert checks["weights"] == checks["weights.dense.onnx"] == "passed"
    add_unused_weight(folder / "dense.onnx")
    failed = [check.name for check in verify_folder(folder).checks if check.verdict == "failed"]
    assert failed == ["weights.dense.onnx"]


def test_a_dense_model_elsewhere_is_compared_and_a_missing_one_is_not(folder: Path, tmp_path: Path) -> None:
    moved = RunFolder(folder).dense.rename(tmp_path / "elsewhere")
    checks = verify_folder(folder).checks
    (missing,) = (check for check in checks if check.name == "agreement.dense.onnx")
    assert missing.verdict == "not_run" and str(RunFolder(folder).dense) in missing.detail
    assert verdicts(list(checks))["onnx.dense.checker"] == "passed"
    compared = verdicts(list(verify_folder(folder, dense=moved).checks))
    assert compared["agreement.dense.onnx.error"] == compared["onnx.dense.idle"] == "passed"


def test_weights_of_another_training_fail_the_fold_check(folder: Path) -> None:
    tensors = load_tensors(folder / "model.safetensors")
    plan = Plan.from_json((folder / "plan.json").read_text())
    tensors["blocks.0.mlp.weight"] *= 1.001
    save_tensors(folder / "model.safetensors", tensors, {"plan": plan.digest})
    checks = verdicts(list(verify_folder(folder).checks))
    names = ("fold.blocks.0.mlp", "fold", "agreement.model.onnx.error", "weights.model.onnx")
    assert [checks[name] for name in names] == ["failed"] * 4


def test_a_folder_with_a_file_of_another_name_or_format_lacks_none(folder: Path) -> None:
    (folder / "model.onnx").rename(folder / "model-fp16.onnx")
    assert not [check for check in verify_folder(folder).checks if check.name == "onnx"]
    (folder / "model-fp16.onnx").rename(folder / "model.xml")
    assert not [check for check in verify_folder(folder).checks if check.name == "onnx"]


def test_without_an_exported_file_a_check_is_not_run(folder: Path) -> None:
    for name in ("model.onnx", "dense.onnx"):
        (folder / name).unlink()
    (check,) = (check for check in verify_folder(folder).checks if check.name == "onnx")
    assert check.verdict == "not_run" and check.command == f"vitcompress export {folder} --format onnx"


@pytest.mark.parametrize("name", ["model.engine", "edge.engine"])
def test_an_engine_without_a_sidecar_fails(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"x")
    checks = {check.name: check for check in verify_folder(folder).checks}
    assert checks[f"{name}.file"].verdict == "failed" and "is missing" in checks[f"{name}.file"].detail


def test_a_damaged_folder_is_an_input_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        verify_folder(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100])
    with pytest.raises(WeightsError):
        verify_folder(folder)


@pytest.mark.parametrize("names", [("images",), ("logits",), ("images", "logits", "more")])
def test_recorded_outputs_of_other_names_are_an_input_error(names: tuple[str, ...], folder: Path) -> None:
    """In a folder without a manifest, which would detect the change."""
    pixels = images("layer_scale", dtype=torch.float32)
    tensors = {"images": pixels, "logits": model_logits(load_model(folder), pixels), "more": pixels}
    save_tensors(folder / "state/verify.safetensors", {name: tensors[name] for name in names})
    for command in ("verify", "export"):
        done = CliRunner().invoke(cli.main, [command, str(folder), "--json"])
        assert done.exit_code == 2 and "images and logits of this model" in json.loads(done.stdout)["error"]


def test_recorded_outputs_of_another_model_are_an_input_error(folder: Path) -> None:
    pixels = images("layer_scale", dtype=torch.float32)
    for tensors in (
        {"images": pixels, "logits": torch.zeros(len(pixels), 2)},
        {"images": pixels[..., 1:], "logits": torch.zeros(len(pixels), 3)},
        {"images": pixels[:0], "logits": torch.zeros(0, 3)},
    ):
        save_tensors(folder / "state/verify.safetensors", tensors)
        with pytest.raises(ArtifactError, match="images and logits of this model"):
            verify_folder(folder)


@pytest.mark.parametrize("content", ["[]", '{"checks": [{"name": "fold"}]}', '{"checks": {}}'])
def test_a_damaged_verify_json_is_replaced_by_verify_and_an_input_error_of_export(content: str, folder: Path) -> None:
    (folder / "verify.json").write_text(content)
    done = CliRunner().invoke(cli.main, ["export", str(folder), "--out", str(folder / "model-new.onnx"), "--json"])
    assert done.exit_code == 2 and "verify.json has other contents" in json.loads(done.stdout)["error"]
    assert not (folder / "model-new.onnx").exists()
    verify_folder(folder)
    assert "passed" in json.loads((folder / "verify.json").read_text())
