"""The next step and the fine-tuning start from the weights that a step trained, also in a resumed run."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from vitcompress import surgery
from vitcompress.errors import ArtifactError, InputError, PlanError, WeightsError
from vitcompress.io.files import read_json
from vitcompress.io.progress import Progress
from vitcompress.io.tensors import load_tensors, save_tensors
from vitcompress.io.training_state import load_state
from vitcompress.methods import depth
from vitcompress.methods.base import LEFT, LEFT_WEIGHTS, context_for, seal
from vitcompress.methods.table import METHODS
from vitcompress.models.checkpoint import load_model_files
from vitcompress.pipeline import dense as dense_stage
from vitcompress.pipeline import preflight, prune
from vitcompress.pipeline.folder import check_folder, open_folder
from vitcompress.pipeline.job import Job, RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.pipeline.training import measure_accuracy
from vitcompress.recipe.load import load_recipe
from vitcompress.training import distributed

RECIPE = """
[model]
name = "vit_tiny_patch16_224"
args = { img_size = 8, patch_size = 4, in_chans = 1, embed_dim = 16, depth = 2, num_heads = 2, init_values = 0.5 }
weights = "random"

[data]
source = "digits"

[[step]]
method = "fixed"
activation = [0]

[[step]]
method = "recover"
epochs = 1
lr = 1e-2

[[step]]
method = "fold"

[[step]]
method = "fixed"
attention = [1]

[finetune]
epochs = 0
batch_size = 128
distillation = "soft"
teacher = "dense"

