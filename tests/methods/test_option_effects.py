"""Every option of every method has an effect in at least one case. Cases of rejected options of width methods are in
test_unused_options.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from method_world import context, model
from test_methods import OPTIONS
from test_methods_families import world
from torch import nn

from vitcompress import surgery
from vitcompress.errors import InputError
from vitcompress.families import family_of
from vitcompress.methods import METHODS
from vitcompress.methods.base import Clock, Context
from vitcompress.methods.isomorphic import Alignment
from vitcompress.training.augmentation import Augmentation
from vitcompress.training.options import TrainOptions

TRAIN = TrainOptions(epochs=2, batch_size=16, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """option: path of an option, as in `te.sign`, that changes to `value`; `base` are other options that it depends on,
    besides those of `ROWS`. family: of the model. train: [finetune]. rejected: the changed option must be an error.
    """

    option: str
    value: Any
    base: dict[str, Any] = field(default_factory=dict)
    family: str = "vit"
    train: TrainOptions = TRAIN
    rejected: bool = False


def unused(option: str, value: Any, **more: Any) -> Case:
    return Case(option, value, rejected=True, **more)


TWO = {"attention": (0, 1), "activation": (0, 2)}
BYPASSES = [Case("attention_bypass", "norm_identity"), Case("gated_ffn", "drop_ffn", family="swiglu")]
OUTPUT_ACT = Case("both_pruned_output_act", "gelu", {"pruned_layers": 4})
ENTROPY = [Case("te.images", 9), Case("te.sign", "abs"), Case("te.resamples", 3)]
FAST = {"images_per_class": 6, "batch_size": 8, "lr": 1e-3, "min_lr": 1e-6, "weight_decay": 0.1}
COLLECTION = [
    *(Case(f"collection.{name}", value) for name, value in FAST.items()),
    Case("collection.epochs", 2),
    Case("collection.rounds", 3),
    Case("collection.interleaved", 3),
    Case("collection.order", "attention_first"),
    unused("collection.order", "attention_first", base={"collection.interleaved": 0}),
    unused("collection.lr", 1e-3, base={"collection.epochs": 0, "collection.images_per_class": 100}),
]
SEARCH = [
    *(Case(f"search.{name}", value) for name, value in FAST.items()),
    Case("search.factor", 0.5),
    Case("search.schedule", "constant", {"search.lr": 1e-2}),
    Case("search.score_lr", 2.0),
    unused("search.min_lr", 1e-6, base={"search.schedule": "constant"}),
]
ALLOCATION = [
    Case("pruned_layers", 3),
    *BYPASSES,
    OUTPUT_ACT,
    *ENTROPY,
    *COLLECTION,
    Case("min_pruned_per_type", 0),
    Case("tie_break", "none"),
]
PUBLISHED = {"layers": "published", "published_attention": (0,), "published_activation": (2,)}
HARD = replace(TRAIN, distillation="hard")
CASES: dict[str, list[Case]] = {
    "hetdpt": [
        *ALLOCATION,
        *SEARCH,
        Case("layers", "published", {"published_attention": (0,), "published_activation": (2,), "layers": "published"}),
        Case("published_attention", (1,), PUBLISHED),
        Case("published_activation", (1,), PUBLISHED),
        Case("example_attention", (0,), {"example_activation": (1,), "example_attention": (2,)}),
        Case("example_activation", (0,), {"example_activation": (1,), "example_attention": (2,)}),
        Case("candidates", "all", {"pruned_layers": 1, "min_pruned_per_type": 0}),
        Case("diagnostics", True),
        Case("diagnostics", True, PUBLISHED),
        unused("published_attention", (1,)),
        unused("published_activation", (1,)),
        *(
            unused(option, value, base=PUBLISHED)
            for option, value in {
                "example_attention": (1,),
                "example_activation": (1,),
                "candidates": "all",
                "tie_break": "none",
                "min_pruned_per_type": 0,
            }.items()
        ),
    ],
    "hetdpt_no_step2": ALLOCATION,
    "hetdpt_no_step1": [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, *SEARCH],
    "te_static": [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, *ENTROPY, Case("te_bypass", "double")],
    "nose": [
        Case("pruned_layers", 1),
        Case("attention_bypass", "drop"),
        Case("both_pruned_output_act", "gelu", family="without activations"),
        *ENTROPY,
        Case("te_bypass", "double"),
        Case("dilution", 0.5),
        unused("gated_ffn", "drop_ffn", family="swiglu"),
    ],
    "activation_only": [
        Case("pruned_layers", 1),
        Case("gated_ffn", "drop_ffn", family="swiglu"),
        Case("both_pruned_output_act", "gelu", family="without attentions"),
        *ENTROPY,
        Case("dilution", 0.5),
        unused("attention_bypass", "double"),
    ],
    "random": [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, Case("pick", "last"), Case("attention", 2)],
    "fixed": [
        Case("attention", (1,)),
        Case("activation", (1,)),
        *BYPASSES,
        Case("both_pruned_output_act", "gelu", TWO),
        unused("attention_bypass", "double", base={"attention": ()}),
        unused("gated_ffn", "drop_ffn", base={"activation": ()}, family="swiglu"),
    ],
    "isomorphic": [
        Case("keep_ratio", 0.75),
        Case("keep_heads", 1.0),
        Case("keep_head_dim", 0.5),
        Case("target", "macs_linear", {"target": "macs", "amount": 4e-5}),
        Case("amount", 5e-5, {"target": "macs", "amount": 4e-5}),
        Case("latency_on", "torch", {"target": "latency", "amount": 7.0}),
        Case("align.residual", 3),
        Case("align.ffn", 5),
        Case("align.head_dim", 4),
        Case("round_to", 3, {"align": Alignment(), "round_to": 2}),
        Case("scope", "global"),
        Case("criterion", "magnitude", {"images": 3200}),
        Case("images", 12),
        Case("attention_scale", "reset"),
    ],
    "magnitude": [Case("keep_heads", 0.25, family="four heads")],
    "sero": [
        Case("sparsity", 0.25),
        Case("epochs", 3),
        Case("warmup_epochs", 0),
        Case("refresh", 1),
        Case("lr", 2e-3),
        Case("layout", "padded"),
        Case("round_to", 4, {"sparsity": 0.25}),
        Case("threshold", "global"),
        Case("criterion", "weight"),
        Case("criterion_pass", "masked"),
        Case("weight_scale", "none"),
    ],
    "upvit": [
        Case("target", "deit_tiny_patch16_224"),
        Case("target_args", {"embed_dim": 8, "num_heads": 1, "depth": 2}),
        Case("heads", "each"),
        Case("images", 9),
        Case("reference", "current", {"target_args": {"depth": 2}}),
        Case("score", "fisher"),
        Case("screen", "images", {"score": "screened"}),
        Case("screen_images", 3, {"score": "screened", "screen": "images"}),
        Case("band", 0.25, {"score": "screened"}),
        Case("directions", 3, {"score": "fisher"}),
        Case("images_at_once", 2),
    ],
    "recover": [
        Case("epochs", 3),
        Case("batch_size", 8),
        Case("lr", 2e-3),
        Case("min_lr", 1e-4),
        Case("warmup_epochs", 1),
        Case("weight_decay", 0.1),
        Case("decay_all", True),
        Case("drop_path", 0.1),
        Case("alpha", 0.25, train=HARD),
        Case("teacher_smoothing", 0.1, train=HARD),
        Case("augmentation", Augmentation(smoothing=0.1)),
        unused("alpha", 0.25),
        unused("teacher_smoothing", 0.1),
        unused("teacher_smoothing", 0.1, train=replace(TRAIN, distillation="soft")),
    ],
    "fold": [],
}


def leaves(options: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all options."""
    for option in fields(options):
        value = getattr(options, option.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{option.name}.")
        else:
            yield f"{prefix}{option.name}"


def change(options: Any, changes: dict[str, Any]) -> Any:
    """`options` with other values at these paths."""
    for path, value in changes.items():
        name, _, inner = path.partition(".")
        options = replace(options, **{name: change(getattr(options, name), {inner: value}) if inner else value})
    return options


@pytest.mark.parametrize("name", METHODS)
def test_every_option_has_a_case(name: str) -> None:
    assert {case.option for case in CASES[name]} == set(leaves(OPTIONS[name]))


@dataclass(frozen=True)
class RecordingContext(Context):
    """Records the trainings that a method starts."""

    trainings: list[Any] = field(default_factory=list)

    def run_training(
        self, module: nn.Module, images: Any, heldout: Any, options: TrainOptions, *a: Any, **k: Any
    ) -> Any:
        self.trainings.append((options, len(images)))
        return super().run_training(module, images, heldout, options, *a, **k)


def receive(family: str, folder: Path) -> tuple[nn.Module, Context]:
    """The model that a method receives, and its context."""
    if family == "swiglu":
        return world("swiglu", folder)
    dense = model(4, num_heads=4 if family == "four heads" else 2)
    around = context(folder, dense)
    kind, bypass = {"without activations": ("mlp.act", "identity"), "without attentions": ("attn", "drop")}.get(
        family, ("", "")
    )
    removed = {f"blocks.{block}.{kind}": bypass for block in range(3)} if kind else {}
    delta = around.plan.delta(removed=removed)
    return surgery.apply_plan(dense, delta), replace(around, plan=around.plan.then(delta))


def effects(name: str, options: Any, case: Case, folder: Path) -> Any:
    """Everything that a method does with its options: plans, files, trainings, batches and descriptions."""
    vit, around = receive(case.family, folder)
    method, batches = METHODS[name], list[Any]()
    vit.register_forward_pre_hook(lambda module, args: batches.append(tuple(args[0].shape)))
    milliseconds = lambda candidate, runtime: sum(p.numel() for p in candidate.parameters()) / 1000  # noqa: E731
    teacher = model(4) if case.train.distillation != "none" else None
    known = {entry.name: getattr(around, entry.name) for entry in fields(around) if entry.init}
    changes = {"train": case.train, "latency": Clock(milliseconds, milliseconds), "teacher": lambda: teacher}
    recording = RecordingContext(**{**known, **changes})
    structure = method.structure(vit, family_of(vit), recording.plan, options)
    plan = method.plan(vit, recording, options)
    info = method.describe(options)
    return (
        structure,
        plan,
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.*"))},
        recording.trainings,
        batches,
        method.estimate(vit, family_of(vit), options),
        (info.choice, info.training and info.training(case.train), info.uses_heldout, info.equal_widths),
        method.dilute and [method.dilute(options, 8)(epoch) for epoch in range(8)],
    )


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in CASES.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else value.option + "-rejected" * value.rejected,
)
def test_an_option_has_an_effect_or_is_rejected(name: str, case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = change(OPTIONS[name], case.base)
    changed = change(base, {case.option: case.value})
    if case.rejected:
        with pytest.raises(InputError, match=case.option.rpartition(".")[2]):
            effects(name, changed, case, tmp_path / "changed")
        assert not list(tmp_path.rglob("*.json")), "rejected before anything is measured"
    elif case.option == "layers":
        assert effects(name, base, case, tmp_path / "base")[0].removed.keys() == {"blocks.0.attn", "blocks.2.mlp.act"}
    else:
        assert effects(name, base, case, tmp_path / "base") != effects(name, changed, case, tmp_path / "changed")
