"""The Python API: every function on a tiny model, with batches, with data sets, and with objects of other packages."""

import doctest
import inspect
import json
import logging
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import timm
import torch
from packages import write_package
from PIL import Image
from torch import Tensor, distributed, nn
from torch.nn.utils.prune import l1_unstructured
from torch.utils.data import Subset, TensorDataset
from whole_runs import RecordedProgress

import vitcompress as vc
from vitcompress.errors import DataError, DeviceError, InputError, PlanError, VitcompressError
from vitcompress.exporters.sidecar import sidecar_path
from vitcompress.io.progress import Progress
from vitcompress.methods.base import Measured
from vitcompress.methods.table import METHODS
from vitcompress.models.cost import count_by_module
from vitcompress.models.create import class_names_of
from vitcompress.pipeline import api
from vitcompress.pipeline.latency import LatencyClock
from vitcompress.training.options import Augmentation

ARGS: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
FINE = {"residual": 2, "ffn": 2, "head_dim": 2}
X = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def model(**changes: Any) -> nn.Module:
    return vc.create_model("vit_tiny_patch16_224", **{**ARGS, "num_classes": 4, **changes})


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 4) for _ in range(count)]


class Pictures:
    """A map-style data set of PIL images, as a user would write it."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(index).integers(0, 255, (8, 8), np.uint8)
        return Image.fromarray(pixels), index % 4


class Stream:
    """An iterable of batches without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(batches())


