"""A script for test_limited_exports: exports a run folder to the places that are given, and says how each one ended.

    python limited_exports.py RUN FORMAT=PLACE ...

Prints one line of JSON for each: the exit code of `vitcompress export`, and its error as `--json` gives it.
"""

import json
import sys

from click.testing import CliRunner

from vitcompress import cli


def main(run: str, wishes: list[str]) -> None:
    for wish in wishes:
        name, _, place = wish.partition("=")
        words = ["export", run, "--format", name, "--out", place]
        done = CliRunner().invoke(cli.main, [*words, *(["--sm", "89"] if name == "trt-rtx" else []), "--json"])
        line = {"code": done.exit_code, "traceback": "Traceback" in done.output, **json.loads(done.stdout)}
        print(json.dumps(line))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
