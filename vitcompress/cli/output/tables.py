"""What each command prints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitcompress.bench.accuracy import Evaluation
from vitcompress.bench.report import run as reports
from vitcompress.bench.report.compare import Comparison
from vitcompress.bench.report.records import BenchRecord, CheckRecord
from vitcompress.cli.output.terminal import print_line, print_table, print_text
from vitcompress.exporters.doctor import NO_CLOCKS
from vitcompress.io.text import NOT_MEASURED, Columns, Table, format_range, format_signed, shorten_names, shorten_paths
from vitcompress.models.source import list_by_source
from vitcompress.pipeline.dry_run import DryRun, Size, SizeComparison
from vitcompress.pipeline.study.run import StudyDryRun
from vitcompress.verify.outputs import AGREEMENT

MOST_WARNINGS = 5  # that `bench` prints without --notes
ON_TARGET = "on the target"
SIZES = {"parameters": "{params:,}", "MACs": "{macs:,}"}  # columns


def print_checks(checks: Iterable[CheckRecord]) -> None:
    """Verdict, value and tolerance of each check; for one that did not run, the command that runs it."""
    print_table(reports.check_table(checks, _describe_check), wrap=True)


def _describe_check(check: CheckRecord) -> str:
    detail, command = check.get("detail") or "", check.get("command")
    if command and not detail.endswith(ON_TARGET):
        detail = f"{detail}{'; ' * bool(detail)}{ON_TARGET}"
    return f"{detail}: {command}" if command else detail


def print_verification(verification: Any) -> None:
    """Checks, every weight that the plan changes, and a summary, of a `VerificationRecord` with `weights`."""
    print_checks(verification["checks"])
    if (weights := reports.weight_table(verification["weights"])).rows:
        print_table(weights)
    print_text("\n".join([*reports.describe_bytes(verification["weights"]), reports.count_verdicts(verification)]))


def print_counts(sizes: Sequence[SizeComparison]) -> None:
    """Published and counted sizes side by side, and the reasons for differences."""
    columns = ("recipe", "parameters published", "counted", "off", "MACs published", "counted", "off", "agrees")
    agreement = {True: "yes", False: "no", None: "not published"}
    params = [_describe_size(size.params_m, "M") for size in sizes]
    macs = [_describe_size(size.macs_g, "G", "*" * size.macs_linear) for size in sizes]
    rows = ((size.recipe, *p, *m, agreement[size.met]) for size, p, m in zip(sizes, params, macs, strict=True))
    print_table(Table("", columns, tuple(rows)))
    print_text("* without the products inside attention, as in the paper's table of pruned models")
    for size in sizes:
        if size.reason:
            print_text(f"{size.recipe}: {size.reason}")


def _describe_size(size: Size, unit: str, mark: str = "") -> tuple[str, str, str]:
    """Published (with a `mark`), counted and relative difference."""
    published = "" if size.published is None else f"{size.published:g} {unit}{mark}"
    return published, f"{size.counted:.3f} {unit}", "" if size.off is None else f"{format_signed(100 * size.off)} %"


def print_dry_run(plan: DryRun) -> None:
    """What a recipe would do: stages, cost before and after, and what is missing here."""
    print_text(f"{plan.recipe} in {plan.folder} (dry run, nothing is written)\n")
    stages: Columns = {
        "stage": lambda work: work.stage,
        "rounds": lambda work: work.rounds,
        "epochs per round": lambda work: "" if work.epochs is None else f"{work.epochs:,}",
        "images per epoch": lambda w: f"{w.images:,}" if w.images is not None else "" if w.epochs is None else "?",
    }
    print_table(Table.of("Stages", stages, plan.stages))
    cost = {"model": "{model}", **SIZES, "MACs without attention products": "{macs_linear:,}"}
    records = ({"model": name, **vars(count)} for name, count in plan.cost.items())
    print_table(Table("", ("source", "dense model"), tuple(list_by_source(plan.settings).items())), wrap=True)
    if plan.cost:
        print_table(Table.of(f"Cost (layers or channels: {plan.layers})" if plan.layers else "Cost", cost, records))
    _print_missing(plan)


def print_study_dry_run(plan: StudyDryRun) -> None:
    """What a study would do."""
    columns: Columns = {
        **{name: f"{{{name}}}" for name in ("row", "title", "epochs")},
        "of these fine-tuning": "{recovery}",
        **SIZES,
        "MACs ratio": "{macs_ratio:.3f}",
    }
    print_table(Table.of(f"{plan.study}: {plan.runs} runs in {plan.folder} (dry run)", columns, plan.rows))
    _print_missing(plan)


def _print_missing(plan: DryRun | StudyDryRun) -> None:
    """What is missing on this machine, and notes."""
    missing = ["A run would be rejected (exit code 2):", *(f"  - {line}" for line in plan.missing)]
    lines = missing if plan.missing else ["Nothing is missing on this machine."]
    print_text("\n".join([*lines, *map("Note: {}".format, plan.notes)]))


def print_export(done: Mapping[str, Any]) -> None:
    """An exported file: what it takes, how it was built and verified; first the candidates of `--precision fastest`."""
    plain = {name: f"{{{name}}}" for name in ("format", "precision", "speedup", "result")}
    columns: Columns = {"ms": lambda row: f"{row['ms']:.2f}" if row["ms"] else "", **plain}
    if done["candidates"]:
        print_table(Table.of("the smallest batch, the fastest first", columns, done["candidates"]), wrap=True)
    opset = ", opset {opset} ({opset_reason})" if done["opset"] else ""
    print_text(f"{{folder}}/{{path}}  {{format}} {{precision}}, {{bytes:,}} bytes{opset}".format_map(done))
    print_text(_describe_input(done["metadata"], done["build"]))
    for warning in done["build"].get("warnings", ()):
        print_line(f"note: {warning}")
    if done["islands_search"]:
        _print_search(done["islands_search"])
    truth = done["build"].get("truth", ())
    checks = [*done["checks"], *truth]
    others = [check for check in checks if check["verdict"] != "passed"]
    for check in (check for check in checks if check not in others):
        if check["name"].endswith(".flips"):
            print_text(f"{check['name'].removeprefix(AGREEMENT).removesuffix('.flips')} {check['detail']}")
        elif check in truth:
            print_text(f"{check['name']}: {check['detail']}")
    if others:
        print_checks(others)
    passed = f"{len(checks) - len(others)} of {len(checks)} checks passed"
    print_text(f"{passed}; values and limits: {done['folder']}/{done['path']}.json")
    if done["verdict"] == "not_run":
        commands = sorted({check["command"] for check in done["checks"] if check.get("command")})
        print_text(f"not verified on this machine; on the target: {', '.join(commands)}")


def _describe_input(metadata: Mapping[str, str], build: Mapping[str, Any]) -> str:
    """`takes uint8 images, NHWC: batch x 224 x 224 x 3`"""
    (channels, height, width), dtype, layout = (json.loads(metadata[key]) for key in ("size", "input", "layout"))
    sides = (height, width, channels) if layout == "NHWC" else (channels, height, width)
    least, best, most = build.get("batch") or (1, 0, 0)
    batch = (format_range(least, most) + f" (best {best})" * (least < most)) if most else "batch"
    sm = f"; for compute capability {', '.join(f'{sm / 10:.1f}' for sm in build['sm'])}" if build.get("sm") else ""
    return f"takes {dtype} images, {layout}: {' x '.join(map(str, (batch, *sides)))}{sm}"


def _print_search(search: Mapping[str, Any]) -> None:
    """The sets of fp32 layers that were tested, and the one that was chosen."""
    columns: Columns = {
        "fp32 layers": lambda trial: ", ".join(trial["islands"]) or "none",
        "verdict": lambda trial: trial["verdict"].replace("_", " "),
        "tested by": "{by}",
        "reason": "{reason}",
    }
    print_table(Table.of("", columns, search["tries"]), wrap=True)
    chosen, minimal = ", ".join(search["chosen"]) or "nothing", ""
    if search["chosen"]:
        minimal = "; none of them can be left out" if search["smallest"] else "; a smaller set may exist"
    proxy = "; tested on a proxy, verify on the target" if search["proxy"] else ""
    images = f"{search['images']} images{'' if search['real'] else ' of noise'}"
    print_text(f"kept in fp32: {chosen} ({images}{minimal}{proxy})")


def print_comparison(comparison: Comparison) -> None:
    """Several runs side by side."""
    print_table(comparison["table"])
    for run, reason in comparison["not_plotted"].items():
        print_text(f"not in a plot: {run}: {reason}")


def print_bench(bench: BenchRecord, table: Table, *, notes: bool) -> None:
    """Throughput, latency and speed-up of every artifact, then the most important warnings; notes: all remarks."""
    print_table(table)
    names = [row["artifact"] for row in bench["rows"]]
    for row in bench["rows"]:
        if row["images_per_joule"]:
            energy = f"{row['images_per_joule']:.3g} images per joule ({row['energy_of']})"
            print_text(shorten_names(f"batch {row['batch']}: {row['artifact']}: {energy}", names))
    if bench["disturbed"]:
        print_line("disturbed: repeat the measurement when nothing else runs; these figures are not reliable")
    lines = [*map("warning: {}".format, bench["warnings"]), *map("note: {}".format, bench["notes"])]
    shown = len(lines) if notes else min(MOST_WARNINGS, len(bench["warnings"]))
    for line in lines[:shown]:
        print_line(shorten_names(line, names))
    if rest := len(lines) - shown:
        print_line(f"warnings and notes not shown: {rest} (--notes prints them)")


def print_accuracy(evaluation: Evaluation) -> None:
    """Accuracy with counts, throughput if it was measured, and McNemar's test of each later row against the first."""
    names = shorten_paths(row["artifact"] for row in evaluation["rows"])
    columns: Columns = {
        "artifact": lambda row: names[row["artifact"]],
        "top-1": lambda row: f"{100 * row['top1']:.2f} % ({row['correct']}/{row['total']})",
        "95 % interval": lambda row: "{:.2f} to {:.2f} %".format(*(100 * end for end in row["top1_ci95"])),
        "top-5": lambda row: f"{100 * row['top5']:.2f} %",
        "images/s (recorded)": lambda row: reports.format_speed(row["speed"], NOT_MEASURED),
        "sha256": lambda row: (row["sha256"] or "")[:12],
    }
    print_table(Table.of("", columns, evaluation["rows"]))
    for test in evaluation["mcnemar"]:
        a, b = names[test["a"]], names[test["b"]]
        low, high = reports.interval_in_points(test)
        print_text(f"{b} against {a}: {reports.describe_difference(test)}")
        counts = f"only {a} is correct: {test['only_a']}, only {b}: {test['only_b']}"
        print_text(f"  {low:+.2f} to {high:+.2f} points (95 %, Tango's interval); {counts} (McNemar's exact test)")


