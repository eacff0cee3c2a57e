"""The steps that prune nothing: what they leave, and what they leave alone. See test_hand_over for them in a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_world import context, model
from pydantic import TypeAdapter, ValidationError

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.io.tensors import load_tensors
from vitcompress.methods import METHODS, auxiliary
from vitcompress.methods.base import LEFT_WEIGHTS
from vitcompress.methods.depth import depth_plan
from vitcompress.training.augmentation import Augmentation
from vitcompress.training.options import TrainOptions


def test_recover_trains_a_copy_and_hands_its_weights_over(tmp_path: Path) -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    found = auxiliary.recover(
        made, context(tmp_path, made), auxiliary.RecoverOptions(epochs=2, lr=1e-2, warmup_epochs=1)
    )
    left = load_tensors(tmp_path / LEFT_WEIGHTS)
    assert found == context(tmp_path, made).plan and left.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in left.items())


def test_recover_learns_from_the_teacher(tmp_path: Path) -> None:
    """With the weight of the labels at zero, only a teacher can have taught."""
    made, wise = model(), model(width=32)
    with torch.no_grad():
        wise.head.bias.add_(torch.tensor([50.0, 0.0, 0.0]))  # always the first class
    around = context(tmp_path, made, teacher=lambda: wise)
    taught = surgery.apply_to_copy(made, around.plan)
    train = type(around.train)(epochs=4, batch_size=16, distillation="hard", alpha=1.0)
    around = context(tmp_path, made, teacher=lambda: wise, train=train)
    auxiliary.recover(made, around, auxiliary.RecoverOptions(epochs=4, lr=1e-2))
    taught.load_state_dict(load_tensors(tmp_path / LEFT_WEIGHTS))
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (taught.eval()(x).argmax(1) == 0).all() and not (made.eval()(x).argmax(1) == 0).all()


def test_a_recovery_between_steps_may_differ_from_the_last_one() -> None:
    """HetDPT+ has one of HetDPT's and one of isomorphic pruning's. What is not said follows [finetune]."""
    base = TrainOptions(epochs=300, batch_size=64, lr_base=1.0, decay_all=True, drop_path=0.2, teacher_smoothing=0.1)
    same = auxiliary.recovery_settings(base, auxiliary.RecoverOptions(epochs=2))
    assert same == replace(base, epochs=2)
    own = {"batch_size": 32, "lr": 0.5, "min_lr": 0.1, "warmup_epochs": 0, "weight_decay": 0.0, "decay_all": False}
    own |= {"drop_path": 0.0, "alpha": 0.25, "teacher_smoothing": 0.0, "augmentation": Augmentation(smoothing=0.1)}
    found = auxiliary.recovery_settings(base, auxiliary.RecoverOptions(epochs=2, **own))
    assert found == replace(base, epochs=2, lr_base=None, **own) and found.peak_lr == 0.5


def test_fold_is_a_plan_and_leaves_the_model_alone(tmp_path: Path) -> None:
    made = depth_plan(model(), context(tmp_path, model()).plan, [], [1])
    linear = surgery.apply_to_copy(model(), made)
    around = context(tmp_path, model(), plan=made)
    found = auxiliary.fold(linear, around, auxiliary.FoldOptions())
    assert found.folded == ("blocks.1.mlp",) and found.removed == {}
    assert found == auxiliary.structure_fold(linear, family_of(linear), made, auxiliary.FoldOptions())
    assert "blocks.1.mlp.fc1.weight" in linear.state_dict()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(surgery.apply_to_copy(linear, found)(x), linear(x), atol=1e-4)
    assert auxiliary.fold(linear, context(tmp_path, model(), plan=made), auxiliary.FoldOptions()) == found


@pytest.mark.parametrize(("name", "wrong"), [("recover", {"epochs": 0}), ("recover", {}), ("fold", {"epochs": 1})])
def test_options_are_checked(name: str, wrong: dict[str, int]) -> None:
    options = METHODS[name].options
    with pytest.raises((ValidationError, TypeError)):
        TypeAdapter(options).validate_json(json.dumps(wrong)) if name == "recover" else options(**wrong)
    assert auxiliary.estimate_recover(model(), family_of(model()), auxiliary.RecoverOptions(epochs=3))[0].epochs == 3
