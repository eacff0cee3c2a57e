"""Prune, prove, export and measure timm Vision Transformers for deployment.

Public names are imported on first use, so that `import vitcompress` and `vitcompress --help` do not import torch.
"""

import os
import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time these names are imported on first use
    from vitcompress.methods.base import Method
    from vitcompress.models.checkpoint import load_model, save_model
    from vitcompress.models.cost import count_cost
    from vitcompress.pipeline.api import bench, create_model, evaluate, export, finetune, fold, plan, prune, verify
    from vitcompress.pipeline.run import run_recipe
    from vitcompress.plan import Plan
    from vitcompress.recipe.load import load_recipe

# Public name -> the module that defines it.
_PUBLIC = {
    **dict.fromkeys(
        ("bench", "create_model", "evaluate", "export", "finetune", "fold", "plan", "prune", "verify"), "pipeline.api"
    ),
    **dict.fromkeys(("load_model", "save_model"), "models.checkpoint"),
    "Method": "methods.base",
    "Plan": "plan",
    "count_cost": "models.cost",
    "load_recipe": "recipe.load",
    "run_recipe": "pipeline.run",
}
# Names that changed before the first release -> module and new name.
_DEPRECATED = {
    "apply": ("surgery.apply", "apply_plan"),
    "family_of": ("families", "family_of"),
    "load": ("models.checkpoint", "load_model"),
    "measure": ("models.cost", "count_cost"),
    "run": ("pipeline.run", "run_recipe"),
    "save": ("models.checkpoint", "save_model"),
}
__all__ = ["Method", "Plan", "__version__", "bench", "count_cost", "create_model", "evaluate", "export", "finetune"]
__all__ += ["fold", "load_model", "load_recipe", "plan", "prune", "run_recipe", "save_model", "verify"]

# ONNX Runtime (from 1.29 on) sends telemetry unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# In a checkout, exporters, bench and recipes lie beside this folder; the installed package holds them inside.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "recipes" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

try:
    __version__ = version("vitcompress")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+checkout"


def _find(package: ModuleType, name: str) -> Any:
    if name not in {**_PUBLIC, **_DEPRECATED}:
        raise AttributeError(f"module 'vitcompress' has no attribute {name!r}")
    module, new = _DEPRECATED.get(name) or (_PUBLIC[name], name)
    if name in _DEPRECATED:
        warnings.warn(f"vitcompress.{name} is now {new} in vitcompress.{module}", DeprecationWarning, stacklevel=2)
    value = getattr(import_module(f"vitcompress.{module}"), new)
    validate = import_module("vitcompress.io.validation").validate_arguments
    return validate(value) if new in _PUBLIC and not isinstance(value, type) else value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Three functions have the name of a submodule. Importing the module must not replace the function, so these names are
# properties of the package's type. Import from these modules with `from vitcompress.bench import suite`: Python reads
# `import vitcompress.bench.suite as suite` as an attribute of the function. `__getattr__` is there, too: type checkers
# accept any name of a module that defines it.
_FUNCTIONS = {n: property(partial(_find, name=n), lambda *submodule: None) for n in ("bench", "plan", "verify")}
sys.modules[__name__].__class__ = type("Package", (ModuleType,), {"__getattr__": _find, **_FUNCTIONS})
