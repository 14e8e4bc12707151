"""Sources in shares: by hand; each row before any comes again; the same for seed and epoch."""

from collections import Counter

import pytest

from litgrpo.data.loader import allocate_rows, mix_sources

SOURCES = [0] * 6 + [1] * 3  # rows 0 to 5 and 6 to 8


def test_shares_add_up_and_the_largest_remainders_are_rounded_up():
    assert allocate_rows(9, [1, 1]) == [5, 4]
    assert allocate_rows(10, [2, 1, 1]) == [5, 3, 2]
    assert allocate_rows(9, [1, 8]) == [1, 8]


def test_in_order_each_source_goes_on_and_is_spread_evenly():
    assert mix_sources(SOURCES, [2, 1], 0, 0, shuffle=False) == [0, 6, 1, 2, 7, 3, 4, 8, 5]
    # One row of source 0 and eight of source 1 in each epoch: rows that come again are + 9, + 18.
    assert mix_sources(SOURCES, [1, 8], 0, 1, shuffle=False) == [8, 6, 7, 17, 1, 15, 16, 26, 24]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_of_a_source_comes_once_before_any_comes_again(shuffle):
    epochs = [mix_sources(SOURCES, [1, 2], 3, epoch, shuffle) for epoch in range(8)]
    for epoch in epochs:
        assert len(set(epoch)) == 9  # a repeated row has another number
    seen = Counter(row % 9 for epoch in epochs for row in epoch)
    assert {seen[row] for row in range(6)} == {4}
    assert {seen[row] for row in range(6, 9)} == {16}


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_shorter_epoch_continues_in_each_source_where_the_last_one_stopped(shuffle):
    # Eight of nine rows: five and three of an epoch, so 6 * 3 epochs use each row equally often.
    rows = [r % 9 for n in range(18) for r in mix_sources(SOURCES, [5, 3], 3, n, shuffle, count=8)]
    seen = Counter(rows)
    assert {seen[row] for row in range(6)} == {15}
    assert {seen[row] for row in range(6, 9)} == {18}


def test_a_weight_too_small_for_a_row_of_an_epoch_is_refused():
    with pytest.raises(ValueError, match=r"source 2 .* \(1 of 101\) that none of the 9 rows"):
        mix_sources(SOURCES, [100, 1], 0, 0)


def test_the_order_depends_on_seed_and_epoch_alone():
    assert mix_sources(SOURCES, [1, 1], 0, 5) == mix_sources(SOURCES, [1, 1], 0, 5)
    assert mix_sources(SOURCES, [1, 1], 0, 5) != mix_sources(SOURCES, [1, 1], 0, 6)
    assert mix_sources(SOURCES, [1, 1], 0, 5) != mix_sources(SOURCES, [1, 1], 1, 5)
    assert (
        sorted(row % 9 < 6 for row in mix_sources(SOURCES, [2, 1], 0, -1))
        == [False] * 3 + [True] * 6
    )


def test_sources_of_one_size_are_shuffled_independently():
    # Of each of two sources of eight rows an epoch takes three; the third source has the rest.
    sources = [row // 8 for row in range(24)]
    chosen = []
    for seed in range(4):
        rows = {row % 24 for row in mix_sources(sources, [1, 1, 6], seed, 0)}
        chosen.append([{row % 8 for row in rows if row // 8 == source} for source in (0, 1)])
    assert all(len(rows) == 3 for pair in chosen for rows in pair)
    assert any(first != second for first, second in chosen)


def test_a_source_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"source 2"):
        mix_sources([0, 0], [1, 1], 0, 0)
