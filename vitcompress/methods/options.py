"""The options of the built-in methods, as plain data: a recipe is validated without importing torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from vitcompress.io.plugins import find_by_name, plugin_names
from vitcompress.io.validation import Doc
from vitcompress.training.options import Augmentation

Indices = tuple[Annotated[int, Ge(0)], ...]
# norm_identity is the released HetDPT code, double the released NOSE code (the residual stream once more).
Bypass = Annotated[
    Literal["drop", "norm_identity", "double"],
    Doc("replacement of an attention: nothing, the block's norm (HetDPT's code) or the residual stream (NOSE's code)"),
]
# drop_ffn is the only reading of HetDPT's DINOv2-g that gives the published size.
GatedFfn = Annotated[
    Literal["mean_gate", "drop_gate", "drop_ffn"],
    Doc("of a SwiGLU FFN that loses its activation: fix its gate at the mean over training images or at 1, or drop it"),
]
Count = Annotated[int | None, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    target: Annotated[
        Literal["sizes", "latency"], Doc("`latency` chooses the sizes that take `amount` ms; `sizes`: as they are set")
    ] = "sizes"
    amount: Annotated[float | None, Gt(0), Doc("ms per call, with target = latency")] = None
    latency_on: Annotated[Literal["onnxruntime", "openvino", "torch"], Doc("runtime of a latency")] = "onnxruntime"
    latency_batch: Annotated[Count, Doc("images per call of a latency; None: bench.batch, or 1")] = None
    latency_threads: Annotated[Count, Le(1024), Doc("on the CPU; None: run.threads for torch, else the default")] = None


@dataclass(frozen=True, kw_only=True)
class BypassOptions:
    attention_bypass: Bypass = "drop"
    both_pruned_output_act: Annotated[
        Literal["none", "gelu"],
        Doc("`gelu` adds a GELU after blocks that lost both types, as in the released HetDPT code"),
    ] = "none"
    gated_ffn: GatedFfn = "mean_gate"


@dataclass(frozen=True, kw_only=True)
class DepthOptions(BypassOptions, LatencyOptions):
    pruned_layers: Annotated[int, Ge(1), Doc("number of attentions and activations to remove, both types together")] = 4


@dataclass(frozen=True)
class EntropyOptions:
    images: Annotated[int, Ge(2), Doc("training images, class-balanced, evaluation transforms (NOSE: 33 280)")] = 10_240
    sign: Annotated[Literal["signed", "abs"], Doc("`signed` as in the paper, or `abs`, the absolute change")] = "signed"
    resamples: Annotated[int, Ge(0), Doc("bootstrap resamples, which show how certain a choice is; 0: none")] = 20


@dataclass(frozen=True, kw_only=True)
class FastTraining:
    """A short training on a class-balanced part of the training set, as in the released code: AdamW, weight decay for
    matrices only, every image once per epoch. Everything else follows the recipe's [finetune].
    """

    images_per_class: Annotated[int, Ge(0), Doc("training images of each class; 0: all")] = 100
    batch_size: Annotated[int | None, Ge(1), Doc("None: that of [finetune]")] = None
    lr: Annotated[float | None, Gt(0), Doc("peak learning rate; None: 5e-5 per 512 images of the batch")] = None
    min_lr: Annotated[float, Ge(0), Doc("final learning rate, at most the peak")] = 1e-5
    weight_decay: Annotated[float, Ge(0), Doc("of matrices")] = 0.05


@dataclass(frozen=True, kw_only=True)
class CollectionOptions(FastTraining):
    epochs: Annotated[int, Ge(0), Doc("of the fast fine-tuning after each removal")] = 10
    rounds: Annotated[int | None, Ge(1), Doc("layers removed by a single-type chain; None: the budget")] = None
    interleaved: Annotated[int, Ge(0), Doc("layers removed by the interleaved chain")] = 6
    order: Annotated[
        Literal["activation_first", "attention_first"],
        Doc("start of the interleaved chain (Algorithm 2: attention; points of Table 10: activation)"),
    ] = "activation_first"


@dataclass(frozen=True, kw_only=True)
class AllocationOptions(DepthOptions):
    min_pruned_per_type: Annotated[
        int, Ge(0), Doc("smallest number of layers of each type to remove; 1 in the paper's listing, 0 in Algorithm 3")
    ] = 1
    tie_break: Annotated[
        Literal["faster", "none"],
        Doc("between nearly equal predictions: `faster` takes the split with fewer MACs, `none` the best prediction"),
    ] = "faster"
    te: EntropyOptions = field(default_factory=EntropyOptions)
    collection: CollectionOptions = field(default_factory=CollectionOptions)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(FastTraining):
    factor: Annotated[float, Gt(0), Doc("scales the schedule of (k + 1)^2 epochs")] = 1.0
    schedule: Annotated[
        Literal["restarts", "constant"],
        Doc("of the learning rate; `restarts` decays from the peak after each removal (before the first: the minimum)"),
    ] = "restarts"
    score_lr: Annotated[float, Gt(0), Doc("learning rate of the scores, as a multiple of that of the weights")] = 1.0


@dataclass(frozen=True, kw_only=True)
class DirectOptions(DepthOptions):
    search: SearchOptions = field(default_factory=SearchOptions)


Example = Annotated[
    Indices, Doc("assumed result of the search in `--structure-only` and `--dry-run`; default: evenly spread")
]


@dataclass(frozen=True, kw_only=True)
class HetdptOptions(AllocationOptions, DirectOptions):
    layers: Annotated[
        Literal["search", "published"], Doc("`search` runs stage 1; `published` takes the published_... lists")
    ] = "search"
    published_attention: Annotated[Indices, Doc('blocks that lose their attention, with layers = "published"')] = ()
    published_activation: Annotated[Indices, Doc('blocks that lose their activation, with layers = "published"')] = ()
    example_attention: Example = ()
    example_activation: Example = ()
    candidates: Annotated[Literal["collected", "all"], Doc("of step 2: from single-type chains, or all")] = "collected"
    diagnostics: Annotated[bool, Doc("also measure gradient disparity and recovery asymmetry")] = False


@dataclass(frozen=True, kw_only=True)
class ActivationOptions(DepthOptions):
    dilution: Annotated[
        float, Gt(0), Le(1), Doc("share of the recovery until layers of the last step are gone (NOSE: 300 of 400)")
    ] = 0.75
    te: EntropyOptions = field(default_factory=EntropyOptions)


@dataclass(frozen=True, kw_only=True)
class NoseOptions(ActivationOptions):
    """Options for attentions; NOSE itself replaces an attention by doubling the residual stream."""

    attention_bypass: Bypass = "double"
    te_bypass: Annotated[Bypass, Doc("replacement while transfer entropy is measured")] = "drop"


@dataclass(frozen=True, kw_only=True)
class FixedOptions(BypassOptions):
    attention: Annotated[Indices, Doc("blocks that lose their attention")] = ()
    activation: Annotated[Indices, Doc("blocks that lose their activation")] = ()


@dataclass(frozen=True, kw_only=True)
class StaticOptions(DepthOptions):
    te: EntropyOptions = field(default_factory=EntropyOptions)
    te_bypass: Annotated[Bypass | None, Doc("replacement while measuring; None: attention_bypass")] = None


@dataclass(frozen=True, kw_only=True)
class RandomOptions(DepthOptions):
    pick: Annotated[
        Literal["random", "first", "last"],
        Doc("`random` by the run's seed, or `first` or `last` in forward order (attention before activation)"),
    ] = "random"
    attention: Annotated[int | None, Ge(0), Doc("number of attentions among them; None: as `pick` takes them")] = None


Scope = Literal["isomorphic", "global", "local"]
Criterion = Literal["taylor", "magnitude", "gradient", "random"]
Share = Annotated[float, Gt(0), Le(1)]
Multiple = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Alignment:
    """Kept widths are multiples of these. 64 fills the tiles of tensor cores; head widths in steps of 16 keep fused
    attention kernels (TensorRT fuses multiples of 8).
    """

    residual: Annotated[Multiple, Doc("of the residual width")] = 64
    ffn: Annotated[Multiple, Doc("of an FFN's channels")] = 64
    head_dim: Annotated[Multiple, Doc("of a head's channels")] = 16


@dataclass(frozen=True, kw_only=True)
class IsomorphicOptions(LatencyOptions):
    keep_ratio: Annotated[Share, Doc("share of residual width and FFN channels kept")] = 0.5
    keep_heads: Annotated[Share, Doc("share of heads kept")] = 0.5
    keep_head_dim: Annotated[Share, Doc("share of a head's channels kept")] = 0.75
    target: Annotated[
        Literal["ratios", "macs", "macs_linear", "params", "latency"],
        Doc("`ratios`: the shares as they are, else scaled to reach `amount`; macs_linear: without attention products"),
    ] = "ratios"  # type: ignore[assignment]
    amount: Annotated[float | None, Gt(0), Doc("G MACs, M parameters or ms on `latency_on`, as `target` says")] = None
    align: Annotated[Alignment, Doc("multiples that widths are kept at")] = field(default_factory=Alignment)
    round_to: Annotated[Multiple | None, Doc("one multiple of all widths but heads, rounded down as published")] = None
    scope: Annotated[
        Scope,
        Doc("what is ranked together: one kind, everything but heads (`global`), or one layer (`local`: equal blocks)"),
    ] = "isomorphic"
    criterion: Annotated[Criterion, Doc("score of a channel")] = "taylor"
    images: Annotated[int, Ge(1), Doc("number of images over which the gradients are summed")] = 3200
    attention_scale: Annotated[
        Literal["keep", "reset"], Doc("`reset` uses the softmax scale of the new head width, as the released code")
    ] = "keep"


@dataclass(frozen=True, kw_only=True)
class MagnitudeOptions(LatencyOptions):
    keep_heads: Annotated[float, Gt(0), Lt(1), Doc("share of the heads kept in every attention; at least one")] = 0.5


WeightScale = Literal["gradient", "update", "none"]
Threshold = Literal["global", "per_layer"]
Layout = Literal["ragged", "uniform", "tied", "padded"]
SeroCriterion = Literal["gradient", "gradient_times_weight", "weight", "random"]
CriterionPass = Literal["dense", "masked"]


@dataclass(frozen=True, kw_only=True)
class SeroOptions(LatencyOptions):
    sparsity: Annotated[float, Gt(0), Lt(1), Doc("share of all q/k, v and FFN units to remove")] = 0.5
    epochs: Annotated[int, Ge(1), Doc("of the exploration")] = 50
    warmup_epochs: Annotated[int, Ge(0), Doc("epochs of the exploration without masks")] = 1
    refresh: Annotated[int, Ge(1), Doc("iterations between two updates of the masks")] = 8
    lr: Annotated[float | None, Gt(0), Doc("of the exploration (peak); None: that of [finetune]")] = None
    layout: Annotated[
        Layout, Doc("`ragged`, `uniform` heads, `tied` (equal q/k and v, at least 16) or `padded` (to the wider)")
    ] = "uniform"
    round_to: Annotated[int, Ge(1), Doc("channels of a head are multiples of this")] = 8
    threshold: Annotated[Threshold, Doc("one over all layers, or the same share in each layer")] = "global"
    criterion: Annotated[SeroCriterion, Doc("|gradient|, |gradient * weight|, |weight|, or random")] = "gradient"
    criterion_pass: Annotated[CriterionPass, Doc("gradients without masks, or previous ones with masks")] = "dense"
    weight_scale: Annotated[WeightScale, Doc("apply |W| to the gradient, to the update, or not at all")] = "gradient"


@dataclass(frozen=True, kw_only=True)
class RecoverOptions:
    """Options of this training. [finetune] sets all others, and those that are None here."""

    epochs: Annotated[int, Ge(1), Doc("of this training")] = 10
    batch_size: Annotated[int | None, Ge(1), Doc("None: as in [finetune]")] = None
    lr: Annotated[float | None, Ge(0), Doc("None: as in [finetune]")] = None
    min_lr: Annotated[float | None, Ge(0), Doc("None: as in [finetune]")] = None
    warmup_epochs: Annotated[int | None, Ge(0), Doc("None: as in [finetune]")] = None
    weight_decay: Annotated[float | None, Ge(0), Doc("None: as in [finetune]")] = None
    decay_all: Annotated[bool | None, Doc("None: as in [finetune]")] = None
    drop_path: Annotated[float | None, Ge(0), Lt(1), Doc("None: as in [finetune]")] = None
    alpha: Annotated[float | None, Ge(0), Doc("None: as in [finetune]")] = None
    teacher_smoothing: Annotated[float | None, Ge(0), Lt(1), Doc("None: as in [finetune]")] = None
    augmentation: Annotated[Augmentation | None, Doc("None: as in [finetune]")] = None


@dataclass(frozen=True)
class FoldOptions:
    """No options: what is cheaper as a product is folded, as at the end of every recipe."""


Strategy = Literal["groups", "across", "each"]


@dataclass(frozen=True, kw_only=True)
class UpvitOptions(LatencyOptions):
    target: Annotated[
        str | None,
        Doc("timm name; None: the model itself, with the sizes of target_args; `latency`: between both, as `amount`"),
    ] = None  # type: ignore[assignment]
    target_args: Annotated[
        dict[str, Any],
        Doc("sizes besides the model's own, as in { num_heads = 3, depth = 10 }; the smallest for a latency"),
    ] = field(default_factory=dict)
    heads: Annotated[
        Strategy,
        Doc("new heads from the best channels of `groups` of old ones, `across` all, or equally many of `each`"),
    ] = "groups"
    images: Annotated[int, Ge(1), Doc("proxy images from the training set, the same number of each class")] = 2000
    reference: Annotated[
        Literal["given", "current"],
        Doc("whose outputs block scores compare with: the model before the step (`given`) or the `current` one"),
    ] = "given"
    score: Annotated[
        Literal["exact", "fisher", "screened", "magnitude", "random"],
        Doc(
            "`exact` deletes each channel; `fisher`: Gauss-Newton estimate; `screened`: exact only in the `band` "
            "around the cut of a ranking by `screen`; for comparison: `magnitude` (sum of |w|), `random` (by the "
            "run's seed)"
        ),
    ] = "exact"
    screen: Annotated[
        Literal["fisher", "images"],
        Doc('ranking for score = "screened": the Gauss-Newton estimate, or exact scores on `screen_images` images'),
    ] = "fisher"
    screen_images: Annotated[int, Ge(1), Doc('images of screen = "images"')] = 500
    band: Annotated[float, Gt(0), Le(1), Doc("share of the channels, around the cut, that is measured exactly")] = 0.5
    directions: Annotated[int, Ge(1), Doc('backward passes per image, with score or screen = "fisher"')] = 2
    images_at_once: Annotated[int, Ge(1), Doc("proxy images in memory at a time")] = 512


# The name of each method and its options; ablations and baselines, which methods are compared with, come last.
OPTIONS: dict[str, type[Any]] = {
    "hetdpt": HetdptOptions,
    "nose": NoseOptions,
    "isomorphic": IsomorphicOptions,
    "sero": SeroOptions,
    "upvit": UpvitOptions,
    "magnitude": MagnitudeOptions,
    "recover": RecoverOptions,
    "fold": FoldOptions,
    "activation_only": ActivationOptions,
    "te_static": StaticOptions,
    "hetdpt_no_step1": DirectOptions,
    "hetdpt_no_step2": AllocationOptions,
    "random": RandomOptions,
    "fixed": FixedOptions,
}
ABLATION_NAMES = ("activation_only", "te_static", "hetdpt_no_step1", "hetdpt_no_step2", "random", "fixed")


def find_options(method: str) -> type[Any]:
    """The options of a method; imports torch only for one of another package. Raises InputError if there is none."""
    if method in OPTIONS or method not in plugin_names("methods"):
        return find_by_name(method, OPTIONS, "methods", "method")
    from vitcompress.methods.table import find_method

    return find_method(method).options
