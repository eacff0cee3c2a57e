"""Exporters write a model in the format of a runtime, and runners open what they wrote."""

from vitcompress.exporters.runtimes import EXPORTERS, available_exporter, exported_files, exporter_of, find_exporter

__all__ = ["EXPORTERS", "available_exporter", "exported_files", "exporter_of", "find_exporter"]
