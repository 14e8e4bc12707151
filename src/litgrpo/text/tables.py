"""Tables and counts for terminals and pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def align_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Pad cells so that columns are aligned, and join each row to a line.

    Example:
        >>> align_columns([["", "before"], ["loss", "1.5"]])
        ['      before', 'loss  1.5']
    """
    return ["  ".join(cells).rstrip() for cells in _pad_cells(rows)]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table whose columns are aligned.

    Example:
        >>> markdown_table(("reward", "weight"), [("correct", 1)])
        ['| reward  | weight |', '| ------- | ------ |', '| correct | 1      |']
    """
    header, *body = _pad_cells([head, *([str(value) for value in row] for row in rows)])
    ruler = ["-" * len(cell) for cell in header]
    return [f"| {' | '.join(cells)} |" for cells in [header, ruler, *body]]


def _pad_cells(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]


def escape_cell(text: str) -> str:
    r"""Escape text so that a cell of a Markdown table shows it literally.

    Example:
        >>> escape_cell("<answer>a|b</answer>\nend")
        '&lt;answer&gt;a&#124;b&lt;/answer&gt;<br>end'
    """
    # TensorBoard renders Markdown, then HTML: a tag would vanish, a bar or a line break would end
    # the cell, and stars, underlines and backticks would format.
    entities = {"|": "&#124;", "*": "&#42;", "_": "&#95;", "`": "&#96;", "\\": "&#92;"}
    escaped = html.escape(text, quote=False)
    for character, entity in entities.items():
        escaped = escaped.replace(character, entity)
    return escaped.replace("\r", "").replace("\n", "<br>")


def plural(count: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "iteration"), plural(2000, "iteration")
        ('1 iteration', '2,000 iterations')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
