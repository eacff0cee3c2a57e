"""One part of a method's work, for a dry run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of a method's work, for a dry run: `rounds` trainings or measurements of `epochs` passes over images.

    images_per_class: of the training set, 0 for all of it. images: the total instead, where that is what is set.
    """

    title: str
    rounds: int
    epochs: int
    images_per_class: int = 0
    images: int = 0
