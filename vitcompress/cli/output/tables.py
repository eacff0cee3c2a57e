"""What each command prints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

from vitcompress.cli.output.terminal import (
    print_line,
    print_pairs,
    print_records,
    print_table,
    print_text,
    stream_console,
)
from vitcompress.io.text import NOT_MEASURED, Table, compared, figure, rate, short, span

MET = {True: "yes", False: "no", None: "none published"}
FIGURES = ("verdict", "value", "tolerance")
VERDICTS = {"passed": "green", "failed": "bold red", "not_run": "yellow"}


def print_checks(checks: Iterable[Mapping[str, Any]]) -> None:
    """The verdicts of a verification, with value and tolerance; what did not run with the command that runs it."""
    console = stream_console(stderr=False)
    table = Grid(Column("check", overflow="fold"), *FIGURES, Column("detail", overflow="fold"), header_style="bold")
    for check in checks:
        verdict = str(check["verdict"])
        table.add_row(
            Text(str(check["name"])),
            Text(verdict.replace("_", " "), style=VERDICTS.get(verdict, "")),
            _figure(check.get("value")),
            _figure(check.get("tolerance")),
            Text(_detail(check)),
        )
    console.print(table)


def _detail(check: Mapping[str, Any]) -> str:
    said, command = check.get("detail") or "", check.get("command")
    if not command:
        return said
    where = "on the target"
    return f"{said}: {command}" if said.endswith(where) else f"{said}{'; ' * bool(said)}{where}: {command}"


def print_verification(checks: Iterable[Mapping[str, Any]], ways: Table, said: Iterable[str]) -> None:
    """The verdicts, what became of every weight that the plan changed, and what is `said` of all that."""
    print_checks(checks)
    if ways.rows:
        _print(ways)
    for line in said:
        print_text(line)


def _print(table: Table) -> None:
    print_table(table.title, table.columns, table.rows)


def _figure(value: float | None) -> Text:
    return Text("" if value is None else figure(value))


def print_recipes(summaries: Mapping[str, str]) -> None:
    """Names and summaries of the recipes."""
    print_pairs(summaries.items())


def print_keys(found: Iterable[Mapping[str, Any]]) -> None:
    """The keys of a recipe: what each is and takes, its default, and the recipe's own value if that is another."""
    print_pairs((key["key"], f"{key['about']}\n{_taken(key)}") for key in found)


def _taken(key: Mapping[str, Any]) -> str:
    default = "needed" if key["required"] else f"default {_toml(key['default'])}"
    here = "" if key["value"] is None or key["value"] == key["default"] else f"; here {_toml(key['value'])}"
    return f"  {key['type']}; {default}{here}"


def _toml(value: Any) -> str:
    """A value as TOML writes it; for none, which it cannot write, in words."""
    if value is None:
        return "not set"
    return json.dumps(value, default=str)


def print_counts(found: Sequence[Mapping[str, Any]]) -> None:
    """Published and counted sizes side by side, and under them why some differ."""
    columns = ["recipe", "parameters published", "counted", "off", "MACs published", "counted", "off", "met"]
    rows = []
    for record in found:
        params, macs = (_beside(record[key], unit) for key, unit in (("params_m", "M"), ("macs_g", "G")))
        mark = "*" if record["macs_linear"] and macs[0] else ""
        rows.append([record["recipe"], *params, macs[0] + mark, *macs[1:], MET[record["met"]]])
    print_table("", columns, rows)
    print_text("* without the products inside attention, as that table counts pruned models")
    for record in found:
        if record["reason"]:
            print_text(f"{record['recipe']}: {record['reason']}")


def _beside(figure: Mapping[str, Any], unit: str) -> list[str]:
    """Published, counted, and how far the count is off; only the count where nothing was published."""
    counted = f"{figure['counted']:.3f} {unit}"
    if figure["published"] is None:
        return ["", counted, ""]
    return [f"{figure['published']:g} {unit}", counted, f"{100 * figure['off']:+.1f} %"]


