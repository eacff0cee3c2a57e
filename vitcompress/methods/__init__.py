"""Methods: what to remove. Their `options` import no torch; the table of methods does, and is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitcompress.methods.base import Method
    from vitcompress.methods.table import METHODS, find_method

__all__ = ["METHODS", "Method", "find_method"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("vitcompress.methods.table"), name)
    raise AttributeError(f"module 'vitcompress.methods' has no attribute {name!r}")
