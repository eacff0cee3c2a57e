"""The files of a report: report.json, report.md, and report.html, which adds plots and loads nothing."""

import html
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

from markdown_it import MarkdownIt

from vitcompress.bench.plots.run import draw
from vitcompress.bench.report.records import Report
from vitcompress.bench.report.run import markdown
from vitcompress.errors import VitcompressError
from vitcompress.io.files import write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import escape_markdown

# The policy keeps browsers from loading or running anything, whatever names from outside contain.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid #ccc; padding: .2rem .6rem; vertical-align: top; }}
th, pre {{ background: #f4f4f4; }}
pre {{ padding: .8rem; overflow-x: auto; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
{body}</body>
</html>
"""


def write_report(folder: Path, report: Report) -> None:
    """Write the report of a run folder. Without matplotlib the page has no plots, and states why."""
    with TemporaryDirectory() as scratch:
        try:
            named = [(escape_markdown(plot.stem), b64encode(plot.read_bytes())) for plot in draw([folder], scratch)]
            plots = "\n\n".join(f"![{name}](data:image/png;base64,{data.decode()})" for name, data in named)
        except VitcompressError as error:
            plots = escape_markdown(f"No plots: {error.message}.")
    files, page = RunFolder(folder), markdown(report)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(f"{page}\n## Plots\n\n{plots}\n")
    write_text(files.html, PAGE.format(title=html.escape(report["recipe"]), body=body))
    write_text(files.markdown, page)
    write_json(files.report, dict(report))  # last: without it the run is not done
