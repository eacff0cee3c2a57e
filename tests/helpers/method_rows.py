"""What the tests of all methods need to know about each: one row per method. A new method needs one in `ROWS`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vitcompress.methods import ablations, auxiliary, isomorphic, magnitude, nose
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.options import Alignment, CollectionOptions, EntropyOptions, SearchOptions
from vitcompress.methods.sero import method as sero
from vitcompress.methods.upvit import method as upvit
from vitcompress.training.options import Augmentation, TrainOptions

TRAIN = TrainOptions(epochs=2, batch_size=16, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """option: path of an option, as in `te.sign`, that changes to `value`; `base` are other options that it depends on,
    besides those of the row. family: of the model. train: [finetune]. rejected: the changed option must be an error.
    """

    option: str
    value: Any
    base: dict[str, Any] = field(default_factory=dict)
    family: str = "vit"
    train: TrainOptions = TRAIN
    rejected: bool = False


def unused(option: str, value: Any, **more: Any) -> Case:
    return Case(option, value, rejected=True, **more)


@dataclass(frozen=True)
class Row:
    """What the tests of all methods need to know about one. Most methods need `options` and `cases` only.

    options: that run in a second on a model of four blocks, width 16, two heads. cases: for every option one in which
    it has an effect. before: sites that are already replaced. composed: options for steps on other families and after
    other methods, with models of three blocks; None: `options`.
    """

    options: Any
    cases: Sequence[Case] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    composed: Any = None


def latency_cases(least: float, most: float) -> list[Case]:
    """Two latencies between those of the largest and the smallest sizes, in thousands of parameters."""
    base = {"target": "latency", "amount": most}
    cases = [Case("amount", least, base), Case("latency_on", "torch", base), unused("target", "latency")]
    settings = {"amount": 1.0, "latency_on": "torch", "latency_batch": 2, "latency_threads": 2}
    return [
        *cases,
        *(unused(option, value) for option, value in settings.items()),
        *(Case(f"latency_{name}", 2, base) for name in ("batch", "threads")),
    ]


TE = EntropyOptions(images=12, resamples=2)
STEP_1: dict[str, Any] = {"te": TE, "collection": CollectionOptions(epochs=1, images_per_class=8, interleaved=2)}
STEP_2 = SearchOptions(factor=0.25, images_per_class=8)
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
LAYERS = latency_cases(11.2, 12.3)
ALLOCATION = [
    Case("pruned_layers", 3),
    *BYPASSES,
    OUTPUT_ACT,
    *ENTROPY,
    *COLLECTION,
    Case("min_pruned_per_type", 0),
    Case("tie_break", "none"),
    *LAYERS,
]
PUBLISHED = {"layers": "published", "published_attention": (0,), "published_activation": (2,)}
HARD = replace(TRAIN, distillation="hard")
COMPOSED = Alignment(residual=4, ffn=4, head_dim=1)
ROWS = {
    "hetdpt": Row(
        hetdpt.Options(pruned_layers=2, search=STEP_2, **STEP_1),
        [
            *ALLOCATION,
            *SEARCH,
            Case("layers", "published", PUBLISHED),
            Case("published_attention", (1,), PUBLISHED),
            Case("published_activation", (1,), PUBLISHED),
            Case("example_attention", (0,), {"example_activation": (1,), "example_attention": (2,)}),
            Case("example_activation", (0,), {"example_activation": (1,), "example_attention": (2,)}),
            Case("candidates", "all", {"pruned_layers": 1, "min_pruned_per_type": 0}),
            Case("diagnostics", True),
            Case("diagnostics", True, PUBLISHED),
            *(unused(f"{table}.images_per_class", 6, base=PUBLISHED) for table in ("collection", "search")),
            unused("te.images", 9, base=PUBLISHED),
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
    ),
    "nose": Row(
        nose.Options(pruned_layers=2, te=TE),
        [
            Case("pruned_layers", 1),
            Case("attention_bypass", "drop"),
            Case("both_pruned_output_act", "gelu", family="without activations"),
            *ENTROPY,
            Case("te_bypass", "double"),
            Case("dilution", 0.5),
            *LAYERS,
            unused("gated_ffn", "drop_ffn", family="swiglu"),
        ],
        composed=nose.Options(pruned_layers=1),
    ),
    "activation_only": Row(
        nose.ActivationOptions(pruned_layers=2, te=TE),
        [
            Case("pruned_layers", 1),
            Case("gated_ffn", "drop_ffn", family="swiglu"),
            Case("both_pruned_output_act", "gelu", family="without attentions"),
            *ENTROPY,
            Case("dilution", 0.5),
            *LAYERS,
            unused("attention_bypass", "double"),
        ],
        composed=nose.ActivationOptions(pruned_layers=1),
    ),
    "te_static": Row(
        ablations.StaticOptions(pruned_layers=2, te=TE),
        [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, *ENTROPY, Case("te_bypass", "double"), *LAYERS],
        composed=ablations.StaticOptions(
            pruned_layers=2, attention_bypass="norm_identity", both_pruned_output_act="gelu"
        ),
    ),
    "hetdpt_no_step2": Row(
        hetdpt.AllocationOptions(pruned_layers=2, **STEP_1),
        ALLOCATION,
    ),
    "hetdpt_no_step1": Row(
        ablations.DirectOptions(pruned_layers=2, search=STEP_2),
        [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, *SEARCH, *LAYERS],
    ),
    "random": Row(
        ablations.RandomOptions(pruned_layers=2),
        [Case("pruned_layers", 3), *BYPASSES, OUTPUT_ACT, Case("pick", "last"), Case("attention", 2), *LAYERS],
        composed=ablations.RandomOptions(pruned_layers=2, pick="last"),
    ),
    "fixed": Row(
        ablations.FixedOptions(attention=(0,), activation=(2,)),
        [
            Case("attention", (1,)),
            Case("activation", (1,)),
            *BYPASSES,
            Case("both_pruned_output_act", "gelu", TWO),
            unused("attention_bypass", "double", base={"attention": ()}),
            unused("gated_ffn", "drop_ffn", base={"activation": ()}, family="swiglu"),
        ],
        composed=ablations.FixedOptions(attention=(1,), activation=(0,), gated_ffn="drop_ffn"),
    ),
    "isomorphic": Row(
        isomorphic.Options(images=24, align=Alignment(residual=1, ffn=1, head_dim=1)),
        [
            Case("keep_ratio", 0.75),
            Case("keep_heads", 1.0),
            Case("keep_head_dim", 0.5),
            Case("target", "macs_linear", {"target": "macs", "amount": 4e-5}),
            Case("amount", 5e-5, {"target": "macs", "amount": 4e-5}),
            *latency_cases(5.0, 7.0),
            Case("align.residual", 3),
            Case("align.ffn", 5),
            Case("align.head_dim", 4),
            Case("round_to", 3, {"align": Alignment(), "round_to": 2}),
            Case("scope", "global"),
            Case("criterion", "magnitude", {"images": 3200}),
            Case("images", 12),
            Case("attention_scale", "reset"),
        ],
        composed=isomorphic.Options(keep_ratio=0.75, keep_heads=0.75, keep_head_dim=0.75, align=COMPOSED),
    ),
    "magnitude": Row(
        magnitude.Options(),
        [
            Case("keep_heads", 0.25, family="four heads"),
            *(replace(case, family="four heads") for case in latency_cases(11.2, 12.3)),
        ],
    ),
    "sero": Row(
        sero.Options(sparsity=0.5, epochs=2, refresh=2, lr=1e-3, round_to=2, threshold="per_layer"),
        [
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
            *latency_cases(6.0, 9.0),
        ],
        composed=sero.Options(sparsity=0.3, round_to=1, layout="padded"),
    ),
    "upvit": Row(
        upvit.Options(target_args={"embed_dim": 8, "num_heads": 1, "depth": 3}, images=6),
        [
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
            *latency_cases(4.0, 9.0),
        ],
        composed=upvit.Options(target_args={"embed_dim": 12, "num_heads": 2, "depth": 2}),
    ),
    "recover": Row(
        auxiliary.RecoverOptions(epochs=2, lr=1e-2),
        [
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
    ),
    "fold": Row(auxiliary.FoldOptions(), before={"blocks.3.mlp.act": "identity"}),
}
OPTIONS = {name: row.options for name, row in ROWS.items()}