class Frames(torch.utils.data.IterableDataset[tuple[Tensor, int]]):
    """A stream of (image, class) pairs for torch's DataLoader."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (
            (image, int(label)) for images, labels in batches() for image, label in zip(images, labels, strict=True)
        )


class Shards(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Batches with a length; torch gives every data set a `__getitem__`, which raises here."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(batches())

    def __len__(self) -> int:
        return len(batches())


def test_an_iterable_data_set_of_torch_gives_batches() -> None:
    runs = [vc.finetune(model(), data, data, epochs=1, device="cpu").history for data in (batches(), Shards())]
    assert [{**record, "seconds": 0} for record in runs[0]] == [{**record, "seconds": 0} for record in runs[1]]


@pytest.mark.parametrize(
    "data", [batches(), Pictures(), Stream(), Shards(), torch.utils.data.DataLoader(Pictures(), collate_fn=list)]
)
def test_isomorphic_plans_from_any_data(data: Any) -> None:
    if isinstance(data, torch.utils.data.DataLoader):  # batches that are no tensors
        with pytest.raises(DataError, match="a batch has tuple instead of two tensors"):
            vc.plan(model(), "isomorphic", data, device="cpu")
        return
    dense = model()
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    plan = vc.plan(dense, "isomorphic", data, keep_ratio=0.5, images=24, align=FINE, device="cpu")
    assert plan.kept and all(torch.equal(before[name], value) for name, value in dense.state_dict().items())
    small = vc.prune(dense, plan)
    assert vc.count_cost(small).params < vc.count_cost(dense).params and small(X).shape == (3, 4)
    assert small.plan.kept == plan.kept  # type: ignore[union-attr, operator]


def test_the_whole_path(tmp_path: Path) -> None:
    dense = model()
    small = vc.prune(dense, vc.plan(dense, "fixed", attention=[1], activation=[0]))
    result = vc.finetune(small, Pictures(), Pictures(), teacher=dense, epochs=1, batch_size=16, device="cpu")
    assert result.accuracy is not None and result.accuracy.total == 32
    folded = vc.fold(small)
    assert not torch.equal(folded(X), dense(X)) and torch.allclose(folded(X), small(X), atol=1e-5)
    assert folded.plan.folded == ("blocks.0.mlp",)  # type: ignore[union-attr]
    vc.save_model(folded, tmp_path / "out")
    again = vc.load_model(tmp_path / "out")
    assert torch.equal(again(X), folded(X))
    path = vc.export(folded, tmp_path / "out" / "model.onnx", class_names=("a", "b", "c", "d"))
    verification = vc.verify(tmp_path / "out")
    assert verification and verification.passed, [check for check in verification.checks if check.verdict == "failed"]
    assert any(check.name.startswith("onnx") and check.verdict == "passed" for check in verification.checks)
    assert vc.evaluate(path, Pictures(), device="cpu").correct == vc.evaluate(folded, Pictures(), device="cpu").correct
    bench = vc.bench([dense, folded, path], batch=2, protocol="paper", warmup=1, runs=3, device="cpu")
    assert len(bench.rows) == 3 and len(bench.ratios) == 2
    assert "images/s" in str(bench)
    assert len(vc.bench(path, batch=1, protocol="paper", warmup=1, runs=3, device="cpu").rows) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_stopped_training_leaves_the_mode_of_the_model_and_no_gradients(training: bool) -> None:
    own, calls = model().train(training), list[int]()

    def stop(*about: object) -> None:
        calls.append(len(calls))
        if calls[1:]:
            raise KeyboardInterrupt

    handle = own.get_submodule("head").register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        vc.finetune(own, batches())
    handle.remove()
    assert {part.training for part in own.modules()} == {training}
    assert all(parameter.grad is None for parameter in own.parameters())


def test_bench_opens_what_the_command_opens() -> None:
    settings: dict[str, Any] = {"batch": 1, "protocol": "paper", "warmup": 1, "runs": 3, "device": "cpu"}
    bench = vc.bench([model(), "timm-onnx:test_vit"], **settings, variants="fp32,bf16")
    runs = [(row["runtime"], row["precision"]) for row in bench.rows]
    assert runs == [("torch", "fp32"), ("torch", "bf16"), ("onnxruntime", "fp32")]
    assert bench.rows[1]["artifact"] == "VisionTransformer 0 bf16"


def test_steps_compose() -> None:
    dense = model()
    first = vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5))
    second = vc.prune(first, vc.plan(first, "nose", batches(), pruned_layers=1, te={"images": 16}, device="cpu"))
    assert second.plan.heads and second.plan.removed  # type: ignore[union-attr]
    assert second(X).shape == (3, 4)


def test_a_plan_that_counts_the_channels_of_another_model_is_rejected() -> None:
    dense: Any = model()
    small, other = (
        vc.prune(dense, vc.plan(dense, "isomorphic", batches(), keep_ratio=ratio, align=FINE, device="cpu"))
        for ratio in (0.7, 0.8)
    )
    plan = vc.plan(small, "isomorphic", batches(), keep_ratio=0.8, align=FINE, device="cpu")
    for wrong in (dense, other):
        with pytest.raises(PlanError, match="counts the channels of a model that was pruned differently"):
            vc.prune(wrong, type(plan).from_json(plan.to_json()))
    assert vc.prune(small, plan).plan.kept == small.plan.then(plan).kept
    part = replace(plan, kept={space: channels for space, channels in plan.kept.items() if space.endswith(".mlp")})
    assert vc.prune(small, replace(part, heads={})).plan.kept.keys() == small.plan.kept.keys()
    first = vc.plan(dense, "isomorphic", batches(), keep_ratio=0.8, align=FINE, device="cpu")
    assert first.digest == vc.prune(dense, first).plan.digest
    assert vc.prune(other, vc.plan(dense, "fixed", activation=[0])).plan.removed


def test_a_method_that_trains_leaves_its_weights_in_the_model() -> None:
    dense = model()
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    plan = vc.plan(
        dense, "sero", batches(), sparsity=0.5, epochs=2, round_to=1, training={"batch_size": 16}, device="cpu"
    )
    assert plan.kept and any(not torch.equal(before[name], value) for name, value in dense.state_dict().items())


def test_a_finished_plan_is_repeated_with_the_model_before_and_after_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sparsity": 0.5, "epochs": 2, "round_to": 1, "training": {"batch_size": 16}}
    dense = model()
    plan = vc.plan(dense, "sero", batches(), folder=tmp_path, **options)
    for same in (dense, model()):
        assert vc.plan(same, "sero", batches(), folder=tmp_path, **options) == plan
        assert all(torch.equal(value, dense.state_dict()[name]) for name, value in same.state_dict().items())
    with pytest.raises(InputError, match="contains a plan of another model or call"):
        vc.plan(model(seed=1), "sero", batches(), folder=tmp_path, **options)


def test_a_scale_that_a_finished_plan_has_reset_is_not_reset_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_ratio": 1, "keep_head_dim": 0.5, "align": FINE, "attention_scale": "reset"}
    dense, before = model(), model().state_dict()["blocks.0.attn.qkv.weight"]
    plan = vc.plan(dense, "isomorphic", batches(), folder=tmp_path, criterion="magnitude", **options)
    after = dense.state_dict()["blocks.0.attn.qkv.weight"].clone()
    assert not torch.equal(after, before)
    assert vc.plan(dense, "isomorphic", batches(), folder=tmp_path, criterion="magnitude", **options) == plan
    assert torch.equal(dense.state_dict()["blocks.0.attn.qkv.weight"], after)


def test_gates_that_a_finished_plan_has_frozen_are_not_frozen_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "activation": [0], "device": "cpu"}
    gated = vc.create_model("vit_giant_patch14_dinov2", num_classes=4, mlp_ratio=4.0, **ARGS).double()
    before = gated.state_dict()["blocks.0.mlp.fc2.weight"].clone()
    plan = vc.plan(gated, "fixed", batches(), **options)
    after = gated.state_dict()["blocks.0.mlp.fc2.weight"].clone()
    assert not torch.equal(after, before)
    assert vc.plan(gated, "fixed", batches(), **options) == plan
    assert torch.equal(gated.state_dict()["blocks.0.mlp.fc2.weight"], after)


@pytest.mark.parametrize("method", ["sero", "recover"])
def test_methods_that_train_leave_the_parameters_of_the_model(method: str) -> None:
    """An optimizer or an average that the caller has refers to them, and a model on a GPU stays there."""
    dense = model()
    before = {name: id(parameter) for name, parameter in dense.named_parameters()}
    options = {"sparsity": 0.5, "epochs": 2, "round_to": 1} if method == "sero" else {"epochs": 1}
    vc.plan(dense, method, batches(), training={"batch_size": 16}, device="cpu", **options)
    assert {name: id(parameter) for name, parameter in dense.named_parameters()} == before


def test_frozen_layers_are_not_ranked_by_their_gradients() -> None:
    dense = model()
    dense.blocks[0].requires_grad_(False)  # type: ignore[index, union-attr]
    options: dict[str, Any] = {"sparsity": 0.5, "epochs": 1, "warmup_epochs": 0, "round_to": 1}
    options["training"] = {"batch_size": 16}
    with pytest.raises(InputError, match="some of their layers are frozen"):
        vc.plan(dense, "sero", batches(), **options)
    assert vc.plan(dense, "sero", batches(), criterion="weight", **options).kept
    dense.head.requires_grad_(False)  # type: ignore[union-attr]
    assert vc.plan(dense.requires_grad_(True), "sero", batches(), **options).kept


def test_models_of_timm_itself_are_taken() -> None:
    import timm

    dense = timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS).eval()
    small = vc.prune(dense, vc.plan(dense, "magnitude", keep_heads=0.5))
    assert vc.count_cost(small).params < vc.count_cost(dense).params


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_classes": 7}, {"img_size": 16}, {"drop_path_rate": 0.1}], ids=str)
def test_a_plan_fits_every_model_with_the_same_modules_and_channels(
    options: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    """Its arguments are those of the model, also those of its standard model of timm."""
    target = {"embed_dim": 8, "num_heads": 2, "depth": 1}
    plan = vc.plan(model(), "upvit", batches(), target_args=target, images=4, device="cpu")
    arguments = {**ARGS, "num_classes": 4, **options}
    other = (vc if own else timm).create_model("vit_tiny_patch16_224.augreg_in21k", **arguments)
    small = vc.prune(other, plan).eval()
    vc.save_model(small, tmp_path / "out")
    assert vc.verify(tmp_path / "out").passed, "with the check `standard`"
    images = torch.randn(2, 1, *[arguments["img_size"]] * 2)
    assert torch.equal(vc.load_model(tmp_path / "out")(images), small(images))


@pytest.mark.parametrize("args", [{}, {"num_classes": 0}, {"global_pool": ""}], ids=str)
@pytest.mark.parametrize("data", [batches(), Pictures()], ids=["batches", "pictures"])
def test_verify_compares_outputs_on_data_and_keeps_it(data: Any, args: dict[str, Any], tmp_path: Path) -> None:
    dense = model(**args)
    vc.save_model(dense, tmp_path)
    vc.export(dense, tmp_path / "model.onnx", precision="int8", data=data)
    for images, noise in ((None, True), (data, False), (None, False)):
        verification = vc.verify(tmp_path, images)
        (check,) = (one for one in verification.checks if one.name == "agreement.model.onnx.error")
        assert verification.passed and check.detail.endswith(", on noise") == noise, verification
    assert {"reload.recorded"} <= {check.name for check in vc.verify(tmp_path).checks}
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert [check.name for check in vc.verify(tmp_path, data).checks] == ["manifest.model.safetensors"]


@pytest.mark.parametrize("arch", ["beit_base_patch16_224", "vit_small_plus_patch16_dinov3"])
def test_models_with_other_names_than_those_of_timm_are_planned_as_those_of_create_model(
    arch: str, tmp_path: Path
) -> None:
    dense = timm.create_model(arch, num_classes=4, **ARGS).eval()
    names = set(dense.state_dict())
    torch.save(dense.state_dict(), tmp_path / "weights.pth")
    same = vc.create_model(arch, weights=tmp_path / "weights.pth", num_classes=4, **ARGS)
    kept = [vc.plan(each, data=batches(), align=FINE).kept for each in (dense, same)]
    assert kept[0] == kept[1]
    vc.save_model(dense, tmp_path / "out")
    vc.export(dense, tmp_path / "out" / "model.onnx")
    assert vc.verify(tmp_path / "out").passed and set(dense.state_dict()) == names
    options: dict[str, Any] = {"sparsity": 0.4, "epochs": 2, "round_to": 1, "training": {"batch_size": 16}}
    kept = [vc.plan(each, "sero", batches(), **options).kept for each in (dense, same)]
    assert kept[0] == kept[1]
    assert torch.equal(dense(X), same(X)) and set(dense.state_dict()) == set(same.state_dict()) != names


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vc.plan(model(), "isomorfic"), "did you mean|nearest|isomorphic"),
        (
            lambda: vc.plan("isomorphic", model()),
            "got a value of type VisionTransformer, expected",
        ),  # type: ignore[arg-type]
        (lambda: vc.plan("runs/x", "magnitude"), "got 'runs/x', expected a model, as of vc.create_model"),  # type: ignore[arg-type]
        (lambda: vc.export("runs/x", "x.onnx"), "model   got 'runs/x', expected a model"),  # type: ignore[arg-type]
        (lambda: vc.finetune(model(), batches(), teacher="runs/x"), "teacher   got 'runs/x', expected"),  # type: ignore[arg-type]
        (lambda: vc.load_model(__file__), "is a file, not a run folder"),
        (lambda: vc.plan(model(), "isomorphic", batches(), keep=0.5), "keep"),
        (lambda: vc.plan(model(), "isomorphic", batches(), keep_ratio=2.0), "keep_ratio"),
        (lambda: vc.finetune(model(), batches(), epoch=3), "epoch"),
        (lambda: vc.finetune(model(), iter(batches())), "without a length"),
        (lambda: vc.finetune(model(), torch.utils.data.DataLoader(Frames(), 4)), "of type DataLoader without a length"),
        (lambda: vc.evaluate(model(), None), "of type NoneType without a length"),
        (lambda: vc.evaluate(model(), batches(), batch_size=0), "batch_size   got 0, expected 1 or more"),
        (lambda: vc.evaluate(model(), batches(), batch_size=3), "batch_size has no effect: the data are batches"),
        (lambda: vc.evaluate(model(), batches(), workers=2), "workers has no effect: the data are batches"),
        (lambda: vc.finetune(model(), batches(), workers=2), "workers has no effect: the data are batches"),
        (lambda: vc.plan(model(), "magnitude", training={"lr": 1.0}), "training has no effect"),
        (lambda: vc.count_cost(model(), (1, 9, 9)), "1x1x9x9 do not fit, expected batches of 1 x 8 x 8"),
        (lambda: vc.count_cost(model(), (8, 8)), "1x8x8 do not fit"),  # type: ignore[arg-type]
        (lambda: vc.run_recipe("no_recipe"), "no_recipe"),
        (lambda: vc.run_recipe(Path("none.toml")), "none.toml cannot be read"),
        (lambda: vc.prune(model(), "plan.json"), "plan   got 'plan.json', expected a plan, as of vc.plan"),  # type: ignore[arg-type]
        (lambda: vc.export(model(), "x.tflite"), "suffix of x.tflite is of no built-in format"),
        (lambda: vc.export(model(), "x.engine"), "trt and trt-rtx"),
        (lambda: vc.export(model(), "x.onnx", precision="int4"), "precision"),
        (lambda: vc.create_model("vit_tini"), "vit_tini"),
        (lambda: vc.plan(vc.create_model("resnet18"), "magnitude"), "is not supported: it is of type ResNet"),
        (lambda: vc.finetune(model(), batches(), augmentation={"mixup": 0.5}), "augmentation has no effect"),
        (lambda: vc.finetune(model(), batches(), batch_size=4), "batch_size has no effect"),
        *(
            (partial(vc.plan, model(num_classes=1), method, [(X, torch.zeros(3).long())], **options), "has one class")
            for method, options in {"isomorphic": {"align": FINE}, "upvit": {"target_args": {"depth": 1}}}.items()
        ),
        (lambda: vc.finetune(model(num_classes=1), [(X, torch.zeros(3).long())], epochs=1), "has one class"),
        (lambda: vc.finetune(model(num_classes=0), batches(), epochs=1), "has no classifier"),
        *(
            (partial(vc.finetune, model(**args), batches(), teacher=model(), distillation=kind, epochs=1), words)
            for kind in ("features", "soft_patch")
            for args, words in (({"num_classes": 0}, "has no classifier"), ({"global_pool": ""}, "has no pooling"))
        ),
        (lambda: vc.plan(model(num_classes=0), "isomorphic", batches(), align=FINE), "has no classifier"),
        (lambda: vc.evaluate(model(num_classes=0), batches()), "has no classifier"),
        (lambda: vc.finetune(model(global_pool=""), batches(), epochs=1), "has no pooling"),
        (lambda: vc.plan(model(global_pool=""), "isomorphic", batches(), align=FINE), "has no pooling"),
        (lambda: vc.evaluate(model(global_pool=""), batches()), "has no pooling"),
        (
            lambda: vc.plan(model(), "isomorphic", [(batches()[0][0], torch.arange(5)), *batches()]),
            "16 images have labels of shape 5 ",
        ),
        (lambda: vc.plan(model(), "isomorphic", [(batches()[0][0], torch.rand(16))]), "float32"),
        *(
            (
                partial(vc.export, model(num_classes=0), "x.onnx", data=[(batches()[0][0], labels)]),
                "labels of shape 16x",
            )
            for labels in (torch.zeros(16, 1).long(), torch.eye(16).long())
        ),
        (lambda: vc.plan(model(), "isomorphic", []), "the data set is empty"),
        (
            lambda: [vc.finetune(own, batches(), teacher=own, epochs=1) for own in [model()]],
            "a teacher with weights of its own",
        ),
        (
            lambda: vc.finetune(model().requires_grad_(False), batches(), epochs=1),
            "no parameter of the model requires gradients",
        ),
        (lambda: vc.prune(model(depth=1), vc.plan(model(), "magnitude")), r"other arguments \(depth\)"),
        (lambda: vc.export(model(), f"{__file__}/model.onnx"), "cannot be written"),
        (lambda: vc.save_model(model(), f"{__file__}/out"), "cannot be written"),
        (lambda: vc.bench([model()], bach=1), "did you mean batch"),
        (lambda: vc.bench([model()], threads="two"), "threads"),
        (lambda: vc.bench([]), "a list of 1 or more"),
        (lambda: vc.bench(model(), memory=True), "memory is measured in a process of its own"),
        (lambda: vc.bench(model(), fail_under=1.0), "got only one"),
        (lambda: vc.export(model(), "x.onnx", class_names=["cat"]), "has 4 classes\ngive one name per class"),
        (
            lambda: vc.plan(model(), "nose", [(batches()[0][0] * float("nan"), batches()[0][1])]),
            r"^an image has values that are not finite\nrepair",
        ),
        (lambda: vc.plan(model(), "nose", iter([])), "^there are no batches\nat least one"),
        (
            lambda: vc.plan(model(), "nose", [(batches()[0][0], torch.full((16, 4), 0.25))]),
            "^labels of shape 16x4 with values from 0.25 to 0.25 cannot be used\nthe label of an image is a number",
        ),
        (lambda: vc.plan(model(), "isomorphic", [(batches()[0][0].byte(), batches()[0][1])]), "uint8"),
    ],
)
def test_mistakes_are_reported(call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_rejected(value: float, tmp_path: Path) -> None:
    broken = model()
    weight = broken.get_submodule("blocks.1.mlp.fc1").weight
    with torch.no_grad():
        weight.flatten()[:3] = value
    torch.save(broken.state_dict(), tmp_path / "own.pth")
    text = rf"weights that are not finite: 3 of {weight.numel()} in blocks\.1\.mlp\.fc1\.weight"
    for call in (
        lambda: vc.create_model("vit_tiny_patch16_224", weights=tmp_path / "own.pth"),
        lambda: vc.plan(broken, "magnitude"),
        lambda: vc.prune(broken, vc.plan(model(), "magnitude")),
        lambda: vc.export(broken, tmp_path / "model.onnx"),
        lambda: vc.save_model(broken, tmp_path / "saved"),
        lambda: vc.evaluate(broken, batches()),
        lambda: vc.finetune(broken, batches(), epochs=1),
    ):
        with pytest.raises(InputError, match=text) as error:
            call()
        assert error.value.hint == "use weights from before the training diverged"
    assert [path.name for path in tmp_path.iterdir()] == ["own.pth"]


def test_weights_without_values_or_of_several_types_are_rejected(tmp_path: Path) -> None:
    empty, mixed = model().to("meta"), model()
    mixed.blocks[1].bfloat16()
    calls: list[Any] = [
        lambda one: vc.finetune(one, batches(), epochs=1),
        lambda one: vc.finetune(model(), batches(), epochs=1, teacher=one),
        lambda one: vc.plan(one, "nose", batches(), pruned_layers=1),
        lambda one: vc.export(one, tmp_path / "model.onnx"),
        lambda one: vc.save_model(one, tmp_path / "saved"),
        lambda one: vc.evaluate(one, batches()),
        lambda one: vc.bench(one, batch=1),
    ]
    for call in calls:
        with pytest.raises(InputError, match="this VisionTransformer has no weights, it is on the meta device"):
            call(empty)
    for call in calls[:3]:  # the others convert all weights to one type
        with pytest.raises(InputError, match="weights of several types: bfloat16, float32") as caught:
            call(mixed)
        assert "model.float()" in str(caught.value.hint)


def test_a_model_that_timm_has_cut_is_neither_exported_nor_saved(tmp_path: Path) -> None:
    small = vc.prune(model(), vc.plan(model(), "magnitude"))
    small.prune_intermediate_layers([0])  # type: ignore[operator]
    for call in (lambda: vc.export(small, tmp_path / "model.onnx"), lambda: vc.save_model(small, tmp_path / "saved")):
        with pytest.raises(InputError, match=r"is not the model of its plan: blocks\.1 differs"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_traceback_shows_the_next_step() -> None:
    with pytest.raises(InputError) as error:
        vc.evaluate(model(), batches(), batch_size=0)
    assert "".join(traceback.format_exception(error.value)).rstrip().endswith(f"more\n{error.value.hint}")


@pytest.mark.parametrize("name", ["", "model.onnx", "model.xml"])
def test_features_of_a_folder_or_file_are_not_evaluated(name: str, tmp_path: Path) -> None:
    own = model(num_classes=0)
    vc.save_model(own, tmp_path)
    artifact = vc.export(own, tmp_path / name) if name else tmp_path
    with pytest.raises(InputError, match="has no classifier: its outputs are features"):
        vc.evaluate(artifact, batches())


def test_a_file_with_logits_of_every_token_is_not_evaluated(tmp_path: Path) -> None:
    file = vc.export(model(global_pool=""), tmp_path / "model.onnx")
    with pytest.raises(DataError, match=r"the model outputs \(5, 4\) for an image, not one logit per class"):
        vc.evaluate(file, batches())


def test_mistakes_in_options_list_what_is_allowed() -> None:
    """Names of options for an unknown one, values for a wrong value."""
    with pytest.raises(InputError, match="keep_head   unknown key, did you mean keep_heads") as error:
        vc.plan(model(), "magnitude", keep_head=0.5)
    assert error.value.hint.startswith("options: target, ") and error.value.hint.endswith(", keep_heads")
    with pytest.raises(InputError, match="keep_heads   got 2, expected less than 1") as error:
        vc.plan(model(), "magnitude", keep_heads=2)
    assert error.value.hint is None


def test_methods_without_images_say_so() -> None:
    with pytest.raises((InputError, DataError), match=r"data|images"):
        vc.plan(model(), "isomorphic", align=FINE, device="cpu")


@pytest.mark.parametrize("kind", ["data set", "batches"])
def test_empty_data_are_rejected(kind: str, tmp_path: Path) -> None:
    empty: Any = Loader() if kind == "batches" else Subset(TensorDataset(*batches()[0]), [])
    for call in (
        lambda: vc.finetune(model(), empty, epochs=1),
        lambda: vc.finetune(model(), batches(), empty, epochs=1),
        lambda: vc.evaluate(model(), empty),
        lambda: vc.plan(model(), "isomorphic", empty, align=FINE),
        lambda: vc.export(model(), tmp_path / "model.onnx", data=empty),
    ):
        with pytest.raises(DataError, match=r"is empty|there are no batches|there is no image"):
            call()


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (torch.arange(16) % 5, "16 with values from 0 to 4 "),
        (torch.arange(16) % 4 - 1, "16 with values from -1 to 2 "),
        (torch.eye(4)[torch.arange(16) % 4].long(), "16x4 with values from 0 to 1 "),
    ],
)
def test_labels_that_are_no_classes_of_the_model_are_rejected(labels: Tensor, text: str) -> None:
    """On a GPU such labels would end in an assertion of a kernel, after which the process cannot use the GPU."""
    data = [(batches()[0][0], labels)]
    for call in (
        lambda: vc.finetune(model(), data, epochs=1),
        lambda: vc.finetune(model(), batches(), data, epochs=1),
        lambda: vc.evaluate(model(), data),
        *([lambda: vc.plan(model(), "isomorphic", data, align=FINE)] if labels.ndim == 1 else []),
    ):
        with pytest.raises(DataError, match=f"labels of shape {text}cannot be used") as caught:
            call()
        assert "0 to 3" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (torch.arange(16.0) % 4, "16 images have labels of shape 16 and torch.float32"),
        (torch.eye(5)[torch.arange(16) % 4], "16 images have labels of shape 16x5 and torch.float32"),
        (torch.arange(8) % 4, "16 images have labels of shape 8 and torch.int64"),
        (torch.ones(16, 4), "16 images have labels of shape 16x4 and torch.float32"),
        (torch.tensor([2.0, -1, 0, 0]).repeat(16, 1), "16 images have labels of shape 16x4 and torch.float32"),
        (torch.full((16, 4), float("nan")), "16 images have labels of shape 16x4 and torch.float32"),
    ],
)
def test_labels_that_do_not_fit_their_images_are_rejected(labels: Tensor, text: str) -> None:
    data = Loader((batches()[0][0], labels))
    for call in (partial(vc.evaluate, model()), partial(vc.finetune, model(), epochs=1)):
        with pytest.raises(DataError, match=text):
            call(data)


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_gradients_are_computed_where_the_caller_disables_them(disabled: Any) -> None:
    expected, same, data = model(), model(), batches()
    losses = vc.finetune(expected, data, epochs=1).history[0]["loss"]
    plan = vc.plan(expected, "isomorphic", data, keep_ratio=0.5, align=FINE)
    with disabled():
        assert vc.finetune(same, data, epochs=1).history[0]["loss"] == losses
        assert vc.plan(same, "isomorphic", data, keep_ratio=0.5, align=FINE) == plan


@pytest.mark.parametrize("name", ["created", "pruned", "folded", "loaded"])
def test_models_and_batches_of_inference_mode_can_be_trained(name: str, tmp_path: Path) -> None:
    dense = model()
    pruned = vc.prune(dense, vc.plan(dense, "fixed", activation=[0]))
    vc.save_model(pruned, tmp_path / "saved")
    create = {
        "created": model,
        "pruned": lambda: vc.prune(dense, pruned.plan.delta(removed=pruned.plan.removed)),
        "folded": lambda: vc.fold(pruned),
        "loaded": lambda: vc.load_model(tmp_path / "saved"),
    }[name]
    expected = vc.finetune(create(), batches(), epochs=1).history[0]["loss"]
    with torch.inference_mode():
        created, data = create(), batches()
    assert vc.finetune(created, data, epochs=1).history[0]["loss"] == expected


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "int8", "data": batches()}])
def test_files_do_not_depend_on_autocast_of_the_caller(options: dict[str, Any], tmp_path: Path) -> None:
    expected = vc.export(model(), tmp_path / "expected.onnx", **options)
    with torch.autocast("cpu", torch.bfloat16):
        file = vc.export(model(), tmp_path / "model.onnx", **options)
    outputs = [vc.evaluate(path, batches()) for path in (file, expected)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_trainings_do_not_depend_on_autocast_of_the_caller(amp: str) -> None:
    """With `amp`, torch would also keep the weights of the first step in bf16 until the caller's region ends."""
    expected, network = model(), model()
    vc.finetune(expected, batches(), epochs=2, amp=amp)
    with torch.autocast("cpu", torch.bfloat16):
        vc.finetune(network, batches(), epochs=2, amp=amp)
        assert torch.is_autocast_enabled("cpu")
    assert all(value.equal(expected.state_dict()[name]) for name, value in network.state_dict().items())


