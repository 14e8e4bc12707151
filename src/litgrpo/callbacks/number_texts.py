"""Numbers as text: evaluation reports and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

BOUNDS = ("_low", "_high")
PLACES_BELOW = {10: 3, 100: 1}


def plain_names(report: dict[str, float]) -> dict[str, float]:
    """The report with its names freed of the stage.

    Example:
        >>> plain_names({"val/loss": 1.0, "val/hard/greedy": 0.25, "greedy": 0.5})
        {'loss': 1.0, 'hard/greedy': 0.25, 'greedy': 0.5}
    """
    return {name.split("/", maxsplit=1)[-1]: float(value) for name, value in report.items()}


def entries(report: dict[str, float]) -> dict[str, str]:
    """Each number of the report as text, with its interval in brackets where it has one.

    Example:
        >>> entries({"avg@4": 0.5, "avg@4_low": 0.45, "avg@4_high": 0.55, "greedy": 0.6})
        {'avg@4': '0.500 [0.450, 0.550]', 'greedy': '0.600'}
    """

    def text(name: str) -> str:
        ends = ", ".join(digits(report[name + end]) for end in BOUNDS if name + end in report)
        return digits(report[name]) + (f" [{ends}]" if ends else "")

    return {name: text(name) for name in report if not name.endswith(BOUNDS)}


def signed(value: float) -> str:
    """A difference, with its sign.

    Example:
        >>> signed(0.5), signed(-13.896)
        ('+0.500', '-13.9')
    """
    text = digits(value)
    return text if text.startswith("-") else f"+{text}"


def marked(text: str, truncated: bool) -> str:
    """A completion, with a mark where the length limit cut it off.

    Example:
        >>> marked("once upon a", True), marked("the end", False)
        ('once upon a [cut]', 'the end')
    """
    return f"{text} [cut]" if truncated else text


def finite(values: Tensor) -> list[float | None]:
    """The numbers in order, None for NaN and infinity, which JSON does not have.

    Example:
        >>> import torch
        >>> finite(torch.tensor([1.5, float("nan")]))
        [1.5, None]
    """
    return [value if math.isfinite(value) else None for value in values.flatten().tolist()]


def digits(value: float) -> str:
    """Three decimals below ten, one below a hundred, none above.

    Example:
        >>> digits(0.51234), digits(13.896), digits(15234.4)
        ('0.512', '13.9', '15234')
    """
    places = next((n for limit, n in PLACES_BELOW.items() if abs(value) < limit), 0)
    return f"{round(value, places) + 0.0:.{places}f}"  # no minus before a zero


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose columns stand under each other.

    Example:
        >>> aligned([["", "before"], ["loss", "1.5"]])
        ['      before', 'loss  1.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head.

    Example:
        >>> print(markdown([["a", "b"], ["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
