"""Tables of package data: pages show them."""

import pytest

from tests.tables import DOCS, TABLES, read, with_tables


@pytest.mark.parametrize("page", TABLES)
def test_a_page_shows_its_tables(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == with_tables(page), "run: python -m tests.tables"


@pytest.mark.parametrize("file", ["metrics.csv"])
def test_every_line_has_every_cell_and_no_line_is_there_twice(file):
    rows = read(file)
    keys = [row["name"] for row in rows]
    assert len({*keys}) == len(rows)
    assert not [row for row in rows if None in row or None in row.values()]
