"""The order of batches: the same for one seed, resumed exactly, shared out by whole prompts."""

from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from litgrpo.data import loader as sampler
from litgrpo.data.loader import (
    BatchLoader,
    BatchOrder,
    batch_by_length,
    select_rank_rows,
    shuffle_rows,
)


def shuffle_batches(count, batch_size, seed, epoch):
    return [*sampler.shuffle_batches(count, batch_size, seed, epoch)]


class Echo(Dataset):
    """Gives back the row numbers that it was asked for."""

    def __getitem__(self, rows):
        return torch.tensor(rows)


def loader(count=11, batch_size=2, seed=3, rank=0, world_size=1):
    plan = partial(shuffle_batches, count, batch_size, seed)
    identity = {"batch_size": batch_size, "seed": seed}
    return BatchLoader(Echo(), BatchOrder(plan, rank, world_size), identity)


def epochs(batches, numbers):
    """The rows of whole epochs, as Lightning goes through them."""
    rows = []
    for epoch in numbers:
        batches.sampler.set_epoch(epoch)
        rows += [batch.tolist() for batch in batches]
    return rows


def test_the_order_depends_on_seed_and_epoch_only():
    orders = {
        (seed, epoch): shuffle_rows(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert shuffle_rows(50, 1, 1).tolist() == orders[1, 1]
    assert torch.equal(torch.get_rng_state(), state)


def test_training_batches_are_full_and_repeat_no_row():
    batches = shuffle_batches(11, 2, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [2] * 5
    assert len({row for batch in batches for row in batch}) == 10


def test_rows_left_out_differ_between_epochs():
    left_out = [
        set(range(11)) - {row for batch in shuffle_batches(11, 2, 0, epoch) for row in batch}
        for epoch in range(8)
    ]
    assert len(set.union(*left_out)) > 1


def test_buckets_hold_rows_of_about_equal_length():
    lengths = torch.tensor([3, 40, 3, 39, 3, 40])
    batches = batch_by_length(lengths, 3, None, seed=0, epoch=0)
    assert sorted(sorted(lengths[rows].tolist()) for rows in batches) == [[3, 3, 3], [39, 40, 40]]


def test_lengths_are_rounded_by_at_most_a_sixteenth():
    # 33 becomes 34 and 36 stays: no batch has both.
    lengths = torch.tensor([33, 36] * 8)
    for seed in range(5):
        batches = batch_by_length(lengths, 4, None, seed=seed, epoch=0)
        assert {len(set(lengths[rows].tolist())) for rows in batches} == {1}


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 400),
    st.integers(0, 99),
)
def test_batches_by_length_hold_every_row_once_within_the_limits(lengths, rows, tokens, seed):
    known = torch.tensor(lengths)
    batches = batch_by_length(known, rows, tokens, seed, epoch=0)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert rows is None or len(batch) <= rows
        padded = len(batch) * int(known[batch].max())
        assert tokens is None or padded <= tokens or len(batch) == 1
    other = batch_by_length(known, rows, tokens, seed, epoch=1)
    assert len(other) == len(batches)


def test_batches_by_length_differ_between_epochs():
    lengths = torch.arange(1, 41)
    plans = {str(batch_by_length(lengths, 4, None, seed=0, epoch=epoch)) for epoch in range(4)}
    assert len(plans) == 4


def test_a_row_beyond_the_token_budget_is_alone():
    assert sorted(batch_by_length(torch.tensor([9, 300, 9]), None, 32, 0, 0), key=len)[0] == [1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_share_the_batches_of_one_process(world_size):
    whole = epochs(loader(batch_size=4), [0, 1])
    ranks = [loader(batch_size=4, rank=r, world_size=world_size) for r in range(world_size)]
    parts = [epochs(part, [0, 1]) for part in ranks]
    assert [list(chain(*rows)) for rows in zip(*parts, strict=True)] == whole
    assert {len(rows) for part in parts for rows in part} == {4 // world_size}


def test_an_uneven_batch_leaves_no_process_without_a_row():
    assert [select_rank_rows([7, 8, 9], rank, 2) for rank in range(2)] == [[7], [8, 9]]
    assert [select_rank_rows([7], rank, 2) for rank in range(2)] == [[7], [7]]


def test_a_loader_has_the_batches_of_the_order():
    expected = shuffle_batches(11, 2, 3, epoch=0) + shuffle_batches(11, 2, 3, epoch=1)
    assert epochs(loader(), [0, 1]) == expected


@given(
    st.integers(2, 12), st.integers(1, 4), st.integers(0, 99), st.integers(1, 3), st.integers(0, 12)
)
def test_a_loader_resumes_after_any_batch_on_every_rank(count, size, seed, world_size, cut):
    size = min(size, count)
    for rank in range(world_size):
        whole = loader(count, size, seed, rank, world_size)
        extra = [whole.draw(1).tolist() for _ in range(cut + 2)]
        whole, first = (loader(count, size, seed, rank, world_size) for _ in range(2))
        expected, rows = epochs(whole, range(cut + 2)), []
        for _ in range(cut):
            first.draw(1)
        for epoch in range(cut + 1):
            first.sampler.set_epoch(epoch)
            for batch in first:
                if len(rows) == cut:
                    break
                rows.append(batch.tolist())
                state = first.state_dict()
        if not cut:
            state = loader(count, size, seed, rank, world_size).state_dict()
        second = loader(count, size, seed, rank, world_size)
        second.load_state_dict(state)
        rows += epochs(second, range(state["epoch"], cut + 2))
        assert rows == expected
        assert [second.draw(1).tolist() for _ in range(2)] == extra[cut:]


def test_the_next_batch_can_be_seen_before_it_is_taken():
    for rank in (0, 1):
        batches = loader(batch_size=4, rank=rank, world_size=2)
        expected = epochs(loader(batch_size=4, rank=rank, world_size=2), [0, 1])
        assert batches.peek().tolist() == expected[0]
        found = []
        for epoch in (0, 1):
            batches.sampler.set_epoch(epoch)
            for batch in batches:
                found.append(batch.tolist())
                if len(found) < len(expected):
                    assert batches.peek().tolist() == expected[len(found)]
        assert found == expected


def test_a_second_pass_over_one_epoch_begins_at_its_start():
    batches = loader()
    state = {"epoch": 0, "batches": 3, "drawn": 0, "batch_size": 2, "seed": 3}
    batches.load_state_dict(state)
    assert batches.state_dict() == state
    assert (len(batches), len(list(batches)), len(list(batches))) == (5, 2, 5)


def test_the_position_in_a_new_epoch_is_its_start():
    batches = loader()
    list(batches)
    batches.sampler.set_epoch(1)
    position = {"epoch": 1, "batches": 0, "drawn": 0}
    assert batches.state_dict() == {**position, "batch_size": 2, "seed": 3}


def test_an_iterator_that_was_made_too_early_heeds_the_epoch():
    batches = loader()
    early = iter(batches)
    batches.sampler.set_epoch(1)
    assert [rows.tolist() for rows in early] == shuffle_batches(11, 2, 3, 1)


def test_another_number_of_processes_goes_on_with_the_same_prompts():
    whole = epochs(loader(batch_size=4), [0])
    two = [loader(batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    for part in two:
        part.load_state_dict({"epoch": 0, "batches": 1, "drawn": 0, "batch_size": 4, "seed": 3})
    halves = [[batch.tolist() for batch in part] for part in two]
    assert [first + second for first, second in zip(*halves, strict=True)] == whole[1:]


def test_rows_out_of_turn_come_once_each_before_any_comes_again():
    batches = loader()
    rows = [row for _ in range(5) for row in batches.draw(4).tolist()]
    for start in (0, 10):  # the eleventh row fills no batch and sits out
        assert len(set(rows[start : start + 10])) == 10
    assert rows[:10] != rows[10:]
    assert rows[:10] != [row for batch in shuffle_batches(11, 2, 3, 0) for row in batch]


def test_rows_out_of_turn_leave_the_batches_to_come_as_they_are():
    batches, rows = loader(), []
    for batch in batches:
        batches.draw(3)
        rows.append(batch.tolist())
    assert rows == epochs(loader(), [0])


def test_processes_get_different_rows_out_of_turn_and_together_those_of_one():
    one, two = loader(batch_size=4), [loader(batch_size=4, rank=r, world_size=2) for r in (0, 1)]
    for _ in range(3):
        parts = [part.draw(3).tolist() for part in two]
        assert parts[0] + parts[1] == one.draw(6).tolist()


def test_a_position_in_another_order_is_refused():
    state = loader(batch_size=4).state_dict()
    with pytest.raises(ValueError, match="with data batch_size=4, now it is 2"):
        loader(batch_size=2).load_state_dict(state)


def test_loading_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    list(loader(0))
    list(loader(2))
    assert torch.equal(torch.get_rng_state(), state)
