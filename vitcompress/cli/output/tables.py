"""What each command prints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from vitcompress.cli.output.terminal import print_line, print_pairs, print_table, print_text, print_texts
from vitcompress.io.text import (
    NOT_MEASURED,
    Table,
    describe_ratio,
    format_number,
    format_range,
    format_rate,
    shorten_paths,
)

STYLES = {"passed": "green", "failed": "bold red", "not_run": "yellow"}
ON_TARGET = "on the target"


def _print(table: Table) -> None:
    print_table(table.title, table.columns, table.rows)


def print_checks(checks: Iterable[Mapping[str, Any]]) -> None:
    """Verdict, value and tolerance of each check; for one that did not run, the command that runs it."""
    rows = []
    for check in checks:
        numbers = ("" if check.get(key) is None else format_number(check[key]) for key in ("value", "tolerance"))
        rows.append((check["name"], _styled(check["verdict"]), *numbers, _detail(check)))
    print_texts(("check", "verdict", "value", "tolerance", "detail"), rows)


def _styled(verdict: str) -> Text:
    return Text(verdict.replace("_", " "), style=STYLES[verdict])


def _detail(check: Mapping[str, Any]) -> str:
    detail, command = check.get("detail") or "", check.get("command")
    if not command:
        return detail
    if detail.endswith(ON_TARGET):
        return f"{detail}: {command}"
    return f"{detail}{'; ' * bool(detail)}{ON_TARGET}: {command}"


def print_verification(checks: Iterable[Mapping[str, Any]], weights: Table, summary: Iterable[str]) -> None:
    """Checks, every weight that the plan changes, and a summary."""
    print_checks(checks)
    if weights.rows:
        _print(weights)
    for line in summary:
        print_text(line)


def print_recipes(summaries: Mapping[str, str]) -> None:
    print_pairs(summaries.items())


def print_keys(keys: Iterable[Mapping[str, Any]]) -> None:
    """The keys of a recipe with description, type, default, and the recipe's value if it differs."""
    print_pairs((key["key"], f"{key['about']}\n{_describe_value(key)}") for key in keys)


def _describe_value(key: Mapping[str, Any]) -> str:
    default = "required" if key["required"] else f"default {_as_toml(key['default'])}"
    here = "" if key["value"] is None or key["value"] == key["default"] else f"; here {_as_toml(key['value'])}"
    return f"  {key['type']}; {default}{here}"


