"""Where what the steps of a recipe remove comes from, and what was looked at for it."""

from collections.abc import Iterator

from vitcompress.methods import METHODS
from vitcompress.methods.base import Choice
from vitcompress.recipe import Recipe


def chosen_by(recipe: Recipe, *, searched: bool) -> str:
    """Where it comes from, in a few words: a publication, a search, or only its amount where nothing is chosen."""
    found = [(method, choice.by if searched else choice.unscored or choice.by) for _, method, choice in _made(recipe)]
    if len({origin for _, origin in found}) <= 1:
        return "".join(origin for _, origin in found[:1])
    return ", ".join(f"{method}: {origin}" for method, origin in found)


def chosen_on(recipe: Recipe) -> str | None:
    """What each search looked at, None where nothing was searched for."""
    made = list(_made(recipe))
    told = [(method, choice.on.format(_given(recipe, number))) for number, method, choice in made if choice.on]
    return "; ".join(f"{method}: {on}" if len(made) > 1 else on for method, on in told) or None


def _made(recipe: Recipe) -> Iterator[tuple[int, str, Choice]]:
    """Number, method and choice of each step that makes one."""
    for number, step in enumerate(recipe.steps):
        if (choice := METHODS[step.method].choice(step.options)) is not None:
            yield number, step.method, choice


def _given(recipe: Recipe, number: int) -> str:
    """The model that step `number` is given."""
    return f"{recipe.model.name} as step {number} left it" if number else f"the dense {recipe.model.name}"
