from litgrpo.text.tables import align_columns, markdown_table


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert markdown_table(("reward", "n"), [("a", 1.5), ("long reward", "")]) == [
        "| reward      | n   |",
        "| ----------- | --- |",
        "| a           | 1.5 |",
        "| long reward |     |",
    ]


def test_a_table_without_rows_has_its_head() -> None:
    assert markdown_table(("a",), []) == ["| a |", "| - |"]


def test_a_table_for_the_terminal_has_no_blanks_at_the_end_of_a_line() -> None:
    assert align_columns([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc  d"]
