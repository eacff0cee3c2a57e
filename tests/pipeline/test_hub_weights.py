"""Weights of Hugging Face's hub, from a cache folder in its layout: one revision, which a run records with a hash."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_runs as world
from click.testing import CliRunner
from command_line import images
from safetensors.torch import save_file
from whole_runs import SMALL, tree

from vitcompress import cli
from vitcompress.errors import WeightsError
from vitcompress.io.manifest import read_manifest
from vitcompress.models.create import create_model
from vitcompress.models.source import resolve_model
from vitcompress.models.weights import read_source

NAME, FIRST, SECOND = "hf-hub:acme/tiny", "1" * 40, "2" * 40
ARGS = {**world.ARGS, "num_classes": 10}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, which has no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def publish(hub: Path, commit: str, seed: int, repository: str = "acme/tiny", args: Any = ARGS) -> str:
    """Add a revision, which becomes that of the branch `main`; returns the SHA-256 of its weights."""
    model = create_model(world.ARCH, args, seed=seed)
    folder = hub / f"models--{repository.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "new")
    digest = sha256((folder / "new").read_bytes()).hexdigest()
    (folder / "new").rename(folder / "blobs" / digest)
    config = {"architecture": world.ARCH, "num_classes": 10, "model_args": world.ARGS}
    (folder / "blobs" / f"config-{commit}").write_text(json.dumps(config))
    for name, blob in (("model.safetensors", digest), ("config.json", f"config-{commit}")):
        (folder / "snapshots" / commit / name).symlink_to(Path("../../blobs", blob))
    (folder / "refs" / "main").write_text(commit)
    return digest


def test_a_revision_selects_the_weights(hub: Path) -> None:
    hashes = {commit: publish(hub, commit, seed) for seed, commit in enumerate((FIRST, SECOND))}
    for seed, (commit, digest) in enumerate(hashes.items()):
        name = f"{NAME}@{commit}"
        resolved = resolve_model(world.ARCH, {}, name)
        model = create_model(resolved.arch, resolved.arch_args, resolved.weights)
        expected = create_model(world.ARCH, ARGS, seed=seed).state_dict()
        assert all(torch.equal(model.state_dict()[key], value) for key, value in expected.items())
        assert read_source(name, world.ARCH) == {"weights": name, "sha256": digest}
    for floating in (NAME, f"{NAME}@main"):
        assert resolve_model(world.ARCH, {}, floating).weights == f"{NAME}@{SECOND}"
    assert hashes[FIRST] != hashes[SECOND]


def test_weights_of_timm_have_a_revision_too(hub: Path) -> None:
    narrow = {"depth": 1, "embed_dim": 48}
    repository = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    digest = publish(hub, FIRST, 3, repository, narrow)
    model = create_model(world.ARCH, narrow, "hub")
    assert torch.equal(model.head.weight, create_model(world.ARCH, narrow, seed=3).head.weight)  # type: ignore[union-attr]
    source = {"weights": f"hf-hub:{repository}@{FIRST}", "sha256": digest}
    assert read_source("hub", world.ARCH) == source
    assert read_source("random", world.ARCH) == {} == read_source("train", world.ARCH)


def test_a_run_records_revision_and_hash_and_rejects_others(hub: Path, tmp_path: Path) -> None:
    first = publish(hub, FIRST, 1)
    run: Any = {"text": SMALL, "weights": NAME}
    result, progress = world.run(tmp_path, *world.BARE, **run)
    source = {"weights": f"{NAME}@{FIRST}", "sha256": first}
    assert (read_manifest(result.folder / "state" / "dense") or {})["source"] == source
    about = result.report["model"]
    assert (about["weights"], about["weights_sha256"]) == tuple(source.values())
    note = f"The weights are {NAME}@{FIRST}; use this name with --weights to get the same again."
    assert note in progress.notes and note in result.report["notes"]
    assert f"dense model: {NAME}@{FIRST}, sha256 {first}" in progress.notes

    (result.folder / "report.json").unlink()  # as after an interruption
    publish(hub, SECOND, 2)
    before = tree(result.folder)
    with pytest.raises(WeightsError, match=f"{SECOND} has other weights .* than this run was started with, .*{FIRST}"):
        world.run(tmp_path, *world.BARE, **run)
    assert tree(result.folder) == before
    publish_again = hub / "models--acme--tiny" / "refs" / "main"
    publish_again.write_text(FIRST)
    assert world.run(tmp_path, *world.BARE, **run)[0].report["model"] == about


def few_images(folder: Path) -> tuple[str, ...]:
    """Settings of a recipe for a few images, of the size of timm's test models."""
    images(str(folder / "images"), each=12)
    data = ("data.source=imagefolder", f"data.path={folder / 'images'}")
    sizes = ("model.args.in_chans=3", "model.args.img_size=160", "model.args.patch_size=80")
    return (*data, *sizes, "dense.batch_size=8", "finetune.batch_size=8")


def test_a_run_states_the_weights_of_its_teacher(tmp_path: Path) -> None:
    path, teacher = tmp_path / "teacher.safetensors", "test_resnet"
    save_file(create_model(teacher, {"num_classes": 2}, seed=5).state_dict(), path)
    sets = (*few_images(tmp_path), f"finetune.teacher={teacher}", f"finetune.teacher_weights={path}")
    _, progress = world.run(tmp_path, *world.BARE, *sets, text=SMALL)
    assert f"teacher: {path}, sha256 {sha256(path.read_bytes()).hexdigest()}" in progress.notes


def test_a_teacher_with_random_weights_has_no_file_to_state(tmp_path: Path) -> None:
    sets = ("finetune.teacher=test_vit", "finetune.teacher_weights=random", "finetune.distillation=soft")
    _, progress = world.run(tmp_path, *world.BARE, *few_images(tmp_path), *sets, text=SMALL)
    assert not [note for note in progress.notes if note.startswith("teacher: ")]


def test_an_unknown_revision_is_one_message(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, FIRST, 1)
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL)
    for revision in (SECOND, "none", "a@b", ""):
        words = ["recipe", "small.toml", "--weights", f"{NAME}@{revision}", "--out", "run"]
        result = CliRunner().invoke(cli.main, words)
        assert result.exit_code == 2 and "Traceback" not in result.output
        assert f"{NAME}@{revision} could not be downloaded" in " ".join(result.stderr.split()).replace("│ ", "")
        assert not Path("run").exists()
