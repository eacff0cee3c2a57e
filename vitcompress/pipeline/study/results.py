"""What a study found: one entry per row, one per pair of rows that are held against each other, tables, study.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from vitcompress.bench import machine
from vitcompress.bench.report import run as reports
from vitcompress.io.files import read_json, write_json, write_text
from vitcompress.io.text import NOT_MEASURED, Table, big, percent
from vitcompress.pipeline.finalize import MISTAKES
from vitcompress.pipeline.study.runs import Run
from vitcompress.pipeline.study.spec import Row, Study
from vitcompress.training.metrics import mcnemar

JSON, MARKDOWN = "study.json", "study.md"
CERTAIN = 0.05  # a difference is said to be one when its p-value, corrected for the number of pairs, is below
HOW_PAIRS_ARE_JUDGED = (
    "The difference of every seed, and McNemar's exact test over the test images of all seeds together. These are the "
    "same images for every seed, and models of one seed descend from one dense model, so the p-value speaks of these "
    "images and seeds and of no others; it is corrected for the number of pairs (Holm 1979). `verdict`: a difference "
    "that has the same sign with every seed and a corrected p-value below 0.05, else `within noise`."
)


def write(folder: Path, study: Study, runs: Sequence[Run], speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """study.json and study.md; the content of study.json."""
    found = collected(study, runs, speed)
    write_text(folder / MARKDOWN, markdown(found))
    write_json(folder / JSON, found)
    return found


def collected(study: Study, runs: Sequence[Run], speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything as plain data, without paths."""
    single = {run.name: _run(run, speed) for run in runs}
    rows = [_row(row, [run for run in single.values() if run["row"] == row.name]) for row in study.rows]
    dense = [_dense(run) for run in {run.seed: run for run in runs}.values()]
    first = reports.read(runs[0].folder)
    return {
        "study": study.name,
        "summary": study.summary,
        "epochs": study.epochs,
        "model": {key: first["plan"][key] for key in ("arch", "arch_args")},  # the dense one of all rows
        "seeds": len(dense),
        "dense": {"seeds": dense, **_spread(dense), "cost": first["cost"]["dense"]},
        "rows": rows,
        "pairs": pairs(runs, rows),
        "runs": list(single.values()),
        "speed": None if speed is None else dict(speed),
        "trained_on": machine.facts(),
    }


# ----------------------------------------------------------------------------------------------------------------- rows


