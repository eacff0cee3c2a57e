"""Kinds of labelled images: in memory, in class folders, and the data sets of timm and torchvision."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.utils.misc import natural_key

from vitcompress.errors import DataError

_DECODED_AT_ONCE = 1000  # images opened when a folder is; the rest is checked when it is read


class ArrayImages:
    """Images held in memory: `pixels` uint8 (images, H, W) or (images, H, W, 3), `labels` integers (images,)."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = [Image.fromarray(one) for one in pixels], np.asarray(labels, np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], int(self.labels[index])


class FolderImages:
    """One folder per class, images at any depth below; class indices follow `classes`."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        _check_folders(folder, classes)
        found, _ = find_images_and_targets(str(folder), class_to_idx={name: i for i, name in enumerate(classes)})
        self.classes, self.files = classes, [Path(file) for file, _ in found]
        self.labels = np.array([label for _, label in found], np.int64)
        _check_filled(folder, classes, self.labels)
        self._check_images()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return _decoded(self.files[index]), int(self.labels[index])

    def _check_images(self) -> None:
        """Decode some images of all classes now; a folder of thumbnails is checked whole."""
        step = max(1, len(self.files) // _DECODED_AT_ONCE)
        broken = [file for file in self.files[::step] if _broken(file)]
        if broken:
            names = ", ".join(str(file) for file in broken[:5]) + (", ..." if len(broken) > 5 else "")
            raise DataError(
                f"{len(broken)} image{'s' if len(broken) > 1 else ''} cannot be read: {names}",
                hint="remove or replace these files",
            )


class TimmImages:
    """A map-style data set of timm or torchvision with the same interface."""

    def __init__(self, dataset: Any, name: str) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"data source timm:{name} is a stream; images must be reachable by index",
                hint="use an image folder, torch/... or hfds/...",
            )
        self.dataset, self.labels = dataset, _labels_of(dataset)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.dataset[index]
        return image, int(label)


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, in timm's natural order (class2 before class10)."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return tuple(sorted(names, key=natural_key))


def _check_folders(folder: Path, classes: tuple[str, ...]) -> None:
    """The class folders must be exactly `classes`: a class that only one part has means that they do not belong."""
    found = set(class_names(folder))
    missing, extra = [name for name in classes if name not in found], sorted(found - set(classes))
    if missing or extra:
        parts = [f"has no class {few(missing)}"] * bool(missing) + [f"has unknown class {few(extra)}"] * bool(extra)
        raise DataError(f"{folder} {' and '.join(parts)}", hint="train and test need the same class folders")


def _check_filled(folder: Path, classes: tuple[str, ...], labels: np.ndarray) -> None:
    """No class folder may be without images."""
    counts = np.bincount(labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        raise DataError(f"{folder} has class folders without images: {few(empty)}", hint="fill or remove these folders")


def _labels_of(dataset: Any) -> np.ndarray:
    """All labels, from the data set's own table where it has one, else by reading every image once."""
    if hasattr(dataset, "targets"):
        return np.asarray(dataset.targets, np.int64)
    samples = getattr(getattr(dataset, "reader", None), "samples", None)
    labels = [label for _, label in samples] if samples else [dataset[i][1] for i in range(len(dataset))]
    return np.asarray(labels, np.int64)


def _decoded(file: Path) -> Image.Image:
    """The image in `file`, read whole."""
    try:
        with Image.open(file) as image:
            return image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"image {file} cannot be read: {error}", hint="remove or replace this file") from error


def _broken(file: Path) -> bool:
    try:
        _decoded(file)
    except DataError:
        return True
    return False


def few(names: Sequence[str]) -> str:
    """The first names of a list that may be long."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
