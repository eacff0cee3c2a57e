"""Where what a step removes comes from, in words for a report."""

from dataclasses import dataclass

GIVEN = "{}"  # stands for the model that the step was given
ARBITRARY = "arbitrary, only their number counts"
SPREAD = "arbitrary, spread evenly over the depth; other layers of that number may be somewhat faster or slower"


@dataclass(frozen=True)
class Choice:
    """Where what a step removes comes from, a few words each.

    by: a search, a publication, chance. on: what was looked at for that, with `{}` for the model that the step was
    given; None where nothing was. unscored: where a plan of the same size comes from when nothing is trained or
    scored; None where it is the same plan.
    """

    by: str
    on: str | None = None
    unscored: str | None = None


MEASURED = Choice("search", GIVEN, ARBITRARY)
MEASURED_LAYERS = Choice("search", GIVEN, SPREAD)
TRAINED = Choice("search", f"short trainings of copies of {GIVEN}", SPREAD)
PUBLISHED = Choice("published")