def _as_toml(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def print_counts(records: Sequence[Mapping[str, Any]]) -> None:
    """Published and counted sizes side by side, and the reasons for differences."""
    agreement = {True: "yes", False: "no", None: "not published"}
    columns = ["recipe", "parameters published", "counted", "off", "MACs published", "counted", "off", "agrees"]
    rows = []
    for record in records:
        params, macs = (_sizes(record[key], unit) for key, unit in (("params_m", "M"), ("macs_g", "G")))
        mark = "*" if record["macs_linear"] and macs[0] else ""
        rows.append([record["recipe"], *params, macs[0] + mark, *macs[1:], agreement[record["met"]]])
    print_table("", columns, rows)
    print_text("* without the products inside attention, as in the paper's table of pruned models")
    for record in records:
        if record["reason"]:
            print_text(f"{record['recipe']}: {record['reason']}")


def _sizes(size: Mapping[str, Any], unit: str) -> list[str]:
    """Published, counted and relative difference."""
    counted = f"{size['counted']:.3f} {unit}"
    if size["published"] is None:
        return ["", counted, ""]
    return [f"{size['published']:g} {unit}", counted, f"{100 * size['off']:+.1f} %"]


def print_dry_run(plan: Mapping[str, Any]) -> None:
    """What a recipe would do: stages, cost before and after, and what is missing here."""
    print_text(f"{plan['recipe']} in {plan['folder']} (dry run, nothing is written)\n")
    stages = [(row["stage"], row["rounds"], *_passes(row)) for row in plan["stages"]]
    print_table("Stages", ("stage", "rounds", "epochs per round", "images per epoch"), stages)
    cost = [
        (name, *(f"{cost[key]:,}" for key in ("params", "macs", "macs_linear"))) for name, cost in plan["cost"].items()
    ]
    columns = ("model", "parameters", "MACs", "MACs without attention products")
    print_table(f"Cost (layers or channels: {plan['layers']})", columns, cost)
    _print_missing(plan)


def _passes(stage: Mapping[str, Any]) -> tuple[str, str]:
    """Epochs and images of a stage; `?` if the number of images is not known without the data."""
    epochs, images = stage["epochs"], stage["images"]
    unknown = "" if epochs is None else "?"
    return "" if epochs is None else f"{epochs:,}", unknown if images is None else f"{images:,}"


def _print_missing(plan: Mapping[str, Any]) -> None:
    """What is missing on this machine, and notes."""
    missing = ["A run would be rejected (exit code 2):", *(f"  - {line}" for line in plan["missing"])]
    lines = missing if plan["missing"] else ["Nothing is missing on this machine."]
    print_text("\n".join([*lines, *map("Note: {}".format, plan["notes"])]))


def print_export(done: Mapping[str, Any]) -> None:
    """An exported file: what it takes, how it was built and verified."""
    print_text(
        f"{done['folder']}/{done['path']}  {done['format']} {done['precision']}, {done['bytes']:,} bytes, opset "
        f"{done['opset']} ({done['opset_reason']})"
    )
    print_text(_describe_input(done))
    for warning in done["build"].get("warnings", ()):
        print_line(f"note: {warning}")
    if done["islands_search"]:
        _print_search(done["islands_search"])
    print_checks([*done["checks"], *done["build"].get("truth", ())])
    if done["verdict"] == "not_run":
        commands = sorted({check["command"] for check in done["checks"] if check.get("command")})
        print_text(f"not verified on this machine; on the target: {', '.join(commands)}")


def _describe_input(done: Mapping[str, Any]) -> str:
    """`takes uint8 images, NHWC: batch x 224 x 224 x 3`"""
    metadata, build = done["metadata"], done["build"]
    channels, height, width = json.loads(metadata["size"])
    dtype, layout = (json.loads(metadata[key]) for key in ("input", "layout"))
    sides = (height, width, channels) if layout == "NHWC" else (channels, height, width)
    least, best, most = build.get("batch") or (1, 0, 0)
    batch = (format_range(least, most) + f" (best {best})" * (least < most)) if most else "batch"
    sm = f"; for compute capability {', '.join(f'{sm / 10:.1f}' for sm in build['sm'])}" if build.get("sm") else ""
    return f"takes {dtype} images, {layout}: {' x '.join(map(str, (batch, *sides)))}{sm}"


def _print_search(search: Mapping[str, Any]) -> None:
    """The sets of fp32 layers that were tested, and the one that was chosen."""
    rows = [(", ".join(t["islands"]) or "none", _styled(t["verdict"]), t["by"], t["reason"]) for t in search["tries"]]
    print_texts(("fp32 layers", "verdict", "tested by", "reason"), rows)
    minimal = "none of them can be left out" if search["smallest"] else "a smaller set may exist"
    proxy = "; tested on a proxy, verify on the target" if search["proxy"] else ""
    images = f"{search['images']} images{'' if search['real'] else ' of noise'}"
    print_text(f"kept in fp32: {', '.join(search['chosen']) or 'nothing'} ({images}; {minimal}{proxy})")


def print_run(summary: Table, page: str) -> None:
    """Before and after, and the file with all results."""
    _print(summary)
    print_text(f"all results: {page}")


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Several runs side by side."""
    print_table("", comparison["table"]["columns"], comparison["table"]["rows"])
    if comparison["plot"]:
        print_text(f"plot: {comparison['plot']}")


def print_study(tables: Sequence[Table], study: Mapping[str, Any]) -> None:
    """Rows and pairs of a study."""
    for table in tables:
        _print(table)
    for warning in (study["speed"] or {}).get("warnings", ()):
        print_line(f"note: {warning}")


def print_study_dry_run(plan: Mapping[str, Any]) -> None:
    """What a study would do."""
    columns = ("row", "title", "epochs", "of these fine-tuning", "parameters", "MACs", "MACs ratio")
    rows = [
        (
            *(row[key] for key in ("row", "title", "epochs", "recovery")),
            f"{row['params']:,}",
            f"{row['macs']:,}",
            f"{row['macs_ratio']:.3f}",
        )
        for row in plan["rows"]
    ]
    print_table(f"{plan['study']}: {plan['runs']} runs in {plan['folder']} (dry run)", columns, rows)
    _print_missing(plan)


def print_bench(bench: Mapping[str, Any], table: Table) -> None:
    """Throughput and latency of every artifact, ratios with intervals, and warnings."""
    _print(table)
    for ratio in bench["ratios"]:
        print_text(f"batch {ratio['batch']}: {describe_ratio(ratio)}: {ratio['verdict']}")
    for row in bench["rows"]:
        if row["images_per_joule"]:
            energy = f"{row['images_per_joule']:.3g} images per joule ({row['energy_of']})"
            print_text(f"batch {row['batch']}: {row['artifact']}: {energy}")
    for line in (*bench["notes"], *bench["warnings"]):
        print_line(f"note: {line}")
    if bench["disturbed"]:
        print_line("disturbed: repeat the measurement when nothing else runs; these figures are not reliable")


def print_accuracy(evaluation: Mapping[str, Any]) -> None:
    """Accuracy with counts, throughput if it was measured, and McNemar's test of each later row against the first."""
    names = shorten_paths([row["artifact"] for row in evaluation["rows"]])
    rows = [
        [
            name,
            f"{100 * row['top1']:.2f} % ({row['correct']}/{row['total']})",
            "{:.2f} to {:.2f} %".format(*(100 * end for end in row["top1_ci95"])),
            f"{100 * row['top5']:.2f} %",
            _throughput(row["speed"]),
            (row["sha256"] or "")[:12],
        ]
        for row, name in zip(evaluation["rows"], names, strict=True)
    ]
    print_table("", ["artifact", "top-1", "95 % interval", "top-5", "images/s", "sha256"], rows)
    for test in evaluation["mcnemar"]:
        only = f"only the first is correct: {test['only_a']}, only the second: {test['only_b']}"
        print_text(f"{test['a']} against {test['b']}: {only}, p = {test['p_value']:.3g} (McNemar, exact)")


def _throughput(speed: Mapping[str, Any] | None) -> str:
    if speed is None:
        return NOT_MEASURED
    return f"{format_rate(speed['images_per_second'])} (batch {speed['batch']})"


def print_doctor(facts: Mapping[str, Any]) -> None:
    """What this machine can do per target; below, what is missing and how to install it."""
    machine = ", ".join(f"{key} {value}" for key, value in facts["machine"].items())
    versions = [f"{name} {version}" for name, version in facts["versions"].items()]
    versions += [part for row in facts["targets"] for part in row["version"].split(", ") if part]
    print_text(f"{machine}\n{', '.join(dict.fromkeys(versions))}\n")
    verbs = ("export", "run", "measure")
    rows = [[row["target"], *(_answer(row[verb]) for verb in verbs)] for row in facts["targets"]]
    print_table("", ["target", *verbs], rows)
    for row in facts["targets"]:
        for reason in dict.fromkeys(row[verb] for verb in verbs if row[verb] not in (None, "-")):
            print_text(f"  {row['target']}: {reason}")
    for item in facts["optional"]:
        print_text(f"  {item['package']} ({item['for']}): {'installed' if item['present'] else item['install']}")


def _answer(reason: str | None) -> str:
    if reason is None:
        return "yes"
    return "-" if reason == "-" else "partly" if reason.startswith("times yes") else "no"
