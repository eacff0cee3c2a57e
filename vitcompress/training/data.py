"""Labeled images in three parts: train, held-out (part of train, for choices) and test (for the report only).

A data set is checked when it is opened, before any training.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from timm.data import create_dataset

from vitcompress.errors import DataError, MissingExtraError, first_line
from vitcompress.io.files import user_path
from vitcompress.io.tensors import tensors_digest
from vitcompress.models.create import image_size
from vitcompress.training import datasets, tinted
from vitcompress.training.datasets import ArrayImages, FolderImages, Images, MappedImages, as_images, class_names
from vitcompress.training.distributed import derived_seed
from vitcompress.training.loaders import Views
from vitcompress.training.options import BUILT_IN, DataOptions

_TEST_FOLDERS = ("val", "validation", "test")
_DIGITS_TEST = 540  # of 1797 images; the same ones for every seed, so that results compare
NO_IMAGES = ArrayImages(np.empty((0, 1, 1), np.uint8), np.empty(0, np.int64))


@dataclass(frozen=True)
class Splits:
    """The parts of a data set; items are (image, class index) before any transform. skipped: unreadable files."""

    name: str = "no data"
    classes: tuple[str, ...] = ()
    train: Images = NO_IMAGES
    heldout: Images = NO_IMAGES
    test: Images = NO_IMAGES
    skipped: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The `images_digest` of training and held-out images."""
        return images_digest(self.classes, self.train, self.heldout)

    def reorder(self, names: Sequence[str]) -> "Splits":
        """The same images with the classes in the order of `names`, if these are their names; else as they are."""
        if names == self.classes or sorted(names) != sorted(self.classes) or len({*names}) < len(names):
            return self
        places = {name: number for number, name in enumerate(names)}
        numbers = np.array([places[name] for name in self.classes])
        parts = train, heldout, test = [Views(part, range(len(part))) for part in (self.train, self.heldout, self.test)]
        for part in parts:
            part.labels = numbers[part.labels]
        return replace(self, classes=tuple(names), train=train, heldout=heldout, test=test)

    def hold_out(self, share: float, seed: int) -> "Splits":
        """Move a share of the training images to the held-out ones: of each class at least one, never its last."""
        labels = self.train.labels
        order = np.random.default_rng(derived_seed("heldout", seed)).permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        heldout: list[int] = []
        for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
            count = min(max(1, round(share * len(members))), len(members) - 1) if share else 0
            heldout += members[:count].tolist()
        kept = np.setdiff1d(np.arange(len(labels)), heldout).tolist()
        return replace(self, train=Views(self.train, kept), heldout=Views(self.train, sorted(heldout)))


def images_digest(classes: tuple[str, ...], *parts: Images) -> str:
    """A hash of the classes, labels and files of images; the same in another folder."""
    return tensors_digest((), str((classes, [(part.labels.tolist(), getattr(part, "digest", "")) for part in parts])))


def open_data(options: DataOptions, seed: int) -> Splits:
    """Open all parts of the data set; `seed` selects the held-out part of the training images.

    Raises DataError for missing folders, empty class folders, one class only, broken or too few images, and
    MissingExtraError for the digits without scikit-learn.
    """
    data = _open(options)
    check_classes(data.name, data.classes, data.train)
    return data.hold_out(options.heldout, seed)


def check_named(options: DataOptions) -> None:
    """Raise DataError if the source is a folder of images and no path is set."""
    if options.source == "imagefolder" and options.path is None:
        raise DataError("no data folder is set", hint="set it with --data PATH")


def class_count(options: DataOptions) -> int | None:
    """Number of classes if it is known without opening the data, else None."""
    if options.source in BUILT_IN:
        return len(tinted.CLASSES) if options.source == "tinted" else 10
    folder = user_path(options.path or "") / (options.train_split or "train")
    is_folder = options.source == "imagefolder" and options.path is not None and folder.is_dir()
    return len(class_names(folder)) or None if is_folder else None


def open_test(options: DataOptions) -> Splits:
    """At least the test images; a folder needs no others. Raises DataError."""
    if options.source != "imagefolder":
        return _open(options)
    folder = _split_folder(options, "test")
    classes = class_names(folder)
    check_classes(str(folder), classes, None)
    images = FolderImages(folder, classes, skip_broken=options.broken == "skip")
    return Splits(str(folder), classes, test=images, skipped=images.skipped)


def subset(dataset: Images, count: int, seed: int, *, per_class: bool = True) -> Images:
    """Random images of `dataset`, in its order: at most `count` of every class or, without `per_class`, `count` in
    total, as equally from all classes as possible.
    """
    order = np.random.default_rng(derived_seed("subset", seed)).permutation(len(dataset))
    labels, rank = dataset.labels[order], np.empty(len(dataset), np.int64)  # rank: how many of its class precede each
    for label in np.unique(labels):
        rank[labels == label] = np.arange((labels == label).sum())
    chosen = rank < count if per_class else np.argsort(rank, kind="stable")[:count]
    return Views(dataset, np.sort(order[chosen]).tolist())


def split_images(data: Any, heldout: float, seed: int, model: Any) -> Splits:
    """The splits of data for `model` (see `as_images`); it has no test images."""
    images = as_images(data, image_size(model), int(getattr(model, "num_classes", 0)))
    names = getattr(data, "classes", None) or range(int(images.labels.max(initial=-1)) + 1)
    return Splits("data", tuple(map(str, names)), images).hold_out(heldout, seed)


