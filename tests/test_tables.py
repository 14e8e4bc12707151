"""Tables of package data: pages show them, each name has one meaning."""

from dataclasses import fields

import pytest
from transformers import TrainingArguments

from litgrpo.cli.mistakes import other_name
from tests.tables import DOCS, TABLES, read, with_tables


@pytest.mark.parametrize("page", TABLES)
def test_a_page_shows_its_tables(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == with_tables(page), "run: python -m tests.tables"


@pytest.mark.parametrize("file", ["metrics.csv", "foreign_names.csv"])
def test_every_line_has_every_cell_and_no_line_is_there_twice(file):
    rows = read(file)
    keys = [tuple(row[key] for key in ("table", "prefix", "name") if key in row) for row in rows]
    assert len({*keys}) == len(rows)
    assert not [row for row in rows if None in row or None in row.values()]


def test_every_option_of_another_trainer_leads_where_its_page_says():
    rows = read("foreign_names.csv")
    shown = {header[0] for tables in TABLES.values() for header, *_ in tables}
    assert {row["table"] for row in rows} <= {*shown, ""}  # without a table: only in messages
    assert all(row["option"] or row["remark"] for row in rows)
    hints = {f"{row['prefix']}.{row['name']}".strip("."): row["option"] for row in rows}
    assert {name: other_name(name) for name, option in hints.items() if option} == {
        name: option for name, option in hints.items() if option
    }


def test_the_options_are_those_of_trl():
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    names = {row["name"] for row in read("foreign_names.csv") if row["table"] == "GRPOConfig"}
    arguments = {field.name for field in fields(TrainingArguments)}
    assert names == {field.name for field in fields(trl.GRPOConfig)} - arguments
