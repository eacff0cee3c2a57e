"""Batches of images on the device, built with timm's samplers, prefetcher and random erasing.

All processes share one order of the training images, so two processes together see exactly the global batches of one.
In evaluation each image goes to exactly one process.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import Mixup, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.loader import PrefetchLoader, fast_collate
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from vitcompress.errors import DataError, InputError, first_line
from vitcompress.families import unwrap
from vitcompress.io.tensors import LIBRARY_ERRORS, tensors_digest
from vitcompress.models.create import InputConfig, Size, image_size
from vitcompress.training.datasets import Images, as_images, check_batch, is_map_style, stack_images
from vitcompress.training.distributed import Runtime, derived_seed
from vitcompress.training.options import Augmentation

CHANNELS = (1, 3)  # of images that can be read from a data set
EVAL_BATCH = 128  # images per process and pass without gradients, whatever the batch size of the training

Transform = Callable[[Image.Image], Tensor]


class Views(Images, Dataset[tuple[Any, int]]):
    """The images of `dataset` at `indices`, in that order.

    transform: from a PIL image to a uint8 tensor (C, H, W). mode: PIL mode that images are converted to first. Prepared
    images (tensors) are passed on as they are.
    """

    def __init__(
        self, dataset: Images, indices: Sequence[int], transform: Transform | None = None, mode: str | None = None
    ) -> None:
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)
        self.transform, self.mode, self.prepared = transform, mode, dataset.prepared
        self.labels, self.digest = dataset.labels[self.indices], getattr(dataset, "digest", "")

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.dataset[int(self.indices[index])][0], int(self.labels[index])
        if self.prepared:
            return image, label
        if self.mode and image.mode != self.mode:
            image = image.convert(self.mode)
        return (self.transform(image) if self.transform else image), label


class EvalLoader:
    """Batches of the images rank, rank + world_size, ... of a data set: each image is on exactly one rank.

    batch_size: images per process at most; nothing is padded or repeated.
    """

    def __init__(self, dataset: Images, input: InputConfig, batch_size: int, runtime: Runtime) -> None:
        self.total = len(dataset)
        own = range(runtime.rank, self.total, runtime.world_size)
        self.batches = _prefetch(Views(dataset, own), input, batch_size, runtime)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            yield from self.batches
        except DataError as error:  # of a worker process: its message and hint instead of its traceback
            message, _, hint = error.message.rsplit("DataError: ", 1)[-1].strip().partition("\n")
            raise DataError(message, hint=error.hint or hint) from error


class TrainLoader(EvalLoader):
    """Batches of one process: (images (batch, C, H, W) normalized, targets (batch,) or soft (batch, classes)).

    Every rank gets the same number of batches; images that do not fill a global batch are left out of the epoch. Call
    `set_epoch` before each pass. batch_size: images per process. classes: width of soft targets.

    Raises InputError if images cannot be mixed in pairs or augmented.
    """

    def __init__(
        self,
        dataset: Images,
        input: InputConfig,
        batch_size: int,
        runtime: Runtime,
        *,
        augmentation: Augmentation,
        seed: int,
        classes: int | None = None,
    ) -> None:
        self.augmentation, self.seed = augmentation, seed
        if augmentation.mixes and batch_size % 2:
            message = f"mixup and cutmix mix pairs, so {batch_size} images per process and step cannot be mixed"
            hint = "use an even batch_size / (processes * accumulate), or set mixup = 0 and cutmix = 0"
            raise InputError(message, hint=hint)
        # One shuffled order, as long as the data (timm rounds it); rank r of W gets its entries r, r + W, ...
        kind: Any = RepeatAugSampler if (repeats := augmentation.repeats) > 1 else DistributedSampler
        settings = {"num_repeats": repeats, "selected_round": 0} if repeats > 1 else {"drop_last": True}
        self.sampler = kind(dataset, runtime.world_size, runtime.rank, **settings)
        self.batches = _prefetch(dataset, input, batch_size, runtime, augmentation, self.sampler)
        a, width = augmentation, classes or int(dataset.labels.max()) + 1
        shares = {"prob": a.mixup_prob, "switch_prob": a.mixup_switch_prob, "label_smoothing": a.smoothing}
        self.mixup = Mixup(a.mixup, a.cutmix, **shares, num_classes=width) if a.mixes else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`; it depends only on the seed and the epoch."""
        self.sampler.set_epoch(derived_seed("order", self.seed, epoch))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, targets in super().__iter__():
            if self.augmentation.noise:
                images = images + self.augmentation.noise * torch.randn_like(images)
            if self.mixup is not None:
                images, targets = self.mixup(images, targets)
            yield images, targets