def test_scores_do_not_depend_on_autocast_of_the_caller(tmp_path: Path) -> None:
    options = {"keep_ratio": 0.5, "align": FINE}
    vc.plan(model(), "isomorphic", batches(), folder=tmp_path / "plain", **options)
    with torch.autocast("cpu", torch.bfloat16):
        vc.plan(model(), "isomorphic", batches(), folder=tmp_path / "autocast", **options)
    first, second = ((tmp_path / name / "widths.json").read_text() for name in ("plain", "autocast"))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("uint8", [False, True])
def test_files_do_not_depend_on_the_default_type_of_the_caller(dtype: torch.dtype, uint8: bool, tmp_path: Path) -> None:
    network = model(in_chans=3)
    expected = vc.export(network, tmp_path / "expected.onnx", uint8=uint8)
    vc.save_model(network, tmp_path / "out")
    torch.set_default_dtype(dtype)
    try:
        file = vc.export(network, tmp_path / "out" / "model.onnx", uint8=uint8)
        assert vc.verify(tmp_path / "out").passed
    finally:
        torch.set_default_dtype(torch.float32)
    assert file.read_bytes() == expected.read_bytes()


def saved(network: nn.Module, folder: Path) -> Path:
    vc.save_model(network, path := folder / str(len([*folder.iterdir()])))
    return path


