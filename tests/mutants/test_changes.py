"""The automatic changes of a small file."""

import pytest

from tests.mutants import changes
from tests.mutants.__main__ import LISTED, PACKAGES
from tests.mutants.changes import automatic

SOURCE = '''"""A text with 1 < 2."""


def count(rows: list[int] = (1, 2), limit: float | None = None) -> int:
    """Return 3 < 4."""
    if limit is None or not rows:
        return 0
    rows.sort()
    assert rows[0] > 5
    list(zip(rows, rows, strict=True))
    return (max(rows) + 1) % 2
'''


@pytest.fixture
def lines(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(SOURCE)
    monkeypatch.setattr(changes, "SOURCE", tmp_path)
    return [str(mutant).partition(" ")[2] for mutant in automatic("small.py")]


def test_conditions_operators_constants_and_statements_are_changed(lines):
    signature = "def count(rows: list[int] = (1, 2), limit: float | None = None) -> int:"
    condition, result = "if limit is None or not rows:", "return (max(rows) + 1) % 2"
    expected = {
        (signature, signature.replace("(1", "(2")),
        (signature, signature.replace("2)", "3)")),
        (condition, "if True:"),
        (condition, "if False:"),
        (condition, "if limit is not None or not rows:"),
        (condition, "if limit is None and not rows:"),
        (condition, "if limit is None or (rows):"),
        ("return 0", "return 1"),
        ("rows.sort()", "pass"),
        ("list(zip(rows, rows, strict=True))", "pass"),
        ("list(zip(rows, rows, strict=True))", "(zip(rows, rows, strict=True))"),
        ("list(zip(rows, rows, strict=True))", "list((rows))"),
        (result, "return (min(rows) + 1) % 2"),
        (result, "return ((rows) + 1) % 2"),
        (result, "return (max(rows) - 1) % 2"),
        (result, "return (max(rows) + 2) % 2"),
        (result, "return (max(rows) + 1) // 2"),
        (result, "return (max(rows) + 1) % 3"),
    }
    assert sorted(lines) == sorted(f"{old} -> {new}" for old, new in expected)


@pytest.mark.parametrize("kind", ["picked", "equivalent"])
def test_what_the_list_changes_is_in_the_source(kind):
    sources = {file: (changes.SOURCE / file).read_text(encoding="utf-8") for file in LISTED[kind]}
    stale = [
        (file, before)
        for file, rows in LISTED[kind].items()
        for before, *_ in rows
        if before not in sources[file]
    ]
    assert not stale
    assert kind == "equivalent" or all(
        sources[file].count(before) == 1
        for file, rows in LISTED[kind].items()
        for before, *_ in rows
    )


def test_every_change_of_the_list_is_in_a_package_that_is_run():
    packages = {file.partition("/")[0].removesuffix(".py") for file in LISTED["picked"]}
    assert packages <= {*PACKAGES}
