"""Batches of images on the device, made of timm's parts: samplers, prefetcher, erasing; `augmentation` has the others.

Training batches are cut from one order that all processes share, so that two processes together see exactly the
global batches of one. Evaluation gives every image to exactly one process.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.loader import PrefetchLoader, fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from vitcompress.errors import DataError, InputError
from vitcompress.models.create import InputConfig
from vitcompress.training.augmentation import Augmentation, eval_transform, mixup, train_transform
from vitcompress.training.distributed import Runtime, derived_seed


class Images(Protocol):
    """A data set before its transforms."""

    @property
    def labels(self) -> np.ndarray:
        """The class of every image, integers (images,), known without opening one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


class Views(Dataset[tuple[Tensor, int]]):
    """The images of `dataset` at `indices`, in that order.

    transform: gives uint8 tensors (C, H, W) instead of PIL images. mode: of PIL images, which are converted to it.
    """

    def __init__(
        self,
        dataset: Images,
        indices: Sequence[int],
        transform: Callable[[Any], Any] | None = None,
        mode: str | None = None,
    ) -> None:
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)
        self.transform, self.mode = transform, mode

    @property
    def labels(self) -> np.ndarray:
        """The class of every image, integers (images,)."""
        return self.dataset.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        image, label = self.dataset[int(self.indices[index])]
        if self.mode and image.mode != self.mode:
            image = image.convert(self.mode)
        return (self.transform(image) if self.transform else image), label


class TrainLoader:
    """Batches of one process: (images (batch, C, H, W) normalised, targets (batch,) or soft (batch, classes)).

    The same number of batches comes on every rank; what does not fill a global batch is left out of the epoch. Call
    `set_epoch` before each pass. batch_size: images per process.

    Raises:
        InputError: the data set has no full batch, or mixing is asked for with an odd batch.
    """

    def __init__(
        self,
        dataset: Images,
        input: InputConfig,
        augmentation: Augmentation,
        batch_size: int,
        seed: int,
        runtime: Runtime,
    ) -> None:
        self.augmentation, self.seed = augmentation, seed
        _check_batch(batch_size, len(dataset) // runtime.world_size, augmentation)
        transformed = _transformed(dataset, input, train_transform(input, augmentation))
        self.sampler = _sampler(transformed, augmentation.repeats, runtime)
        self.batches = _prefetch(transformed, self.sampler, input, batch_size, runtime, augmentation)
        self.mixup = mixup(augmentation, classes=int(dataset.labels.max()) + 1)

    def set_classes(self, classes: int) -> None:
        """The width of soft targets, where it is more than the classes present in the data set."""
        if self.mixup is not None:
            self.mixup.num_classes = classes

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`: it depends on the seed and the epoch, not on what ran before."""
        self.sampler.set_epoch(derived_seed("order", self.seed, epoch))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in _readable(self.batches):
            if self.augmentation.noise:
                images = images + self.augmentation.noise * torch.randn_like(images)
            if self.mixup is not None:
                images, targets = self.mixup(images, targets)
            yield images, targets


class EvalLoader:
    """The images of this rank, each image of the data set on exactly one rank, in order: rank, rank + world, ...

    batch_size: images per process at most; nothing is padded or repeated.
    """

    def __init__(self, dataset: Images, input: InputConfig, batch_size: int, runtime: Runtime) -> None:
        self.total = len(dataset)
        own = range(runtime.rank, self.total, runtime.world_size)
        transformed = _transformed(Views(dataset, own), input, eval_transform(input))
        self.batches = _prefetch(transformed, None, input, batch_size, runtime, None)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return _readable(self.batches)


def _transformed(dataset: Images, input: InputConfig, transform: Callable[[Image.Image], Tensor]) -> Views:
    """`dataset` as tensors, grey or colour as the model wants it."""
    return Views(dataset, range(len(dataset)), transform, "L" if input.size[0] == 1 else "RGB")


def _sampler(dataset: Views, repeats: int, runtime: Runtime) -> Any:
    """One shuffled order dealt to all ranks in turn, so that rank r of W has entries r, r + W, ... of it."""
    if repeats > 1:
        return RepeatAugSampler(dataset, runtime.world_size, runtime.rank, num_repeats=repeats)
    return DistributedSampler(dataset, runtime.world_size, runtime.rank, drop_last=True)


def _prefetch(
    dataset: Views,
    sampler: Any,
    input: InputConfig,
    batch_size: int,
    runtime: Runtime,
    augmentation: Augmentation | None,
) -> Any:
    """timm's prefetcher over torch's loader; with an `augmentation` for training.

    Worker processes start anew every epoch: a worker that lives on carries its random state with it, and a resumed
    run could not be the uninterrupted one.
    """
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=runtime.workers,
        collate_fn=fast_collate,
        drop_last=augmentation is not None,
        pin_memory=runtime.device.type == "cuda",
    )
    erase = augmentation.reprob if augmentation and not augmentation.no_aug else 0.0
    mode = augmentation.remode if augmentation else "const"
    return PrefetchLoader(
        loader, input.mean, input.std, channels=input.size[0], device=runtime.device, re_prob=erase, re_mode=mode
    )


def _check_batch(batch_size: int, available: int, augmentation: Augmentation) -> None:
    """Refuse a batch that the data set cannot fill, or that cannot be mixed in pairs."""
    if batch_size < 1 or batch_size > available:
        raise InputError(
            f"a batch of {batch_size} images per process was asked for, {available} are there",
            hint="lower batch_size or give more images",
        )
    if augmentation.mixes and batch_size % 2:
        raise InputError(
            f"mixup and cutmix mix pairs, so {batch_size} images per process and step cannot be mixed",
            hint="use an even batch_size / (processes * accumulate), or set mixup = 0 and cutmix = 0",
        )


def _readable(batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """`batches`, with an unreadable image of a worker process reported as one sentence instead of its traceback."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(error.message.rsplit("DataError: ", 1)[-1].strip(), hint=error.hint) from error
