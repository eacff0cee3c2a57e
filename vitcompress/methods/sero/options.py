"""SERo's options, and the schedule of sparsity that follows from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from vitcompress.io.validation import Doc

WeightScale = Literal["gradient", "update", "none"]
Threshold = Literal["global", "per_layer"]
Layout = Literal["ragged", "uniform", "tied", "padded"]
Criterion = Literal["gradient", "gradient_times_weight", "weight", "random"]
CriterionPass = Literal["dense", "masked"]


@dataclass(frozen=True, kw_only=True)
class Options:
    sparsity: Annotated[float, Gt(0), Lt(1), Doc("share of all q/k, v and FFN units to remove")] = 0.5
    epochs: Annotated[int, Ge(1), Doc("of the exploration")] = 50
    warmup_epochs: Annotated[int, Ge(0), Doc("epochs of the exploration without masks")] = 1
    refresh: Annotated[int, Ge(1), Doc("iterations between two updates of the masks")] = 8
    lr: Annotated[float | None, Gt(0), Doc("of the exploration (peak); None: that of [finetune]")] = None
    layout: Annotated[
        Layout, Doc("`ragged`, `uniform` heads, `tied` (equal q/k and v) or `padded` (uniform, padded to the wider)")
    ] = "uniform"
    round_to: Annotated[int, Ge(1), Doc("channels of a head are multiples of this")] = 8
    threshold: Annotated[Threshold, Doc("one over all layers, or the same share in each layer")] = "global"
    criterion: Annotated[Criterion, Doc("|gradient|, |gradient * weight|, |weight|, or random")] = "gradient"
    criterion_pass: Annotated[CriterionPass, Doc("gradients without masks, or of the previous step with masks")] = (
        "dense"
    )
    weight_scale: Annotated[WeightScale, Doc("apply |W| to the gradient, to the update, or not at all")] = "gradient"


def sparsity_at(options: Options) -> Callable[[int, int, int], float]:
    """Share of units to mask at iteration `step` of `steps` in `epoch`: cubic from the end of the warm-up, T counting
    all epochs; the whole of it in the last one.
    """

    def share(epoch: int, step: int, steps: int) -> float:
        if epoch == options.epochs - 1:
            return options.sparsity
        if epoch < options.warmup_epochs:
            return 0.0
        progress = ((epoch - options.warmup_epochs) * steps + step) / (options.epochs * steps)
        return options.sparsity * (1 - (1 - progress) ** 3)

    return share