@pytest.mark.parametrize(
    "work",
    [
        lambda network, folder: vc.evaluate(network, batches(), device="cpu"),
        lambda network, folder: vc.plan(network, "magnitude", keep_heads=0.5, device="cpu"),
        lambda network, folder: vc.plan(network, "isomorphic", batches(), keep_ratio=0.5, align=FINE, device="cpu"),
        lambda network, folder: vc.finetune(network, batches(), epochs=1, device="cpu").history[0]["loss"],
        lambda network, folder: vc.export(network, folder / "model.onnx", precision="fp16").read_bytes(),
        lambda network, folder: vc.bench(network, batch=1, protocol="paper", warmup=1, runs=1).rows[0]["device"],
        lambda network, folder: vc.verify(saved(network, folder)).passed,
    ],
)
def test_results_do_not_depend_on_the_default_device_of_the_caller(
    work: Callable[[nn.Module, Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, network = batches(), model()
    monkeypatch.setitem(globals(), "batches", lambda: data)
    expected = work(model(), tmp_path)
    with torch.device("meta"):
        assert {weight.device.type for weight in model().parameters()} == {"meta"}  # that of the user's own code
        assert work(network, tmp_path) == expected
        assert torch.get_default_device().type == "meta"


def test_checks_do_not_depend_on_autocast_and_default_type_of_the_caller(tmp_path: Path) -> None:
    network = model(embed_dim=32, num_heads=4)
    vc.save_model(network, tmp_path / "out")
    vc.export(network, tmp_path / "out" / "model.onnx", precision="int8", data=batches())
    expected = vc.verify(tmp_path / "out")
    with torch.autocast("cpu", torch.bfloat16):
        verification = vc.verify(tmp_path / "out")
    assert [check.value for check in verification.checks] == [check.value for check in expected.checks]
    torch.set_default_dtype(torch.float64)
    try:
        verification = vc.verify(tmp_path / "out")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [check.value for check in verification.checks] == [check.value for check in expected.checks]


def test_weights_of_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        created = timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS)
    plan = vc.plan(created, "isomorphic", batches(), keep_ratio=0.5, align=FINE)
    assert plan == vc.plan(deepcopy(created), "isomorphic", batches(), keep_ratio=0.5, align=FINE)
    vc.save_model(created, tmp_path / "saved")
    assert vc.finetune(vc.prune(created, plan), batches(), epochs=1).history
    with pytest.raises(InputError, match=r"inference_mode cannot be trained\n.*deepcopy"):
        vc.finetune(created, batches(), epochs=1)
    assert vc.finetune(deepcopy(created), batches(), epochs=1).history
    copied, options = deepcopy(created), {"sparsity": 0.5, "epochs": 2, "round_to": 1, "training": {"batch_size": 16}}
    plans = [vc.plan(one, "sero", batches(), **options) for one in (created, copied)]
    assert plans[0] == plans[1]
    assert all(value.equal(copied.state_dict()[name]) for name, value in created.state_dict().items())


def test_preprocessing_of_a_module_without_configuration_is_not_assumed() -> None:
    """timm's default is that of ImageNet; the teacher inside has another one."""
    seen: list[Tensor] = []
    wrapped = nn.Sequential(model(seed=1))
    wrapped.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    vc.finetune(model(), batches()[:1], teacher=wrapped, epochs=1)
    assert torch.equal(seen[0], batches()[0][0])
    for call in (lambda: vc.evaluate(wrapped, Pictures()), lambda: vc.finetune(wrapped, Pictures(), epochs=1)):
        with pytest.raises(InputError, match="Sequential does not state its preprocessing"):
            call()
    assert vc.evaluate(wrapped, batches()) == vc.evaluate(model(seed=1), batches())


@pytest.mark.parametrize("distillation", ["soft", "hard", "soft_patch", "features"])
def test_a_teacher_may_compute_in_another_type(distillation: str) -> None:
    exact = model(seed=1).half().float()
    losses = [
        vc.finetune(
            model().to(own), batches(), teacher=deepcopy(exact).to(other), distillation=distillation, epochs=1
        ).history[0]["loss"]
        for own in (torch.float32, torch.float64)
        for other in (torch.float32, torch.float16, torch.float64)
    ]
    # Each output of the teacher in fp16 has an error of some 2^-11 of its size; 30 roundings in two blocks.
    assert losses == pytest.approx([losses[0]] * len(losses), rel=30 * 2**-11) and losses[0] > 0


def test_evaluation_takes_streams() -> None:
    expected = vc.evaluate(model(), batches())
    for stream in (Stream(), torch.utils.data.DataLoader(Frames(), 16)):
        assert vc.evaluate(model(), stream).correct == expected.correct


def test_labels_may_be_integers_of_any_type() -> None:
    data = [(images, labels.int()) for images, labels in batches()]
    assert vc.finetune(model(), data, data, epochs=1).history[0]["heldout"]
    assert vc.evaluate(model(), data) == vc.evaluate(model(), batches())


class Loader:
    """Batches with a length, without an index."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Named(list[Any]):
    """Batches with the names of their classes."""

    classes: tuple[str, ...] = ()


def test_classes_of_the_data_are_those_of_the_file(tmp_path: Path) -> None:
    file, data = vc.export(model(), tmp_path / "model.onnx", class_names=["a", "b", "c", "d"]), Named(batches())
    for names, message in (
        ("abd", "has 4 classes, the data has 3"),
        ("abdc", "with the classes in another order"),
        ("abcx", "with class d, the data has x instead"),
        ("abcd", ""),
        ("", ""),
    ):
        data.classes = tuple(names)
        if message:
            with pytest.raises(InputError, match=message):
                vc.evaluate(file, data)
        else:
            assert vc.evaluate(file, data).total > 0
    data.classes = tuple("efgh")
    with pytest.warns(UserWarning, match="named a, b, c.* of the data e, f, g.* assumed equal, in this order"):
        vc.evaluate(file, data)


class Records:
    """A map-style data set of dictionaries."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("image", "label"), Pictures()[index], strict=True))


def test_data_of_another_form_is_rejected(tmp_path: Path) -> None:
    images, labels = batches()[0]
    file = vc.export(model(), tmp_path / "model.onnx")
    for data, text in (
        ([{"image": images, "label": labels}], "not (image, class) pairs"),
        ([()], "not (image, class) pairs"),
        (Loader({"image": images, "label": labels}), "a batch is dict instead of two tensors"),
        ([(images.numpy(), labels.numpy())], "a batch has ndarray, ndarray instead of two tensors"),
        (Loader(images[0, 0, 0, 0].item()), "a batch is float instead of two tensors"),
        (Loader((images, labels, labels)), "a batch has Tensor, Tensor, Tensor instead"),
        ([(images[0], 1, 2)], "too many values"),
        (Records(), "an item is of type dict"),
        ([(images[0], torch.eye(4)[1].long())], "a label is not a whole number"),
        ([(images[0], 1), (images[0, :, 1:], 1)], "images of one batch have the shapes 1x7x8, 1x8x8"),
        ([(images[0].numpy(), 1)], "images of float32"),
        ([(images[0], 1.5)], "a label is not a whole number"),
        (Fractions(), "a label is not a whole number"),
        ([(torch.zeros(1, 8, 8, dtype=torch.uint8), 1)], "images of torch.uint8"),
    ):
        with pytest.raises(DataError, match=re.escape(text)):
            vc.evaluate(model(), data)
    for use in (partial(vc.evaluate, model()), partial(vc.evaluate, file), partial(vc.finetune, model(), epochs=1)):
        with pytest.raises(InputError, match=r"the images are torch\.uint8"):
            use([((100 * images).byte(), labels)])
    deep = Image.fromarray(np.full((8, 8), 1000, np.uint16))
    with pytest.raises(DataError, match=r"image 0 of the data set .* more than 8 bits \(mode I;16\)"):
        vc.finetune(model(), [(deep, 1)] * 4, epochs=1, batch_size=2)
    with pytest.raises(DataError, match="image 1 of the data set"):
        vc.evaluate(model(), [Pictures()[0], (deep, 1)])
    with pytest.raises(InputError, match="images of shape 16x1x12x12 do not fit, expected batches of 1 x 8 x 8"):
        vc.evaluate(file, [(torch.zeros(16, 1, 12, 12), labels)])


@pytest.mark.parametrize("shape", [(16, 1, 12, 12), (16, 3, 8, 8), (16, 8, 8)])
def test_images_that_the_model_does_not_take_are_rejected(shape: tuple[int, ...], tmp_path: Path) -> None:
    images, labels, folder = torch.zeros(shape), torch.arange(16) % 4, tmp_path / "saved"
    vc.save_model(model(), folder)
    batch, pairs = Loader((images, labels)), [(image, int(label)) for image, label in zip(images, labels, strict=True)]
    for data in (batch, *[pairs] * (len(shape) == 4)):
        for call in (
            lambda data: vc.evaluate(model(), data),
            lambda data: vc.evaluate(folder, data),
            lambda data: vc.plan(model(), "isomorphic", data, align=FINE),
            lambda data: vc.export(model(), tmp_path / "model.onnx", data=data),
            *([lambda data: vc.finetune(model(), data, epochs=1)] if data is batch else []),
        ):
            with pytest.raises(
                DataError, match=r"images of shape .* do not fit, expected batches of (1 x 8 x 8|channels|any)"
            ) as caught:
                call(data)
            assert ("wrap single images in a DataLoader" in str(caught.value.hint)) is (len(shape) == 3)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_model_for_any_size_takes_images_of_any_size() -> None:
    other = [(torch.zeros(4, 1, 12, 12), torch.arange(4))]
    assert vc.evaluate(model(dynamic_img_size=True), other).total == 4


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_file_takes_the_size_of_its_images(precision: str, tmp_path: Path) -> None:
    other, any_size = [(torch.randn(4, 1, 12, 12), torch.arange(4))], model(dynamic_img_size=True)
    vc.save_model(any_size, tmp_path / "saved")
    for call in (
        lambda: vc.export(any_size, tmp_path / "model.onnx", data=other, precision=precision),
        lambda: vc.verify(tmp_path / "saved", other),
    ):
        with pytest.raises(DataError, match="1x1x12x12 do not fit, expected batches of 1 x 8 x 8"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_patches_of_a_model_for_any_size_must_divide_its_images() -> None:
    other = [(torch.zeros(4, 1, 12, 9), torch.arange(4))]
    with pytest.raises(DataError, match="4x1x12x9 do not fit, expected batches of 1 x multiple of 4 x multiple of 4"):
        vc.evaluate(model(dynamic_img_size=True), other)
    with pytest.raises(InputError, match="patches of 4x4 pixels do not divide images of 9x9"):
        model(dynamic_img_size=True, img_size=9)
    assert vc.evaluate(model(dynamic_img_size=True, dynamic_img_pad=True, img_size=9), other).total == 4


@pytest.mark.parametrize(("dtype", "amp"), [(torch.float16, "fp16"), (torch.float16, "bf16"), (torch.bfloat16, "fp16")])
def test_weights_in_half_precision_and_another_amp(dtype: torch.dtype, amp: Any) -> None:
    with pytest.raises(InputError, match=f"amp is '{amp}', but the weights are {dtype}"):
        vc.finetune(model().to(dtype), batches(), epochs=1, amp=amp)
    history = vc.finetune(model(), batches(), epochs=1, amp=amp, teacher=model(seed=1).to(dtype)).history
    assert 0 < history[0]["loss"] < 10


def test_autocast_has_no_effect_on_float64() -> None:
    with pytest.raises(InputError, match=r"amp is 'bf16', but the weights are torch\.float64"):
        vc.finetune(model().double(), batches(), epochs=1, amp="bf16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_are_converted_to_the_type_of_the_weights(dtype: torch.dtype) -> None:
    exact = [(images.to(torch.bfloat16).float(), labels) for images, labels in batches()]
    other = [(images.to(dtype), labels) for images, labels in exact]
    assert vc.evaluate(model(), other) == vc.evaluate(model(), exact)
    plans = [vc.plan(model(), "isomorphic", data, keep_ratio=0.5, align=FINE) for data in (exact, other)]
    assert plans[0] == plans[1] and plans[0].kept
    losses = [vc.finetune(model(), data, epochs=1).history[0]["loss"] for data in (exact, other)]
    assert losses[0] == losses[1]
    for data in (exact, Pictures()):
        network, options = model().to(dtype), {} if data is exact else {"batch_size": 16}
        assert vc.finetune(network, data, epochs=1, **options).history and network.head.weight.dtype == dtype
        assert vc.plan(network, "isomorphic", data, keep_ratio=0.5, align=FINE).kept


class Coarse:
    """A data set as in torchvision, whose classes are mapped to coarser ones."""

    targets = torch.arange(16) * 10

    def __len__(self) -> int:
        return 16

    def target_transform(self, target: int) -> int:
        return target // 10 % 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return batches()[0][0][index], self.target_transform(int(self.targets[index]))


class Fractions(Pictures):
    targets = torch.full((32,), 1.5)


def test_labels_of_a_data_set_are_transformed() -> None:
    assert vc.evaluate(model(), Coarse()) == vc.evaluate(model(), batches(1))


def test_pictures_have_as_many_channels_as_the_model_takes(tmp_path: Path) -> None:
    file = vc.export(model(in_chans=4), tmp_path / "model.onnx")
    for call in (
        lambda: vc.evaluate(model(in_chans=4), Pictures()),
        lambda: vc.evaluate(file, Pictures()),
        lambda: vc.finetune(model(in_chans=4), Pictures(), epochs=1, batch_size=8),
        lambda: vc.plan(model(in_chans=4), "isomorphic", Pictures(), align=FINE),
        lambda: vc.export(model(in_chans=4), tmp_path / "other.onnx", data=Pictures()),
    ):
        with pytest.raises(InputError, match="takes images of 4 channels, and files have 1 or 3"):
            call()


class Limited(Coarse):
    """The first images of a data set, whose `targets` are those of all."""

    def __len__(self) -> int:
        return 6


def test_targets_of_more_images_than_the_data_set_has_do_not_count() -> None:
    expected = vc.evaluate(model(), [tuple(part[:6] for part in batches()[0])])
    assert vc.evaluate(model(), Limited()) == expected and expected.total == 6


class Once(Loader):
    """Batches that can be read only once."""

    def __iter__(self) -> Iterator[Any]:
        while self.items:
            first, *self.items = self.items  # type: ignore[assignment]
            yield first

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(("accumulate", "read"), [(1, 2), (2, 3)])
def test_batches_that_are_missing_stop_a_training(accumulate: int, read: int) -> None:
    """They counted as a loss of 0."""
    with pytest.raises(DataError, match=f"gave {read} of 4 batches") as caught:
        vc.finetune(model(), Once(*batches(read)), epochs=1, accumulate=accumulate)
    assert "every epoch" in str(caught.value.hint)
    with pytest.raises(DataError, match="gave 0 of 4 batches in epoch 2"):
        vc.finetune(model(), Once(*batches()), epochs=2)


def test_a_batch_without_images_stops_a_training_and_counts_nothing_in_an_evaluation() -> None:
    """Its loss is NaN, which was reported as divergence."""
    first, second, *_ = batches()
    empty = tuple(part[:0] for part in first)
    with pytest.raises(DataError, match="batch 1 of epoch 1 has no images"):
        vc.finetune(model(), [first, empty, second], epochs=1)
    assert vc.evaluate(model(), [first, empty, second]) == vc.evaluate(model(), [first, second])


def test_settings_of_batches() -> None:
    plain, smooth = (
        vc.finetune(model(), batches(), epochs=1, augmentation={"smoothing": smoothing}).history[0]["loss"]
        for smoothing in (0.0, 0.5)
    )
    assert plain != smooth
    as_object = Augmentation(smoothing=0.5)
    assert vc.finetune(model(), batches(), epochs=1, augmentation=as_object).history[0]["loss"] == smooth
    parts = vc.finetune(model(), batches(3), epochs=1, accumulate=3)  # does not divide the default batch_size
    whole = vc.finetune(model(), [tuple(map(torch.cat, zip(*batches(3), strict=True)))], epochs=1)
    assert parts.history[0]["loss"] == pytest.approx(whole.history[0]["loss"], rel=1e-5)
    with pytest.raises(InputError, match="accumulate 8 is more than the 4 batches"):
        vc.finetune(model(), batches(), epochs=1, accumulate=8)


def test_a_folder_belongs_to_one_plan(tmp_path: Path) -> None:
    plan = vc.plan(model(), "isomorphic", batches(), folder=tmp_path, keep_ratio=0.5, align=FINE)
    assert vc.plan(model(), "isomorphic", batches(), folder=tmp_path, keep_ratio=0.5, align=FINE) == plan
    others = [model(depth=1), model(seed=1)]
    brighter = [(images + 1, labels) for images, labels in batches()]
    calls = [(model(), batches(), 0.6), (model(), batches(5), 0.5), (model(), brighter, 0.5)]
    calls += [(other, batches(), 0.5) for other in others]
    for network, data, ratio in calls:
        with pytest.raises(InputError, match="contains a plan of another model or call"):
            vc.plan(network, "isomorphic", data, folder=tmp_path, align=FINE, keep_ratio=ratio)


def test_a_rejected_call_does_not_occupy_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ema needs held-out images"):
        vc.finetune(model(), batches(), epochs=1, folder=tmp_path / "new", ema=0.9)
    assert not list((tmp_path / "new").iterdir())
    vc.finetune(model(), batches(), epochs=1, folder=tmp_path / "new", ema=0.9, val_data=batches())
    with pytest.raises(InputError, match="of another model or call"):
        vc.finetune(model(), batches(), epochs=1, folder=tmp_path / "new")
    with pytest.raises(InputError):
        vc.plan(model(), "fixed", folder=tmp_path / "plan", activation=[9])
    vc.plan(model(), "fixed", folder=tmp_path / "plan", activation=[0])


def test_a_folder_belongs_to_one_training(tmp_path: Path) -> None:
    network, other = model(), model(seed=1)
    trained = vc.finetune(network, batches(), epochs=1, folder=tmp_path)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for rejected in (other, vc.prune(model(), vc.plan(model(), "fixed", activation=[0]))):
        with pytest.raises(InputError, match="contains a training of another model"):
            vc.finetune(rejected, batches(), epochs=1, folder=tmp_path)
    for other_call in ({"amp": "bf16"}, {"val_data": batches()}):
        with pytest.raises(InputError, match="of another model or call"):
            vc.finetune(network, batches(), epochs=1, folder=tmp_path, **other_call)
    frozen = model()
    frozen.get_submodule("blocks").requires_grad_(False)  # the weights in the folder are those of another training
    with pytest.raises(InputError, match="of another model or call"):
        vc.finetune(frozen, batches(), epochs=1, folder=tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    for same in (model(), network):  # the model before and after the training
        assert vc.finetune(same, batches(), epochs=1, folder=tmp_path) == trained
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in same.state_dict().items())


def test_a_folder_belongs_to_one_list_of_batches(tmp_path: Path) -> None:
    vc.finetune(model(), batches(), epochs=1, folder=tmp_path, device="cpu")
    vc.finetune(model(), batches(), epochs=1, folder=tmp_path, device="cpu")
    images, labels = batches()[0]
    for other in ([*batches()[:3], (images + 1, labels)], [*batches()[:3], (images, labels.flip(0))]):
        with pytest.raises(InputError, match="other settings, images or teacher"):
            vc.finetune(model(), other, epochs=1, folder=tmp_path, device="cpu")


def test_a_folder_belongs_to_one_validation(tmp_path: Path) -> None:
    """A training that continued with other images chose the best of weights that were evaluated on different ones."""
    train = partial(vc.finetune, epochs=1, folder=tmp_path, device="cpu", select="best")
    assert train(model(), batches(), batches()[:2]) == train(model(), batches(), batches()[:2])
    for other in (batches()[:3], [(batches()[0][0] + 1, batches()[0][1])] * 2):
        with pytest.raises(InputError, match="another model or call"):
            train(model(), batches(), other)


def test_a_folder_belongs_to_the_labels_of_one_data_set(tmp_path: Path) -> None:
    pairs = [(image, index % 4) for index, image in enumerate(batches()[0][0])]
    train = partial(vc.finetune, epochs=1, folder=tmp_path, device="cpu", batch_size=4)
    assert train(model(), pairs) == train(model(), pairs)
    with pytest.raises(InputError, match="other settings, images or teacher"):
        train(model(), [(image, 3 - label) for image, label in pairs])


def test_a_training_neither_uses_nor_leaves_gradients() -> None:
    network, other = model(), model()
    other(X).square().sum().backward()
    for trained in (network, other):
        vc.finetune(trained, batches(), epochs=1, device="cpu")
        assert all(parameter.grad is None for parameter in trained.parameters())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in network.state_dict().items())


def test_a_model_with_a_head_of_the_user_is_trained(tmp_path: Path) -> None:
    """It has no plan that vitcompress knows."""
    network = timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS)
    network.head = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    before = network.head[0].weight.detach().clone()
    trained = vc.finetune(network, batches(), epochs=1, folder=tmp_path, device="cpu")
    assert not torch.equal(network.head[0].weight, before)
    assert vc.finetune(network, batches(), epochs=1, folder=tmp_path, device="cpu") == trained


def test_a_stopped_training_continues_with_the_same_model(tmp_path: Path) -> None:
    class Stopped(Progress):
        def update(self, label: str, done: int, total: int, text: str = "") -> None:
            if done > 6:  # in the second of two epochs of four batches
                raise KeyboardInterrupt

    network, whole = model(), model()
    with pytest.raises(KeyboardInterrupt):
        vc.finetune(network, batches(), epochs=2, folder=tmp_path, progress=Stopped())
    vc.finetune(whole, batches(), epochs=2)
    vc.finetune(network, batches(), epochs=2, folder=tmp_path)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in network.state_dict().items())


def test_a_rejected_call_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DataError):
        vc.plan(model(), "isomorphic", data="images")
    with pytest.raises(VitcompressError):
        vc.plan(model(), "isomorphic", batches(), device="cuda:99")
    assert not list(tmp_path.iterdir())


