"""Recipes: TOML, validated as a whole; all mistakes are reported at once."""

from vitcompress.recipe.load import load_recipe
from vitcompress.recipe.schema import Recipe

__all__ = ["Recipe", "load_recipe"]
