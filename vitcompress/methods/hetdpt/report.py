"""What the depth-pruning methods measured on their way, as tables and curves for the report.

A table is plain data: {title, columns, rows}, every cell text. All comes from JSON that a step has left in its folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitcompress.io.files import read_json
from vitcompress.methods.base import Chart, Line, StepReport

Table = dict[str, Any]
CHAINS = ("dense", "attention_*", "activation_*", "interleaved_*")


def report(folder: Path) -> StepReport:
    """Tables and curves of what one step measured, from its `folder`."""
    return StepReport(tables(folder), charts=charts(folder))


def tables(folder: Path) -> list[Table]:
    """The tables of one step, in the order of its work; none for what it did not measure."""
    sources: tuple[tuple[str, Callable[[Any], Table]], ...] = (
        ("gradient_disparity", _gradients),
        ("recovery_asymmetry", _recovery),
        ("transfer_entropy", _entropies),
        ("allocation", _allocation),
        ("search", _search),
    )
    found = [make(read_json(path)) for name, make in sources if (path := folder / f"{name}.json").is_file()]
    collected = list(_collected(folder))
    return found if not collected else [_collection(collected), *found]


def _table(title: str, columns: str, rows: Sequence[Sequence[Any]]) -> Table:
    return {"title": title, "columns": columns.split(", "), "rows": [list(map(str, row)) for row in rows]}


def _collected(folder: Path) -> Iterator[dict[str, Any]]:
    for pattern in CHAINS:
        for path in sorted(folder.glob(f"{pattern}.json")):
            yield read_json(path)


def _collection(records: Sequence[dict[str, Any]]) -> Table:
    columns = "chain, attentions gone, activations gone, last removed, before fine-tuning %, after %"
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
    return _table("HetDPT step 1: held-out accuracy, what the predictor is fitted on", columns, rows)


def _allocation(found: dict[str, Any]) -> Table:
    columns = (
        "attentions + activations, predicted accuracy, behind the best, within the error, wins with two points left out"
    )
    rows = [
        (
            _split(s, found["chosen"]),
            f"{s['prediction']:.2f}",
            f"{s['gap']:.2f}",
            "yes" if s["near_tie"] else "no",
            f"{100 * s['jackknife']:.0f} %",
        )
        for s in found["splits"]
    ]
    fit = f"degree {found['polynomial']['degree']}, cross-validation error {found['rmse']:.2f}"
    return _table(f"HetDPT step 1: splits of the budget ({fit})", columns, rows)


def _split(split: dict[str, Any], chosen: Sequence[int]) -> str:
    counts = [split["attention"], split["activation"]]
    return f"{counts[0]} + {counts[1]}{' (chosen)' if counts == list(chosen) else ''}"


def _search(found: dict[str, Any]) -> Table:
    rows = list(zip(found["removal_epochs"], found["order"], strict=True))
    return _table("HetDPT step 2: which layer went when", "after epoch, layer", rows)


def _entropies(found: Any) -> Table:
    """The layer that each greedy round took, or all layers where they were measured once."""
    rounds = found if isinstance(found, list) else [found]
    chosen = [min(r["rows"], key=lambda row: row["score"]) for r in rounds] if len(rounds) > 1 else rounds[0]["rows"]
    rows = [
        (
            row["site"],
            f"{row['entropy']:.3f}",
            f"{row['transfer_entropy']:.4f}",
            f"{row['deviation']:.4f}",
            f"{row['accuracy']:.1f}",
        )
        for row in chosen
    ]
    columns = "layer, entropy without it, transfer entropy, its deviation (bootstrap), top-1 without it %"
    title = "Transfer entropy: the layer of each round" if len(rounds) > 1 else "Transfer entropy of each layer alone"
    return _table(title, columns, rows)


def _gradients(found: Sequence[dict[str, Any]]) -> Table:
    rows = [(row["site"], f"{row['magnitude']:.2e}", f"{row['mean']:.2e}") for row in found]
    return _table("Gradient disparity: d loss / d mask", "layer, mean magnitude, mean", rows)


def _recovery(found: Sequence[dict[str, Any]]) -> Table:
    rows = [(row["site"], *(f"{row[key]:.1f}" for key in ("dense", "before", "after"))) for row in found]
    columns = "layer removed alone, dense %, right after removal %, after fine-tuning %"
    return _table("Recovery asymmetry: held-out accuracy", columns, rows)


# --------------------------------------------------------------------------------------------------------------- curves


def charts(folder: Path) -> list[Chart]:
    """What one step measured, as curves: accuracies of the chains, transfer entropies, learnable scores."""
    found = []
    if len(collected := list(_collected(folder))) > 1:
        found.append(_collection_chart(collected))
    if rows := _first_entropies(folder):
        choice = read_json(folder / "choice.json") if (folder / "choice.json").is_file() else {}
        found.append(_entropy_chart(rows, choice))
    if (path := folder / "search_epochs.json").is_file():
        found.append(_search_chart(read_json(path)))
    if (path := folder / "gradient_disparity.json").is_file():
        found.append(_gradient_chart(read_json(path)))
    if (path := folder / "recovery_asymmetry.json").is_file():
        found.append(_recovery_chart(read_json(path)))
    return found


def _collection_chart(records: Sequence[dict[str, Any]]) -> Chart:
    chains: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        count = len(record["attention"]) + len(record["activation"])
        chains.setdefault(record["chain"], []).append((count, record["accuracy"]))
    start = chains.pop("dense", [])
    lines = [_line(name, [*start, *points]) for name, points in chains.items()]
    return Chart("HetDPT step 1: chains of removals", "layers gone", "held-out top-1 after fine-tuning, %", lines)


def _line(name: str, points: Sequence[tuple[float, float]]) -> Line:
    return Line(name, [x for x, _ in points], [y for _, y in points])


def _first_entropies(folder: Path) -> list[dict[str, Any]]:
    """The rows of every layer alone on the model as the step was given it."""
    paths = [folder / f"{name}.json" for name in ("transfer_entropy", "te_attention_01", "te_activation_01")]
    tables = [read_json(path) for path in paths if path.is_file()]
    return [row for table in tables for row in (table[0] if isinstance(table, list) else table)["rows"]]


def _entropy_chart(rows: Sequence[dict[str, Any]], choice: dict[str, list[int]]) -> Chart:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        gone = [row["index"] in choice.get(kind, ()) for row in own]
        lines.append(Line(kind, [row["index"] for row in own], [row["score"] for row in own], gone))
    positive = all(row["score"] > 0 for row in rows)  # the first block's is many times the others'
    return Chart("transfer entropy without each layer alone", "block", "score, nats", lines, log=positive)


def _search_chart(records: Sequence[dict[str, Any]]) -> Chart:
    """Scores by epoch; a line ends where its layer was removed."""
    ends = {record["removed"]: record["epoch"] for record in records if record["removed"]}
    lines = []
    for site in records[0]["scores"] if records else ():
        own = [r for r in records if r["epoch"] <= ends.get(site, r["epoch"])]
        epochs, scores = [r["epoch"] + 1 for r in own], [r["scores"][site] for r in own]
        group = "attention" if site.endswith(".attn") else "activation"
        block = ".".join(part for part in site.split(".") if part.isdigit())
        lines.append(Line(site, epochs, scores, [site in ends] * len(own), block if site in ends else "", group))
    title = "HetDPT step 2: learnable scores (numbers: blocks whose layer went)"
    return Chart(title, "epoch", "score", lines)


def _gradient_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    lines = [_line(kind, [(r["index"], r["magnitude"]) for r in own]) for kind, own in _by_kind(rows).items()]
    return Chart("HetDPT: gradient disparity", "block", "mean |d loss / d m|", lines, log=True)


def _recovery_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """Before fine-tuning each curve is faint, as what is removed is: nothing has made up for the layer yet."""
    lines = []
    for kind, own in _by_kind(rows).items():
        before, after = (_line(kind, [(r["index"], r[state]) for r in own]) for state in ("before", "after"))
        lines += [replace(before, gone=[True] * len(own)), after]
    title = "HetDPT: recovery asymmetry (faint: not fine-tuned)"
    return Chart(title, "block without its layer", "held-out top-1, %", lines)


def _by_kind(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
