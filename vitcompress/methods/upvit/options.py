"""UP-ViT's options."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from vitcompress.methods.upvit.heads import Strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """target: timm name of the model to arrive at; without it the model's own, with other sizes. target_args: what the
    target is built with besides the model's own arguments, as in { embed_dim = 192, num_heads = 3, depth = 10 }.

    heads: how new heads are made of old ones (see `regroup`). images: proxy images, from the training set, the same
    number of each class. reference: while blocks go one after the other, answers are compared with those of the model
    as `given` or of the `current` one.

    score: `exact` deletes each channel; `fisher` ranks by the Gauss-Newton estimate alone; `screened` measures exactly
    only the `band` of channels around the cut, as a screen ranks them: `screen` is the same estimate, with so many
    `directions` per image, or exact scores on `screen_images` images. Channels to compare with: `magnitude` (sum
    of |w|), `random` (by the run's seed). images_at_once bounds the memory.
    """

    target: str | None = None
    target_args: dict[str, Any] = field(default_factory=dict)
    heads: Strategy = "groups"
    images: Annotated[int, Ge(1)] = 2000
    reference: Literal["given", "current"] = "given"
    score: Literal["exact", "fisher", "screened", "magnitude", "random"] = "exact"
    screen: Literal["fisher", "images"] = "fisher"  # what ranks them: the estimate, or exact scores on few images
    screen_images: Annotated[int, Ge(1)] = 500  # of the screen `images`
    band: Annotated[float, Gt(0), Le(1)] = 0.5  # share of the channels, around the cut, that is measured exactly
    directions: Annotated[int, Ge(1)] = 2  # of the screen `fisher`, for each image
    images_at_once: Annotated[int, Ge(1)] = 512  # bounds the memory
