"""Report of an audit: tables, faults and remarks, as lines and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from litgrpo.text.tables import align_columns, plural

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 21  # characters of an example
# Columns that only faults and remarks, and the file, tell: lines have at most 80 characters.
UNSHOWN = ("reason", "kind", "reaches_best", "beats_mean", "scored")


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit.

    Args:
        title: what was audited, in a sentence.
        numbers: {name: number or text} about the whole audit, for JSON.
        tables: {what the rows are: their numbers, with names as index}.
        faults: problems that make the rewards unfit for training, one sentence each.
        remarks: findings that may be intended, one sentence each.
        untested: what a report without a fault does not show; "" if nothing.
    """

    title: str
    numbers: dict[str, Any]
    tables: dict[str, DataFrame]
    faults: list[str]
    remarks: list[str]
    untested: str = ""

    @property
    def passed(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        tables = {
            name: table.rename_axis(name).reset_index().to_dict("records")
            for name, table in self.tables.items()
        }
        verdict = {"passed": self.passed, "faults": self.faults, "remarks": self.remarks}
        return self.numbers | verdict | {"untested": self.untested, "tables": tables}

    def lines(self) -> Iterator[str]:
        """Yield the report in lines."""
        yield self.title
        for name, table in self.tables.items():
            yield ""
            columns = [
                column
                for column in table
                if column not in UNSHOWN and not isinstance(table[column].iloc[0], dict)
            ]
            head = [name, *(str(column).replace("_", " ") for column in columns)]
            rows = table[columns].itertuples(name=None)
            cells = [[str(row), *map(_cell, columns, numbers)] for row, *numbers in rows]
            yield from align_columns([head, *cells])
        yield ""
        yield from (f"remark: {remark}" for remark in self.remarks)
        yield from (f"FAULT: {fault}" for fault in self.faults)
        untested = f" ({self.untested})" if self.untested else ""
        yield f"PASS{untested}" if self.passed else "FAIL: " + plural(len(self.faults), "fault")


def _cell(column: str, value: object) -> str:
    """Write a number with three digits, and the end of an example, which has the answer."""
    if column == "example":
        return repr(" ".join(str(value).split())[-SHOWN:])
    return f"{value:.3g}" if isinstance(value, float) else str(value)
