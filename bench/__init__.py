"""Measuring models: timing (samples), suite (A/B over artifacts), report (tables, Markdown, plots)."""
