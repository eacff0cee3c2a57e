"""A script for test_methods_distributed: HetDPT's stage 1 and isomorphic pruning's scores, of one process and of two.

    python distributed_methods.py FOLDER

The results are in FOLDER/1 and FOLDER/2.

The model computes in float64, and augmentation, mixup and drop-path are off, so that what is left of a difference is
the order of additions.
"""

import sys
from pathlib import Path
from typing import Any

from method_world import context, model
from processes import in_both_worlds

from vitcompress.io.files import write_json
from vitcompress.methods import isomorphic
from vitcompress.methods.hetdpt import method as hetdpt
from vitcompress.methods.options import Alignment, CollectionOptions, EntropyOptions, SearchOptions
from vitcompress.methods.table import METHODS
from vitcompress.training.distributed import start

LR = 5e-3
OPTIONS = hetdpt.Options(
    pruned_layers=2,
    te=EntropyOptions(images=30, resamples=4),
    collection=CollectionOptions(epochs=1, images_per_class=8, interleaved=2, lr=LR),
    search=SearchOptions(factor=0.5, images_per_class=16, lr=LR, schedule="constant"),
    candidates="all",
)
# 33 images: the processes' shares are not alike.
WIDTHS = isomorphic.Options(images=33, align=Alignment(residual=1, ffn=1, head_dim=1))


def widened(module: Any, args: Any) -> Any:
    return (args[0].double(),)


def main(folder: Path) -> None:
    vit = model().double()
    vit.register_forward_pre_hook(widened)
    runtime = start("cpu")
    METHODS["hetdpt"].plan(vit, context(folder, vit, runtime=runtime), OPTIONS)
    METHODS["isomorphic"].plan(vit, context(folder / "isomorphic", vit, runtime=runtime), WIDTHS)
    if runtime.is_main:
        write_json(folder / "world.json", runtime.world_size)
    runtime.stop()


if __name__ == "__main__":
    in_both_worlds(main, Path(sys.argv[1]))
