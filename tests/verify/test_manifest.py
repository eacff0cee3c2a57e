"""Every change to a file of a finished run folder is detected and named, and no later command hides it."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_runs as world
from click.testing import CliRunner
from whole_runs import SMALL

import vitcompress as vc
from vitcompress import cli
from vitcompress.errors import ArtifactError, InputError, OutputError
from vitcompress.io import manifest as manifests
from vitcompress.io.files import changing, lock_file, read_json, write_json
from vitcompress.io.manifest import _to_text, find_changes, read_manifest, record_changes, write_manifest
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.models.checkpoint import load_model, read_plan
from vitcompress.pipeline.folder import dense_folder_of_run
from vitcompress.verify.folder import manifest_checks, report_checks, verify_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, and `other` of the same recipe with another seed and without ONNX files."""
    folder = tmp_path_factory.mktemp("finished")
    world.run(folder, text=SMALL)
    world.run(folder, *world.BARE, "run.seed=1", name="other")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder `run`, with its dense model beside it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def command(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli.main, [*map(str, words), "--json"])
    assert "bug in vitcompress" not in result.output and "Traceback" not in result.output
    return result.exit_code, result.stdout


def flip(place: int) -> Callable[[Path, Path], None]:
    def change(path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place * (len(data) - 1) // 2] ^= 1
        path.write_bytes(data)

    return change


def link(path: Path, _: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "first byte": flip(0),
    "middle byte": flip(1),
    "last byte": flip(2),
    "truncated": lambda path, _: path.write_bytes(path.read_bytes()[:-1]) and None,  # type: ignore[func-returns-value]
    "empty": lambda path, _: path.write_bytes(b"") and None,  # type: ignore[func-returns-value]
    "deleted": lambda path, _: path.unlink(),
    "swapped": lambda path, other: shutil.copy(other, path) and None,  # type: ignore[func-returns-value]
    "link": link,
}


def relatives(folder: Path) -> list[str]:
    """All files of a run folder but locks."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def test_a_finished_run_lists_all_of_its_files(run: Path) -> None:
    manifest = read_manifest(run)
    assert manifest and sorted([*manifest["files"], "manifest.json"]) == relatives(run)
    assert manifest["bytes"] == {name: (run / name).stat().st_size for name in manifest["files"]}
    assert manifest["plan_sha256"] == read_plan(run / "plan.json").digest and "torch" in manifest["versions"]
    assert {"model.onnx.json", "dense.onnx", "state/mistakes.json", "report.json"} <= set(manifest["files"])
    assert [check.verdict for check in manifest_checks(RunFolder(run))] == ["passed"]


def test_a_trained_dense_model_lists_all_of_its_files(run: Path) -> None:
    (dense, *_) = run.parent.glob("dense-*")
    manifest = read_manifest(dense)
    assert manifest and sorted([*manifest["files"], "manifest.json"]) == relatives(dense)
    assert {"settings.json", "training.json", "model.safetensors"} <= set(manifest["files"])


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_of_every_file_fails_and_names_the_file(run: Path, kind: str) -> None:
    other, count = run.parent / "other", 0
    for name in relatives(run):
        path, replacement = run / name, other / name if (other / name).is_file() else run / "state/verify.safetensors"
        content = path.read_bytes()
        if not content or (kind == "swapped" and (replacement.read_bytes() == content or replacement == path)):
            continue
        CHANGES[kind](path, replacement)
        failed = [check for check in manifest_checks(RunFolder(run)) if check.verdict == "failed"]
        assert any(name in f"{check.name} {check.detail}" for check in failed), name
        (run / "elsewhere").unlink(missing_ok=True)
        (path.parent / "elsewhere").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        count += 1
    assert count >= 15
    assert not any(check.verdict == "failed" for check in manifest_checks(RunFolder(run)))


NAMES = ("manifest.json", "model.safetensors", "recipe.toml", "verify.json", "report.json", "state/mistakes.json")


@pytest.mark.parametrize("name", NAMES)
def test_the_command_exits_1_for_every_change(run: Path, name: str) -> None:
    for kind, change in CHANGES.items():
        folder = Path(shutil.copytree(run, run.with_name(f"copy {kind}")))
        change(folder / name, run.parent / "other" / name)
        code, output = command("verify", folder)
        checks = json.loads(output)["checks"]
        assert code == 1 and any(name in f"{c['name']} {c['detail']}" for c in checks if c["verdict"] == "failed"), kind
        assert read_json(folder / "verify.json")["passed"] is False


def test_a_folder_that_is_a_link_is_detected(run: Path, tmp_path: Path) -> None:
    (run / "state").rename(tmp_path / "elsewhere")
    (run / "state").symlink_to(tmp_path / "elsewhere")
    assert {c.verdict for c in manifest_checks(RunFolder(run)) if "state/" in c.name} == {"failed"}


def test_weights_of_the_other_sign_fail_after_all_else_is_deleted(run: Path) -> None:
    for path in (*run.glob("*.onnx*"), run / "state"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    tensors = load_tensors(run / "model.safetensors")
    tensors["head.weight"].neg_()
    save_tensors(run / "model.safetensors", tensors, {"plan": read_plan(run / "plan.json").digest})
    code, output = command("verify", run)
    failed = {check["name"] for check in json.loads(output)["checks"] if check["verdict"] == "failed"}
    assert code == 1 and {"manifest.model.safetensors", "manifest.model.onnx", "manifest.state/accuracy.json"} <= failed
    for words in (("bench", run), ("export", run), ("evaluate", run)):
        code, output = command(*words)
        assert code == 2 and "model.safetensors" in output and "--adopt" in output, words
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        load_model(run)


def test_an_edited_recipe_chooses_no_other_images(run: Path) -> None:
    """Those of the run are named there: counts of others were added to its report."""
    path, accuracy = run / "recipe.toml", read_json(run / "state/accuracy.json")
    path.write_text(path.read_text().replace("heldout = ", "heldout = 0.5 # "))
    for words in (("evaluate", run), ("evaluate", run / "model.onnx"), ("export", run, "--precision", "int8")):
        code, output = command(*words)
        assert code == 2 and "recipe.toml" in output and "--adopt" in output, words
    assert read_json(run / "state/accuracy.json") == accuracy
    code, output = command("verify", run)
    failed = [check["name"] for check in json.loads(output)["checks"] if check["verdict"] == "failed"]
    assert (code, failed) == (1, ["manifest.recipe.toml"])


@pytest.mark.parametrize("edit", ["correct", "top1", "mcnemar", "file", "both", "plan"])
def test_counts_are_those_of_the_images_and_the_plan_is_the_stored_one(run: Path, edit: str) -> None:
    """Without a manifest, too; `both`: also in the stored accuracy."""
    report = read_json(run / "report.json")
    report["accuracy"]["compressed"]["correct"] += 5 * (edit in ("correct", "both"))
    report["accuracy"]["compressed"]["top1"] += 0.01 * (edit == "top1")
    report["accuracy"]["mcnemar"]["only_b"] += edit == "mcnemar"
    report["artifacts"][-1]["accuracy"]["correct"] += edit == "file"
    report["plan"] |= {"arch": "deit_tiny_patch16_224"} if edit == "plan" else {}
    assert [check.verdict for check in report_checks(RunFolder(run))] == ["passed"]
    write_json(run / "report.json", report)
    if edit == "both":
        write_json(run / "state/accuracy.json", report["accuracy"])
    (check,) = report_checks(RunFolder(run))
    assert check.verdict == "failed"
    code, output = command("report", run)
    assert code == 2 and "report.json" in output
    (run / "manifest.json").unlink()
    code, output = command("verify", run, "--adopt")
    assert code == 1 and not (run / "manifest.json").exists()


@pytest.mark.parametrize("data", [None, [], {}, {"accuracy": {"dense": 1}, "plan": {}}, {"accuracy": [1]}])
def test_a_report_of_another_structure_fails(run: Path, data: object) -> None:
    write_json(run / "report.json", data)
    assert [check.verdict for check in report_checks(RunFolder(run))] == ["failed"]


def test_later_commands_record_their_own_files_only(run: Path) -> None:
    before = read_manifest(run)
    (run / "report.md").write_text("better")
    assert command("export", run, "--out", run / "edge.onnx")[0] == 0
    assert command("verify", run)[0] == 1
    after = read_manifest(run)
    assert before and after and after["files"]["report.md"] == before["files"]["report.md"]
    assert {"edge.onnx", "edge.onnx.json"} == after["files"].keys() - before["files"].keys()
    failed = [check.name for check in manifest_checks(RunFolder(run)) if check.verdict == "failed"]
    assert failed == ["manifest.report.md"]


def test_commands_that_update_the_report_keep_the_folder_valid(run: Path) -> None:
    assert command("evaluate", run / "dense.onnx")[0] == 0
    quick = ("--protocol", "paper", "--batch", 1, "--warmup", 1, "--runs", 3)
    assert command("bench", run / "dense.onnx", run / "model.onnx", *quick)[0] == 0
    assert command("report", run)[0] == 0
    assert "dense.onnx" in read_json(run / "state/mistakes.json") and len(read_json(run / "bench.json")) > 2
    code, output = command("verify", run)
    assert code == 0, output
    assert [check.verdict for check in manifest_checks(RunFolder(run))] == ["passed"]


def test_an_edited_measurement_does_not_reach_the_report(run: Path) -> None:
    before = (run / "report.json").read_bytes()
    write_json(run / "bench.json", [])
    for words in (("report", run), ("evaluate", run / "dense.onnx")):
        assert command(*words)[0] == 0
        assert (run / "report.json").read_bytes() == before
    failed = [check.name for check in manifest_checks(RunFolder(run)) if check.verdict == "failed"]
    assert failed == ["manifest.bench.json"]


def test_a_text_file_that_was_edited_before_keeps_its_entry(run: Path) -> None:
    write_json(run / "bench.json", [])
    with record_changes(run):
        write_json(run / "bench.json", [*read_json(run / "bench.json"), 1])
        write_json(run / "model.onnx.json", {})
        (run / "dense.onnx.json").unlink()
    names = [check.name for check in manifest_checks(RunFolder(run)) if check.verdict == "failed"]
    assert names == ["manifest.bench.json"]
    assert "dense.onnx.json" not in (read_manifest(run) or {})["files"]


def test_a_file_that_is_written_and_removed_has_no_entry(run: Path) -> None:
    """As of an export that fails its check: a block inside of this one has recorded it."""
    path = run / "model-fp16.onnx.json"
    with record_changes(run):
        with record_changes(run):
            write_json(path, {})
        assert path.name in read_manifest(run)["files"]
        path.unlink()
    assert [check.verdict for check in manifest_checks(RunFolder(run))] == ["passed"]


@pytest.mark.parametrize("name", ["bench.json", "model.onnx.json", "state/mistakes.json"])
def test_a_killed_process_leaves_no_entry_that_contradicts_a_file(run: Path, name: str) -> None:
    def change() -> None:
        with record_changes(run), lock_file(run):
            write_json(run / name, read_json(run / name) | {"note": {}} if name != "bench.json" else [])
            changing.get()(run / "report.md")
            (run / "report.md").unlink()
            os._exit(0)

    assert world.forked(change) == 0
    manifest = read_manifest(run)
    assert manifest and not {name, "report.md"} & manifest["files"].keys()
    assert [check.verdict for check in manifest_checks(RunFolder(run))] == ["passed"]
    with record_changes(run):
        pass
    assert sorted([*(read_manifest(run) or {})["files"], "manifest.json"]) == relatives(run)


def test_a_manifest_that_another_process_replaces_while_it_is_read_is_intact(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        with record_changes(run):
            write_json(run / "bench.json", [])

    def read_and_replace(path: Path, *args: Any, **more: Any) -> Any:
        data = read_json(path, *args, **more)
        if path.name == "manifest.json":
            monkeypatch.undo()
            assert world.forked(other) == 0
        return data

    monkeypatch.setattr(manifests, "read_json", read_and_replace)
    with record_changes(run):
        write_json(run / "model.onnx.json", {})
    assert read_json(run / "bench.json") == [] and find_changes(run) == {}


def test_a_hidden_folder_has_no_entries(run: Path) -> None:
    """An export is written to one, which a process that is killed leaves behind and the next one removes."""
    hidden = run / ".model.onnx.0.part"
    (hidden / "inner").mkdir(parents=True)
    (hidden / "inner" / "model.onnx").touch()
    with record_changes(run):
        write_json(run / "bench.json", [])
    shutil.rmtree(hidden)
    assert find_changes(run) == {}


@pytest.mark.parametrize("moment", ["listed", "stated", "hashed"])
def test_files_and_folders_that_another_process_removes_meanwhile_have_no_entry(
    run: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := run / "state" / "gone").mkdir()
    gone, scan, files, sha256 = run / "bench.json", os.scandir, RunFolder.files, manifests.file_sha256

    def scan_removed(path: Any) -> Any:
        if str(path) == str(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return scan(path)

    def removed_sha256(path: Path) -> str:
        (gone if path == gone else run / "missing").unlink(missing_ok=True)
        return sha256(path)

    with record_changes(run):
        write_json(gone, [])
        if moment == "listed":
            monkeypatch.setattr(os, "scandir", scan_removed)
        elif moment == "stated":
            monkeypatch.setattr(RunFolder, "files", lambda own: (*files(own), run / "missing"))
        else:
            monkeypatch.setattr(manifests, "file_sha256", removed_sha256)
    monkeypatch.undo()
    manifest = read_manifest(run)
    assert manifest["files"].keys() == manifest["bytes"].keys() and "missing" not in manifest["files"]
    assert (gone.name in manifest["files"]) is gone.exists() is (moment != "hashed") and find_changes(run) == {}


@pytest.mark.parametrize(
    "change", [lambda data: b"\xef\xbb\xbf" + data, lambda data: data.replace(b"\n", b"\r\n")], ids=["mark", "lines"]
)
def test_a_manifest_that_an_editor_wrote_is_not_as_it_was_written(run: Path, change: Callable[[bytes], bytes]) -> None:
    path = run / "manifest.json"
    path.write_bytes(change(path.read_bytes()))
    assert "failed" in [check.verdict for check in manifest_checks(RunFolder(run))]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "parts"), [("model.onnx.json", 0), ("model.onnx", 1), ("verify.json", 0)])
def test_an_export_that_is_killed_can_be_repeated(run: Path, stop: str, parts: int) -> None:
    def export() -> None:
        def watch(event: str, args: tuple[object, ...]) -> None:
            if event == "os.rename" and args[1] == str(run / stop):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        command("export", run)

    assert world.forked(export) == -signal.SIGKILL
    assert len([path for path in run.glob(".*.part") if path.is_dir()]) == parts
    assert [command(*words)[0] for words in (("export", run), ("verify", run))] == [0, 0]
    assert not any(path.is_dir() for path in run.glob(".*.part"))
    complete = [name for name in relatives(run) if not name.endswith(".part")]  # a small file may be left
    assert sorted([*(read_manifest(run) or {})["files"], "manifest.json"]) == complete


@pytest.mark.slow
def test_an_export_removes_only_what_is_left_of_the_same_file(run: Path, tmp_path: Path) -> None:
    """Others may be written at this moment: by a run that is not finished, or by another program in another folder."""
    other = tmp_path / "elsewhere"
    for folder, name in ((run, ".model.onnx.1.part"), (run, ".dense.onnx.1.part"), (other, ".model.onnx.1.part")):
        (folder / name).mkdir(parents=True)
    assert command("export", other)[0] == 2 and command("export", run)[0] == 0
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".*.part") if path.is_dir())
    assert left == ["elsewhere/.model.onnx.1.part", "run/.dense.onnx.1.part"]
    (run / "report.json").unlink()
    (run / ".model.onnx.2.part").mkdir()
    assert command("export", run)[0] == 2 and (run / ".model.onnx.2.part").is_dir()


def test_verify_passes_again_after_it_replaced_its_own_verdict(run: Path) -> None:
    (run / "verify.json").write_text("{}")
    assert [command("verify", run)[0] for _ in range(2)] == [1, 0]


def test_the_function_and_the_command_compare_dense_files_with_the_dense_model_that_runs_share(run: Path) -> None:
    assert [*run.parent.glob("dense-*")] and not RunFolder(run).dense.exists()
    checks = [check.to_dict() for check in vc.verify(run).checks]
    assert {c["name"]: c["verdict"] for c in checks}["agreement.dense.onnx.error"] == "passed"
    assert json.loads(command("verify", run)[1])["checks"] == json.loads(json.dumps(checks))
    (run / "recipe.toml").write_text("[")
    assert [check.name for check in vc.verify(run).checks if check.verdict == "failed"] == ["manifest.recipe.toml"]


def test_files_of_the_dense_model_are_not_compared_with_a_changed_one(run: Path) -> None:
    dense = dense_folder_of_run(run)
    flip(2)(dense / "model.safetensors", run)
    checks = {check.name: check.verdict for check in vc.verify(run).checks}
    assert [name for name in checks if checks[name] == "failed"] == ["dense.manifest.model.safetensors"]
    assert not any(name.startswith(("onnx.dense", "agreement.dense")) for name in checks)


def test_a_folder_without_a_manifest_works_and_can_be_adopted(run: Path) -> None:
    report = read_json(run / "report.json")
    write_json(run / "report.json", {key: value for key, value in report.items() if key != "manifest"})
    (run / "manifest.json").unlink()
    code, output = command("verify", run)
    (check,) = (check for check in json.loads(output)["checks"] if check["name"] == "manifest")
    assert code == 0 and check["verdict"] == "not_run" and "--adopt" in check["detail"]
    assert command("verify", run, "--require-verified")[0] == 1 and not (run / "manifest.json").exists()
    assert command("report", run)[0] == 0
    assert command("verify", run, "--adopt")[0] == 0
    assert sorted([*(read_manifest(run) or {})["files"], "manifest.json"]) == relatives(run)
    assert command("verify", run)[0] == 0


def test_a_manifest_keeps_the_origin_of_a_dense_model_when_it_is_adopted_again(run: Path) -> None:
    """Without `source` and `images`, a run continues with other weights or images than it was started with."""
    origin = {"source": {"weights": "mine.pth", "sha256": "0" * 64}, "images": "digits"}
    write_manifest(run, **origin)
    assert command("verify", run, "--adopt")[0] == 0
    assert (read_manifest(run) or {}).items() >= origin.items()


def test_a_run_that_was_stopped_before_its_manifest_is_verified(run: Path) -> None:
    (run / "manifest.json").rename(run / ".manifest.json.0.part")
    world.run(run.parent, text=SMALL)
    assert [check.verdict for check in manifest_checks(RunFolder(run))] == ["passed"]
    assert not list(run.rglob("*.part"))


def test_a_continued_run_keeps_the_entries_of_other_files(run: Path) -> None:
    """Without report.json a run continues; a benchmark that was edited stays detected."""
    (run / "report.json").unlink()
    (run / "log.jsonl").write_text("")
    world.run(run.parent, text=SMALL)
    names = [check.name for check in manifest_checks(RunFolder(run)) if check.verdict == "failed"]
    assert names == ["manifest.log.jsonl"]


def test_a_manifest_of_a_newer_format_is_one_message(run: Path) -> None:
    manifest = read_manifest(run) or {}
    (run / "manifest.json").write_text(_to_text({**manifest, "format": 2, "files": []}))
    before = relatives(run)
    for name in ("verify", "report", "export", "bench"):
        code, output = command(name, run)
        assert code == 2 and "format 2, this version reads 1" in output, name
    with pytest.raises(InputError, match="format 2"):
        load_model(run)
    assert relatives(run) == before


def test_a_forged_manifest_is_no_crash(run: Path) -> None:
    manifest = read_manifest(run) or {}
    for data in ({**manifest, "files": []}, {**manifest, "files": {"../../etc/passwd": 1, "\0": {}}}, {"format": 1}):
        (run / "manifest.json").write_text(_to_text(data))
        assert command("verify", run)[0] == 1


def test_a_manifest_of_another_program_is_none(run: Path, tmp_path: Path) -> None:
    """Web applications have a manifest.json, too."""
    (app := tmp_path / "app").mkdir()
    for name in ("model.onnx", "model.onnx.json"):
        shutil.copy(run / name, app)
    (app / "manifest.json").write_text('{"name": "app", "icons": []}')
    assert command("bench", app / "model.onnx", "--batch", 1, "--warmup", 1, "--runs", 3)[0] == 0
    shutil.copy(app / "manifest.json", run)
    assert command("verify", run)[0] == 1  # the folder had one of its own
    vc.save_model(vc.create_model(world.ARCH, **world.ARGS, num_classes=10), saved := tmp_path / "saved")
    shutil.copy(app / "manifest.json", saved)
    (check,) = manifest_checks(RunFolder(saved))
    assert check.detail.endswith("if no other file has this name")
    code, output = command("sign", saved, "--key", tmp_path / "key")
    assert code != 0 and "unexpected" not in output


def test_a_saved_model_has_a_manifest(tmp_path: Path) -> None:
    model = vc.create_model(world.ARCH, **world.ARGS, num_classes=10)
    vc.save_model(model, tmp_path / "saved")
    assert set((read_manifest(tmp_path / "saved") or {})["files"]) == {"plan.json", "model.safetensors"}
    assert vc.verify(tmp_path / "saved").passed
    flip(2)(tmp_path / "saved/model.safetensors", tmp_path)
    with pytest.raises(ArtifactError):
        vc.load_model(tmp_path / "saved")


def test_a_saved_model_whose_manifest_was_checked_needs_it(tmp_path: Path) -> None:
    """It has no report; verify.json, which may be damaged, tells that there was one."""
    vc.save_model(vc.create_model(world.ARCH, **world.ARGS, num_classes=10), tmp_path / "saved")
    files = RunFolder(tmp_path / "saved")
    assert vc.verify(files.path).passed
    files.manifest.unlink()
    for _ in range(2):  # the failed check is recorded, too
        failed = [check for check in vc.verify(files.path).checks if check.verdict == "failed"]
        assert [check.name for check in failed] == ["manifest"] and "is missing" in failed[0].detail
    for text in ("[]", "{", '{"checks": [1, null]}', '{"checks": [{}, {"name": "manifest", "verdict": "not_run"}]}'):
        files.verification.write_text(text)
        assert [check.verdict for check in manifest_checks(files)] == ["not_run"]
    assert verify_folder(files.path, adopt=True).passed and files.manifest.is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_fail_and_the_old_verdict_goes(run: Path, value: float) -> None:
    (run / "manifest.json").unlink()
    tensors = load_tensors(run / "model.safetensors")
    tensors["head.bias"][0] = torch.tensor(value)
    save_tensors(run / "model.safetensors", tensors, {"plan": read_plan(run / "plan.json").digest})
    verification = verify_folder(run, adopt=True)
    failed = [check.to_dict() for check in verification.checks if check.verdict == "failed"]
    assert any("nan" in str(check["detail"]) or "inf" in str(check["detail"]) for check in failed)
    assert read_json(run / "verify.json")["passed"] is False and not (run / "manifest.json").exists()


@pytest.mark.parametrize("name", ["state", "failed", "tensorboard", "state/recovery", "model.onnx"])
def test_a_run_folder_with_a_link_is_not_written(run: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "keep").touch()
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(precious)
    for fresh in (True, False):
        with pytest.raises(OutputError, match="is a link"):
            world.run(run.parent, text=SMALL, fresh=fresh)
    assert [entry.name for entry in precious.iterdir()] == ["keep"]
