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
from vitcompress.bench.self import dense, gpu, harness, importance, processes, realised, screens, training_steps
from vitcompress.bench.self.parts import Line, Options, describe
from vitcompress.io.files import write_json

# Every part yields a Line per result; the first line of its docstring is its help text.
PARTS: dict[str, Callable[[Options], Iterator[Line]]] = {
    "gates": training_steps.time_gates,
    "harness": harness.run,
    "realised": realised.run_depth,
    "dense": dense.run,
    "export": processes.run_exports,
    "rtx": processes.run_rtx,
    "widths": realised.run_widths,
    "importance": importance.run,
    "screens": screens.run,
    "exploration": training_steps.time_exploration,
    "slicing": processes.run_slicing,
    "gpu": gpu.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in this order, and write the file after every line, so that an error loses no result."""
    args = _parse(arguments)
    lines: list[Line] = []
    gpu_name = torch.cuda.get_device_name().replace(" ", "-").lower() if torch.cuda.is_available() else "cpu"
    out = args.out if args.out.suffix == ".json" else args.out / f"speed-{'-'.join(args.parts)}-{gpu_name}.json"
    explicit = args.batch, args.runs
    with tempfile.TemporaryDirectory() as folder:
        batch, runs = args.batch or Options.batch, args.runs or Options.runs
        options = Options(Path(folder), args.arch, batch, runs, args.threads, explicit)
        _write(out, lines, args.parts, options)  # fails now if the file cannot be written
        for part in args.parts:
            for line in PARTS[part](options):
                sys.stdout.write(describe(line) + "\n")
                sys.stdout.flush()
                lines.append(line)
                _write(out, lines, args.parts, options)
    sys.stdout.write(f"written to {out}\n")
    return 0


def _write(out: Path, lines: Sequence[Line], parts: Sequence[str], options: Options) -> None:
    settings = {key: getattr(options, key) for key in ("arch", "batch", "runs", "threads")}
    content = {
        "figures": lines,
        "machine": machine.facts(),
        "load_average": machine.load_average(),
        "torch_threads": torch.get_num_threads(),
        "settings": {"parts": parts, **settings, "given": options.explicit},
    }
    write_json(out, content)


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
    parser.add_argument("--batch", type=int, help=f"images per run (default: {Options.batch}; gpu: 256)")
    parser.add_argument("--runs", type=int, help=f"timed runs (default: {Options.runs}; gpu: 100)")
    parser.add_argument("--threads", type=int, help="threads of one call of a runtime (default: the runtime's)")
    out = Path("bench/results/speed.json")
    parser.add_argument("--out", type=Path, default=out, help="file, or folder (default: %(default)s)")
    args = parser.parse_args(arguments)
    for name in ("batch", "runs", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} must be 1 or more, got {value}")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
