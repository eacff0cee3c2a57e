"""SERo's options, and the schedule of sparsity that follows from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from vitcompress.methods.sero.layout import Layout, LayoutRules, Threshold

Criterion = Literal["gradient", "gradient_times_weight", "weight", "random"]
CriterionPass = Literal["dense", "masked"]
WeightScale = Literal["gradient", "update", "none"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """sparsity: share of all q/k, v and FFN units that go. epochs, lr (peak; None: that of [finetune]): of the
    exploration. warmup_epochs: of them without masks. refresh: iterations between two choices of masks.

    layout: `ragged` as scores have it, `uniform` as many in every head, `tied` as many in q/k and v, `padded` uniform
    with zeros up to the wider of both. round_to: channels of a head are multiples of it. threshold: one over
    everything, or each layer the same share. criterion: |gradient|, |gradient * weight|, |weight|, or by lot.
    criterion_pass: gradients without masks, or those of the step before with them. weight_scale: where |W| goes, on the
    gradient, on the update, or nowhere.
    """

    sparsity: Annotated[float, Gt(0), Lt(1)]
    epochs: Annotated[int, Ge(1)] = 50
    warmup_epochs: Annotated[int, Ge(0)] = 1
    refresh: Annotated[int, Ge(1)] = 8
    lr: Annotated[float, Gt(0)] | None = None
    layout: Layout = "uniform"
    round_to: Annotated[int, Ge(1)] = 8
    threshold: Threshold = "global"
    criterion: Criterion = "gradient"
    criterion_pass: CriterionPass = "dense"
    weight_scale: WeightScale = "gradient"

    @property
    def rules(self) -> LayoutRules:
        return LayoutRules(self.layout, self.round_to, self.threshold)


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
