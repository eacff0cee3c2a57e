"""Tables and curves of the depth-pruning methods, from the JSON files of a step's folder."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from vitcompress.io.files import read_json
from vitcompress.io.text import Columns, Table
from vitcompress.methods.base import Chart, Line, StepReport

Row = Mapping[str, Any]
CHAINS = ("dense", "attention", "activation", "interleaved")


def report(folder: Path) -> StepReport:
    """Tables in the order of the step's work, and curves; none for what it did not measure."""
    data = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    data["chains"] = [data[name] for chain in CHAINS for name in data if name.rstrip("_0123456789") == chain]
    first = [data[name] for name in ("transfer_entropy", "te_attention_01", "te_activation_01") if name in data]
    data["alone"] = [row for rounds in first for row in (rounds[0] if isinstance(rounds, list) else rounds)["rows"]]
    return StepReport(
        tables=[build(data[name]) for name, build in TABLES.items() if data.get(name)],
        charts=[draw(data) for name, draw in CHARTS.items() if data.get(name)],
    )


def _entropies(content: Any) -> Table:
    """The chosen layer of each greedy round, or all layers if they were measured once."""
    rounds = content if isinstance(content, list) else [content]
    greedy = len(rounds) > 1
    columns: Columns = {
        "layer": "{site}",
        "entropy without it": "{entropy:.3f}",
        "transfer entropy": "{transfer_entropy:.4f}",
        "its deviation (bootstrap)": lambda row: "" if row["deviation"] is None else f"{row['deviation']:.4f}",
        "top-1 without it %": "{accuracy:.1f}",
    }
    title = "Transfer entropy: the layer of each round" if greedy else "Transfer entropy of each layer alone"
    chosen = [min(r["rows"], key=itemgetter("score")) for r in rounds] if greedy else rounds[0]["rows"]
    return Table.of(title, columns, chosen)


def _allocation(allocation: Row) -> Table:
    def name(split: Row) -> str:
        counts = [split["attention"], split["activation"]]
        return f"{counts[0]} + {counts[1]}{' (chosen)' if counts == allocation['chosen'] else ''}"

    columns: Columns = {
        "attentions + activations": name,
        "predicted accuracy": "{prediction:.2f}",
        "below the best": "{gap:.2f}",
        "within the error": lambda s: "yes" if s["near_tie"] else "no",
        "wins with two points left out": lambda s: f"{100 * s['jackknife']:.0f} %",
    }
    fit = f"degree {allocation['polynomial']['degree']}, cross-validation error {allocation['rmse']:.2f}"
    return Table.of(f"HetDPT step 1: splits of the budget ({fit})", columns, allocation["splits"])


COLLECTION: Columns = {
    "chain": "{chain}",
    "attentions removed": lambda record: len(record["attention"]),
    "activations removed": lambda record: len(record["activation"]),
    "last removed": lambda record: record["removed"] or "",
    "before fine-tuning %": "{accuracy_before:.2f}",
    "after %": "{accuracy:.2f}",
}
GRADIENTS = {"layer": "{site}", "mean magnitude": "{magnitude:.2e}", "mean": "{mean:.2e}"}
RECOVERY = {
    "layer removed alone": "{site}",
    "dense %": "{dense:.1f}",
    "right after removal %": "{before:.1f}",
    "after fine-tuning %": "{after:.1f}",
}
REMOVALS = {"after epoch": itemgetter(0), "layer": itemgetter(1)}
TABLES: dict[str, Callable[[Any], Table]] = {
    "chains": partial(Table.of, "HetDPT step 1: held-out accuracies, the data of the predictor", COLLECTION),
    "gradient_disparity": partial(Table.of, "Gradient disparity: d loss / d mask", GRADIENTS),
    "recovery_asymmetry": partial(Table.of, "Recovery asymmetry: held-out accuracy", RECOVERY),
    "transfer_entropy": _entropies,
    "allocation": _allocation,
    "search": lambda result: Table.of(
        "HetDPT step 2: order of removal", REMOVALS, zip(result["removal_epochs"], result["order"], strict=True)
    ),
}


def _collection_chart(data: Row) -> Chart:
    chains: dict[str, list[tuple[int, float]]] = {}
    for record in data["chains"]:
        count = len(record["attention"]) + len(record["activation"])
        chains.setdefault(record["chain"], []).append((count, record["accuracy"]))
    start = chains.pop("dense", [])
    curves = {name: list(zip(*start, *points, strict=True)) for name, points in chains.items()}
    lines = [Line(name, counts, accuracies) for name, (counts, accuracies) in curves.items()]
    return Chart("HetDPT step 1: chains of removals", "layers removed", "held-out top-1 after fine-tuning, %", lines)


def _entropy_chart(data: Row) -> Chart:
    lines = _lines(data["alone"], "score", lambda row: row["index"] in data.get("choice", {}).get(row["kind"], ()))
    positive = all(row["score"] > 0 for row in data["alone"])  # that of the first block is many times the others
    return Chart("transfer entropy without each layer alone", "block", "score, nats", lines, log=positive)


def _search_chart(data: Row) -> Chart:
    """Scores by epoch; a line ends when its layer is removed."""
    ends = {record["removed"]: record["epoch"] for record in data["search_epochs"] if record["removed"]}
    lines = []
    for name in data["search_epochs"][0]["scores"]:
        site = data["search"]["sites"][name]
        own = [record for record in data["search_epochs"] if record["epoch"] <= ends.get(name, record["epoch"])]
        epochs, scores = [record["epoch"] + 1 for record in own], [record["scores"][name] for record in own]
        mark = str(site["index"]) if name in ends else ""
        lines.append(Line(name, epochs, scores, [name in ends] * len(own), mark, site["kind"]))
    return Chart("HetDPT step 2: learnable scores (numbers: blocks whose layer is removed)", "epoch", "score", lines)


def _gradient_chart(data: Row) -> Chart:
    lines = _lines(data["gradient_disparity"], "magnitude")
    return Chart("HetDPT: gradient disparity", "block", "mean |d loss / d m|", lines, log=True)


def _recovery_chart(data: Row) -> Chart:
    """Curves before fine-tuning are faint, like removed layers."""
    before = _lines(data["recovery_asymmetry"], "before", lambda row: True)
    pairs = zip(before, _lines(data["recovery_asymmetry"], "after"), strict=True)
    title = "HetDPT: recovery asymmetry (faint: not fine-tuned)"
    return Chart(title, "block without its layer", "held-out top-1, %", [line for pair in pairs for line in pair])


def _lines(rows: Sequence[Row], key: str, gone: Callable[[Row], bool] = lambda row: False) -> list[Line]:
    """One curve per kind of layer: the values of `key` by block."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
    return [
        Line(kind, [row["index"] for row in own], [row[key] for row in own], list(map(gone, own)))
        for kind, own in kinds.items()
    ]


CHARTS: dict[str, Callable[[Row], Chart]] = {
    "chains": _collection_chart,
    "alone": _entropy_chart,
    "search": _search_chart,
    "gradient_disparity": _gradient_chart,
    "recovery_asymmetry": _recovery_chart,
}
