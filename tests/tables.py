"""Tables of pages that package data has: `python -m tests.tables` writes them into the pages."""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def read(name: str) -> list[dict[str, str]]:
    """Rows of a file of the package's data."""
    with (ROOT / "src" / "litgrpo" / "assets" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def metrics() -> list[list[str]]:
    rows = [["name", "definition", "healthy", "TRL", "verl"]]
    for row in read("metrics.csv"):
        others = [code(row["trl"]), code(row["verl"])]
        rows.append([code(row["name"]), row["definition"], row["healthy"], *others])
    return rows


def options(table: str) -> list[list[str]]:
    """Options of TRL or verl, and those of litgrpo."""
    rows = [[table, "litgrpo"]]
    for row in read("foreign_names.csv"):
        if row["table"] == table:
            name = ".".join(filter(None, (row["prefix"], row["name"])))
            rows.append([code(name), "; ".join(filter(None, (code(row["option"]), row["remark"])))])
    return rows


# {page: its tables}
TABLES = {
    "reference/metrics.md": [metrics()],
    "howto/coming_from_trl.md": [
        options("GRPOTrainer"),
        options("GRPOConfig"),
        options("TrainingArguments"),
    ],
    "howto/coming_from_verl.md": [options("verl")],
}


def with_tables(page: str) -> str:
    """Text of a page, whose tables are written anew; a table is found by its first line."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for header, *rows in TABLES[page]:
        lines = [f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows)]
        (old,) = re.findall(rf"^{re.escape(lines[0])}(?:\|.*\n)*", text, re.MULTILINE)
        text = text.replace(old, "".join(lines))
    return text


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")
