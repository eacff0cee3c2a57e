"""The results of a study: rows, comparisons of rows, and tables of both; study.json and study.md."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from vitcompress.bench import machine
from vitcompress.bench.report import run as reports
from vitcompress.io.files import read_json, write_json, write_text
from vitcompress.io.run_folder import RunFolder
from vitcompress.io.text import NOT_MEASURED, Table, format_count, format_percent
from vitcompress.pipeline.study.runs import Run
from vitcompress.pipeline.study.spec import Row, Study
from vitcompress.training.metrics import mcnemar

JSON, MARKDOWN = "study.json", "study.md"
SIGNIFICANT = 0.05  # a corrected p-value below it counts as a difference
HOW_PAIRS_ARE_COMPARED = (
    "The difference for every seed, and McNemar's exact test over the test images of all seeds together. All seeds use "
    "the same images, and models of one seed start from one dense model, so the p-value holds for these images and "
    "seeds only. It is corrected for the number of pairs (Holm 1979). `verdict`: a difference of the same sign for "
    "every seed with a corrected p-value below 0.05, else `within noise`."
)


def write_results(folder: Path, study: Study, runs: Sequence[Run], speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Write study.json and study.md; returns the content of study.json, which has no paths."""
    reported: dict[str, Any] = {run.name: reports.read_report(run.folder) for run in runs}
    records = [_run_record(run, reported[run.name], speed) for run in runs]
    rows = [_row_record(row, [record for record in records if record["row"] == row.name]) for row in study.rows]
    first, dense = reported[runs[0].name], dict[int, dict[str, Any]]()
    for run in runs:
        accuracy = reported[run.name]["accuracy"]["dense"]
        dense[run.seed] = {"seed": run.seed, "correct": accuracy["correct"], "total": accuracy["total"]}
    result = {
        "study": study.name,
        "summary": study.summary,
        "epochs": study.epochs,
        "model": {key: first["plan"][key] for key in ("arch", "arch_args")},  # the dense model of all rows
        "seeds": len(dense),
        "dense": {"seeds": list(dense.values()), **_spread(list(dense.values())), "cost": first["cost"]["dense"]},
        "rows": rows,
        "pairs": compare_rows(rows, _correct_images(runs, records)),
        "runs": records,
        "speed": None if speed is None else dict(speed),
        "trained_on": machine.facts(),
    }
    write_text(folder / MARKDOWN, markdown(result))
    write_json(folder / JSON, result)
    return result


# ----------------------------------------------------------------------------------------------------------------- rows


def _run_record(run: Run, report: Mapping[str, Any], speed: Mapping[str, Any] | None) -> dict[str, Any]:
    """One row with one seed: counts, cost, speed relative to the dense model, what was removed and kept."""
    accuracy, cost, plan = report["accuracy"]["compressed"], report["cost"], report["plan"]
    ratio = next((r for r in (speed or {}).get("ratios", ()) if r["b"] == run.name), None)
    # The exported file that was measured must classify as many images correctly as the model.
    same_accuracy = speed is None or bool(speed["correct"][run.name] == accuracy["correct"])
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
        "passed": report["verify"]["passed"] and same_accuracy,
        "removed": plan["removed"],
        "folded": plan["folded"],
        "heads": plan["heads"],
        "kept": {space: len(channels) for space, channels in plan["kept"].items()},
    }


