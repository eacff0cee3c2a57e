"""The terminal, and the only package that knows rich. Results go to standard output, all else to standard error."""

from vitcompress.console.drawing import print_json, print_line, print_markdown, print_table, print_toml
from vitcompress.console.errors import error_as_data, print_error
from vitcompress.console.progress import ConsoleProgress
from vitcompress.console.results import (
    print_accuracy,
    print_bench,
    print_checks,
    print_comparison,
    print_counts,
    print_doctor,
    print_export,
    print_keys,
    print_outlook,
    print_recipes,
    print_result,
    print_study,
    print_study_outlook,
    print_verification,
)

__all__ = [
    "ConsoleProgress",
    "error_as_data",
    "print_accuracy",
    "print_bench",
    "print_checks",
    "print_comparison",
    "print_counts",
    "print_doctor",
    "print_error",
    "print_export",
    "print_json",
    "print_keys",
    "print_line",
    "print_markdown",
    "print_outlook",
    "print_recipes",
    "print_result",
    "print_study",
    "print_study_outlook",
    "print_table",
    "print_toml",
    "print_verification",
]
