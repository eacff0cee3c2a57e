"""Print one line per result, and write all of them with every sample to a JSON file.

Compared measurements are interleaved. Weights are random where no time depends on them.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from vitcompress.bench import environment, machine
from vitcompress.bench.self import speed
from vitcompress.bench.self.speed import Line, Options, describe
from vitcompress.io.files import write_json

# Every part yields a Line per result; the first line of its docstring is its help text.
PARTS: dict[str, Callable[[Options], Iterator[Line]]] = {
    "realised": speed.run_pruned,
    "dense": speed.run_dense,
    "int8": speed.run_int8,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in this order, and write the file after every line, so that an error loses no result."""
    args = _parse(arguments)
    out = args.out if args.out.suffix == ".json" else args.out / f"speed-{'-'.join(args.parts)}.json"
    set_here = {name: value for name in vars(Options()) if (value := getattr(args, name)) is not None}
    settings: dict[str, object] = {"parts": args.parts, "set": set_here}
    lines: list[Line] = []
    _write(out, lines, settings)  # fails now if the file cannot be written
    for part in args.parts:
        for line in PARTS[part](Options(**set_here)):
            sys.stdout.write(f"{describe(line)}\n")
            sys.stdout.flush()
            lines.append(line)
            _write(out, lines, settings)
    sys.stdout.write(f"written to {out}\n")
    return 0


def _write(path: Path, lines: list[Line], settings: dict[str, object]) -> None:
    state = {"load_average": machine.cpu_state()["load_average"], "torch_threads": torch.get_num_threads()}
    write_json(path, {"figures": lines, "machine": environment.facts(), **state, "settings": settings})


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summaries = [f"{name}: {str(part.__doc__).splitlines()[0]}" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m vitcompress.bench.self",
        description="Measure the cost of vitcompress itself and the real gain of pruning.",
        epilog="parts:\n  " + "\n  ".join(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", default=[*PARTS], help="which parts to run (default: all)")
    parser.add_argument("--batch", type=_count, help=f"images per run (default: {Options.batch})")
    parser.add_argument("--runs", type=_count, help=f"timed runs (default: {Options.runs})")
    parser.add_argument("--threads", type=_count, help="threads of one call of a runtime (default: the runtime's)")
    out = Path("bench/results/speed.json")
    parser.add_argument("--out", type=Path, default=out, help="file, or folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
