"""Splits do not overlap, every process gets its share and no more, and every bad data set is rejected at once."""

import dataclasses
import errno
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset
from torchvision import transforms

from vitcompress.errors import DataError, InputError
from vitcompress.models.create import InputConfig
from vitcompress.training.data import Splits, open_data, open_test, subset
from vitcompress.training.datasets import ArrayImages, Images, MappedImages, as_images
from vitcompress.training.distributed import Runtime
from vitcompress.training.loaders import BatchLoader, EvalLoader, TrainLoader, image_transform, open_source
from vitcompress.training.options import Augmentation, DataOptions

CPU = Runtime(torch.device("cpu"))
RANKS = [Runtime(torch.device("cpu"), rank=rank, world_size=2) for rank in (0, 1)]
DEIT = Augmentation(False, "rand-m9-mstd0.5-inc1", 0.3, reprob=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3)
INPUT = InputConfig((1, 4, 4), (0.0,), (1.0,), "bicubic", 1.0, "center")


def numbered(count: int, classes: int = 2) -> ArrayImages:
    """Image i is uniformly gray i, its class is i modulo `classes`."""
    pixels = np.repeat(np.arange(count, dtype=np.uint8), 16).reshape(count, 4, 4)
    return ArrayImages(pixels, np.arange(count) % classes)


def numbers(images: torch.Tensor) -> list[int]:
    return [round(float(image[0, 0, 0]) * 255) for image in images]


def flat(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [number for images, _ in batches for number in numbers(images)]


def image_folder(root: Path, splits: dict[str, dict[str, int]]) -> Path:
    """PNG images: {split: {class: count}}."""
    for split, classes in splits.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (6, 5), (number, 0, 0)).save(root / split / name / f"{number}.png")
    return root


# ------------------------------------------------------------------------------------------------------------- digits


def test_digits_are_cut_into_three_parts_that_share_nothing() -> None:
    splits = open_data(DataOptions(heldout=0.2), seed=0)
    parts = [
        {image.tobytes() for image, _ in (part[i] for i in range(len(part)))}
        for part in (splits.train, splits.heldout, splits.test)
    ]
    assert len(splits.test) == 540 and sum(map(len, (splits.train, splits.heldout, splits.test))) == 1797
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert splits.classes == tuple("0123456789")
    shares = np.bincount(splits.heldout.labels) / np.bincount(
        np.concatenate([splits.train.labels, splits.heldout.labels])
    )
    assert np.all(np.abs(shares - 0.2) < 1 / 125)  # every class to within one of its 125 images or more


def test_the_seed_selects_heldout_images_and_never_test_images() -> None:
    first, again, other = (open_data(DataOptions(heldout=0.1), seed) for seed in (0, 0, 1))
    pixels = [
        [part[i][0].tobytes() for i in range(len(part))] for part in (first.heldout, again.heldout, other.heldout)
    ]
    assert pixels[0] == pixels[1] != pixels[2]
    assert [first.test[i][0].tobytes() for i in range(540)] == [other.test[i][0].tobytes() for i in range(540)]


def test_a_share_of_zero_keeps_all_training_images() -> None:
    splits = open_data(DataOptions(heldout=0.0), seed=0)
    assert len(splits.heldout) == 0 and len(splits.train) == 1257


def test_subset_is_balanced_and_drawn_by_the_seed() -> None:
    data = ArrayImages(np.zeros((30, 4, 4), np.uint8), np.array([0] * 20 + [1] * 8 + [2] * 2))
    assert np.bincount(subset(data, 5, 0).labels).tolist() == [5, 5, 2]
    big = numbered(60, 3)
    drawn = [[part[i][0].getpixel((0, 0)) for i in range(len(part))] for part in (subset(big, 4, s) for s in (0, 0, 1))]
    assert drawn[0] == drawn[1] != drawn[2]


# ------------------------------------------------------------------------------------------------------------ folders


def test_image_folder_numbers_classes_in_natural_order(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"c10": 4, "c2": 6}, "val": {"c10": 2, "c2": 1}})
    splits = open_data(DataOptions("imagefolder", str(root), heldout=0.25), seed=0)
    assert splits.classes == ("c2", "c10")
    assert np.bincount(splits.train.labels).tolist() == [4, 3] and np.bincount(splits.heldout.labels).tolist() == [2, 1]
    assert splits.test.labels.tolist() == [0, 1, 1]
    assert splits.test[0][0].size == (6, 5)


