"""Labeled images: in memory, in class folders, and any map-style data set."""

import os
import random
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset
from torch import Tensor
from torch.utils.data import IterableDataset
from torchvision.datasets.folder import make_dataset

from vitcompress.errors import DataError, first_line
from vitcompress.io.tensors import DAMAGED, tensors_digest
from vitcompress.io.text import few, format_shape, natural_key
from vitcompress.models.create import Size, check_images

_CHECKED_ON_OPENING = 1000  # images decoded when a folder is opened; the others are checked when they are read
# Pillow has decoders for many more formats, and chooses by content: one starts Ghostscript, whatever the suffix.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_MOST_PIXELS = 89_478_485  # above this, Pillow warns of a decompression bomb
_UNREADABLE = (*DAMAGED, SyntaxError, zlib.error, Image.DecompressionBombError)  # decoders raise these for broken files


@runtime_checkable  # for the validation of arguments
class Images(Protocol):
    """A labeled data set before its transforms.

    labels: the class of every image, integers (images,), known without opening one. prepared: whether images are
    tensors (C, H, W), normalized for the model, instead of PIL images. digest: of files, arrays or labels; empty for
    built-in data.
    """

    labels: np.ndarray
    prepared: bool = False
    digest: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]: ...


class ArrayImages(Images):
    """Images in memory: uint8 (images, H, W) or (images, H, W, 3), or a tensor (images, C, H, W) of prepared images.

    labels: integers (images,).
    """

    def __init__(self, images: np.ndarray | Tensor, labels: np.ndarray | Tensor) -> None:
        self.prepared, self.labels = isinstance(images, Tensor), np.asarray(labels, np.int64)
        self.images = images if self.prepared else [Image.fromarray(one) for one in images]
        some: Any = images[:: max(1, -(-len(images) // _CHECKED_ON_OPENING))]
        self.digest = tensors_digest(map(torch.as_tensor, some if self.prepared else np.array(some)))

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], int(self.labels[index])


class FolderImages(Images):
    """One folder per class, images at any depth below, but not hidden ones; class indices follow `classes`.

    Images of all classes, at most about 1000, are decoded at once to see whether they can be read; with `skip_broken`
    all of them are, and those that cannot be read are in `skipped` instead.
    """

    def __init__(self, folder: Path, classes: tuple[str, ...], *, skip_broken: bool = False) -> None:
        check_readable(folder)
        present = set(class_names(folder))
        missing, extra = [name for name in classes if name not in present], sorted(present - set(classes))
        if missing or extra:
            parts = [f"has no class {few(missing)}"] * bool(missing) + [f"has unknown class {few(extra)}"] * bool(extra)
            raise DataError(f"{folder} {' and '.join(parts)}", hint="train and test need the same class folders")
        samples = make_dataset(folder, {name: i for i, name in enumerate(classes)}, _SUFFIXES, allow_empty=True)
        start = len(str(folder)) + 1  # of names in the folder; strings need a fifth of the memory of paths
        samples = [sample for sample in samples if f"{os.sep}." not in sample[0][start - 1 :]]
        samples.sort(key=lambda sample: natural_key(sample[0]))
        step = max(1, -(-len(samples) // _CHECKED_ON_OPENING))
        checked = [file for file, _ in samples[:: 1 if skip_broken else step]]
        with ThreadPool() as pool:
            broken = {file: text for file, text in zip(checked, pool.map(_problem, checked), strict=True) if text}
        if broken and not skip_broken:
            names, count = few([*broken]), f"{len(broken)} image{'s' if len(broken) > 1 else ''}"
            message = f"{count} cannot be read: {names} (the first: {next(iter(broken.values()))})"
            raise DataError(message, hint="remove or replace these files, or set data.broken = 'skip'")
        self.classes, self.skipped = classes, tuple(broken)
        kept = [(file, label) for file, label in samples if file not in broken]
        self.files, self.labels = [file for file, _ in kept], np.array([label for _, label in kept], np.int64)
        sums = [zlib.crc32(Path(file).read_bytes()) for file in self.files[::step]]
        self.digest = tensors_digest((), f"{[file[start:].replace(os.sep, '/') for file in self.files]}{sums}")
        if empty := [classes[label] for label in np.setdiff1d(range(len(classes)), self.labels)]:
            message = f"{folder} has class folders without images: {few(empty)}"
            raise DataError(message, hint="fill or remove these folders")

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return decode(self.files[index]), int(self.labels[index])


class MappedImages(Images):
    """A map-style data set of (image, class) pairs: timm's, torchvision's or the user's own.

    Its images are PIL images, or tensors (C, H, W) that are normalized for the model. Labels come from its attribute
    `targets` or from timm's reader; if neither has one label per item, every item is read once.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        is_map_style(dataset, name)  # raises DataError if it is empty
        try:
            if not isinstance(item := self._read(0), tuple | list):
                raise TypeError(f"an item is of type {type(item).__name__}")
            source = dataset if hasattr(dataset, "targets") else getattr(dataset, "reader", None)
            labels = getattr(source, "targets", [sample[1] for sample in getattr(source, "samples", ())])
            if len(labels) != len(dataset):
                labels = [self._read(i)[1] for i in range(len(dataset))]  # with the target_transform
            elif transform := getattr(dataset, "target_transform", None):
                labels = [transform(label) for label in np.asarray(labels).tolist()]
            self.labels = np.asarray(labels, np.int64)
            if self.labels.ndim != 1 or (self.labels != np.asarray(labels)).any():
                raise ValueError("a label is not a whole number")
            image, _ = item
            self.prepared = isinstance(image, Tensor)
            if not (image.is_floating_point() if self.prepared else isinstance(image, Image.Image)):
                raise ValueError(f"images of {getattr(image, 'dtype', type(image).__name__)}")
        except (TypeError, ValueError, LookupError) as error:
            hint = "return a PIL image or a normalized tensor (C, H, W), and the index of its class"
            message = f"the items of {name} are not (image, class) pairs: {first_line(error)}"
            raise DataError(message, hint=hint) from error
        samples = {self._sample_digest() for _ in range(2)}  # equal, unless transforms have a random state of their own
        self.digest = tensors_digest([torch.from_numpy(self.labels)], samples.pop() if len(samples) == 1 else "")

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self._read(index)
        if int(label) != self.labels[index]:  # a subclass may change the classes of its items
            message = f"item {index} of {self.name} is of class {label}, by its targets of {self.labels[index]}"
            hint = "set `targets` to the classes of all items before `target_transform`, or delete these attributes"
            raise DataError(message, hint=hint)
        return image if self.prepared else decode(image, f"{index} of {self.name}"), int(label)

    def _sample_digest(self) -> str:
        """A hash of at most eight images, the same for the same data; random states are as before."""
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
                seed(0)
            images = [self[i][0] for i in np.linspace(0, len(self) - 1, min(8, len(self)), dtype=int).tolist()]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        return tensors_digest(image if self.prepared else torch.tensor(np.array(image)) for image in images)

    def _read(self, index: int) -> Any:
        """An item. timm's `ImageDataset` returns the next one for a file that cannot be read; its reader does not."""
        data = self.dataset
        if type(data).__getitem__ is not ImageDataset.__getitem__:
            return data[index]
        try:
            file, label, *_ = data.reader[index]
        except OSError as error:
            message = f"image {index} of {self.name} cannot be read: {error}"
            raise DataError(message, hint="replace it by a readable one") from error
        with file:
            image = decode(file, data.filename(index, absolute=True)).convert(data.input_img_mode)
        image = data.transform(image) if data.transform else image
        return image, data.target_transform(label) if data.target_transform else label


def is_map_style(data: Any, name: str = "the data set") -> bool:
    """Whether `data` gives one (image, class) pair per index, not batches. Raises DataError if it is empty."""
    if isinstance(data, Mapping | IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    if not len(data):
        raise DataError(f"{name} is empty", hint="at least one image is needed")
    first = data[0]
    return not (isinstance(first, tuple | list) and getattr(next(iter(first), None), "ndim", 0) == 4)


def check_labels(labels: Any, classes: int) -> None:
    """Raise DataError if `labels` are not (count,) numbers from 0 to `classes` - 1; with 0 classes, any numbers."""
    if len(labels) and (labels.ndim != 1 or (classes and not 0 <= labels.min() <= labels.max() < classes)):
        about = f"of shape {format_shape(labels.shape)} with values from {labels.min():g} to {labels.max():g}"
        known = f"the model has {classes} classes: " if classes else ""
        hint = f"{known}the label of an image is a number from 0{f' to {classes - 1}' if classes else ''}"
        raise DataError(f"labels {about} cannot be used", hint=hint)


def check_batch(batch: Any, size: Size = (), classes: int = 0) -> tuple[Tensor, Tensor]:
    """Images (batch, *size) and labels: numbers below `classes` (0: any) or rows of probabilities. Raises DataError."""
    if not isinstance(batch, tuple | list) or [isinstance(part, Tensor) for part in batch] != [True, True]:
        parts = ", ".join(type(part).__name__ for part in batch) if isinstance(batch, tuple | list) else ""
        content = f"has {parts}" if parts else f"is {type(batch).__name__}"
        hint = "pass batches of (images, labels): wrap single items in a DataLoader, and turn dicts into pairs"
        raise DataError(f"a batch {content} instead of two tensors", hint=hint)
    images, targets = batch
    check_images(images, size)
    fits, soft = targets.shape[:1] == images.shape[:1], targets.is_floating_point()
    if fits and soft:  # sums up to the rounding of half precision
        fits = targets.ndim == 2 and classes in (0, targets.shape[1])
        fits = fits and bool((targets >= 0).all() and ((targets.float().sum(1) - 1).abs() < 0.01).all())
    if not fits:
        message = f"{len(images)} images have labels of shape {format_shape(targets.shape)} and {targets.dtype}"
        hint = f"pass {len(images)} class numbers, or a row of probabilities with the sum 1 for each image"
        raise DataError(message, hint=hint)
    if not soft:
        check_labels(targets := targets.long(), classes)
    return images, targets


def stack_images(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Items (C, H, W) and their classes as one batch. Raises DataError if the images have several shapes."""
    images, labels = zip(*items, strict=True)
    if len(shapes := sorted({tuple(image.shape) for image in images})) > 1:
        message = f"images of one batch have the shapes {few(list(map(format_shape, shapes)))}"
        raise DataError(message, hint="resize them to one size")
    return torch.stack(images), torch.tensor(labels)


def as_images(data: Any, size: Size = (), classes: int = 0) -> Images:
    """`data` with the interface of `Images`.

    data: a map-style data set of (image, class) pairs, or an iterable of batches (images (batch, C, H, W) normalized
    for the model, classes (batch,)), which is read once and kept in memory. size, classes: see `check_batch`.
    Raises DataError for other data.
    """
    known = hasattr(data, "labels") and hasattr(data, "prepared")
    images = data if known else MappedImages(data, "the data set") if is_map_style(data) else _read_batches(data)
    check_labels(images.labels, classes)
    if images.prepared and len(images):
        check_images(images[0][0][None], size)
    return cast(Images, images)


def _read_batches(data: Any) -> Images:
    try:
        if not (pairs := [check_batch(batch) for batch in data]):
            raise DataError("there are no batches", hint="at least one is needed")
        images, labels = (torch.cat([part.detach().cpu() for part in parts]) for parts in zip(*pairs, strict=True))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        message = f"the data is not an iterable of (images, labels) batches: {first_line(error)}"
        hint = "pass a map-style data set of (image, class) pairs, or batches of (batch, C, H, W) and (batch,)"
        raise DataError(message, hint=hint) from error
    check_labels(labels, 0)  # no probabilities
    if not images.isfinite().all():
        raise DataError("an image has values that are not finite", hint="repair the images or their normalization")
    return ArrayImages(images, labels)


def check_readable(folder: Path) -> None:
    """Raise DataError for a folder below `folder` that cannot be listed: torchvision and timm leave out its images."""
    errors = list[OSError]()
    for _, folders, _ in os.walk(folder, onerror=errors.append, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
    if errors:
        raise DataError(f"{errors[0].filename} cannot be read: {errors[0].strerror}", hint="correct its permissions")


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, in timm's natural order (class2 before class10)."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return tuple(sorted(names, key=natural_key))


def decode(file: Any, name: str = "") -> Image.Image:
    """The image in `file` (a path, a binary file), gray or RGB; one of Pillow as it is. name: for errors.

    Raises DataError, also for gray pixels of more than 8 bits; Pillow reads colors of more with 8.
    """
    try:
        with nullcontext(file) if isinstance(file, Image.Image) else Image.open(file, formats=_FORMATS) as image:
            if not 0 < image.width * image.height <= _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are not from 1 to {_MOST_PIXELS:,}")
            if image.mode[0] in "IF":  # Pillow clips them to 255
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); convert it to 8 bits")
            return image if image is file else image.convert("L" if image.mode in ("1", "L") else "RGB")
    except _UNREADABLE as error:
        raise DataError(f"image {name or file} cannot be read: {error}", hint="replace it by a readable one") from error


def _problem(file: str) -> str:
    """Why `file` cannot be read; empty if it can."""
    try:
        decode(file)
    except DataError as error:
        return first_line(error.__cause__ or error)
    return ""


def describe_skipped(files: Sequence[str]) -> str:
    """One line on the images that `skip_broken` left out."""
    return f"left out, because they cannot be read: {len(files)} image{'s' * (len(files) > 1)}, {few(files)}"
