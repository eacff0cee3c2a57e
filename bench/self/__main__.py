"""Print one line per figure and write all of them, with every sample, to a JSON file.

Everything that is compared takes turns. Weights are random, as no time depends on them.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitcompress.bench import machine
from vitcompress.bench.self import (
    dense,
    exploration,
    exporters,
    gates,
    gpu,
    harness,
    importance,
    realised,
    rtx,
    screens,
    slicing,
    widths,
)
from vitcompress.bench.self.parts import Options, Part, text
from vitcompress.io.files import write_json

# To add a part: a file beside this one with `run`, and a line here.
PARTS: dict[str, Part] = {
    "gates": gates.run,
    "harness": harness.run,
    "realised": realised.run,
    "dense": dense.run,
    "export": exporters.run,
    "rtx": rtx.run,
    "widths": widths.run,
    "importance": importance.run,
    "screens": screens.run,
    "exploration": exploration.run,
    "slicing": slicing.run,
    "gpu": gpu.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in the order they are asked for. Each line is written at once, whatever stops the rest."""
    asked = _parsed(arguments)
    lines: list[dict[str, Any]] = []
    out = _file(asked.out, asked.parts)
    with tempfile.TemporaryDirectory() as folder:
        batch, runs = asked.batch or Options.batch, asked.runs or Options.runs
        given = asked.batch, asked.runs
        options = Options(Path(folder), asked.arch, batch, runs, asked.threads, given)
        _write(out, lines, asked.parts, options)  # a place that cannot be written fails now
        for part in asked.parts:
            for line in PARTS[part](options):
                _say(text(line))
                lines.append(line)
                _write(out, lines, asked.parts, options)  # a later error must not lose hours of measuring
    _say(f"written to {out}")
    return 0


def _write(out: Path, lines: Sequence[dict[str, Any]], parts: Sequence[str], options: Options) -> None:
    about = {
        "machine": machine.facts(),
        "load_average": machine.load_average(),
        "torch_threads": torch.get_num_threads(),
    }
    settings = {key: value for key, value in asdict(options).items() if key != "folder"}
    write_json(out, {"figures": lines, **about, "settings": {"parts": parts, **settings}})


def _file(out: Path, parts: Sequence[str]) -> Path:
    """The file itself; in a folder one named after the parts and what they ran on."""
    where = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu"
    return out if out.suffix == ".json" else out / f"speed-{'-'.join(parts)}-{where}.json"


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = [f"{name}: {str(sys.modules[part.__module__].__doc__).splitlines()[0]}" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m vitcompress.bench.self",
        description="What vitcompress itself costs, and what pruning really gains.",
        epilog="parts:\n  " + "\n  ".join(about),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options(Path())
    parser.add_argument(
        "parts",
        nargs="*",
        default=[name for name in PARTS if name != "gpu"],
        help=f"which of {', '.join(PARTS)} (default: all but gpu)",
    )
    parser.add_argument("--arch", default=default.arch, help="model of the gates (default: %(default)s)")
    parser.add_argument("--batch", type=int, help=f"images per run (default: {default.batch}; gpu: 256)")
    parser.add_argument("--runs", type=int, help=f"timed runs (default: {default.runs}; gpu: 100)")
    parser.add_argument("--threads", type=int, help="threads of a runtime's call (default: the runtime's)")
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/speed.json"), help="file, or folder (%(default)s)"
    )
    found = parser.parse_args(arguments)
    for name in ("batch", "runs", "threads"):
        if (value := getattr(found, name)) is not None and value < 1:
            parser.error(f"--{name} must be 1 or more, got {value}")
    if unknown := set(found.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return found


def _say(said: str) -> None:
    sys.stdout.write(said + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
