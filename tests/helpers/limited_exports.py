"""A script for test_limited_exports: export a run folder to several places, and print how each export ended.

    python limited_exports.py RUN FORMAT=PLACE ...

Prints one line of JSON per export: the exit code of `vitcompress export`, and its error from `--json`.
"""

import json
import sys

from click.testing import CliRunner

from vitcompress import cli


def main(run: str, targets: list[str]) -> None:
    for target in targets:
        name, _, place = target.partition("=")
        words = ["export", run, "--format", name, "--out", place]
        done = CliRunner().invoke(cli.main, [*words, *(["--sm", "89"] if name == "trt-rtx" else []), "--json"])
        line = {"code": done.exit_code, "traceback": "Traceback" in done.output, **json.loads(done.stdout)}
        print(json.dumps(line))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