def print_outlook(outlook: Mapping[str, Any]) -> None:
    """What a recipe would do: stages, cost before and after, and what is missing here."""
    print_text(f"{outlook['recipe']}, run folder {outlook['folder']}; nothing is written now\n")
    stages = [{**row, "images": _images(row)} for row in outlook["stages"]]
    print_records("stages (epochs of each round, images of each epoch)", stages)
    print_records(f"cost (layers: {outlook['layers']})", [_named(*cost) for cost in outlook["cost"].items()])
    _print_missing(outlook["missing"], outlook["notes"])


def _named(model: str, cost: Mapping[str, int]) -> dict[str, Any]:
    names = {"params": "parameters", "macs": "MACs", "macs_linear": "MACs without attention products"}
    return {"model": model, **{words: cost[key] for key, words in names.items()}}


def _print_missing(missing: Sequence[str], notes: Sequence[str]) -> None:
    """What this machine lacks for the work, and what else to know before it begins."""
    lines = ["needed and not here yet, a run would be refused (exit code 2):", *(f"  - {line}" for line in missing)]
    print_text(
        "\n".join([*(lines if missing else ["nothing is missing on this machine"]), *map("note: {}".format, notes)])
    )


def _images(stage: Mapping[str, Any]) -> Any:
    """The images of a stage; a question mark where it needs some and the data is not there to count."""
    return "?" if stage["images"] is None and stage["epochs"] is not None else stage["images"]


def print_export(done: Mapping[str, Any]) -> None:
    """Where an exported file lies and what it is."""
    print_text(
        f"{done['folder']}/{done['path']}  {done['format']} {done['precision']}, {done['bytes']:,} bytes, opset "
        f"{done['opset']} ({done['opset_reason']})"
    )
    print_text(_asks(done))
    for warning in done["build"].get("warnings", ()):
        print_line(f"note: {warning}")
    if done["islands_search"]:
        print_search(done["islands_search"])
    print_checks([*done["checks"], *done["build"].get("truth", ())])
    if done["verdict"] == "not_run":
        commands = sorted({check["command"] for check in done["checks"] if check.get("command")})
        print_text(f"not verified on this machine; on the target: {', '.join(commands)}")


def _asks(done: Mapping[str, Any]) -> str:
    """What images a file takes, and where it runs: `takes uint8 images, NHWC: batch x 224 x 224 x 3`."""
    known, build = done["metadata"], done["build"]
    channels, height, width = json.loads(known["size"])
    kind, layout = (json.loads(known[key]) for key in ("input", "layout"))
    sides = (height, width, channels) if layout == "NHWC" else (channels, height, width)
    least, best, most = build.get("batch") or (1, 0, 0)
    batch = (span(least, most) + f" (best {best})" * (least < most)) if most else "batch"
    on = f"; for compute capability {', '.join(f'{sm / 10:.1f}' for sm in build['sm'])}" if build.get("sm") else ""
    return f"takes {kind} images, {layout}: {' x '.join(map(str, (batch, *sides)))}{on}"


def print_search(found: Mapping[str, Any]) -> None:
    """The sets of fp32 islands that were tried, and which one was taken."""
    table = Grid("fp32 islands", "verdict", "judge", "reason", header_style="bold")
    for tried in found["tries"]:
        verdict = Text(tried["verdict"], style=VERDICTS[tried["verdict"]])
        table.add_row(Text(", ".join(tried["islands"]) or "none"), verdict, Text(tried["by"]), Text(tried["reason"]))
    stream_console(stderr=False).print(table)
    proven = "no island of it can be left out" if found["smallest"] else "it may not be the smallest, the tries ran out"
    proxy = "; the judge is a proxy, verify on the target" if found["proxy"] else ""
    on = f"on {found['images']} images{'' if found['real'] else ' of noise'}"
    print_text(f"kept in fp32: {', '.join(found['chosen']) or 'nothing'} ({on}; {proven}{proxy})")