class BatchLoader:
    """Batches of (images (batch, C, H, W) normalized for the model, targets), moved to the device of `runtime`.

    batches: an iterable with a length that can be read once per epoch. Resuming is bit-exact only if it gives the same
    batches again; those of a list are compared, others may be random. size, classes: see `check_batch`.
    """

    total = None  # number of images, unknown before the first pass

    def __init__(self, batches: Any, runtime: Runtime, size: Size = (), classes: int = 0) -> None:
        self.batches, self.runtime, self.size, self.classes = batches, runtime, size, classes

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def digest(self) -> str:
        """A hash of a list of batches; empty for others, as for `Images`."""
        return tensors_digest(chain.from_iterable(self)) if isinstance(self.batches, list | tuple) else ""

    def reject(self, **changed: bool) -> None:
        """Raise InputError for the first option that was changed: these have no effect on batches."""
        for option in (name for name, is_changed in changed.items() if is_changed):
            hint = "omit it, or pass a data set of (image, class) pairs"
            raise InputError(f"{option} has no effect: the data are batches", hint=hint)

    def set_epoch(self, epoch: int) -> None:
        """Nothing to do: the order is that of `batches`."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device, dtype = self.runtime.device, self.runtime.dtype
        for batch in self.batches:
            images, targets = check_batch(batch, self.size, self.classes)
            # Gradients need copies of tensors that were created in torch.inference_mode.
            images = images.to(device, dtype, non_blocking=True, copy=images.is_inference())
            yield images, targets.to(device, non_blocking=True, copy=targets.is_inference())


TrainData = Images | BatchLoader  # labeled images, or the user's own batches


def open_source(data: Any, runtime: Runtime, model: Any = None, *, once: bool = False) -> TrainData:
    """Training or evaluation data of a user: a map-style data set of (image, class) pairs, or an iterable of batches.

    once: whether the data is read once, so that a stream is enough. Raises InputError for an iterable without a length,
    or one that several processes would have to share, and DataError for images and labels that do not fit `model`.
    """
    size, classes = image_size(model), int(getattr(model, "num_classes", 0))
    if is_map_style(data):
        images = as_images(data, size, classes)
        if isinstance(model, nn.Module) and not (images.prepared or hasattr(unwrap(model), "pretrained_cfg")):
            message = f"this {type(model).__name__} does not state its preprocessing (pretrained_cfg)"
            raise InputError(message, hint="pass tensors that are normalized for it, instead of PIL images")
        return images
    try:
        if not (once and isinstance(data, Iterable)) and not len(data):
            raise DataError("there are no batches", hint="at least one is needed")
    except TypeError:  # also of a DataLoader of a stream
        message = f"batches of type {type(data).__name__} without a length cannot be read in every epoch"
        raise InputError(message, hint="pass a list of batches, a map-style data set, or a DataLoader of one") from None
    if runtime.world_size > 1:
        message = f"{runtime.world_size} processes cannot share an iterable of batches"
        raise InputError(message, hint="pass a map-style data set")
    return BatchLoader(data, runtime, size, classes)


def check_channels(dataset: Images, input: InputConfig) -> None:
    """Raise InputError if the model takes images of other channels than files have."""
    if not dataset.prepared and (channels := input.size[0]) not in CHANNELS:
        message = f"the model takes images of {channels} channels, and files have 1 or 3"
        raise InputError(message, hint="use vc.finetune and vc.evaluate with tensors, or --structure-only")


def _prefetch(
    dataset: Images,
    input: InputConfig,
    batch_size: int,
    runtime: Runtime,
    augmentation: Augmentation | None = None,
    sampler: Any = None,
) -> Any:
    """timm's prefetcher over torch's loader, for training if there is an `augmentation`.

    Worker processes are restarted every epoch: a persistent worker keeps its random state, and a resumed run would
    differ from an uninterrupted one.
    """
    check_channels(dataset, input)
    active = None if augmentation is None or augmentation.no_aug else augmentation  # it changes images
    if dataset.prepared and active:
        message = "crop, flip, color and erasing need PIL images, and the data set gives tensors"
        raise InputError(message, hint="set augmentation.no_aug = true, or pass a data set of PIL images")
    if runtime.workers:
        batch = min(batch_size, len(dataset)) * math.prod(input.size) * (4 if dataset.prepared else 1)  # bytes
        _check_shared_memory(2 * runtime.workers * batch)
    loader = DataLoader(
        Views(dataset, range(len(dataset)), image_transform(input, augmentation), "L" if input.size[0] == 1 else "RGB"),
        batch_size,
        sampler=sampler,
        num_workers=runtime.workers,
        collate_fn=stack_images if dataset.prepared else fast_collate,
        drop_last=augmentation is not None,
        generator=None if augmentation else torch.Generator(),  # else torch draws seeds of workers from its own
        pin_memory=runtime.device.type == "cuda",
    )
    if dataset.prepared:
        return BatchLoader(loader, runtime)
    erase: dict[str, float | str] = {"re_prob": active.reprob, "re_mode": active.remode} if active else {}
    return PrefetchLoader(loader, input.mean, input.std, input.size[0], runtime.device, runtime.dtype, **erase)


def _check_shared_memory(need: int) -> None:
    """Raise InputError if batches of `need` bytes do not fit: torch would wait forever for what its workers lost."""
    if (shared := Path("/dev/shm")).is_dir() and (free := shutil.disk_usage(shared).free) < need:
        message = f"the workers need {need / 1e6:.1f} MB of shared memory (/dev/shm), {free / 1e6:.1f} MB are free"
        raise InputError(message, hint="use fewer workers, smaller batches, or docker run --shm-size=8g")


def image_transform(input: InputConfig, augmentation: Augmentation | None = None) -> Transform:
    """timm's transform from a PIL image to a uint8 tensor (C, H, W), which the prefetcher normalizes later.

    With `no_aug` it is that of evaluation (resize and crop): timm's own would stretch images to the input size.
    """
    a = None if augmentation is None or augmentation.no_aug else augmentation
    settings: dict[str, Any] = {"crop_pct": input.crop_pct, "crop_mode": input.crop_mode}
    if a:
        settings = {"hflip": a.hflip, "scale": a.scale, "ratio": a.ratio}
        settings |= {"auto_augment": a.auto_augment, "color_jitter": a.color_jitter or None}
    pixels = {"interpolation": input.interpolation, "mean": input.mean, "std": input.std}
    try:
        transform: Any = create_transform(input.size, bool(a), use_prefetcher=True, **pixels, **settings)
    except LIBRARY_ERRORS as error:  # of timm's parser of policies
        message = f"timm cannot create these transforms of images: {first_line(error)}"
        raise InputError(message, hint="correct auto_augment, as in rand-m9-mstd0.5-inc1") from error
    # Posterize in RandAugment, AugMix (`ops`) and AutoAugment (`policy`) may keep no bit, which Pillow rejects.
    for step in getattr(transform, "transforms", ()):
        for operation in (*getattr(step, "ops", ()), *chain(*getattr(step, "policy", ()))):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    return cast(Transform, transform)


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """`image` with the `bits_to_keep` highest bits of each channel, from 0 (black) to 8 (all of them)."""
    if bits_to_keep <= 0:
        return image.point(lambda _: 0)
    return image if bits_to_keep >= 8 else ImageOps.posterize(image, bits_to_keep)
