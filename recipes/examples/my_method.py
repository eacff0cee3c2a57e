"""Write your own pruning method: keep the FFN channels with the largest weights, without data.

    python my_method.py

To use it in recipes, declare it in your package's pyproject.toml, then write `method = "ffn_magnitude"`:

    [project.entry-points."vitcompress.methods"]
    ffn_magnitude = "my_package.my_method:FFN_MAGNITUDE"
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le
from torch import nn

import vitcompress as vc
from vitcompress.io.validation import Doc
from vitcompress.methods.scores import channel_scores


@dataclass(frozen=True, kw_only=True)
class Options:
    keep_ratio: Annotated[float, Gt(0), Le(1), Doc("share of the hidden channels of every FFN to keep")] = 0.5


def plan(model: nn.Module, context, options: Options) -> vc.Plan:
    """Keep the channels with the largest sum of squared weights.

    Scores from data: `for images, labels in calibration_images(context, 512)`, of vitcompress.methods.calibration.
    """
    spaces = [space for space in context.family.spaces(model) if space.kind == "mlp"]
    scores = channel_scores(model, spaces, lambda name, weight: weight.square())
    counts = {space.name: max(1, round(options.keep_ratio * space.size)) for space in spaces}
    best = {name: scores[name].topk(count).indices.tolist() for name, count in counts.items()}
    return context.plan.delta(kept={name: tuple(sorted(channels)) for name, channels in best.items()})


def structure(model: nn.Module, family, base: vc.Plan, options: Options) -> vc.Plan:
    """The same sizes for a model without weights: the first channels."""
    spaces = [space for space in family.spaces(model) if space.kind == "mlp"]
    return base.delta(kept={s.name: tuple(range(max(1, round(options.keep_ratio * s.size)))) for s in spaces})


FFN_MAGNITUDE = vc.Method("ffn_magnitude", "FFN channels with the largest weights", Options, plan, structure)

if __name__ == "__main__":
    dense = vc.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10)
    small = vc.prune(dense, vc.plan(dense, FFN_MAGNITUDE, keep_ratio=0.25))
    print(vc.count_cost(dense), "->", vc.count_cost(small), sep="\n")