def _run(run: Run, speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """One row with one seed: counts, cost, speed against the dense model, what was removed, what was kept."""
    report = reports.read(run.folder)
    accuracy, cost, plan = report["accuracy"]["compressed"], report["cost"], report["plan"]
    ratio = next((r for r in (speed or {}).get("ratios", ()) if r["b"] == run.name), None)
    return {
        "run": run.name,
        "row": run.row.name,
        "seed": run.seed,
        "correct": accuracy["correct"],
        "total": accuracy["total"],
        "params": cost["compressed"]["params"],
        "macs": cost["compressed"]["macs"],
        "macs_ratio": cost["compressed"]["macs"] / cost["dense"]["macs"],
        "before_recovery": (report["before_recovery"] or {}).get("pruned", {}).get("top1"),
        "speedup": None if ratio is None else {"median": ratio["median"], "ci95": ratio["ci95"]},
        "passed": report["verify"]["passed"] and _agrees(run, accuracy["correct"], speed),
        "removed": plan["removed"],
        "folded": plan["folded"],
        "heads": plan["heads"],
        "kept": {space: len(channels) for space, channels in plan["kept"].items()},
    }


def _agrees(run: Run, correct: int, speed: Mapping[str, Any] | None) -> bool:
    """Whether the file that was measured gets as many images right as the model; True where none was measured."""
    return speed is None or bool(speed["correct"][run.name] == correct)


def _dense(run: Run) -> dict[str, Any]:
    accuracy = reports.read(run.folder)["accuracy"]["dense"]
    return {"seed": run.seed, "correct": accuracy["correct"], "total": accuracy["total"]}


def _spread(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (of the sample, None of one) of top-1 over seeds, shares."""
    shares = [seed["correct"] / seed["total"] for seed in seeds]
    return {"top1_mean": fmean(shares), "top1_std": stdev(shares) if len(shares) > 1 else None}


def _row(row: Row, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row over all seeds: sums of counts, means of the rest."""
    before = [seed["before_recovery"] for seed in seeds if seed["before_recovery"] is not None]
    speedups = [seed["speedup"]["median"] for seed in seeds if seed["speedup"]]
    return {
        "row": row.name,
        "curve": row.curve,
        "title": row.title,
        "against": list(row.against),
        "correct": sum(seed["correct"] for seed in seeds),
        "total": sum(seed["total"] for seed in seeds),
        **_spread(seeds),
        **{key: fmean(seed[key] for seed in seeds) for key in ("params", "macs", "macs_ratio")},
        "macs_ratio_range": [end(seed["macs_ratio"] for seed in seeds) for end in (min, max)],
        "speedup": math.exp(fmean(map(math.log, speedups))) if speedups else None,
        "speedup_range": [min(speedups), max(speedups)] if speedups else None,
        "before_recovery": fmean(before) if len(before) == len(seeds) else None,
        "recovery_epochs": row.recipe.finetune.epochs,
    }


# ---------------------------------------------------------------------------------------------------------------- pairs


def pairs(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every row against the nearest row, by MACs, of each curve that it is held against; see HOW_PAIRS_ARE_JUDGED."""
    right = _right(runs)
    found = []
    for row in rows:
        for curve in row["against"]:
            rivals = [other for other in rows if other["curve"] == curve]
            rival = min(rivals, key=lambda other: abs(other["macs"] - row["macs"]))
            found.append(_pair(row, rival, right))
    for pair, adjusted in zip(found, holm([pair["p_value"] for pair in found]), strict=True):
        same_sign = len({np.sign(d) for d in pair["differences"]}) == 1
        better = "better" if pair["mean"] > 0 else "worse"
        pair |= {"p_holm": adjusted, "verdict": better if same_sign and adjusted < CERTAIN else "within noise"}
    return found


def _pair(
    row: Mapping[str, Any], rival: Mapping[str, Any], right: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, Any]:
    ours, theirs = right[row["row"]], right[rival["row"]]
    differences = [float(a.mean() - b.mean()) for a, b in zip(ours, theirs, strict=True)]
    test = asdict(mcnemar(np.concatenate(ours), np.concatenate(theirs)))
    return {
        "row": row["row"],
        "against": rival["row"],
        "macs_ratio": [row["macs_ratio"], rival["macs_ratio"]],
        "differences": differences,
        "mean": fmean(differences),
        "std": stdev(differences) if len(differences) > 1 else None,
        "only_row": test["only_a"],
        "only_against": test["only_b"],
        "p_value": test["p_value"],
    }


def _right(runs: Sequence[Run]) -> dict[str, list[np.ndarray]]:
    """Row -> for every seed, which test images it gets right."""
    found: dict[str, list[np.ndarray]] = {}
    for run in runs:
        total = reports.read(run.folder)["accuracy"]["compressed"]["total"]
        mask = np.ones(total, bool)
        mask[read_json(run.folder / "state" / MISTAKES)["compressed"]] = False
        found.setdefault(run.row.name, []).append(mask)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979, Scandinavian Journal of Statistics 6)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    found, worst = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - place) * p_values[index]))
        found[index] = worst
    return found


# --------------------------------------------------------------------------------------------------------------- tables


def table(found: Mapping[str, Any]) -> Table:
    """One line per row of the study, the dense model first. `before recovery` is on held-out images, accuracy on test
    images; of a step that trains what it prunes it is the accuracy after that training.
    """
    dense = found["dense"]
    speed = "1" if found["speed"] else NOT_MEASURED
    counts = [sum(seed[key] for seed in dense["seeds"]) for key in ("correct", "total")]
    first = ("dense", "", _accuracy(dense), f"{counts[0]} of {counts[1]}", *_sizes(dense["cost"]), "1", speed)
    rows = [
        (
            row["title"],
            "" if row["before_recovery"] is None else percent(row["before_recovery"]),
            _accuracy(row),
            f"{row['correct']} of {row['total']}",
            *_sizes(row),
            _range(row["macs_ratio"], row["macs_ratio_range"]),
            NOT_MEASURED if row["speedup"] is None else _range(row["speedup"], row["speedup_range"]),
        )
        for row in found["rows"]
    ]
    columns = ("row", "before recovery", "accuracy", "right", "parameters", "MACs", "MACs ratio", "times as fast")
    return Table(f"{found['study']}: {found['seeds']} seeds, {found['epochs']} epochs each", columns, (first, *rows))


def pair_table(found: Mapping[str, Any]) -> Table:
    """One line per pair."""
    titles = {row["row"]: row["title"] for row in found["rows"]}
    rows = [
        (
            titles[pair["row"]],
            titles[pair["against"]],
            "{:.2f} / {:.2f}".format(*pair["macs_ratio"]),
            _points(pair["mean"], pair["std"]),
            f"{pair['only_row']} / {pair['only_against']}",
            f"{pair['p_holm']:.2g}",
            pair["verdict"],
        )
        for pair in found["pairs"]
    ]
    columns = ("row", "against", "MACs ratios", "points", "only one right", "p (Holm)", "verdict")
    return Table("Pairs", columns, tuple(rows))


def markdown(found: Mapping[str, Any]) -> str:
    """The study as one page."""
    parts = [f"# Study: {found['study']}", found["summary"], table(found).markdown()]
    parts += ["## Pairs", pair_table(found).markdown(), HOW_PAIRS_ARE_JUDGED]
    return "\n\n".join(parts) + "\n"


def _accuracy(row: Mapping[str, Any]) -> str:
    spread = "" if row["top1_std"] is None else f" ± {100 * row['top1_std']:.1f}"
    return percent(row["top1_mean"]).replace(" %", f"{spread} %")


def _points(mean: float, std: float | None) -> str:
    return f"{100 * mean:+.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


def _sizes(row: Mapping[str, Any]) -> tuple[str, str]:
    return big(row["params"]), big(row["macs"])


def _range(value: float, ends: Sequence[float]) -> str:
    """`0.55`, or `0.55 (0.53 to 0.57)` where seeds differ by more than the last digit."""
    low, high = (f"{end:.2f}" for end in ends)
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low} to {high})"