def print_doctor(facts: Mapping[str, Any]) -> None:
    """What this machine can do per target; below, what is missing and how to install it."""
    machine = facts["machine"]
    known = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in (machine["instruction_sets"] or {}).items())
    print_text("{system}, Python {python}\n{cpu}, {cores} cores, {memory_gib} GiB of memory".format_map(machine))
    print_text(f"instruction sets: {known or 'unknown, this system does not list them (no /proc/cpuinfo)'}")
    print_text(f"fast with them: {', '.join(name for name, slow in facts['precisions'].items() if not slow)}")
    print_text("\n".join(f"  {name}: {slow}" for name, slow in facts["precisions"].items() if slow))
    versions = [f"{name} {version}" for name, version in facts["versions"].items()]
    versions += [part for row in facts["targets"] for part in row["version"].split(", ") if part]
    print_text(f"{', '.join(dict.fromkeys(versions))}\n")
    for line in facts["warnings"]:
        print_line(f"note: {line}")
    verbs = ("export", "run", "measure")
    words = {None: "yes", "-": "-", NO_CLOCKS: "partly"}  # other reasons: why it does not work
    rows = ((row["target"], *(words.get(row[verb], "no") for verb in verbs)) for row in facts["targets"])
    print_table(Table("", ("target", *verbs), tuple(rows)))
    remedies = dict[str, list[str]]()  # of each reason, one line per target
    for row in facts["targets"]:
        for text in dict.fromkeys(row[verb] for verb in verbs if row[verb] not in (None, "-")):
            reason, _, remedy = text.partition("; ")
            remedies.setdefault(reason, []).append(f"    {row['target']}{': ' * bool(remedy)}{remedy}")
    for reason, lines in remedies.items():
        print_text("\n".join([f"  {reason}", *lines]))
    for item in facts["optional"]:
        print_text(f"  {item['package']} ({item['for']}): {'installed' if item['present'] else item['install']}")
