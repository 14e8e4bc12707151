"""Format numbers and reports as text."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from litgrpo.evaluation.evaluator import format_success_rule

BOUNDS = ("_low", "_high")
DECIMALS = {10: 3, 100: 1}  # of numbers below the limit


def strip_stage(report: dict[str, float]) -> dict[str, float]:
    """Remove the stage from the names of a report."""
    return {name.split("/", maxsplit=1)[-1]: float(value) for name, value in report.items()}


def format_report(report: dict[str, float]) -> dict[str, str]:
    """Format each number of a report, with its interval in brackets if it has one."""
    texts = {}
    for name, value in report.items():
        if name.endswith(BOUNDS):
            continue
        texts[name] = format_number(value)
        bounds = [format_number(report[name + end]) for end in BOUNDS if name + end in report]
        if bounds:
            texts[name] += f" [{', '.join(bounds)}]"
    return texts


def without_zero_counts(report: Mapping[str, float]) -> dict[str, float]:
    """Leave out the fraction of unscored completions where all are scored."""
    return {n: value for n, value in report.items() if value or not n.endswith("unscored_frac")}


def format_number(value: float) -> str:
    """Three decimals below 10, one below 100, none above."""
    decimals = next((digits for limit, digits in DECIMALS.items() if abs(value) < limit), 0)
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no minus sign before a zero


def format_change(value: float) -> str:
    """A difference, with its sign."""
    text = format_number(value)
    return text if text.startswith("-") else f"+{text}"


def format_success(success: Mapping[str, Any]) -> str:
    """Rule by which a completion is correct; "" for a module that samples nothing."""
    if not success:
        return ""
    return f"correct: {format_success_rule(success['rewards'], success['threshold'])}"


def mark_truncated(text: str, truncated: bool) -> str:
    """Append ` [cut]` to a completion that the length limit cut off."""
    return f"{text} [cut]" if truncated else text


def finite_or_none(values: Tensor) -> list[float | None]:
    """Flatten to a list, with None for NaN and infinity, which JSON does not have."""
    return [value if math.isfinite(value) else None for value in values.flatten().tolist()]


def terminal_columns() -> float:
    """Number of columns of the terminal that standard output goes to; infinite without one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
