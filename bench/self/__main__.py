"""Print one line per result, and write all of them with every sample to a JSON file.

Compared measurements are interleaved. Weights are random where no time depends on them.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from vitcompress.bench import machine
from vitcompress.bench.self import methods, processes, runtimes
from vitcompress.bench.self.parts import Line, Options, describe
from vitcompress.io.files import write_json

# Every part yields a Line per result; the first line of its docstring is its help text.
PARTS: dict[str, Callable[[Options], Iterator[Line]]] = {
    "gates": methods.time_gates,
    "harness": runtimes.time_harness,
    "realised": runtimes.run_depth,
    "dense": runtimes.run_dense,
    "export": processes.run_exports,
    "rtx": processes.run_rtx,
    "widths": runtimes.run_widths,
    "importance": methods.run_exact,
    "screens": methods.run_proxies,
    "exploration": methods.time_exploration,
    "slicing": processes.run_slicing,
    "gpu": runtimes.run_gpu,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in this order, and write the file after every line, so that an error loses no result."""
    args = _parse(arguments)
    gpu_name = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu"
    out = args.out if args.out.suffix == ".json" else args.out / f"speed-{'-'.join(args.parts)}-{gpu_name}.json"
    with tempfile.TemporaryDirectory() as folder:
        counts = args.batch or Options.batch, args.runs or Options.runs
        options = Options(Path(folder), args.arch, *counts, args.threads, explicit=(args.batch, args.runs))
        settings = {name: getattr(options, name) for name in ("arch", "batch", "runs", "threads")}
        settings |= {"parts": args.parts, "given": options.explicit}
        lines: list[Line] = []
        _write(out, lines, settings)  # fails now if the file cannot be written
        for part in args.parts:
            for line in PARTS[part](options):
                sys.stdout.write(f"{describe(line)}\n")
                sys.stdout.flush()
                lines.append(line)
                _write(out, lines, settings)
    sys.stdout.write(f"written to {out}\n")
    return 0


def _write(path: Path, lines: list[Line], settings: dict[str, object]) -> None:
    state = {"load_average": machine.load_average(), "torch_threads": torch.get_num_threads()}
    write_json(path, {"figures": lines, "machine": machine.facts(), **state, "settings": settings})


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summaries = [f"{name}: {str(part.__doc__).splitlines()[0]}" for name, part in PARTS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m vitcompress.bench.self",
        description="Measure the cost of vitcompress itself and the real gain of pruning.",
        epilog="parts:\n  " + "\n  ".join(summaries),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = [name for name in PARTS if name != "gpu"]
    parser.add_argument("parts", nargs="*", default=default, help="which parts to run (default: all but gpu)")
    parser.add_argument("--arch", default=Options.arch, help="model of parts with one model (default: %(default)s)")
    counts = ("batch", "runs", "threads")
    parser.add_argument("--batch", type=int, help=f"images per run (default: {Options.batch}; gpu: 256)")
    parser.add_argument("--runs", type=int, help=f"timed runs (default: {Options.runs}; gpu: 100)")
    parser.add_argument("--threads", type=int, help="threads of one call of a runtime (default: the runtime's)")
    out = Path("bench/results/speed.json")
    parser.add_argument("--out", type=Path, default=out, help="file, or folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    for name in counts:
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be 1 or more, got {value}")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
