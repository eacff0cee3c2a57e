"""The built-in color images: scikit-learn's digits in random tints on colored noise or on its two photographs.

Twelve classes of equal size: ten digits, a checker board and a ring, 56 to 150 pixels wide and high. Digits, and
regions of the photographs, appear in training images or in test images, never in both.
"""

import numpy as np
from PIL import Image

from vitcompress.training.datasets import Images

CLASSES = (*map(str, range(10)), "checker board", "ring")
TRAIN, TEST = 3600, 960
SIZES = (56, 150)  # smallest and largest width and height, pixels
FIGURE = (0.75, 0.95)  # smallest and largest figure, as a share of the shorter side
TINT = (120, 255)  # darkest and brightest channel of a figure, of 255
BRIGHTNESS = (0.2, 0.6)  # by which backgrounds are darkened
NOISE = 50  # standard deviation of the colors in a background of noise, of 255
TRAINING_REGION = 0.75  # of the width of the photographs; test images use the rest


class TintedImages(Images):
    """Images that are generated when they are first read, the same ones in every run.

    digits: gray values 0 to 1, (digits, 8, 8), with their `labels`. photographs: uint8 (H, W, 3).
    """

    def __init__(self, digits: np.ndarray, labels: np.ndarray, photographs: list[np.ndarray], count: int) -> None:
        self.labels = np.arange(count) % len(CLASSES)
        self._digits = [digits[labels == digit] for digit in range(10)]
        self._photographs = photographs
        self._images: dict[int, Image.Image] = {}

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = int(self.labels[index])
        if index not in self._images:
            self._images[index] = self._draw(index, label)
        return self._images[index], label

    def _draw(self, index: int, label: int) -> Image.Image:
        """A figure in one color on a darkened background."""
        rng = np.random.default_rng([len(self.labels), index])
        width, height = (int(side) for side in rng.integers(SIZES[0], SIZES[1], size=2, endpoint=True))
        pixels = self._background(rng, width, height)
        short = min(width, height)  # the figure is inside the central square, which a center crop keeps
        side = int(rng.uniform(*FIGURE) * short)
        top, left = (int((size - short) // 2 + rng.integers(short - side + 1)) for size in (height, width))
        behind, tint = pixels[top : top + side, left : left + side], rng.uniform(*TINT, 3)
        behind += self._figure(rng, label, side)[..., None] * (tint - behind)
        pixels += rng.normal(0, rng.uniform(2, 12), pixels.shape)
        return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))

    def _background(self, rng: np.random.Generator, width: int, height: int) -> np.ndarray:
        """Colored noise or a part of a photograph, float (height, width, 3) of 0 to 255."""
        if rng.random() < 0.5:
            cells = rng.uniform(0, 255, 3) + rng.normal(0, NOISE, (*rng.integers(2, 7, size=2), 3))
            coarse = Image.fromarray(np.clip(cells, 0, 255).astype(np.uint8))
            image = coarse.resize((width, height), Image.Resampling.BICUBIC)
        else:
            whole = self._photographs[int(rng.integers(len(self._photographs)))]
            top, left = (int(rng.integers(whole.shape[axis] - size + 1)) for axis, size in ((0, height), (1, width)))
            image = Image.fromarray(whole[top : top + height, left : left + width])
        return np.asarray(image, np.float64) * rng.uniform(*BRIGHTNESS)

    def _figure(self, rng: np.random.Generator, label: int, side: int) -> np.ndarray:
        """How much the figure covers each pixel, 0 to 1, (side, side)."""
        if label < 10:
            digit = self._digits[label][int(rng.integers(len(self._digits[label])))]
            large = Image.fromarray(digit.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
            return np.clip(np.asarray(large, np.float64), 0, 1)
        rows, columns = np.indices((side, side)) / side - 0.5
        if CLASSES[label] == "checker board":
            cells = int(rng.integers(3, 7))
            squares = ((rows + 0.5) * cells).astype(int) + ((columns + 0.5) * cells).astype(int)
            return np.asarray(squares % 2, np.float64)
        outer = rng.uniform(0.35, 0.5)
        radius = np.hypot(rows, columns)
        return np.asarray((radius < outer) & (radius > outer - rng.uniform(0.08, 0.2)), np.float64)


def train_and_test(
    digits: np.ndarray, labels: np.ndarray, parts: tuple[np.ndarray, np.ndarray], photographs: list[np.ndarray]
) -> tuple[TintedImages, TintedImages]:
    """The training and the test images. parts: indices of the digits of each. photographs: uint8 (H, W, 3)."""
    cut = round(TRAINING_REGION * photographs[0].shape[1])
    sides = ([photo[:, :cut] for photo in photographs], [photo[:, cut:] for photo in photographs])
    of = zip(parts, sides, (TRAIN, TEST), strict=True)
    train, test = (TintedImages(digits[part], labels[part], side, count) for part, side, count in of)
    return train, test