[run]
device = "cpu"
"""


def prepare_job(folder: Path, text: str = RECIPE) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "steps.toml").write_text(text)
    recipe = load_recipe(str(folder.parent / "steps.toml"))
    check_folder(folder, recipe, structure_only=False, fresh=False)
    job = preflight.prepare(recipe, RunOptions(out=folder), distributed.start("cpu"), Progress(), None)
    with open_folder(folder, recipe, structure_only=False, fresh=False):
        return job


def job_with_dense(folder: Path, text: str = RECIPE) -> tuple[Job, nn.Module]:
    job = prepare_job(folder, text)
    dense_stage.create_dense(job)
    return job, dense_stage.load_dense(job)


def test_a_training_between_steps_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size 5000 is more than"):
        prepare_job(tmp_path / "run", RECIPE.replace("lr = 1e-2\n", "lr = 1e-2\nbatch_size = 5000\n"))


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return prepare_job(tmp_path_factory.mktemp("handed") / "run")


@pytest.fixture(scope="module")
def dense(job: Job) -> nn.Module:
    dense_stage.create_dense(job)
    return dense_stage.load_dense(job)


@pytest.fixture(scope="module")
def steps(job: Job, dense: nn.Module) -> prune.Steps:
    return prune.run_steps(job, dense)


def test_weights_of_a_step_reach_the_end(job: Job, dense: nn.Module, steps: prune.Steps) -> None:
    """By hand: remove, load the weights, fold, remove. Fine-tuning for 0 epochs changes nothing."""
    first = METHODS["fixed"].structure(dense, job.family, job.base, job.recipe.steps[0].options)
    by_hand = surgery.apply_to_copy(dense, first)
    untrained = deepcopy(by_hand)
    surgery.fold_linears(untrained, job.base)
    left = load_tensors(job.steps[1].files.path / LEFT_WEIGHTS)
    assert any(not torch.equal(left[name], value) for name, value in by_hand.state_dict().items())
    by_hand.load_state_dict(left)
    plan, _ = surgery.fold_linears(by_hand, job.base)
    assert {"blocks.0.mlp", "blocks.0.ls2"} <= set(plan.folded)
    assert same(steps.model, by_hand) and not same(steps.model, untrained)
    assert steps.base.folded == plan.folded and steps.base.removed == {"blocks.0.mlp.act": "identity"}
    surgery.apply_plan(by_hand, steps.last)
    prune.recover(job)
    assert same(load_model_files(job.files.unfolded_plan, job.files.unfolded), by_hand)


def test_the_plan_alone_rebuilds_the_shapes(dense: nn.Module, job: Job, steps: prune.Steps) -> None:
    rebuilt = surgery.apply_to_copy(job.blank, steps.plan).to_empty(device="cpu")
    rebuilt.load_state_dict(steps.pruned().state_dict())
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rebuilt.eval()(x), steps.pruned().eval()(x))


def test_steps_that_are_done_are_not_trained_again(job: Job, dense: nn.Module, steps: prune.Steps) -> None:
    path = job.steps[1].files.path / LEFT_WEIGHTS
    written = path.stat().st_mtime_ns
    again = prune.run_steps(job, dense)
    assert same(again.model, steps.model) and (again.base, again.last) == (steps.base, steps.last)
    assert path.stat().st_mtime_ns == written


def test_the_step_trains_as_the_fine_tuning_does(job: Job, steps: prune.Steps) -> None:
    state = load_state(job.steps[1].files.path / "training")
    assert state is not None
    options = state.data["made_with"]["options"]
    assert (options["epochs"], options["lr"], options["distillation"]) == (1, 1e-2, "soft")


def test_a_step_killed_between_weights_and_plan_hands_over_the_same_weights(
    tmp_path: Path, dense: nn.Module, steps: prune.Steps
) -> None:
    stopped = prepare_job(tmp_path / "run")
    dense_stage.create_dense(stopped)
    prune.run_steps(stopped, dense_stage.load_dense(stopped))
    for number in (1, 2, 3):
        stopped.steps[number].files.plan.unlink()
    again = prune.run_steps(prepare_job(tmp_path / "run"), dense_stage.load_dense(stopped))
    assert same(again.model, steps.model) and again.plan == steps.plan


def test_weights_of_another_step_are_rejected(tmp_path: Path) -> None:
    broken, dense = job_with_dense(tmp_path / "run")
    prune.run_steps(broken, dense)
    path = broken.steps[1].files.path / LEFT_WEIGHTS
    tensors = load_tensors(path)
    save_tensors(path, tensors, {"plan": broken.base.digest})
    with pytest.raises(ArtifactError, match=r"was changed after its step: weights\.safetensors: sha256 is"):
        prune.run_steps(broken, dense)
    seal(path.parent)
    with pytest.raises(PlanError, match="saved with another plan"):
        prune.run_steps(broken, dense)
    save_tensors(path, {"head.weight": tensors["head.weight"]})
    seal(path.parent)
    with pytest.raises(WeightsError, match="does not fit its plan"):
        prune.run_steps(broken, dense)


@pytest.mark.parametrize("lost", [LEFT_WEIGHTS, LEFT])
def test_missing_weights_are_not_silently_replaced_by_older_ones(tmp_path: Path, lost: str) -> None:
    broken, dense = job_with_dense(tmp_path / "run")
    prune.run_steps(broken, dense)
    (broken.steps[1].files.path / lost).unlink()
    with pytest.raises(ArtifactError, match=r"was changed after its step: .*missing") as raised:
        prune.run_steps(broken, dense)
    assert lost in raised.value.message and "--fresh" in str(raised.value.hint)


def test_folds_between_steps_are_in_the_tables(job: Job, steps: prune.Steps) -> None:
    folder = job.steps[2].files.path
    (table,) = METHODS["fold"].report(folder).tables
    rows = {row[0]: row for row in table.rows}
    assert rows["blocks.0.mlp"][1] == "yes" and len(rows) == len(read_json(folder / "fold.json"))
    assert not METHODS["fold"].report(folder.parent).tables


@pytest.mark.slow
def test_nose_fades_out_on_the_weights_handed_over(tmp_path: Path) -> None:
    """The layers of the last step fade out of the weights that the step before trained, not of the dense ones."""
    text = RECIPE.replace(
        'method = "fixed"\nattention = [1]', 'method = "nose"\npruned_layers = 1\nte = { images = 20 }'
    )
    text = text.replace("[finetune]\nepochs = 0", "[finetune]\nepochs = 1\nlr = 0")
    faded, dense = job_with_dense(tmp_path / "run", text)
    prune.recover(faded)
    kept = load_model_files(faded.files.unfolded_plan, faded.files.unfolded)
    left = load_tensors(faded.steps[1].files.path / LEFT_WEIGHTS)
    assert torch.equal(kept.state_dict()["head.weight"], left["head.weight"])
    assert not torch.equal(left["head.weight"], dense.state_dict()["head.weight"])


@pytest.mark.slow
def test_a_whole_run_with_steps_in_between(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(
        RECIPE + '[bench]\nprotocol = "paper"\nbatch = 2\nwarmup = 1\nruns = 2\nruntimes = ["torch"]\n'
    )
    result = run_recipe(load_recipe(str(tmp_path / "steps.toml")), RunOptions(out=tmp_path / "run"))
    assert result.passed
    assert any(table["title"].startswith("Folded") for table in result.report["tables"])


@pytest.mark.slow
@pytest.mark.parametrize("after", ["", '[[step]]\nmethod = "recover"\nepochs = 1\nlr = 0\n\n'], ids=["fades", "gone"])
def test_a_removed_gate_ends_at_the_mean_that_was_measured(tmp_path: Path, after: str) -> None:
    """With a learning rate of 0 the recovered model is the one that transfer entropy was measured on."""
    text = RECIPE.replace('"vit_tiny_patch16_224"', '"vit_giant_patch14_dinov2"')
    text = text.replace("init_values = 0.5", "init_values = 0.5, mlp_ratio = 4.0")
    start, end = text.index("[[step]]"), text.index("[finetune]")
    step = '[[step]]\nmethod = "activation_only"\npruned_layers = 1\nte = { images = 20 }\n\n'
    text = text[:start] + step + after + text[end:].replace("epochs = 0", "epochs = 1\nlr = 0\nmin_lr = 0")
    faded, dense = job_with_dense(tmp_path / "run", text)
    prune.recover(faded)
    kept = load_model_files(faded.files.unfolded_plan, faded.files.unfolded)
    (site,) = (site for site in faded.family.sites(dense) if site.name in kept.plan.removed)
    around = context_for(dense, plan=faded.base, folder=tmp_path / "again")
    around = replace(around, data=faded.data)
    measured = depth.gate_layers(dense, around, [site], faded.recipe.steps[0].options).eval()
    measured.set_gate(site.name, 0.0)
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dropped = surgery.apply_to_copy(dense, kept.plan)
        # Both add the same few hundred float32 terms of order 1.
        torch.testing.assert_close(kept(x), measured(x), rtol=1e-4, atol=1e-5)
        assert (dropped(x) - kept(x)).abs().max() > 1e-3, "the gate at its bias is another function"
    assert faded.data is not None
    accuracy = measure_accuracy(faded, kept, faded.data.heldout).to_dict()
    assert read_json(faded.files.before_recovery)["pruned"] == accuracy
