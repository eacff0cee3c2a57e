"""Recipes: TOML, validated as a whole; all mistakes are reported at once."""