def test_order_of_classes_does_not_depend_on_the_order_of_folders(tmp_path: Path) -> None:
    # 01 and 1 are the same number, B2 and b2 the same letter; int() does not read the last digit of 1\u00b2
    pairs = {"01": 1, "1": 1, "1\u00b2": 1} | {f"{letter}{i}": 1 for i in range(2, 9) for letter in "Bb"}
    names = tuple(pairs)
    assert len(names) == 17
    for number, order in enumerate((names, names[::-1])):
        root = image_folder(tmp_path / str(number), {"train": dict.fromkeys(order, 2), "val": dict.fromkeys(order, 1)})
        assert open_data(DataOptions("imagefolder", str(root), heldout=0.5), seed=0).classes == names


def test_test_images_need_no_training_images(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"validation": {"a": 1, "b": 2}})
    data = open_test(DataOptions("imagefolder", str(root)))
    assert data.classes == ("a", "b") and len(data.test) == 3
    with pytest.raises(DataError, match="no folder train"):
        open_data(DataOptions("imagefolder", str(root)), seed=0)


def test_reorder_numbers_the_classes_as_the_names(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "B": 4, "c": 5}, "val": {"a": 1, "B": 2, "c": 3}})
    data = open_data(DataOptions("imagefolder", str(root), heldout=0.3), seed=0)
    other = data.reorder(("c", "a", "B"))
    for one, two in ((data.train, other.train), (data.heldout, other.heldout), (data.test, other.test)):
        assert len(one) == len(two) and [item[1] for item in two] == two.labels.tolist()
        assert [data.classes[label] for label in one.labels] == [other.classes[label] for label in two.labels]
        assert all(first[0] == second[0] for first, second in zip(one, two, strict=True))
    assert other.classes == ("c", "a", "B") and other.digest != data.digest == other.reorder(data.classes).digest
    for names in ((), data.classes, ("a", "B", "d"), ("a", "a", "B")):
        assert data.reorder(names) is data
    twice = Splits(classes=("crane", "b", "crane"))
    assert twice.reorder(("crane", "crane", "b")) is twice


def break_one(root: Path) -> None:
    (root / "train/a/1.png").write_bytes(b"not an image")


def truncate_one(root: Path) -> None:
    path = root / "val/b/0.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:1500])  # its header is whole, its pixels are not


def deepen_one(root: Path) -> None:
    Image.fromarray(np.full((5, 6), 1000, np.uint16)).save(root / "val/b/0.png")


