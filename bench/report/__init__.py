"""Reports of runs as tables, Markdown and JSON."""
