"""Exporters write a model in the format of a runtime, and runners open what they wrote.

The options of exporters import no torch; the table of exporters does, and is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitcompress.exporters.runtimes import EXPORTERS, available_exporter, exported_files, exporter_of, find_exporter

__all__ = ["EXPORTERS", "available_exporter", "exported_files", "exporter_of", "find_exporter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("vitcompress.exporters.runtimes"), name)
    raise AttributeError(f"module 'vitcompress.exporters' has no attribute {name!r}")