def remove(*names: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for name in names:
            for file in sorted((root / name).rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            (root / name).rmdir()

    return change


def empty(*names: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for file in (file for name in names for file in (root / name).iterdir()):
            file.unlink()

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("train", "val"), "no folder train"),
        (remove("val"), "no folder val or validation or test"),
        (remove("train/a", "val/a"), "has 1 class, at least 2"),
        (remove("val/a"), "has no class a"),
        (remove("train/a"), "1 class"),
        (empty("train/b"), "class folders without images: b"),
        (empty("val/a"), "class folders without images: a"),
        (empty("train/b", "val/a"), r"train has class folders without images: b; .*val has class folders"),
        (break_one, r"1 image cannot be read: .*1\.png"),
        (truncate_one, r"1 image cannot be read: .*0\.png"),
        (deepen_one, r"0\.png .*more than 8 bits \(mode I(;16)?\)"),
        (lambda root: (root / "val/zz").mkdir(), "unknown class zz"),
    ],
)
def test_bad_folders_are_rejected_when_opened(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    open_data(DataOptions("imagefolder", str(root)), seed=0)  # it is good before it is spoiled
    spoil(root)
    with pytest.raises(DataError, match=message) as caught:
        open_data(DataOptions("imagefolder", str(root)), seed=0)
    assert caught.value.hint


def test_unreadable_training_and_test_images_are_listed_together(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    broken = [root / "train/a/1.png", root / "val/b/0.png"]
    for path in broken:
        path.write_bytes(b"no image")
    with pytest.raises(DataError) as caught:
        open_data(DataOptions("imagefolder", str(root)), seed=0)
    assert all(str(path) in caught.value.message for path in broken)
    assert caught.value.hint == "remove or replace these files, or set data.broken = 'skip'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DataOptions("imagefolder"), "no data folder"),
        (DataOptions("imagefolder", "/nowhere/at/all"), "/nowhere/at/all does not exist"),
        (DataOptions("imagenet"), "'imagenet' is not supported"),
        (
            DataOptions("timm:torch/cifar10", "/nowhere"),
            "timm:torch/cifar10 split 'train' at /nowhere cannot be opened",
        ),
        (DataOptions("timm:torch/nonsense", "/nowhere"), "Unknown torchvision dataset nonsense"),
        *(
            (DataOptions(f"timm:{reader}"), "is not supported")
            for reader in ("hfds/NAME", "HFDS/NAME", "hfids/NAME", "tfds/NAME", "wds/NAME", "cifar10", "torch/")
        ),
    ],
)
def test_bad_sources_are_rejected(options: DataOptions, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_data(options, seed=0)


@pytest.mark.parametrize("source", ["imagefolder", "timm:torch/image_folder"])
def test_images_in_subfolders_belong_to_the_class(source: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    (root / "train/a/b").mkdir()
    (root / "train/a/2.png").rename(root / "train/a/b/2.png")
    splits = open_data(DataOptions(source, str(root), heldout=0.0, test_split="val"), seed=0)
    assert np.bincount(splits.train.labels).tolist() == [3, 3]


def test_hidden_files_and_folders_are_no_images(tmp_path: Path) -> None:
    root = image_folder(tmp_path / ".data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    before = open_data(DataOptions("imagefolder", str(root)), seed=0)
    for file in ("._0.png", ".thumbs/0.png", ".thumbs/1.PNG"):
        (root / "train/a" / file).parent.mkdir(exist_ok=True)
        (root / "train/a" / file).write_bytes(b"no image")
    for broken in ("error", "skip"):
        after = open_data(DataOptions("imagefolder", str(root), broken=broken), seed=0)
        assert after.digest == before.digest and not after.skipped and len(after.train) == len(before.train)


@pytest.mark.parametrize("source", ["imagefolder", "timm:", "timm:torch/image_folder"])
def test_all_sources_use_the_same_decoders(source: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    Image.new("RGB", (4, 4)).save(root / "train/a/2.png", "EPS")
    with pytest.raises(DataError, match=r"image .*cannot be read"):
        splits = open_data(DataOptions(source, str(root), heldout=0.0, test_split="val"), seed=0)
        [splits.train[i] for i in range(6)]


@pytest.mark.parametrize(
    "spoil", [lambda path: path.symlink_to("/nowhere"), lambda path: path.write_bytes(b"no image")]
)
def test_timm_never_replaces_an_unreadable_image_by_the_next_one(spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 9, "b": 6}})
    spoil(root / "val/a/9.png")
    own = create_dataset(
        "", str(root), "val", transform=transforms.ToTensor(), target_transform=lambda label: 1 - label
    )
    sources = [
        open_data(DataOptions(source, str(root), test_split="val"), 0).test
        for source in ("timm:", "timm:torch/image_folder")
    ]
    for images in (*sources, as_images(own)):
        assert [int(images[i][1]) for i in (0, 8, 10)] == images.labels[[0, 8, 10]].tolist()
        with pytest.raises(DataError, match=r"cannot be read: ") as caught:
            images[9]
        assert "9.png" in caught.value.message
    assert images.prepared and images.labels.tolist() == [1] * 10 + [0] * 6 and images[10][0].shape == (3, 5, 6)


@pytest.mark.parametrize("source", ["timm:", "timm:torch/image_folder"])
def test_a_timm_data_set_is_read_through_timm(source: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    splits = open_data(DataOptions(source, str(root), heldout=0.0, test_split="val"), seed=0)
    assert splits.classes == ("a", "b") and splits.test.labels.tolist() == [0, 0, 1]
    assert splits.train[5][0].getpixel((0, 0)) == (2, 0, 0)


def test_an_archive_is_rejected_as_a_source_and_is_a_data_set_of_its_own(tmp_path: Path) -> None:
    """timm would read the same archive for both splits."""
    image_folder(tmp_path / "images", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    archive = Path(shutil.make_archive(str(tmp_path / "all"), "tar", tmp_path / "images/train"))
    for options in (DataOptions("timm:", str(archive)), DataOptions("timm:", str(tmp_path), train_split="all.tar")):
        with pytest.raises(DataError, match=r"all\.tar is a file, not a folder of images") as caught:
            open_data(options, seed=0)
        assert "unpack it" in str(caught.value.hint)
    images = as_images(create_dataset("", str(archive)))
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1] and images[5][0].getpixel((0, 0)) == (2, 0, 0)


@pytest.mark.parametrize("source", ["timm:", "timm:torch/image_folder"])
def test_a_timm_folder_without_a_split_is_not_tested_on_its_training_images(source: str, tmp_path: Path) -> None:
    """timm reads the whole folder if it has none for a split."""
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}})
    with pytest.raises(DataError, match="'validation' has the images of 'train'"):
        open_data(DataOptions(source, str(root)), seed=0)
    same = open_data(DataOptions(source, str(root), heldout=0.0, test_split="train"), seed=0)
    assert len(same.train) == len(same.test) == 6


