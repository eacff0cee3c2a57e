"""Weights that a step leaves are what the next step is given, what its own plan is applied to, and what recovery
starts from; killed and resumed the same.
"""

from copy import deepcopy
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
from vitcompress.methods import METHODS
from vitcompress.methods.base import LEFT, LEFT_WEIGHTS, seal
from vitcompress.models.checkpoint import load_model_files
from vitcompress.pipeline import dense as dense_stage
from vitcompress.pipeline import preflight, prune, recover
from vitcompress.pipeline.folder import check_folder, opened
from vitcompress.pipeline.job import Job, RunOptions
from vitcompress.pipeline.run import run_recipe
from vitcompress.recipe.load import load_recipe
from vitcompress.training import distributed
from vitcompress.verify.fold import UNFOLDED, UNFOLDED_PLAN

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


def prepared(folder: Path, text: str = RECIPE) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "steps.toml").write_text(text)
    recipe = load_recipe(str(folder.parent / "steps.toml"))
    check_folder(folder, recipe, structure_only=False, fresh=False)
    job = preflight.prepare(recipe, RunOptions(out=folder), distributed.start("cpu"), Progress())
    with opened(folder, recipe, structure_only=False, fresh=False):
        return job


def test_a_recovery_between_steps_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size 5000 is more than"):
        prepared(tmp_path / "run", RECIPE.replace("lr = 1e-2\n", "lr = 1e-2\nbatch_size = 5000\n"))


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return prepared(tmp_path_factory.mktemp("handed") / "run")


@pytest.fixture(scope="module")
def dense(job: Job) -> nn.Module:
    return dense_stage.dense_model(job)


@pytest.fixture(scope="module")
def steps(job: Job, dense: nn.Module) -> prune.Steps:
    return prune.take_steps(job, dense)


def test_what_a_step_leaves_reaches_the_end(job: Job, dense: nn.Module, steps: prune.Steps) -> None:
    """By hand: remove, load what was left, fold, remove; recovery of no epochs keeps exactly that."""
    first = METHODS["fixed"].structure(dense, job.family, job.base, job.recipe.steps[0].options)
    by_hand = surgery.apply_to_copy(dense, first)
    untrained = deepcopy(by_hand)
    surgery.fold_linears(untrained, job.base)
    left = load_tensors(job.step_folder(1) / LEFT_WEIGHTS)
    assert any(not torch.equal(left[name], value) for name, value in by_hand.state_dict().items())
    by_hand.load_state_dict(left)
    folding = surgery.fold_linears(by_hand, job.base)
    assert {"blocks.0.mlp", "blocks.0.ls2"} <= set(folding.plan.folded)
    assert same(steps.model, by_hand) and not same(steps.model, untrained)
    assert steps.base.folded == folding.plan.folded and steps.base.removed == {"blocks.0.mlp.act": "identity"}
    surgery.apply_plan(by_hand, steps.last)
    recover.recover(job, dense, steps)
    assert same(load_model_files(job.folder / UNFOLDED_PLAN, job.folder / UNFOLDED), by_hand)


def test_the_plan_alone_rebuilds_the_shapes(dense: nn.Module, job: Job, steps: prune.Steps) -> None:
    rebuilt = surgery.apply_to_copy(job.blank, steps.plan).to_empty(device="cpu")
    rebuilt.load_state_dict(steps.pruned().state_dict())
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rebuilt.eval()(x), steps.pruned().eval()(x))


def test_taken_again_nothing_is_trained(job: Job, dense: nn.Module, steps: prune.Steps) -> None:
    path = job.step_folder(1) / LEFT_WEIGHTS
    written = path.stat().st_mtime_ns
    again = prune.take_steps(job, dense)
    assert same(again.model, steps.model) and (again.base, again.last) == (steps.base, steps.last)
    assert path.stat().st_mtime_ns == written


def test_the_step_trains_as_recovery_does(job: Job, steps: prune.Steps) -> None:
    state = load_state(job.step_folder(1) / "training")
    assert state is not None
    made_with = state.data["made_with"]["options"]
    assert (made_with["epochs"], made_with["lr"], made_with["distillation"]) == (1, 1e-2, "soft")


def test_stopped_between_weights_and_plan_it_hands_over_the_same(
    tmp_path: Path, dense: nn.Module, steps: prune.Steps
) -> None:
    stopped = prepared(tmp_path / "run")
    prune.take_steps(stopped, dense_stage.dense_model(stopped))
    for number in (1, 2, 3):
        (stopped.step_folder(number) / "plan.json").unlink()
    again = prune.take_steps(prepared(tmp_path / "run"), dense_stage.dense_model(stopped))
    assert same(again.model, steps.model) and again.plan == steps.plan


def test_weights_of_another_step_are_refused(tmp_path: Path) -> None:
    broken = prepared(tmp_path / "run")
    dense = dense_stage.dense_model(broken)
    prune.take_steps(broken, dense)
    path = broken.step_folder(1) / LEFT_WEIGHTS
    tensors = load_tensors(path)
    save_tensors(path, tensors, {"plan": broken.base.digest})
    with pytest.raises(ArtifactError, match=r"not as its step left it: weights\.safetensors: sha256 is"):
        prune.take_steps(broken, dense)
    seal(path.parent)
    with pytest.raises(PlanError, match="saved with another plan"):
        prune.take_steps(broken, dense)
    save_tensors(path, {"head.weight": tensors["head.weight"]})
    seal(path.parent)
    with pytest.raises(WeightsError, match="does not fit its plan"):
        prune.take_steps(broken, dense)


@pytest.mark.parametrize("lost", [LEFT_WEIGHTS, LEFT])
def test_weights_that_are_gone_are_not_silently_replaced_by_older_ones(tmp_path: Path, lost: str) -> None:
    broken = prepared(tmp_path / "run")
    dense = dense_stage.dense_model(broken)
    prune.take_steps(broken, dense)
    (broken.step_folder(1) / lost).unlink()
    with pytest.raises(ArtifactError, match=r"not as its step left it: .*missing") as raised:
        prune.take_steps(broken, dense)
    assert lost in raised.value.message and "--fresh" in str(raised.value.hint)


def test_what_was_folded_in_between_is_in_the_tables(job: Job, steps: prune.Steps) -> None:
    folder = job.step_folder(2)
    (table,) = METHODS["fold"].report(folder).tables
    rows = {row[0]: row for row in table["rows"]}
    assert rows["blocks.0.mlp"][1] == "yes" and len(rows) == len(read_json(folder / "fold.json"))
    assert METHODS["fold"].report(folder.parent).tables == ()


@pytest.mark.slow
def test_nose_fades_out_on_the_weights_handed_over(tmp_path: Path) -> None:
    """The last step's layers fade from what that step was given: the recovered model is not the dense one's child."""
    text = RECIPE.replace(
        'method = "fixed"\nattention = [1]', 'method = "nose"\npruned_layers = 1\nte = { images = 20 }'
    )
    faded = prepared(tmp_path / "run", text.replace("[finetune]\nepochs = 0", "[finetune]\nepochs = 1\nlr = 0"))
    dense = dense_stage.dense_model(faded)
    steps = prune.take_steps(faded, dense)
    recover.recover(faded, dense, steps)
    kept = load_model_files(faded.folder / UNFOLDED_PLAN, faded.folder / UNFOLDED)
    left = load_tensors(faded.step_folder(1) / LEFT_WEIGHTS)
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