def _open(options: DataOptions) -> Splits:
    """All training images and the test images."""
    if options.source in BUILT_IN:
        return _built_in(options.source)
    if options.source == "imagefolder":
        return _image_folder(options)
    if re.fullmatch("timm:(torch/.+)?", options.source):
        return _timm(options)
    hint = "use digits, tinted, imagefolder, timm: or timm:torch/NAME; other readers of timm may download files"
    raise DataError(f"data source {options.source!r} is not supported", hint=hint)


@cache
def _built_in(source: str) -> Splits:
    """scikit-learn's 1797 handwritten digits (8x8, 17 gray levels), 540 of them for the test, or `tinted` ones."""
    try:
        from sklearn.datasets import load_digits, load_sample_images
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo", need=f"the {source} data set") from error
    digits = load_digits()
    labels, gray = digits.target, digits.images / 16
    parts = train_test_split(np.arange(len(labels)), test_size=_DIGITS_TEST, stratify=labels, random_state=0)
    if source == "tinted":
        sides = tinted.train_and_test(gray, labels, parts, load_sample_images().images)
        return Splits("tinted", tinted.CLASSES, sides[0], test=sides[1])
    pixels = np.rint(gray * 255).astype(np.uint8)
    train, test = (ArrayImages(pixels[part], labels[part]) for part in map(np.sort, parts))
    train.digest = test.digest = ""
    return Splits("digits", tuple(map(str, digits.target_names)), train, test=test)


def _image_folder(options: DataOptions) -> Splits:
    """An ImageNet-like folder; the training folder's class names, in natural order, number the classes."""
    folder = _split_folder(options, "train")
    classes = class_names(folder)
    check_classes(str(folder), classes, None)
    parts, errors = list[FolderImages](), list[DataError]()
    for part in (folder, _split_folder(options, "test")):
        try:
            parts.append(FolderImages(part, classes, skip_broken=options.broken == "skip"))
        except DataError as error:  # the other part may have one, too
            errors.append(error)
    if errors:
        raise DataError("; ".join(error.message for error in errors), hint=errors[0].hint)
    train, test = parts
    return Splits(str(user_path(options.path or "")), classes, train, test=test, skipped=train.skipped + test.skipped)


def _split_folder(options: DataOptions, split: Literal["train", "test"]) -> Path:
    check_named(options)
    root = user_path(options.path or "")
    name = options.test_split if split == "test" else options.train_split or "train"
    names = [name] if name else [other for other in _TEST_FOLDERS if other != options.train_split]
    if not root.is_dir():
        what = "is a file, not a folder of images" if root.exists() else "does not exist"
        raise DataError(f"data folder {root} {what}", hint="use --data PATH with PATH/train/CLASS/IMAGE and PATH/val")
    if folder := next((root / name for name in names if (root / name).is_dir()), None):
        return folder
    hint = f"expected PATH/{names[0]}/<class>/<image>; data.{split}_split sets other names"
    if (root.parent / names[0]).is_dir():
        hint = f"use its parent {root.parent}"
    raise DataError(f"data folder {root} has no folder {' or '.join(names)}", hint=hint)


def check_classes(name: str, classes: tuple[str, ...], train: Images | None) -> None:
    """Raise DataError for fewer than two classes."""
    if len(classes) < 2:
        hint = "use one folder of images per class"
        raise DataError(f"{name} has {len(classes)} class{'es' * (not classes)}, at least 2 are needed", hint=hint)
    if train is not None and len(np.unique(train.labels)) < 2:
        raise DataError(f"{name} has images of one class only", hint="use images of at least 2 classes")


def _timm(options: DataOptions) -> Splits:
    """timm's image folders and data sets of torchvision; nothing is downloaded."""
    name, parts = options.source.removeprefix("timm:"), []
    splits = (options.train_split or "train", options.test_split or "validation")
    for path in (user_path(options.path or "") / name for name in ("", *splits)):
        if path.is_file():  # an archive: timm would read it for both splits
            hint = f"unpack it: data.path is a folder with {splits[0]}/CLASS and {splits[1]}/CLASS"
            raise DataError(f"{path} is a file, not a folder of images", hint=hint)
    for split in splits:
        try:
            dataset: Any = create_dataset(name, root=options.path, split=split)
            dataset.loader = datasets.decode  # of torchvision
            if root := getattr(getattr(dataset, "reader", None), "root", None):
                datasets.check_readable(root)
            parts.append(MappedImages(dataset, f"data source timm:{name}"))
        except (RuntimeError, OSError, ValueError, TypeError, AssertionError, ImportError) as error:
            message = f"data source timm:{name} split {split!r} at {options.path} cannot be opened: {first_line(error)}"
            raise DataError(message, hint="check the name, --data and the splits") from error
    train, test = parts
    readers = [getattr(part.dataset, "reader", part.dataset) for part in parts]
    files, test_files = ({str(sample[0]) for sample in getattr(reader, "samples", ())} for reader in readers)
    numbers, test_numbers = (getattr(reader, "class_to_idx", None) or {} for reader in readers)
    # timm reads the whole folder where that of a split is missing, and torchvision's test images for unknown splits.
    alike = np.array_equal(np.array(train[0][0]), np.array(test[0][0])) and train.digest == test.digest
    same = (bool(files & test_files) if files else alike) and options.test_split != splits[0]
    if same or numbers != test_numbers:
        message = f"timm:{name}: {splits[1]!r} has {'the images of' if same else 'other classes than'} {splits[0]!r}"
        raise DataError(
            message, hint=f"use a folder for each in {options.path}, with the same classes; or set data.test_split"
        )
    names = getattr(train.dataset, "classes", None) or [*numbers] or range(int(train.labels.max()) + 1)
    return Splits(name, tuple(map(str, names)), train, test=test)
