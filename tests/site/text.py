"""Markdown: titles, tables, cells."""

from collections.abc import Iterable, Iterator, Sequence


def title(heading: str, words: str) -> Iterator[str]:
    """Lines of the beginning of a page."""
    yield f"# {heading}\n"
    yield f"{words}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def cell(text: str) -> str:
    """A text of several lines as the content of a cell."""
    return escape(" ".join(text.split())).replace("|", "\\|")


def escape(text: str) -> str:
    """A text in which `<` and `*` are themselves, also outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "\\<").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)