def test_paths_may_start_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells replace ~, Python does not: functions created a folder of this name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    dense = model()
    plan = vc.plan(dense, "magnitude", keep_heads=0.5, folder="~/plan")
    small = vc.prune(dense, plan)
    vc.finetune(small, batches(), epochs=1, folder=Path("~/training"), device="cpu")
    vc.save_model(small, "~/out")
    file = vc.export(small, "~/out/model.onnx")
    assert file == tmp_path / "home" / "out" / "model.onnx" and vc.verify("~/out").passed
    assert vc.evaluate("~/out/model.onnx", batches()).total == vc.evaluate("~/out", batches()).total == 64
    assert torch.equal(vc.load_model("~/out")(X), small(X))
    torch.save(dense.state_dict(), tmp_path / "home" / "dense.pth")
    loaded = vc.create_model("vit_tiny_patch16_224", weights="~/dense.pth", num_heads=2)
    assert torch.equal(loaded(X), dense(X))
    (tmp_path / "home" / "mine.toml").write_text(
        'model = { name = "vit_tiny_patch16_224" }\nstep = [{ method = "fold" }]'
    )
    assert vc.load_recipe("~/mine.toml").name == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    with pytest.raises(InputError, match="~nobody-of-this-name"):
        vc.load_model("~nobody-of-this-name/out")


