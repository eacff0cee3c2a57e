"""The loss of accuracy: differences of two models on the same images in words, and the limit `--max-drop`."""

import math
from collections.abc import Iterable, Iterator

from vitcompress.bench.report.records import McNemarRecord, Report
from vitcompress.errors import InputError
from vitcompress.io.text import format_signed
from vitcompress.training.metrics import paired_interval


def paired_tests(report: Report) -> Iterator[tuple[str, McNemarRecord]]:
    """The compressed model compared with the dense one and, if the run has it, with the control.

    Earlier versions did not record intervals; they follow from the counts.
    """
    accuracy = report.get("accuracy") or {}
    tests = {"the dense model": accuracy.get("mcnemar"), "the control": accuracy.get("control_mcnemar")}
    for name, test in tests.items():
        if test is not None:
            a, b, total = test["only_a"], test["only_b"], accuracy["compressed"]["total"]
            yield name, {**test, "difference": (b - a) / total, "difference_ci95": paired_interval(a, b, total)}


def interval_in_points(test: McNemarRecord) -> tuple[float, float]:
    """The 95 % interval of the difference in percentage points, both ends rounded outwards to two digits."""
    low, high = (round(1e4 * end, 6) for end in test["difference_ci95"])
    return math.floor(low) / 100, math.ceil(high) / 100


def describe_difference(test: McNemarRecord) -> str:
    """`-0.6 points (p = 0.59), loses at most 2.48 points (95 %)`: the lower end of the interval."""
    low, _ = interval_in_points(test)
    bound = f"{'loses at most' if low < 0 else 'gains at least'} {abs(low):.2f} points (95 %)"
    return f"{format_signed(100 * test['difference'])} points (p = {test['p_value']:.2g}), {bound}"


def list_drops(tests: Iterable[tuple[str, McNemarRecord]], limit: float | None) -> list[str]:
    """A sentence for each comparison whose 95 % interval does not exclude a loss of more than `limit` points."""
    return [
        f"{names}: {describe_difference(test)}; the limit of --max-drop is {limit:g} point{'s' * (limit != 1)}"
        f"{'; more test images narrow the interval' if -100 * test['difference'] <= limit else ''}"
        for names, test in tests
        if limit is not None and -100 * test["difference_ci95"][0] > limit
    ]


def list_run_drops(name: str, report: Report, limit: float | None) -> list[str]:
    """`list_drops` of a run. Raises InputError if its accuracy was not measured."""
    tests = [(f"{name} against {other}", test) for other, test in paired_tests(report)]
    if limit is not None and not tests:
        problem = f"--max-drop needs the accuracy of {name}, which was not measured"
        raise InputError(problem, hint="run the recipe without --structure-only, into another folder")
    return list_drops(tests, limit)
