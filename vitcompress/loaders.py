"""Batches of images on the device, made of timm's parts: transforms, samplers, prefetcher, erasing, mixup.

Training batches are cut from one order that all processes share, so that two processes together see exactly the
global batches of one. Evaluation gives every image to exactly one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Ge, Le, Lt
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.loader import PrefetchLoader, fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from vitcompress.distributed import Runtime, derived_seed
from vitcompress.errors import DataError, InputError
from vitcompress.posterize import allow_no_bits

if TYPE_CHECKING:
    from vitcompress.models import InputConfig

Share = Annotated[float, Ge(0), Le(1)]


class Images(Protocol):
    """A data set before its transforms."""

    @property
    def labels(self) -> np.ndarray:
        """The class of every image, integers (images,), known without opening one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images; the names are timm's. The defaults change nothing.

    `no_aug` leaves out crop, flip, colour and erasing; mixup, cutmix, smoothing, repeats and noise have switches of
    their own. DeiT's recipe (Touvron et al., 2021, https://arxiv.org/abs/2012.12877, table 9) is no_aug=False,
    auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3.
    """

    no_aug: bool = True
    auto_augment: str | None = None  # timm's policy string; it turns colour jitter off
    color_jitter: Annotated[float, Ge(0)] = 0.0
    hflip: Share = 0.5
    scale: tuple[float, float] = (0.08, 1.0)  # area of the random crop, share of the image
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width to height of the random crop
    reprob: Share = 0.0  # share of images with one erased rectangle
    remode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: Annotated[float, Ge(0)] = 0.0  # alpha of the Beta distribution, 0 is off
    cutmix: Annotated[float, Ge(0)] = 0.0
    mixup_prob: Share = 1.0
    mixup_switch_prob: Share = 0.5
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    repeats: Annotated[int, Ge(0)] = 0  # views of an image per pass (repeated augmentation), 0 or 1 is off
    noise: Annotated[float, Ge(0)] = 0.0  # standard deviation of Gaussian noise on the normalised pixels

    @property
    def mixes(self) -> bool:
        """True when images of a batch are mixed, which makes targets soft."""
        return self.mixup > 0 or self.cutmix > 0


DEIT = Augmentation(False, "rand-m9-mstd0.5-inc1", 0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3)


class Views(Dataset[tuple[Tensor, int]]):
    """`dataset`, or the part of it at `indices`; with a `transform`, uint8 tensors (C, H, W) instead of PIL images."""

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


def views(dataset: Images, indices: Sequence[int]) -> Views:
    """The images of `dataset` at `indices`, in that order."""
    return Views(dataset, indices)


class TrainLoader:
    """Batches of one process: (images (batch, C, H, W) normalised, targets (batch,) or soft (batch, classes)).

    The same number of batches comes on every rank; what does not fill a global batch is left out of the epoch.
    """

    def __init__(
        self,
        dataset: Images,
        input: "InputConfig",
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
        self.mixup = _mixup(augmentation, classes=int(dataset.labels.max()) + 1)

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
    """The images of this rank, each image of the data set on exactly one rank, in order: rank, rank + world, ..."""

    def __init__(self, dataset: Images, input: "InputConfig", batch_size: int, runtime: Runtime) -> None:
        self.total = len(dataset)
        own = range(runtime.rank, self.total, runtime.world_size)
        transformed = _transformed(views(dataset, own), input, eval_transform(input))
        self.batches = _prefetch(transformed, None, input, batch_size, runtime, None)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return _readable(self.batches)


def train_loader(
    dataset: Images, input: "InputConfig", augmentation: Augmentation, batch_size: int, seed: int, runtime: Runtime
) -> TrainLoader:
    """Training batches of `batch_size` images per process; call `set_epoch` before each pass.

    Raises:
        InputError: when the data set has no full batch, or mixing is asked for with an odd batch.
    """
    return TrainLoader(dataset, input, augmentation, batch_size, seed, runtime)


def eval_loader(dataset: Images, input: "InputConfig", batch_size: int, runtime: Runtime) -> EvalLoader:
    """Evaluation batches of at most `batch_size` images per process, without padding or repetition."""
    return EvalLoader(dataset, input, batch_size, runtime)


def train_transform(input: "InputConfig", augmentation: Augmentation) -> Callable[[Image.Image], Tensor]:
    """timm's training transform from a PIL image to a uint8 tensor (C, H, W)."""
    a = augmentation
    transform: Callable[[Image.Image], Tensor] = create_transform(
        input.size,
        is_training=True,
        no_aug=a.no_aug,
        auto_augment=a.auto_augment,
        hflip=a.hflip,
        scale=a.scale,
        ratio=a.ratio,
        color_jitter=a.color_jitter or None,
        interpolation=input.interpolation,
        mean=input.mean,
        std=input.std,
        use_prefetcher=True,
    )
    allow_no_bits(transform)
    return transform


def eval_transform(input: "InputConfig") -> Callable[[Image.Image], Tensor]:
    """timm's evaluation transform (resize, centre crop) from a PIL image to a uint8 tensor (C, H, W)."""
    transform: Callable[[Image.Image], Tensor] = create_transform(
        input.size,
        is_training=False,
        interpolation=input.interpolation,
        mean=input.mean,
        std=input.std,
        crop_pct=input.crop_pct,
        crop_mode=input.crop_mode,
        use_prefetcher=True,
    )
    return transform


def _transformed(dataset: Images, input: "InputConfig", transform: Callable[[Image.Image], Tensor]) -> Views:
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
    input: "InputConfig",
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


def _mixup(augmentation: Augmentation, classes: int) -> Any:
    """timm's Mixup with this augmentation's settings, or None."""
    if not augmentation.mixes:
        return None
    a = augmentation
    return Mixup(
        a.mixup,
        a.cutmix,
        prob=a.mixup_prob,
        switch_prob=a.mixup_switch_prob,
        label_smoothing=a.smoothing,
        num_classes=classes,
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
