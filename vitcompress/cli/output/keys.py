"""The keys of a recipe, printed without the imports that the other tables need."""

import json
from collections.abc import Iterable

from vitcompress.cli.output.terminal import print_pairs
from vitcompress.recipe.keys import Key


def print_keys(keys: Iterable[Key]) -> None:
    """The keys of a recipe with description, type, default, and the recipe's value if it differs."""
    pairs = []
    for key in keys:
        default = "required" if key.required else f"default {_as_toml(key.default)}"
        here = "" if key.value is None or key.value == key.default else f"; here {_as_toml(key.value)}"
        pairs.append((key.key, f"{key.about}\n  {key.type}; {default}{here}"))
    print_pairs(pairs)


def _as_toml(value: object) -> str:
    return "not set" if value is None else json.dumps(value, default=str)