@pytest.mark.parametrize("source", ["timm:", "timm:torch/image_folder"])
def test_both_splits_of_a_timm_folder_need_the_same_classes(source: str, tmp_path: Path) -> None:
    """Without one, timm gives its number to the next class."""
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3, "c": 3}, "validation": {"b": 2, "c": 1}})
    with pytest.raises(DataError, match="'validation' has other classes than 'train'"):
        open_data(DataOptions(source, str(root)), seed=0)


@pytest.mark.parametrize(("name", "option"), [("train", "train_split"), ("val", "test_split")])
def test_a_folder_of_another_name_can_be_named(name: str, option: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    (root / name).rename(root / "other")
    with pytest.raises(DataError) as caught:
        open_data(DataOptions("imagefolder", str(root)), seed=0)
    assert f"data.{option}" in str(caught.value.hint)
    assert open_data(DataOptions("imagefolder", str(root), **{option: "other"}), seed=0).classes == ("a", "b")


def test_the_training_folder_is_not_the_test_folder_by_default(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"val": {"a": 3, "b": 3}})
    with pytest.raises(DataError, match="has no folder validation or test"):
        open_data(DataOptions("imagefolder", str(root), train_split="val"), seed=0)
    image_folder(tmp_path, {"test": {"a": 2, "b": 1}})
    splits = open_data(DataOptions("imagefolder", str(root), train_split="val", heldout=0.0), seed=0)
    assert (len(splits.train), len(splits.test)) == (6, 3)


def replace_image(root: Path) -> None:
    Image.new("RGB", (6, 5), (9, 9, 9)).save(root / "train/a/0.png")


def move_image(root: Path) -> None:
    (root / "train/a/0.png").rename(root / "train/b/9.png")


def rename_class(root: Path) -> None:
    (root / "train/b").rename(root / "train/c")
    (root / "val/b").rename(root / "val/c")


def test_the_digest_of_arrays_follows_their_values() -> None:
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    arrays = (pixels, pixels[:, ::-1], torch.from_numpy(pixels) / 255, torch.from_numpy(pixels) / 256)
    digests = [ArrayImages(array, np.arange(2)).digest for array in arrays]
    assert len({"", *digests}) == 5 and ArrayImages(pixels.copy(), np.arange(2)).digest == digests[0]
    assert open_data(DataOptions(), 0).train.digest == "", "folders with the built-in data have none"


@pytest.mark.parametrize("change", [None, replace_image, move_image, rename_class])
def test_the_digest_of_images_follows_contents_labels_and_classes(
    change: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    root = image_folder(tmp_path / "one", {"train": {"a": 4, "b": 4}, "val": {"a": 2, "b": 1}})
    copy = shutil.copytree(root, tmp_path / "copy")
    if change is not None:
        change(copy)
    first, second = (open_data(DataOptions("imagefolder", str(one)), seed=0).digest for one in (root, copy))
    assert (first == second) == (change is None)


def test_a_timm_data_set_whose_first_image_is_broken_is_rejected(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 1}})
    for path in (root / "train" / "a").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"image .*0\.png cannot be read"):
        open_data(DataOptions("timm:torch/image_folder", str(root), test_split="val"), seed=0)