def test_numbers_of_numpy_are_options() -> None:
    plan = vc.plan(model(), "magnitude", keep_heads=np.float64(0.5))
    assert plan == vc.plan(model(), "magnitude", keep_heads=0.5)
    kept = {space: np.array(channels) for space, channels in plan.kept.items()}
    assert plan.delta(kept=kept, heads=plan.heads) == plan


def test_models_are_exported_in_several_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        models = [model(seed=seed) for seed in range(3)]
        files = list(pool.map(lambda n: vc.export(models[n], tmp_path / f"{n}.onnx"), range(3)))
    assert [vc.evaluate(file, batches()).correct for file in files] == [
        vc.evaluate(network, batches()).correct for network in models
    ]


def test_a_model_is_counted_while_other_threads_export_and_serve(tmp_path: Path) -> None:
    """torch's counter has hooks on all modules of the process, and traces and counts with one global state."""
    network, served, stop = model(), timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS), Event()
    size = (1, 8, 8)
    expected = vc.count_cost(network), count_by_module(network, size)
    with ThreadPoolExecutor(2) as pool:
        export = pool.submit(vc.export, network, tmp_path / "model.onnx")
        serve = pool.submit(lambda: {served(X).shape for _ in iter(stop.is_set, True)})
        try:
            while not export.done():
                assert (vc.count_cost(network), count_by_module(network, size)) == expected
        finally:
            stop.set()
        assert serve.result() and export.result().is_file()


def test_folders_are_verified_and_models_created_in_several_threads(tmp_path: Path) -> None:
    vc.save_model(model(), tmp_path / "out")
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: vc.verify(tmp_path / "out").passed, range(8)))
        models = list(pool.map(lambda _: model(seed=1), range(8)))
    expected = model(seed=1).state_dict()
    assert all(weight.equal(expected[name]) for one in models for name, weight in one.state_dict().items())


def test_the_name_of_a_file_fits_its_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.bin cannot be a file of the format onnx") as caught:
        vc.export(model(), tmp_path / "model.bin", format="onnx")
    assert "model.onnx" in str(caught.value.hint)


