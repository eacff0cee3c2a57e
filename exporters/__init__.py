"""Exporters write a model in the format of a runtime, and runners open what they wrote; options import no torch."""
