"""The steps that prune nothing: what they change, and what they leave unchanged. See test_hand_over for whole runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_plans import depth_plan
from method_world import context, model
from pydantic import TypeAdapter, ValidationError

from vitcompress import surgery
from vitcompress.families import family_of
from vitcompress.io.tensors import load_tensors
from vitcompress.methods import auxiliary
from vitcompress.methods.base import LEFT_WEIGHTS
from vitcompress.methods.table import METHODS
from vitcompress.training.options import Augmentation, TrainOptions


def test_recover_trains_a_copy_and_hands_over_its_weights(tmp_path: Path) -> None:
    student = model()
    before = {name: value.clone() for name, value in student.state_dict().items()}
    around = context(tmp_path, student)
    plan = auxiliary.recover(student, around, auxiliary.RecoverOptions(epochs=2, lr=1e-2, warmup_epochs=1))
    trained = load_tensors(tmp_path / LEFT_WEIGHTS)
    assert plan == around.plan and trained.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())


def test_recover_learns_from_the_teacher(tmp_path: Path) -> None:
    """The weight of the labels is zero. The teacher always predicts the first class."""
    student, teacher = model(), model(width=32)
    with torch.no_grad():
        teacher.head.bias.add_(torch.tensor([50.0, 0.0, 0.0]))
    train = TrainOptions(epochs=4, batch_size=16, distillation="hard", alpha=1.0)
    around = context(tmp_path, student, teacher=lambda: teacher, train=train)
    auxiliary.recover(student, around, auxiliary.RecoverOptions(epochs=4, lr=1e-2))
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not (student.eval()(x).argmax(1) == 0).all()
    student.load_state_dict(load_tensors(tmp_path / LEFT_WEIGHTS))
    assert (student.eval()(x).argmax(1) == 0).all()


def test_a_recovery_between_steps_may_differ_from_the_last_one() -> None:
    """HetDPT+ has one of HetDPT's and one of isomorphic pruning's. Options that are not set follow [finetune]."""
    base = TrainOptions(
        epochs=300,
        batch_size=64,
        lr_base=1.0,
        decay_all=True,
        drop_path=0.2,
        distillation="hard",
        teacher_smoothing=0.1,
    )
    assert auxiliary.recovery_settings(base, auxiliary.RecoverOptions(epochs=2)) == replace(base, epochs=2)
    own = {"batch_size": 32, "lr": 0.5, "min_lr": 0.1, "warmup_epochs": 0, "weight_decay": 0.0, "decay_all": False}
    own |= {"drop_path": 0.0, "alpha": 0.25, "teacher_smoothing": 0.0, "augmentation": Augmentation(smoothing=0.1)}
    settings = auxiliary.recovery_settings(base, auxiliary.RecoverOptions(epochs=2, **own))
    assert settings == replace(base, epochs=2, lr_base=None, **own) and settings.peak_lr == 0.5


def test_fold_is_a_plan_and_leaves_the_model_unchanged(tmp_path: Path) -> None:
    base = depth_plan(model(), context(tmp_path, model()).plan, [], [1])
    linear = surgery.apply_to_copy(model(), base)
    options = auxiliary.FoldOptions()
    plan = auxiliary.fold(linear, context(tmp_path, model(), plan=base), options)
    assert plan.folded == ("blocks.1.mlp",) and plan.removed == {}
    assert plan == METHODS["fold"].structure(linear, family_of(linear), base, options)
    assert "blocks.1.mlp.fc1.weight" in linear.state_dict()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(surgery.apply_to_copy(linear, plan)(x), linear(x), atol=1e-4)
    (table,) = auxiliary.report_fold(tmp_path).tables
    assert table.rows[0][:2] == ("blocks.1.mlp", "yes")


def test_wrong_options() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(METHODS["recover"].options).validate_json(json.dumps({"epochs": 0}))
    with pytest.raises(TypeError):
        METHODS["fold"].options(epochs=1)
