"""Tables and curves of the depth-pruning methods, from the JSON files of a step's folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport, Table, table

Row = Mapping[str, Any]
CHAINS = ("dense", "attention_*", "activation_*", "interleaved_*")


def report(folder: Path) -> StepReport:
    """Tables in the order of the step's work, and curves; none for what it did not measure."""
    data = {name: read_json(path) for name in TABLES if (path := folder / f"{name}.json").is_file()}
    tables = [TABLES[name](content) for name, content in data.items()]
    charts = [CHARTS[name](data[name]) for name in CHARTS if name in data]
    if rows := _first_entropies(folder):
        choice = read_json(folder / "choice.json") if (folder / "choice.json").is_file() else {}
        charts.insert(0, _entropy_chart(rows, choice))
    if "search" in data:
        charts.insert(1, _search_chart(read_json(folder / "search_epochs.json"), data["search"].get("sites", {})))
    if chains := list(_read_chains(folder)):
        tables.insert(0, _collection(chains))
        charts.insert(0, _collection_chart(chains))
    return StepReport(tables, charts=charts)


def _read_chains(folder: Path) -> Iterator[dict[str, Any]]:
    for pattern in CHAINS:
        for path in sorted(folder.glob(f"{pattern}.json")):
            yield read_json(path)


def _collection(records: Sequence[Row]) -> Table:
    columns = "chain, attentions removed, activations removed, last removed, before fine-tuning %, after %"
    rows = [
        (
            r["chain"],
            len(r["attention"]),
            len(r["activation"]),
            r["removed"] or "",
            f"{r['accuracy_before']:.2f}",
            f"{r['accuracy']:.2f}",
        )
        for r in records
    ]
    return table("HetDPT step 1: held-out accuracies, the data of the predictor", columns, rows)


def _allocation(allocation: Row) -> Table:
    columns = (
        "attentions + activations, predicted accuracy, below the best, within the error, wins with two points left out"
    )
    rows = [
        (
            _name_split(s, allocation["chosen"]),
            f"{s['prediction']:.2f}",
            f"{s['gap']:.2f}",
            "yes" if s["near_tie"] else "no",
            f"{100 * s['jackknife']:.0f} %",
        )
        for s in allocation["splits"]
    ]
    fit = f"degree {allocation['polynomial']['degree']}, cross-validation error {allocation['rmse']:.2f}"
    return table(f"HetDPT step 1: splits of the budget ({fit})", columns, rows)


def _name_split(split: Row, chosen: Sequence[int]) -> str:
    counts = [split["attention"], split["activation"]]
    return f"{counts[0]} + {counts[1]}{' (chosen)' if counts == list(chosen) else ''}"


def _search(result: Row) -> Table:
    rows = zip(result["removal_epochs"], result["order"], strict=True)
    return table("HetDPT step 2: order of removal", "after epoch, layer", rows)


def _entropies(content: Any) -> Table:
    """The chosen layer of each greedy round, or all layers if they were measured once."""
    rounds = content if isinstance(content, list) else [content]
    greedy = len(rounds) > 1
    chosen = [min(r["rows"], key=lambda row: row["score"]) for r in rounds] if greedy else rounds[0]["rows"]
    rows = [
        (
            row["site"],
            f"{row['entropy']:.3f}",
            f"{row['transfer_entropy']:.4f}",
            "" if row["deviation"] is None else f"{row['deviation']:.4f}",
            f"{row['accuracy']:.1f}",
        )
        for row in chosen
    ]
    columns = "layer, entropy without it, transfer entropy, its deviation (bootstrap), top-1 without it %"
    title = "Transfer entropy: the layer of each round" if greedy else "Transfer entropy of each layer alone"
    return table(title, columns, rows)


def _gradients(rows: Sequence[Row]) -> Table:
    cells = [(row["site"], f"{row['magnitude']:.2e}", f"{row['mean']:.2e}") for row in rows]
    return table("Gradient disparity: d loss / d mask", "layer, mean magnitude, mean", cells)


