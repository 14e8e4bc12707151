"""Tables for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table whose columns are aligned.

    Example:
        >>> markdown_table(("reward", "weight"), [("correct", 1)])
        ['| reward  | weight |', '| ------- | ------ |', '| correct | 1      |']
    """
    lines = [list(head), *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return [
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True))} |"
        for line in lines
    ]