def write_mnist(root: Path) -> None:
    """Files as torchvision reads them, with 40 training and 20 test images."""
    (raw := root / "MNIST" / "raw").mkdir(parents=True)
    for name, count in (("train", 40), ("t10k", 20)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


@pytest.mark.parametrize(("split", "accepted"), [(None, True), ("training", True), ("Train", False), ("val", False)])
def test_names_of_splits_that_torchvision_does_not_know_give_no_test_images(
    tmp_path: Path, split: str | None, accepted: bool
) -> None:
    write_mnist(tmp_path)
    options = DataOptions("timm:torch/mnist", str(tmp_path), train_split=split)
    if accepted:
        assert len(open_data(options, seed=0).test) == 20
    else:
        with pytest.raises(DataError, match=f"'validation' has the images of '{split}'"):
            open_data(options, seed=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_breaks_later_is_named_in_one_sentence(tmp_path: Path, workers: int) -> None:
    root = image_folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    splits = open_data(DataOptions("imagefolder", str(root), heldout=0.0), seed=0)
    break_one(root)
    runtime = Runtime(torch.device("cpu"), workers=workers)
    with pytest.raises(DataError) as caught:
        list(EvalLoader(splits.train, INPUT, 2, runtime))
    assert caught.value.message.startswith(f"image {root / 'train/a/1.png'} cannot be read")
    assert "Traceback" not in caught.value.message and "\n" not in caught.value.message
    assert caught.value.hint == "replace it by a readable one"


@pytest.mark.parametrize("source", ["imagefolder", "timm:"])
def test_a_folder_without_permissions_is_an_error(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.walk`, which torchvision and timm use, omits it. Hidden folders hold no images."""
    root = image_folder(tmp_path, {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}})
    scan, locked = os.scandir, root / "val/b/more"
    for folder in (locked, root / "val/b/.trash"):
        folder.mkdir()

    def scandir(path: Any) -> Any:
        if Path(path) == locked or Path(path).name == ".trash":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError) as caught:
        open_data(DataOptions(source, str(root)), seed=0)
    assert caught.value.message == f"{locked} cannot be read: Permission denied"
    locked.rmdir()
    assert len(open_data(DataOptions(source, str(root)), seed=0).test) == 2


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_workers_need_shared_memory_for_two_batches_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers lose batches that do not fit, for which torch would wait forever."""
    data, runtime = numbered(8), Runtime(torch.device("cpu"), workers=2)
    need = 2 * 2 * 8 * 16  # no batch has more than all 8 images
    usage = shutil.disk_usage("/dev/shm")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=need))
    assert flat(EvalLoader(data, INPUT, 100, runtime)) == [*range(8)]
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=need - 1))
    assert flat(EvalLoader(data, INPUT, 100, CPU)) == [*range(8)]
    with pytest.raises(InputError, match=r"shared memory .*\n.*fewer workers"):
        EvalLoader(data, INPUT, 100, runtime)


# ------------------------------------------------------------------------------------------------------------- loaders


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(repeats=3)])
def test_two_processes_see_the_batches_of_one(augmentation: Augmentation) -> None:
    data = numbered(250)
    loaders = [
        TrainLoader(data, INPUT, size, runtime, augmentation=augmentation, seed=0)
        for size, runtime in ((8, CPU), (4, RANKS[0]), (4, RANKS[1]))
    ]
    for loader in loaders:
        loader.set_epoch(3)
    one, first, second = ([numbers(images) for images, _ in loader] for loader in loaders)
    assert len(one) == len(first) == len(second) == 31
    assert [sorted(batch) for batch in one] == [sorted(a + b) for a, b in zip(first, second, strict=True)]
    seen = np.bincount(list(chain.from_iterable(one)), minlength=250)
    assert seen.max() == max(1, augmentation.repeats)  # repeated views are in the epoch, others once


@pytest.mark.parametrize("repeats", [0, 3])
def test_an_epoch_has_as_many_views_as_images(repeats: int) -> None:
    data = ArrayImages(np.zeros((400, 8, 8), np.uint8), np.arange(400) % 2)
    for size, runtime in ((8, CPU), (4, RANKS[0])):
        loader = TrainLoader(data, INPUT, size, runtime, augmentation=Augmentation(repeats=repeats), seed=0)
        assert len(loader) == 50


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = TrainLoader(numbered(40), INPUT, 8, CPU, augmentation=Augmentation(), seed=seed)
        loader.set_epoch(epoch)
        return flat(loader)

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("count", [7, 8, 9])
def test_evaluation_gives_every_image_to_one_process(count: int) -> None:
    shares = [flat(EvalLoader(numbered(count), INPUT, 2, runtime)) for runtime in RANKS]
    assert shares[0] == list(range(0, count, 2)) and shares[1] == list(range(1, count, 2))


def test_the_default_augmentation_changes_nothing() -> None:
    images, targets = next(iter(TrainLoader(numbered(8), INPUT, 8, CPU, augmentation=Augmentation(), seed=0)))
    assert images.dtype == torch.float32 and targets.tolist() == [n % 2 for n in numbers(images)]
    assert torch.equal(images, images[:, :, :1, :1].expand_as(images))


def test_noise_has_the_configured_standard_deviation() -> None:
    torch.manual_seed(0)
    data = ArrayImages(np.full((256, 4, 4), 51, np.uint8), np.arange(256) % 2)
    images, _ = next(iter(TrainLoader(data, INPUT, 256, CPU, augmentation=Augmentation(noise=0.5), seed=0)))
    count = images.numel()
    # mean and variance of `count` normal draws, to five standard errors
    assert abs(float(images.mean()) - 0.2) < 5 * 0.5 / count**0.5
    assert abs(float(images.var()) - 0.25) < 5 * 0.25 * (2 / count) ** 0.5


def test_mixed_targets_are_probabilities_over_all_classes() -> None:
    augmentation = Augmentation(mixup=0.8, cutmix=1.0, smoothing=0.1)
    loader = TrainLoader(numbered(8), INPUT, 4, CPU, augmentation=augmentation, seed=0, classes=5)
    _, targets = next(iter(loader))
    assert targets.shape == (4, 5)
    assert torch.allclose(targets.sum(dim=1), torch.ones(4)) and float(targets.min()) == pytest.approx(0.02)


def test_deits_recipe_runs_on_color_images_of_any_shape(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"train": {"a": 4, "b": 4}, "val": {"a": 1, "b": 1}})
    data = open_data(DataOptions("imagefolder", str(root), heldout=0.0), seed=0)
    wide = InputConfig((3, 16, 24), (0.5,) * 3, (0.5,) * 3, "bicubic", 0.9, "center")
    images, targets = next(iter(TrainLoader(data.train, wide, 4, CPU, augmentation=DEIT, seed=0)))
    assert images.shape == (4, 3, 16, 24) and targets.shape == (4, 2)
    assert next(iter(EvalLoader(data.test, wide, 2, CPU)))[0].shape == (2, 3, 16, 24)


def test_an_impossible_batch_is_rejected() -> None:
    with pytest.raises(InputError, match="mix pairs"):
        TrainLoader(numbered(8), INPUT, 3, CPU, augmentation=Augmentation(mixup=0.8), seed=0)


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "augmix-m10", "v0r"])
def test_policies_with_zero_bits_per_channel_work(policy: str) -> None:
    """Their strongest posterizing, which Pillow rejects, is black."""
    transform = image_transform(INPUT, Augmentation(no_aug=False, auto_augment=policy))
    assert isinstance(transform, transforms.Compose)
    steps = [step for step in transform.transforms if hasattr(step, "ops") or hasattr(step, "policy")]
    operations = [op for step in steps for op in (*getattr(step, "ops", ()), *chain(*getattr(step, "policy", ())))]
    posterizers = [operation for operation in operations if operation.name.startswith("Posterize")]
    assert posterizers
    image = Image.fromarray(np.full((4, 4), 200, np.uint8))
    for operation in posterizers:
        assert operation.aug_fn(image, 0).getextrema() == (0, 0)
        assert operation.aug_fn(image, 1).getextrema() == (128, 128)
        assert operation.aug_fn(image, 8) is image
    for _ in range(50):
        transform(image)


class Pairs:
    """A map-style data set of prepared tensors, as a user would write it."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self.images, self.targets = images, classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.targets[index])


@dataclasses.dataclass
class Noisy(Pairs):
    """Adds noise of global generators of random numbers, or of one of its own."""

    images: torch.Tensor
    targets: torch.Tensor
    own: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(1) + random.random() + np.random.rand() if self.own is None else self.own.random()
        return self.images[index] + torch.as_tensor(noise, dtype=torch.float32), int(self.targets[index])


class Relabeled(Pairs):
    """Gives the item `changed` another class than its attribute `targets`."""

    changed = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.targets[index]) + (index == self.changed)


def test_targets_that_are_not_the_classes_of_the_items_are_rejected() -> None:
    data: Any = Relabeled(torch.rand(20, 1, 4, 4), torch.arange(20) % 2)
    with pytest.raises(DataError, match="item 0 of the data set is of class 1, by its targets of 0"):
        as_images(data)
    data.changed = 1  # not among the items that are read first
    images = as_images(data)
    with pytest.raises(DataError, match="item 1 of the data set is of class 2, by its targets of 1"):
        list(TrainLoader(images, INPUT, 4, CPU, augmentation=Augmentation(), seed=0))


def test_an_image_without_pixels_is_rejected() -> None:
    for pairs in ([(Image.new("L", (0, 0)), 0)], [(Image.new("L", (4, 4)), 0)] * 3 + [(Image.new("L", (4, 0)), 1)]):
        with pytest.raises(DataError, match=r"of the data set cannot be read: \d x 0 pixels are not from 1 to 89,478"):
            as_images(pairs)


@pytest.mark.parametrize("kind", [Pairs, Noisy, "pillow"])
def test_the_digest_of_a_data_set_follows_its_images(kind: Any) -> None:
    def digest(images: torch.Tensor) -> str:
        pillow = [(transforms.ToPILImage()(image), i % 2) for i, image in enumerate(images)]
        return as_images(pillow if kind == "pillow" else kind(images, torch.arange(20) % 2)).digest

    images = torch.rand(20, 1, 4, 4)
    changed = [images.index_fill(0, torch.tensor(index), 0.0) for index in (0, 19)]
    states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    assert len({digest(one) for one in (images, images.clone(), *changed)}) == 3
    if kind is not Noisy:
        assert states == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())


def test_the_digest_of_images_with_a_random_generator_of_their_own_is_that_of_labels() -> None:
    images, generator = torch.rand(20, 1, 4, 4), np.random.default_rng(0)
    digests = {as_images(Noisy(images, torch.arange(20) % 2, generator)).digest for _ in range(2)}
    assert len(digests) == 1 and digests != {as_images(Noisy(images, torch.zeros(20), generator)).digest}


def test_prepared_tensors_are_passed_on_unchanged() -> None:
    images, classes = torch.randn(8, 1, 4, 4), torch.arange(8) % 2
    data = as_images(Pairs(images, classes))
    assert data.prepared and data.labels.tolist() == classes.tolist()
    batch, targets = next(iter(EvalLoader(data, INPUT, 8, CPU)))
    assert torch.equal(batch, images) and torch.equal(targets, classes)
    seen, _ = next(iter(TrainLoader(data, INPUT, 8, CPU, augmentation=Augmentation(), seed=0)))
    assert sorted(seen.flatten().tolist()) == sorted(images.flatten().tolist())
    with pytest.raises(InputError, match="need PIL images"):
        TrainLoader(data, INPUT, 4, CPU, augmentation=Augmentation(no_aug=False), seed=0)


def test_an_iterable_of_batches_becomes_a_data_set() -> None:
    batches = [(torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2])), (torch.randn(2, 1, 4, 4), torch.tensor([1, 0]))]
    data = as_images(iter(batches))
    assert data.labels.tolist() == [0, 1, 2, 1, 0] and torch.equal(data[3][0], batches[1][0][0])
    assert isinstance(open_source(batches, CPU), BatchLoader) and len(open_source(batches, CPU)) == 2
    with pytest.raises(InputError, match="without a length"):
        open_source(iter(batches), CPU)
    with pytest.raises(DataError, match=r"not \(image, class\) pairs"):
        as_images([1, 2, 3])
    with pytest.raises(DataError, match="data source timm:torch/mnist is empty"):
        MappedImages([], "data source timm:torch/mnist")


def test_tinted_images_are_the_same_in_every_run_and_share_no_source() -> None:
    one, two = (open_data(DataOptions("tinted", heldout=0.1), seed=0) for _ in range(2))
    assert (len(one.train), len(one.heldout), len(one.test)) == (3240, 360, 960)
    assert len(one.classes) == 12
    for part in ("train", "heldout", "test"):
        assert len(set(np.bincount(getattr(one, part).labels))) == 1, "classes of equal size"
    for index in (0, 10, 11, 500):
        (image, label), (again, _) = one.test[index], two.test[index]
        assert label == index % 12 and np.array_equal(np.asarray(image), np.asarray(again))
        assert image.mode == "RGB" and all(56 <= side <= 150 for side in image.size)
    assert np.asarray(one.test[0][0]).shape != np.asarray(one.test[12][0]).shape  # another image of the same class
    whole = open_data(DataOptions("tinted", heldout=0), seed=0)
    for sources in ("_digits", "_photographs"):
        train, test = (
            {row.tobytes() for group in getattr(part, sources) for row in group}
            for part in (whole.train.dataset, whole.test)
        )
        assert train and test and not train & test


def test_tinted_classes_are_distinguishable_by_their_mean_image() -> None:
    """A classifier of the nearest mean, on 16 x 16 gray pixels, is far above the 8 % of guessing."""

    def pixels(images: Images, indices: range) -> tuple[np.ndarray, np.ndarray]:
        small = [np.asarray(images[i][0].convert("L").resize((16, 16)), np.float64).ravel() for i in indices]
        rows = np.stack(small)
        return (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True), images.labels[list(indices)]

    data = open_data(DataOptions("tinted", heldout=0), seed=0)
    (train, labels), (test, expected) = pixels(data.train, range(1200)), pixels(data.test, range(360))
    means = np.stack([train[labels == label].mean(0) for label in range(12)])
    correct = int((np.argmax(test @ means.T, axis=1) == expected).sum())
    assert 360 * 0.25 < correct < 360 * 0.9


def test_the_smoothing_of_mixed_targets_is_the_configured_one() -> None:
    """Not timm's default of 0.1."""
    loader = TrainLoader(
        numbered(8), INPUT, 4, CPU, augmentation=Augmentation(mixup=0.8, smoothing=0.2), seed=0, classes=5
    )
    assert float(next(iter(loader))[1].min()) == pytest.approx(0.04)


def test_crops_have_the_configured_area_and_aspect_ratio() -> None:
    augmentation = Augmentation(no_aug=False, scale=(0.4, 0.6), ratio=(0.5, 1.5), hflip=0.25)
    transform: Any = image_transform(INPUT, augmentation)
    crop, flip = transform.transforms[:2]
    assert (tuple(crop.scale), tuple(crop.ratio), flip.p) == ((0.4, 0.6), (0.5, 1.5), 0.25)


def test_squash_keeps_the_whole_of_a_wide_image() -> None:
    """Only its ends are bright; a center crop has none of them."""
    pixels = np.full((4, 16), 255, np.uint8)
    pixels[:, 4:12] = 0
    image = Image.fromarray(pixels)
    largest = {
        m: int(image_transform(dataclasses.replace(INPUT, crop_mode=m))(image).max()) for m in ("center", "squash")
    }
    assert largest["center"] < 50 < 200 < largest["squash"]


@pytest.mark.parametrize("crop", [("center", 0.5), ("center", 1.0), ("border", 0.9), ("squash", 1.0)])
def test_without_augmentation_models_are_trained_on_the_images_of_the_evaluation(crop: tuple[str, float]) -> None:
    """timm's own transform without augmentation would stretch a wide image."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 23), dtype=np.uint8))
    input = dataclasses.replace(INPUT, crop_mode=crop[0], crop_pct=crop[1])
    expected, trained = image_transform(input)(image), image_transform(input, Augmentation())(image)
    assert np.array_equal(trained, expected)
    assert not np.array_equal(image_transform(input, Augmentation(no_aug=False))(image), expected)


@pytest.mark.parametrize(("mode", "contents"), [("const", 1), ("pixel", 17)])
def test_an_erased_rectangle_has_the_configured_content(mode: Any, contents: int) -> None:
    """Zero, or a normal number in each pixel."""
    data = ArrayImages(np.full((16, 4, 4), 255, np.uint8), np.arange(16) % 2)
    whole = {"no_aug": False, "scale": (1.0, 1.0), "ratio": (1.0, 1.0), "hflip": 0.0}
    images, _ = next(
        iter(TrainLoader(data, INPUT, 16, CPU, augmentation=Augmentation(**whole, reprob=1.0, remode=mode), seed=0))
    )
    assert min(images[images != 1].unique().numel(), 17) == contents


def test_as_many_views_of_an_image_as_configured() -> None:
    loader = TrainLoader(numbered(250), INPUT, 8, CPU, augmentation=Augmentation(repeats=2), seed=0)
    loader.set_epoch(3)
    seen = np.bincount([round(float(image[0, 0, 0]) * 255) for images, _ in loader for image in images])
    assert seen.max() == 2