def print_result(table: Table, folder: object) -> None:
    """Before and after, and where everything lies."""
    _print(table)
    print_text(f"all of it, with how it was measured: {folder}/report.md")


def print_comparison(found: Mapping[str, Any]) -> None:
    """Several runs side by side."""
    print_table("", found["table"]["columns"], found["table"]["rows"])
    if found["plot"]:
        print_text(f"plot: {found['plot']}")


def print_study(tables: Sequence[Table], found: Mapping[str, Any]) -> None:
    """Rows and pairs of a study."""
    for table in tables:
        _print(table)
    for warning in (found["speed"] or {}).get("warnings", ()):
        print_line(f"note: {warning}")


def print_study_outlook(found: Mapping[str, Any]) -> None:
    """What a study would do."""
    rows = [{**row, "macs_ratio": f"{row['macs_ratio']:.3f}"} for row in found["rows"]]
    print_records(f"{found['study']}: {found['runs']} runs in {found['folder']}", rows)
    _print_missing(found["missing"], found["notes"])


def print_bench(found: Mapping[str, Any], table: Table) -> None:
    """Throughput and latency of every artifact, the ratios with their intervals, and what to beware of."""
    _print(table)
    for ratio in found["ratios"]:
        print_text(f"batch {ratio['batch']}: {compared(ratio)}: {ratio['verdict']}")
    for row in found["rows"]:
        if row["images_per_joule"]:
            used = f"{row['images_per_joule']:.3g} images per joule of {row['energy_of']}"
            print_text(f"batch {row['batch']}: {row['artifact']}: {used}")
    for said in (*found["notes"], *found["warnings"]):
        print_line(f"note: {said}")
    if found["disturbed"]:
        print_line("disturbed: measure again when nothing else runs before you believe these figures")


def print_accuracy(found: Mapping[str, Any]) -> None:
    """Accuracy with counts, speed where it was measured, and McNemar's test of each later row against the first."""
    names = short([row["artifact"] for row in found["rows"]])
    rows = [
        [
            name,
            f"{100 * row['top1']:.2f} % ({row['correct']}/{row['total']})",
            "{:.2f} to {:.2f} %".format(*(100 * end for end in row["top1_ci95"])),
            f"{100 * row['top5']:.2f} %",
            _speed(row["speed"]),
            (row["sha256"] or "")[:12],
        ]
        for row, name in zip(found["rows"], names, strict=True)
    ]
    print_table("", ["artifact", "top-1", "95 % interval", "top-5", "images/s", "sha256"], rows)
    for test in found["mcnemar"]:
        only = f"right by the first alone: {test['only_a']}, by the other alone: {test['only_b']}"
        print_text(f"{test['a']} against {test['b']}: {only}, p = {test['p_value']:.3g} (McNemar, exact)")


def _speed(measured: Mapping[str, Any] | None) -> str:
    if measured is None:
        return NOT_MEASURED
    return f"{rate(measured['images_per_second'])} (batch {measured['batch']})"


def print_doctor(found: Mapping[str, Any]) -> None:
    """What this machine can do per target, and below it why not and how to get the rest."""
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    known = [f"{name} {version}" for name, version in found["versions"].items()]
    special = [part for row in found["targets"] for part in row["version"].split(", ") if part]
    print_text(f"{machine}\n{', '.join(dict.fromkeys([*known, *special]))}\n")
    verbs = ("export", "run", "measure")
    rows = [[row["target"], *(_can(row[verb]) for verb in verbs)] for row in found["targets"]]
    print_table("", ["target", *verbs], rows)
    for row in found["targets"]:
        reasons = dict.fromkeys(row[verb] for verb in verbs if row[verb] not in (None, "-"))
        for reason in reasons:
            print_text(f"  {row['target']}: {reason}")
    for item in found["optional"]:
        print_text(f"  {item['package']} ({item['for']}): {'installed' if item['present'] else item['install']}")


def _can(reason: str | None) -> str:
    if reason is None:
        return "yes"
    return "-" if reason == "-" else "partly" if reason.startswith("times yes") else "no"
