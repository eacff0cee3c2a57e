"""From a recipe to a run folder: run a recipe, or print what a run would do."""

from vitcompress.pipeline.dry_run import dry_run_recipe
from vitcompress.pipeline.job import RunOptions
from vitcompress.pipeline.run import RunResult, run_recipe

__all__ = ["RunOptions", "RunResult", "dry_run_recipe", "run_recipe"]
