"""UP-ViT's options."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from vitcompress.io.validation import Doc
from vitcompress.methods.upvit.heads import Strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    target: Annotated[str | None, Doc("timm name; None: the model itself, with the sizes of target_args")] = None
    target_args: Annotated[dict[str, Any], Doc("besides the model's own, as in { num_heads = 3, depth = 10 }")] = field(
        default_factory=dict
    )
    heads: Annotated[Strategy, Doc("how new heads are formed from old ones (`regroup`)")] = "groups"
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
    directions: Annotated[int, Ge(1), Doc('of screen = "fisher", per image')] = 2
    images_at_once: Annotated[int, Ge(1), Doc("proxy images in memory at a time")] = 512
