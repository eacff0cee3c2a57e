"""Each head learns from its own source, teachers stay frozen, and no untrained head is ever averaged."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from contracts import add_gates, layers
from tiny_training import CPU, INPUT, OPTIONS, fit, same, stripes, two_headed, vit, weights
from torch.nn import functional

from vitcompress.errors import InputError
from vitcompress.exporters.quantize.emulate import QuantizedTraining
from vitcompress.exporters.quantize.graph import Quantization
from vitcompress.models.create import input_config
from vitcompress.training.losses import Objective, both_heads, check_outputs, hard_loss, soft_loss, student_of
from vitcompress.training.options import Augmentation, TrainOptions
from vitcompress.training.trainer import make_optimizer


def test_hard_and_soft_losses_are_deits() -> None:
    student = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 0.0]])
    teacher = torch.tensor([[0.0, 3.0, 0.0], [0.0, 1.0, 4.0]])
    hard = -torch.log_softmax(student, 1)[[0, 1], [1, 2]].mean()
    assert float(hard_loss(student, teacher)) == pytest.approx(float(hard))
    p, q = torch.softmax(teacher / 3, 1), torch.softmax(student / 3, 1)
    soft = 9 * (p * (p.log() - q.log())).sum() / 2  # the mean over the two images
    assert float(soft_loss(student, teacher, 3.0)) == pytest.approx(float(soft), rel=1e-5)


def test_soft_losses_are_not_rounded_to_half_precision() -> None:
    """Rounded logarithms of close logits, as of a pruned model and its teacher, have another divergence."""
    generator = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(64, 10, generator=generator)
    teacher = (student + 0.1 * torch.randn(64, 10, generator=generator)).bfloat16()
    exact = float(soft_loss(student.bfloat16().double(), teacher.double(), 2.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert float(soft_loss(student.bfloat16(), teacher, 2.0)) == pytest.approx(exact, rel=1e-4)


def test_the_decision_of_a_teacher_may_count_as_a_smoothed_label() -> None:
    """As in the code released with isomorphic pruning; the labels keep a smoothing of their own."""
    student, teacher = vit(), vit(seed=1)
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    options = TrainOptions(distillation="hard", augmentation=Augmentation(smoothing=0.2), teacher_smoothing=0.1)
    loss = Objective(student, options, teacher=teacher, input=INPUT, device=CPU.device)
    logits, decisions = student(images).detach(), teacher(images).argmax(1)
    wanted = torch.full((6, 3), 0.1 / 3).scatter_(1, decisions[:, None], 0.9 + 0.1 / 3)
    distilled = -(wanted * torch.log_softmax(logits, 1)).sum(1).mean()
    labels = functional.cross_entropy(logits, targets, label_smoothing=0.2)
    assert loss(student, images, targets).item() == pytest.approx(((labels + distilled) / 2).item(), rel=1e-5)
    assert distilled.item() != pytest.approx(float(hard_loss(logits, teacher(images))), rel=1e-3)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_each_head_learns_from_its_own_source(kind: Any) -> None:
    student, teacher = two_headed().train(), vit(seed=1)
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    smooth = Augmentation(smoothing=0.1)
    options = TrainOptions(distillation=kind, alpha=0.25, temperature=2.0, augmentation=smooth)
    loss = Objective(student, options, teacher=teacher, input=INPUT, device=CPU.device)
    with both_heads(student):
        first, second = student(images)
        value = loss(student, images, targets)
    labels = functional.cross_entropy(first, targets, label_smoothing=0.1)
    logits_of_teacher = teacher(images)
    distilled = hard_loss(second, logits_of_teacher) if kind == "hard" else soft_loss(second, logits_of_teacher, 2.0)
    assert value.item() == pytest.approx((0.75 * labels + 0.25 * distilled).item(), rel=1e-5)


def test_one_head_learns_from_both_sources() -> None:
    student, teacher = vit(), vit(seed=1)
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    loss = Objective(student, TrainOptions(distillation="hard"), teacher=teacher, input=INPUT, device=CPU.device)
    expected = (functional.cross_entropy(student(images), targets) + hard_loss(student(images), teacher(images))) / 2
    assert loss(student, images, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_no_untrained_head_is_averaged(tmp_path: Path) -> None:
    """Without a teacher both heads learn the labels: each of them alone is right about the images afterwards."""
    model: Any = two_headed()
    result = fit(model, tmp_path, dataclasses.replace(OPTIONS, epochs=12))
    images = torch.stack([torch.tensor(np.asarray(stripes()[i][0])) for i in range(48)])[:, None] / 127.5 - 1
    with torch.no_grad(), both_heads(model):
        heads = model.train()(images)
    shares = [float((head.argmax(1).numpy() == stripes().labels).mean()) for head in heads]
    assert min(shares) > 0.9 and result.accuracy is not None and result.accuracy.top1 > 0.9
    assert model.distilled_training is False  # as before
    for alpha in (0.0, 1.0):
        with pytest.raises(InputError, match="one of the two heads untrained"):
            fit(model, tmp_path / "x", dataclasses.replace(OPTIONS, distillation="hard", alpha=alpha), teacher=vit())
    with pytest.raises(InputError, match=r"alpha = 0\.5, label_weight = 0 would leave one of the two heads untrained"):
        Objective(
            model, TrainOptions(distillation="soft", label_weight=0.0), teacher=vit(), input=INPUT, device=CPU.device
        )
    Objective(model, TrainOptions(distillation="features", alpha=0.0), teacher=vit(), input=INPUT, device=CPU.device)


def test_two_classes_are_enough() -> None:
    check_outputs(vit(num_classes=2))


def test_a_teacher_is_frozen_and_must_fit(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, distillation="soft")
    teacher = vit(seed=1)
    before = weights(teacher)
    fit(two_headed(), tmp_path / "a", options, teacher=teacher)
    assert same(before, weights(teacher)) and all(p.grad is None for p in teacher.parameters())
    with pytest.raises(InputError, match="needs a teacher"):
        fit(vit(), tmp_path / "b", options)
    with pytest.raises(InputError, match="teacher takes images of"):
        fit(vit(), tmp_path / "b", options, teacher=vit(img_size=6))
    with pytest.raises(InputError, match="teacher has 5 classes, the student 3"):
        fit(vit(), tmp_path / "b", options, teacher=vit(num_classes=5))
    cnn = timm.create_model("test_resnet", num_classes=3, in_chans=1)
    with pytest.raises(InputError, match="teacher takes images of") as caught:
        fit(vit(), tmp_path / "c", options, teacher=cnn)
    assert "pretrained_cfg['input_size']" in str(caught.value.hint)
    cnn.pretrained_cfg["input_size"] = input_config(vit()).size
    fit(vit(), tmp_path / "c", options, teacher=cnn)


def test_a_teacher_sees_pixels_normalized_its_own_way() -> None:
    student, teacher = vit(), vit(seed=1)
    other = dataclasses.replace(INPUT, mean=(0.2,), std=(0.7,))
    pixels = torch.rand(3, 1, 4, 4)
    loss: Objective = Objective(
        student, TrainOptions(distillation="hard"), teacher=teacher, input=other, device=CPU.device
    )
    assert loss.teacher is not None
    own = input_config(teacher)
    expected = teacher((pixels - own.mean[0]) / own.std[0])
    assert torch.allclose(loss.teacher((pixels - 0.2) / 0.7, "hard")[0], expected, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- UP-ViT's recovery


def test_labels_may_count_fully_beside_the_teacher() -> None:
    """UP-ViT: CE(p, y) + alpha * KL(q || p), and CE(p, y) + alpha * CE(p, argmax q) (eq. D1)."""
    student, teacher = vit(), vit(seed=1)
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    logits, logits_of_teacher = student(images), teacher(images)
    labels = functional.cross_entropy(logits, targets)
    for kind, term in (
        ("soft", soft_loss(logits, logits_of_teacher, 1.0)),
        ("hard", hard_loss(logits, logits_of_teacher)),
    ):
        how = TrainOptions(distillation=kind, alpha=6.4, label_weight=1.0)
        loss = Objective(student, how, teacher=teacher, input=INPUT, device=CPU.device)
        assert loss(student, images, targets).item() == pytest.approx((labels + 6.4 * term).item(), rel=1e-5)
    with pytest.raises(InputError, match=r"the labels would weigh -5\.4"):
        Objective(
            student, TrainOptions(distillation="soft", alpha=6.4), teacher=teacher, input=INPUT, device=CPU.device
        )


def test_patch_tokens_and_features_are_compared() -> None:
    """Eq. D2, and the mean squared distance of pooled features; in eval mode only logits are returned."""
    teacher, images, targets = vit(seed=1), torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    narrow: Any = vit(embed_dim=4, num_heads=1)
    student: Any = student_of(narrow, "soft_patch", teacher).train()
    how: Any = {"teacher": teacher, "input": INPUT, "device": CPU.device}
    loss = Objective(
        student, TrainOptions(distillation="soft_patch", alpha=0.2, label_weight=1.0, patch_weight=0.5), **how
    )
    own, theirs = student.projection(narrow.forward_features(images)[:, 1:]), teacher.forward_features(images)[:, 1:]
    patches = sum(functional.mse_loss(own[:, i], theirs[:, i]) for i in range(own.shape[1]))
    soft = functional.cross_entropy(narrow(images), targets) + 0.2 * soft_loss(narrow(images), teacher(images), 1.0)
    assert loss(student, images, targets).item() == pytest.approx((soft + 0.5 * patches).item(), rel=1e-5)
    assert torch.equal(student.eval()(images), narrow.eval()(images))

    wide: Any = vit()
    student = student_of(wide, "features", teacher).train()
    loss = Objective(student, TrainOptions(distillation="features", alpha=20.0, label_weight=1.0), **how)
    pooled = [of.forward_head(of.forward_features(images), pre_logits=True) for of in (wide, teacher)]
    expected = functional.cross_entropy(wide(images), targets) + 20 * functional.mse_loss(*pooled)
    assert loss(student, images, targets).item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(InputError, match="pooled features have 16 channels, the student's 4"):
        student_of(narrow, "features", teacher)
    assert student_of(narrow, "soft", teacher) is narrow


def test_the_exceptions_from_weight_decay_are_those_of_the_model_inside_of_a_wrapper() -> None:
    model, teacher = vit(), vit(seed=1, embed_dim=8)
    quantized = QuantizedTraining(model, Quantization("int8", {"blocks.0.mlp.fc1": 1.0}), learned=True)
    for wrapper in (student_of(model, "soft_patch", teacher), add_gates(model, layers(model)), quantized):
        names = {id(p): name for name, p in wrapper.named_parameters()}
        groups = make_optimizer(wrapper, TrainOptions(weight_decay=0.05), CPU.device).param_groups
        decay = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        matrices = {name for name, p in wrapper.named_parameters() if p.ndim > 1}
        assert matrices - decay == {"model.cls_token", "model.pos_embed"} and decay < matrices


@pytest.mark.parametrize("kind", ["soft_patch", "features"])
def test_recovery_with_features_trains_resumes_and_leaves_no_trace(kind: Any, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, distillation=kind, alpha=0.5, label_weight=1.0, ema=0.5, epochs=4)
    teacher, model = vit(seed=1), vit()
    names, before = set(model.state_dict()), weights(model)
    result = fit(model, tmp_path, options, teacher=teacher)
    assert set(model.state_dict()) == names and not same(before, weights(model))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    again = vit()
    fit(again, tmp_path, options, teacher=teacher)  # finished: loaded
    assert same(weights(again), weights(model))
    two = two_headed()
    fit(two, tmp_path / "two", options, teacher=teacher)
    assert all(torch.isfinite(t).all() for t in two.state_dict().values())


def test_the_projection_of_patch_tokens_depends_on_the_seed() -> None:
    wide = vit(embed_dim=12, num_heads=1)
    projections = [student_of(vit(), "soft_patch", wide, seed).projection.weight for seed in (0, 0, 1)]
    assert torch.equal(projections[0], projections[1]) and not torch.equal(projections[0], projections[2])


def test_probabilities_are_not_smoothed_again() -> None:
    """timm's mixup has smoothed them."""
    student, images = vit(), torch.randn(6, 1, 4, 4)
    soft = torch.softmax(torch.randn(6, 3), 1)
    options = TrainOptions(distillation="none", augmentation=Augmentation(smoothing=0.3))
    loss = Objective(student, options, teacher=None, input=INPUT, device=CPU.device)
    expected = functional.cross_entropy(student(images), soft)
    assert loss(student, images, soft).item() == pytest.approx(expected.item(), rel=1e-5)
    assert functional.cross_entropy(student(images), soft, label_smoothing=0.3).item() != pytest.approx(expected.item())


def test_without_a_teacher_both_heads_share_the_labels() -> None:
    student: Any = two_headed().train()
    images, targets = torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    loss = Objective(student, TrainOptions(distillation="none"), teacher=None, input=INPUT, device=CPU.device)
    with both_heads(student):
        first, second = student(images)
        value = loss(student, images, targets)
    expected = (functional.cross_entropy(first, targets) + functional.cross_entropy(second, targets)) / 2
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
