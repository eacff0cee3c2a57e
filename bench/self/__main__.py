"""Print one line per result, and write all of them with every sample to a JSON file.

Compared measurements are interleaved. Weights are random where no time depends on them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import click
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
SUMMARIES = "\n".join(f"{name}: {str(part.__doc__).splitlines()[0]}" for name, part in PARTS.items())


@click.command(help="Measure the real gain of pruning: these parts, default all.", epilog=f"\b\nparts:\n{SUMMARIES}")
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--batch", type=click.IntRange(1), help=f"images per run (default: {Options.batch})")
@click.option("--runs", type=click.IntRange(1), help=f"timed runs (default: {Options.runs})")
@click.option("--threads", type=click.IntRange(1), help="threads of one call of a runtime (default: the runtime's)")
@click.option("--out", type=Path, default="bench/results/speed.json", show_default=True, help="file, or folder")
def main(parts: tuple[str, ...], out: Path, **options: int | None) -> None:
    """Run the parts in this order, and write the file after every line, so that an error loses no result."""
    parts = parts or tuple(PARTS)
    out = out if out.suffix == ".json" else out / f"speed-{'-'.join(parts)}.json"
    set_here = {name: value for name, value in options.items() if value is not None}
    settings: dict[str, object] = {"parts": list(parts), "set": set_here}
    lines: list[Line] = []
    _write(out, lines, settings)  # fails now if the file cannot be written
    for part in parts:
        for line in PARTS[part](Options(**set_here)):
            click.echo(describe(line))
            lines.append(line)
            _write(out, lines, settings)
    click.echo(f"written to {out}")


def _write(path: Path, lines: list[Line], settings: dict[str, object]) -> None:
    state = {"load_average": machine.cpu_state()["load_average"], "torch_threads": torch.get_num_threads()}
    write_json(path, {"figures": lines, "machine": environment.facts(), **state, "settings": settings})


if __name__ == "__main__":
    main()