COMPILED = partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        COMPILED,
        nn.DataParallel,
        lambda model: COMPILED(nn.DataParallel(model)),
        lambda model: nn.DataParallel(COMPILED(model)),
    ],
)
def test_a_wrapped_model_is_evaluated_and_counted_but_not_changed_or_saved(wrap: Any, tmp_path: Path) -> None:
    wrapped, plan = wrap(model()), vc.plan(model(), "fixed", activation=[0])
    assert vc.evaluate(wrapped, batches()) == vc.evaluate(model(), batches())
    assert vc.count_cost(wrapped) == vc.count_cost(model(), X.shape[1:])
    for distillation in ("soft", "soft_patch", "features"):
        results = [
            vc.finetune(model(seed=1), batches(), teacher=teacher, distillation=distillation, alpha=0.5, epochs=1)
            for teacher in (wrapped, model())
        ]
        losses = [[epoch["loss"] for epoch in result.history] for result in results]
        assert losses[0] == losses[1]
    for call in (
        lambda: vc.plan(wrapped, "magnitude"),
        lambda: vc.prune(wrapped, plan),
        lambda: vc.finetune(wrapped, batches(), epochs=1),  # names with a prefix would get weight decay
        lambda: vc.fold(wrapped),
        lambda: vc.save_model(wrapped, tmp_path / "out"),
        lambda: vc.export(wrapped, tmp_path / "out.onnx"),
    ):
        with pytest.raises(InputError, match="wraps a model"):
            call()
    assert not list(tmp_path.iterdir())


def test_hooks_do_not_run_while_costs_are_counted() -> None:
    """They could neither read values there nor keep useful ones."""
    network, outputs = model(), list[float]()
    network.blocks[0].register_forward_hook(lambda module, args, out: outputs.append(out.sum().item()))
    network.blocks[1].register_forward_pre_hook(lambda module, args: outputs.append(args[0].sum().item()))
    assert vc.count_cost(network) == vc.count_cost(model()) and not outputs
    assert vc.plan(network, "isomorphic", criterion="magnitude", target="params", amount=0.004, align=FINE).kept
    network.cpu()(X)
    assert len(outputs) == 2


def test_models_are_counted_without_a_copy_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model()
    expected = vc.count_cost(network)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda *_: pytest.fail("copied"))
    assert vc.count_cost(network) == expected and not any(parameter.is_meta for parameter in network.parameters())


class Extractor:
    """Keeps what a block returns, as a user's own object does."""

    def __init__(self, network: nn.Module) -> None:
        self.kept: list[Tensor] = []
        network.get_submodule("blocks.1").register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept.append(out)


def test_a_hook_that_keeps_results_with_their_gradients_is_rejected(tmp_path: Path) -> None:
    network = model()
    plan, cost, extractor = vc.plan(network, "magnitude", keep_heads=0.5), vc.count_cost(network), Extractor(network)
    network.cpu()(X)
    calls = (
        lambda: vc.plan(network, "isomorphic", batches(), align=FINE),
        lambda: vc.prune(network, plan),
        lambda: vc.fold(network),
        lambda: vc.export(network, tmp_path / "model.onnx"),
        lambda: vc.evaluate(network, batches()),
        lambda: vc.bench(network, batch=1, runs=1),
    )
    for call in calls:
        with pytest.raises(InputError, match="cannot be copied") as caught:
            call()
        assert "detach" in str(caught.value.hint)
    assert vc.count_cost(network) == cost and len(extractor.kept) == 1


def _parametrize(name: str, leaf: str) -> Callable[[nn.Module], None]:
    def change(network: nn.Module) -> None:
        nn.utils.parametrize.register_parametrization(network.get_submodule(name), leaf, nn.Identity())

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_parametrize("blocks.0.norm1", "weight"), "norm"),
        (_parametrize("blocks.0.norm1", "bias"), "norm"),
        (_parametrize("", "pos_embed"), "pos_embed"),
        (lambda network: l1_unstructured(network.blocks[0].norm1, "weight", 0.5), "norm"),
        (lambda network: l1_unstructured(network.blocks[0].mlp.fc2, "bias", 0.5), r"blocks\.0\.mlp\.fc2"),
    ],
)
def test_computed_tensors_are_not_sliced(change: Any, name: str) -> None:
    network = model()
    plan = vc.plan(network, "isomorphic", batches(), align=FINE, keep_ratio=0.5)
    assert any("residual" in space for space in plan.kept)
    change(network)
    with torch.no_grad():
        network.cpu()(X)  # the result no longer has a gradient, so that torch copies it
    with pytest.raises(InputError, match=f"its {name} computes its weight; make it permanent"):
        vc.prune(network, plan)


