"""From a recipe to a run folder: run a recipe, or print what a run would do."""