def _spread(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample standard deviation (None for one seed) of top-1 over seeds, as shares."""
    shares = [seed["correct"] / seed["total"] for seed in seeds]
    return {"top1_mean": fmean(shares), "top1_std": stdev(shares) if len(shares) > 1 else None}


def _row_record(row: Row, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row over all seeds: sums of counts, means of the rest, the geometric mean of speed-ups."""
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


def compare_rows(
    rows: Sequence[Mapping[str, Any]], correct: Mapping[str, Sequence[np.ndarray]]
) -> list[dict[str, Any]]:
    """Every row compared with the row of nearest MACs on each of its `against` curves; see HOW_PAIRS_ARE_COMPARED.

    correct: row name -> for every seed, a mask of the correctly classified test images.
    """
    pairs = []
    for row in rows:
        for curve in row["against"]:
            rivals = [other for other in rows if other["curve"] == curve]
            rival = min(rivals, key=lambda other: abs(other["macs"] - row["macs"]))
            pairs.append(_compare_pair(row, rival, correct))
    for pair, adjusted in zip(pairs, correct_p_values([pair["p_value"] for pair in pairs]), strict=True):
        same_sign = len({np.sign(difference) for difference in pair["differences"]}) == 1
        better = "better" if pair["mean"] > 0 else "worse"
        pair |= {"p_holm": adjusted, "verdict": better if same_sign and adjusted < SIGNIFICANT else "within noise"}
    return pairs


def _compare_pair(
    row: Mapping[str, Any], rival: Mapping[str, Any], correct: Mapping[str, Sequence[np.ndarray]]
) -> dict[str, Any]:
    ours, theirs = correct[row["row"]], correct[rival["row"]]
    differences = [float(a.mean() - b.mean()) for a, b in zip(ours, theirs, strict=True)]
    test = mcnemar(np.concatenate(ours), np.concatenate(theirs))
    return {
        "row": row["row"],
        "against": rival["row"],
        "macs_ratio": [row["macs_ratio"], rival["macs_ratio"]],
        "differences": differences,
        "mean": fmean(differences),
        "std": stdev(differences) if len(differences) > 1 else None,
        "only_row": test.only_a,
        "only_against": test.only_b,
        "p_value": test.p_value,
    }


def _correct_images(runs: Sequence[Run], records: Sequence[Mapping[str, Any]]) -> dict[str, list[np.ndarray]]:
    masks: dict[str, list[np.ndarray]] = {}
    for run, record in zip(runs, records, strict=True):
        mask = np.ones(record["total"], bool)
        mask[read_json(RunFolder(run.folder).mistakes)["compressed"]] = False
        masks.setdefault(run.row.name, []).append(mask)
    return masks


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979, Scandinavian Journal of Statistics 6)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


# --------------------------------------------------------------------------------------------------------------- tables


def row_table(study: Mapping[str, Any]) -> Table:
    """One line per row of the study, the dense model first.

    `before recovery` is the held-out accuracy of the pruned model before the final fine-tuning, but after the training
    of a step that trains. `accuracy` is on the test images.
    """
    dense = study["dense"]
    speed = "1" if study["speed"] else NOT_MEASURED
    counts = [sum(seed[key] for seed in dense["seeds"]) for key in ("correct", "total")]
    first = ("dense", "", _format_accuracy(dense), f"{counts[0]} of {counts[1]}", *_sizes(dense["cost"]), "1", speed)
    rows = [
        (
            row["title"],
            "" if row["before_recovery"] is None else format_percent(row["before_recovery"]),
            _format_accuracy(row),
            f"{row['correct']} of {row['total']}",
            *_sizes(row),
            _format_spread(row["macs_ratio"], row["macs_ratio_range"]),
            NOT_MEASURED if row["speedup"] is None else _format_spread(row["speedup"], row["speedup_range"]),
        )
        for row in study["rows"]
    ]
    columns = ("row", "before recovery", "accuracy", "correct", "parameters", "MACs", "MACs ratio", "speed-up")
    return Table(f"{study['study']}: {study['seeds']} seeds, {study['epochs']} epochs each", columns, (first, *rows))


def pair_table(study: Mapping[str, Any]) -> Table:
    """One line per comparison; the difference of their accuracies in percentage points."""
    titles = {row["row"]: row["title"] for row in study["rows"]}
    rows = [
        (
            titles[pair["row"]],
            titles[pair["against"]],
            "{:.2f} / {:.2f}".format(*pair["macs_ratio"]),
            f"{100 * pair['mean']:+.1f}" + ("" if pair["std"] is None else f" ± {100 * pair['std']:.1f}"),
            f"{pair['only_row']} / {pair['only_against']}",
            f"{pair['p_holm']:.2g}",
            pair["verdict"],
        )
        for pair in study["pairs"]
    ]
    columns = ("row", "against", "MACs ratios", "points", "only one correct", "p (Holm)", "verdict")
    return Table("Pairs", columns, tuple(rows))


def markdown(study: Mapping[str, Any]) -> str:
    """The study as one page."""
    parts = [f"# Study: {study['study']}", study["summary"], row_table(study).markdown()]
    parts += ["## Pairs", pair_table(study).markdown(), HOW_PAIRS_ARE_COMPARED]
    return "\n\n".join(parts) + "\n"


def _format_accuracy(row: Mapping[str, Any]) -> str:
    spread = "" if row["top1_std"] is None else f" ± {100 * row['top1_std']:.1f}"
    return format_percent(row["top1_mean"]).replace(" %", f"{spread} %")


def _sizes(row: Mapping[str, Any]) -> tuple[str, str]:
    return format_count(row["params"]), format_count(row["macs"])


def _format_spread(value: float, ends: Sequence[float]) -> str:
    """`0.55`, or `0.55 (0.53 to 0.57)` if seeds differ in the digits shown."""
    low, high = (f"{end:.2f}" for end in ends)
    return f"{value:.2f}" if low == high else f"{value:.2f} ({low} to {high})"
