"""Prune, prove, export and measure timm Vision Transformers for deployment.

Public names are imported on first use, so that `vitcompress --help` answers without torch.
"""

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Plan", "__version__", "apply", "family_of", "fold", "load", "load_recipe", "measure", "run", "save"]

_HOMES = {
    "Plan": ("plan", "Plan"),
    "apply": ("surgery", "apply_plan"),
    "family_of": ("families", "family_of"),
    "fold": ("surgery", "fold_linears"),
    "load": ("models.checkpoint", "load_model"),
    "load_recipe": ("recipe", "load_recipe"),
    "measure": ("models.cost", "count_cost"),
    "run": ("pipeline", "run_recipe"),
    "save": ("models.checkpoint", "save_model"),
}

# ONNX Runtime (from 1.29 on) reports models and machine to its maker unless it is told not to before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# In a checkout, exporters, bench and recipes lie beside this folder; the installed package holds them inside.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "recipes" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

try:
    __version__ = version("vitcompress")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+checkout"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(f"vitcompress.{module}"), attribute)
    raise AttributeError(f"module 'vitcompress' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