def test_measurements_do_not_depend_on_autocast_of_the_caller() -> None:
    network, types = model(), set[torch.dtype]()
    expected = vc.evaluate(network, batches())
    network.get_submodule("head").register_forward_hook(lambda module, args, out: types.add(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        measured = vc.bench(network, batch=1, protocol="paper", warmup=1, runs=1)
        assert vc.evaluate(network, batches()) == expected
    assert measured.rows[0]["precision"] == "fp32" and types == {torch.float32}


class Adapted(nn.Linear):
    """A linear layer that adds something to its outputs, as LoRA does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def adapted(network: nn.Module) -> None:
    network.set_submodule("blocks.0.mlp.fc1", Adapted(16, 64))


def wrapped(network: nn.Module) -> None:
    network.set_submodule("blocks.0.attn.qkv", nn.Sequential(network.get_submodule("blocks.0.attn.qkv")))


def masked(network: nn.Module) -> None:
    l1_unstructured(network.get_submodule("blocks.1.attn.qkv"), "weight", 0.5)


def parametrized(network: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(network.get_submodule("blocks.0.attn.qkv"))


def tied(network: nn.Module) -> None:
    network.set_submodule("blocks.1.mlp", network.get_submodule("blocks.0.mlp"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (adapted, r"its blocks\.0\.mlp\.fc1 is of type Adapted; use a plain layer"),
        (wrapped, r"its blocks\.0\.attn\.qkv is of type Sequential; use a plain layer"),
        (parametrized, r"its blocks\.0\.attn\.qkv is of type ParametrizedLinear"),
        (masked, r"blocks\.1\.attn\.qkv(\.weight was computed| computes its weight)"),
        (tied, "some of its modules share parameters"),
    ],
)
def test_layers_that_slicing_and_folding_do_not_know_are_rejected(change: Any, text: str) -> None:
    network, pruned = model(), vc.prune(model(), vc.plan(model(), "fixed", activation=[0]))
    change(network), change(pruned)
    calls = (
        lambda: vc.plan(network, "magnitude"),
        lambda: vc.prune(network, pruned.plan),  # type: ignore[arg-type]
        lambda: vc.fold(pruned),
    )
    for call in calls:
        with pytest.raises(InputError, match=text):
            call()


def test_weights_that_torch_cannot_copy_are_named() -> None:
    network = model()
    l1_unstructured(network.blocks[0].mlp.fc1, "weight", 0.5)  # type: ignore[index, no-untyped-call, union-attr]
    for call in (vc.count_cost, vc.bench, partial(vc.evaluate, data=batches())):
        with pytest.raises(InputError, match=r"cannot be copied: blocks\.0\.mlp\.fc1\.weight was computed"):
            call(network)  # type: ignore[operator]


@pytest.mark.parametrize("method", ["isomorphic", "fixed"])
def test_a_model_that_stores_a_result_is_rejected(method: str, tmp_path: Path) -> None:
    """As one with a hook of the user that keeps an attention map: torch does not copy it."""
    network = model()
    plan = vc.plan(network, "magnitude", keep_heads=0.5)
    network.blocks[1].attn.kept = network(X)  # type: ignore[index, union-attr]
    calls: list[Callable[[], Any]] = [
        lambda: vc.plan(network, method, batches(), **({"activation": [0]} if method == "fixed" else {"align": FINE})),
        lambda: vc.prune(network, plan),
        lambda: vc.fold(network),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"blocks\.1\.attn\.kept was computed") as caught:
            call()
        assert ".detach()" in str(caught.value.hint)
    vc.save_model(network, tmp_path / "out")  # copies no module
    assert torch.equal(vc.load_model(tmp_path / "out")(X), network.cpu().eval()(X))


def test_methods_that_train_nothing_leave_the_random_generator_of_torch() -> None:
    for method, options in {"isomorphic": {"align": FINE}, "te_static": {"pruned_layers": 1}}.items():
        before = torch.get_rng_state()
        vc.plan(model(), method, Pictures(), device="cpu", **options)
        vc.evaluate(model(), Pictures(), device="cpu")
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"precision": "int8", "data": batches()}])
def test_a_model_in_training_mode_is_exported_as_in_evaluation_mode(options: Any, tmp_path: Path) -> None:
    network = model(drop_path_rate=0.5, proj_drop_rate=0.5)
    files = [vc.export(network.train(mode), tmp_path / f"{mode}.onnx", **options) for mode in (False, True)]
    assert network.training and files[0].read_bytes() == files[1].read_bytes()


def test_folding_leaves_the_random_generator_of_torch() -> None:
    small = vc.prune(model(), vc.plan(model(), "fixed", activation=[0]))
    before = torch.get_rng_state()
    folded: Any = vc.fold(small)
    assert folded.plan.folded and torch.equal(torch.get_rng_state(), before)


def test_a_classifier_of_several_layers_stays_if_its_inputs_stay() -> None:
    network = model()
    network.head = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    assert vc.prune(network, vc.plan(network, "magnitude", keep_heads=0.5, device="cpu"))(X).shape == (3, 4)
    with pytest.raises(InputError, match=r"no mask applies to head\.weight"):
        vc.prune(network, vc.plan(network, "isomorphic", criterion="magnitude", keep_ratio=0.5, align=FINE))


def test_the_process_group_of_the_caller_stays(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        vc.finetune(model(), batches(), epochs=1)
        vc.evaluate(model(), batches())
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()


def test_probabilities_may_be_labels_of_a_training_but_have_no_accuracy() -> None:
    soft = [(images, torch.eye(4)[labels] * 0.7 + 0.075) for images, labels in batches()]
    assert vc.finetune(model(), soft, epochs=1).history
    with pytest.raises(DataError, match=r"labels of shape \d+x4 with values from 0.075 to 0.775 cannot be used"):
        vc.evaluate(model(), soft)


@pytest.mark.parametrize("name", METHODS)
def test_every_option_of_every_method_has_a_default(name: str) -> None:
    METHODS[name].options()


@dataclass(frozen=True)
class NoOptions:
    pass


def test_a_method_object_and_an_entry_point_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def keep_half(dense: nn.Module, context: Any, options: NoOptions) -> vc.Plan:
        space = next(space for space in context.family.spaces(dense) if space.kind == "mlp")
        return context.plan.delta(kept={space.name: tuple(range(space.size // 2))})

    mine = vc.Method("mine", "half of the first FFN", NoOptions, keep_half, lambda *_: vc.Plan("x"))
    assert vc.plan(model(), mine).kept
    plugin = (
        "import vitcompress as vc\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Options: pass\n"
        "def plan(model, context, options): return context.plan.delta(removed={'blocks.0.attn': 'drop'})\n"
        "METHOD = vc.Method('plugged', 'from another package', Options, plan, plan)\n"
    )
    points = "plugged = plugin:METHOD\nbroken = plugin:Options"
    monkeypatch.syspath_prepend(write_package(tmp_path / "site", "methods", points, plugin=plugin))
    assert vc.plan(model(), "plugged").removed == {"blocks.0.attn": "drop"}
    with pytest.raises(InputError, match="is not of type Method"):
        vc.plan(model(), "broken")


@pytest.mark.parametrize(
    "name", ["create_model", "plan", "finetune", "fold", "export", "evaluate", "bench", "count_cost"]
)
def test_the_examples_in_docstrings_run(name: str) -> None:
    function = getattr(vc, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, vitcompress as vc; dir(vc); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_functions_keep_their_names_when_submodules_are_imported() -> None:
    import vitcompress.bench.timing
    import vitcompress.plan
    import vitcompress.verify.fold  # noqa: F401

    for name in ("plan", "bench", "verify"):
        assert inspect.unwrap(getattr(vc, name)) is inspect.unwrap(getattr(api, name))


def test_names_that_changed_before_the_first_release_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="count_cost"):
        assert vc.measure is vc.count_cost
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert vc.load is vc.load_model and vc.save is vc.save_model
    with pytest.raises(AttributeError):
        vc.nothing  # noqa: B018


def test_an_option_that_another_choice_disables_is_rejected() -> None:
    model = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10)
    with pytest.raises(InputError, match=r"published_attention = \(0,\) has no effect: layers is 'search'"):
        vc.plan(model, "hetdpt", published_attention=(0,))
    with pytest.raises(InputError, match=r"temperature = 2\.0 has no effect: distillation is 'none'"):
        vc.finetune(model, [], temperature=2.0)
    with pytest.raises(InputError, match=r"dilution = 0\.5 has no effect"):
        vc.plan(model, "nose", dilution=0.5)


def test_a_plan_for_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters replace milliseconds; without an amount, the message names it."""
    size = lambda one: sum(p.numel() for p in one.parameters()) / 1000  # noqa: E731
    monkeypatch.setattr(LatencyClock, "measure", lambda clock, one, goal: Measured(*4 * [size(one)]))
    vit = model()
    least = size(vc.prune(vit, vc.plan(vit, "magnitude", keep_heads=0.3)))
    goal: dict[str, Any] = {"target": "latency", "amount": least, "latency_on": "torch"}
    assert set(vc.plan(vit, "magnitude", **goal).heads.values()) == {1}
    with pytest.warns(UserWarning, match="The latency target was missed by"):
        vc.plan(vit, "magnitude", **{**goal, "amount": 1.1 * least})
    vc.plan(vit, "magnitude", **{**goal, "amount": 1.1 * least}, progress=RecordedProgress())
    with pytest.raises(PlanError, match="cannot be reached"):
        vc.plan(vit, "magnitude", **{**goal, "amount": 0.5 * least})
    with pytest.raises(PlanError, match="amount is required with target = 'latency'"):
        vc.plan(vit, "isomorphic", target="latency")


def test_training_options_are_checked_before_a_latency_is_measured() -> None:
    progress, wrong = RecordedProgress(), {"batch_size": 6, "accumulate": 4}
    with pytest.raises(InputError, match="6 images per process cannot be computed in 4 equal parts"):
        vc.plan(model(), "sero", batches(), training=wrong, progress=progress, target="latency", amount=1.0)
    assert not progress.notes


def test_up_vit_is_saved_with_its_standard_model(tmp_path: Path) -> None:
    """Also after `fold`, which leaves LayerScales in place then."""
    dense = vc.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS, init_values=0.5)
    target = {"embed_dim": 8, "num_heads": 1}
    plan = vc.plan(dense, "upvit", batches(), target_args=target, images=4, device="cpu")
    small = vc.fold(vc.prune(dense, plan))
    vc.save_model(small, tmp_path / "out")
    assert (tmp_path / "out" / "standard.safetensors").is_file() and vc.verify(tmp_path / "out").passed
    assert hasattr(small.get_submodule("blocks.0").ls1, "gamma")
    small.pretrained_cfg["mean"] = (0.25,)
    vc.save_model(small, tmp_path / "other")
    saved = json.loads((tmp_path / "other" / "plan.json").read_text())
    for args in (saved["arch_args"], saved["standard"]["args"]):
        assert args["pretrained_cfg_overlay"]["mean"] == [0.25]
    assert vc.verify(tmp_path / "other").passed


@pytest.mark.parametrize("classes", [None, ("ant", "bee")])
def test_a_model_with_another_head_and_preprocessing_is_exported_into_its_folder(tmp_path: Path, classes: Any) -> None:
    """The file names the plan that was saved: with these changes, and with the names of classes or without them."""
    small = vc.prune(model(), vc.plan(model(), "fixed", activation=[0]))
    small.reset_classifier(2)
    small.pretrained_cfg["mean"] = (0.25,)
    vc.save_model(small, tmp_path / "out", classes)
    file = vc.export(small, tmp_path / "out" / "model.onnx", class_names=classes or ())
    assert vc.verify(tmp_path / "out").passed
    vc.save_model(model(), tmp_path / "other")
    for path in (file, sidecar_path(file)):
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    checks = {check.name: check.detail for check in vc.verify(tmp_path / "other").checks}
    assert "plan_sha256" in checks["onnx.metadata"]


def test_class_names_that_timm_stores_are_saved(tmp_path: Path) -> None:
    network = timm.create_model("vit_tiny_patch16_224", num_classes=4, **ARGS).eval()
    network.pretrained_cfg["label_names"] = names = ("ant", "bee", "cat", "dog")
    vc.save_model(vc.prune(network, vc.plan(network, "magnitude", keep_heads=0.5)), tmp_path)
    assert class_names_of(vc.load_model(tmp_path)) == names


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0)])
def test_devices_of_torch_are_taken(device: torch.device) -> None:
    network = model()
    assert vc.plan(network, "magnitude", keep_heads=0.5, device=device).heads
    assert vc.finetune(network, batches(), epochs=1, device=device).history
    assert vc.evaluate(network, batches(), device=device).total == 64
    with pytest.raises(DeviceError, match="'meta' is unknown"):
        vc.evaluate(network, batches(), device=torch.device("meta"))


def test_a_model_without_a_classifier_is_exported_without_class_names(tmp_path: Path) -> None:
    features = vc.create_model("vit_tiny_patch16_224", num_classes=0, **ARGS)
    vc.save_model(features, tmp_path / "out")
    vc.export(features, tmp_path / "out" / "model.onnx")
    assert vc.verify(tmp_path / "out").passed


def test_an_export_logs_no_warnings_of_libraries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """onnxscript warns of every Split of this model."""
    vc.export(vc.create_model("vit_small_patch16_dinov3", num_classes=3, **ARGS), tmp_path / "model.onnx")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("onnxscript").level == logging.NOTSET


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_type_is_verified_in_int8(dtype: torch.dtype, smooth: bool, tmp_path: Path) -> None:
    """Its file computes in fp32 beside the products."""
    network = model().to(dtype)
    vc.save_model(network, tmp_path / "out")
    file = vc.export(network, tmp_path / "out" / "model.onnx", precision="int8", smooth=smooth, data=batches())
    checks = {check.name: check.verdict for check in vc.verify(tmp_path / "out").checks}
    assert checks[f"agreement.{file.name}.emulation"] == "passed" and "failed" not in checks.values()


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
def test_a_model_for_images_of_any_size_is_verified_in_int8(suffix: str, tmp_path: Path) -> None:
    """Its positions are a constant of the graph, which is not stored in half precision."""
    network = model(dynamic_img_size=True)
    with torch.no_grad():
        network.get_parameter("pos_embed").mul_(300)
    vc.save_model(network, tmp_path / "out")
    file = vc.export(network, tmp_path / "out" / f"model.{suffix}", precision="int8", data=batches())
    checks = {check.name: check for check in vc.verify(tmp_path / "out", batches()).checks}
    assert checks[f"agreement.{file.name}.emulation"].verdict == "passed"


def test_int8_in_a_deep_model_is_not_taken_for_wrong_arithmetic(tmp_path: Path) -> None:
    """Values that round to another step than in torch multiply from layer to layer."""
    deep = vc.create_model("pvt_v2_b0", num_classes=4, pretrained_cfg_overlay={"input_size": (3, 64, 64)})
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 64, 64, generator=generator)
    vc.save_model(deep, tmp_path / "out")
    file = vc.export(deep, tmp_path / "out" / "model.onnx", precision="int8", data=[(images, torch.arange(16) % 4)])
    checks = {check.name: check for check in vc.verify(tmp_path / "out").checks}
    emulation = checks[f"agreement.{file.name}.emulation"]
    assert emulation.verdict == "passed" and emulation.tolerance > 0.5