def _recovery(rows: Sequence[Row]) -> Table:
    cells = [(row["site"], *(f"{row[key]:.1f}" for key in ("dense", "before", "after"))) for row in rows]
    columns = "layer removed alone, dense %, right after removal %, after fine-tuning %"
    return table("Recovery asymmetry: held-out accuracy", columns, cells)


# --------------------------------------------------------------------------------------------------------------- curves


def _collection_chart(records: Sequence[Row]) -> Chart:
    chains: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        count = len(record["attention"]) + len(record["activation"])
        chains.setdefault(record["chain"], []).append((count, record["accuracy"]))
    start = chains.pop("dense", [])
    lines = [_line(name, [*start, *points]) for name, points in chains.items()]
    return Chart("HetDPT step 1: chains of removals", "layers removed", "held-out top-1 after fine-tuning, %", lines)


def _line(name: str, points: Sequence[tuple[float, float]]) -> Line:
    return Line(name, [x for x, _ in points], [y for _, y in points])


def _first_entropies(folder: Path) -> list[Row]:
    """The rows of every layer alone in the model that the step received."""
    paths = [folder / f"{name}.json" for name in ("transfer_entropy", "te_attention_01", "te_activation_01")]
    contents = [read_json(path) for path in paths if path.is_file()]
    return [row for content in contents for row in (content[0] if isinstance(content, list) else content)["rows"]]


def _entropy_chart(rows: Sequence[Row], choice: Mapping[str, list[int]]) -> Chart:
    lines = []
    for kind, own in _by_kind(rows).items():
        removed = [row["index"] in choice.get(kind, ()) for row in own]
        lines.append(Line(kind, [row["index"] for row in own], [row["score"] for row in own], removed))
    positive = all(row["score"] > 0 for row in rows)  # that of the first block is many times the others
    return Chart("transfer entropy without each layer alone", "block", "score, nats", lines, log=positive)


def _search_chart(records: Sequence[Row], sites: Mapping[str, Row]) -> Chart:
    """Scores by epoch; a line ends when its layer is removed."""
    ends = {record["removed"]: record["epoch"] for record in records if record["removed"]}
    lines = []
    for name in records[0]["scores"]:
        own = [r for r in records if r["epoch"] <= ends.get(name, r["epoch"])]
        epochs, scores = [r["epoch"] + 1 for r in own], [r["scores"][name] for r in own]
        site = sites.get(name, {"kind": "layer", "index": name})
        mark = str(site["index"]) if name in ends else ""
        lines.append(Line(name, epochs, scores, [name in ends] * len(own), mark, site["kind"]))
    return Chart("HetDPT step 2: learnable scores (numbers: blocks whose layer is removed)", "epoch", "score", lines)


def _gradient_chart(rows: Sequence[Row]) -> Chart:
    lines = [_line(kind, [(r["index"], r["magnitude"]) for r in own]) for kind, own in _by_kind(rows).items()]
    return Chart("HetDPT: gradient disparity", "block", "mean |d loss / d m|", lines, log=True)


def _recovery_chart(rows: Sequence[Row]) -> Chart:
    """Curves before fine-tuning are faint, like removed layers."""
    lines = []
    for kind, own in _by_kind(rows).items():
        before, after = (_line(kind, [(r["index"], r[state]) for r in own]) for state in ("before", "after"))
        lines += [replace(before, gone=[True] * len(own)), after]
    title = "HetDPT: recovery asymmetry (faint: not fine-tuned)"
    return Chart(title, "block without its layer", "held-out top-1, %", lines)


def _by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}


TABLES: dict[str, Callable[[Any], Table]] = {
    "gradient_disparity": _gradients,
    "recovery_asymmetry": _recovery,
    "transfer_entropy": _entropies,
    "allocation": _allocation,
    "search": _search,
}
CHARTS: dict[str, Callable[[Any], Chart]] = {
    "gradient_disparity": _gradient_chart,
    "recovery_asymmetry": _recovery_chart,
}
