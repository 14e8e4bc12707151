"""A curriculum: which prompts are skipped, the same ones after a resume and in every process."""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.data.curriculum import Curriculum, CurriculumOrder
from litgrpo.data.loader import BatchLoader, shuffle_batches

COUNT, SIZE = 11, 2


class Echo:
    """Gives back the row numbers that it was asked for."""

    def __getitem__(self, rows):
        return torch.tensor(rows)


def order(curriculum=Curriculum(), rank=0, world_size=1, seed=3):  # noqa: B008 (frozen)
    return CurriculumOrder(
        partial(shuffle_batches, COUNT, SIZE, seed),
        curriculum,
        index_of=lambda row: row,
        num_indices=COUNT,
        num_prompts=COUNT,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )


def loader(**settings):
    return BatchLoader(Echo(), order(**settings))


def run(batches, number, success, *, epoch=0, peek=False):
    """Draw batches as a run does that measures `success`, {row: fraction}, of what it draws."""
    seen = []
    while len(seen) < number:
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            if peek:
                batches.peek()
            seen.append(batch.tolist())
            fractions = torch.tensor([success.get(row, 0.5) for row in batch.tolist()])
            batches.sampler.record(batch, fractions)
            if len(seen) == number:
                break
        epoch += 1
    return seen


def test_without_results_the_order_is_the_usual_one():
    usual = [batch for epoch in range(2) for batch in shuffle_batches(COUNT, SIZE, 3, epoch)]
    assert run(loader(), 10, {}) == usual


def test_easy_and_hard_prompts_are_drawn_as_often_as_asked():
    curriculum = Curriculum(easy_prob=0.1, hard_prob=0.4)
    rows = [
        row for batch in run(loader(curriculum=curriculum), 3000, {0: 1.0, 1: 0.0}) for row in batch
    ]
    counts, usual = Counter(rows), 6000 / (COUNT - 2 + 0.1 + 0.4)
    assert counts[0] / usual == pytest.approx(0.1, abs=0.04)
    assert counts[1] / usual == pytest.approx(0.4, abs=0.06)
    assert counts[2] / usual == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("cut", [1, 4, 5, 7, 12])
def test_a_resumed_run_draws_the_same_batches(cut, peek):
    success = {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}
    whole = run(loader(), 20, success, peek=peek)
    first = loader()
    before = run(first, cut, success, peek=peek)
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    after = run(resumed, 20 - cut, success, epoch=resumed.sampler.epoch, peek=peek)
    assert before + after == whole


def test_a_batch_that_was_peeked_at_stays_the_next_one():
    batches, success = loader(curriculum=Curriculum(easy_prob=0.01)), torch.ones(COUNT)
    draws = iter(batches)
    next(draws)
    following = batches.peek().tolist()
    batches.sampler.record(torch.arange(COUNT), success)  # all of them became easy
    assert next(draws).tolist() == following


@given(st.integers(0, 50), st.dictionaries(st.integers(0, COUNT - 1), st.sampled_from([0.0, 1.0])))
def test_processes_share_each_batch(number, success):
    whole = order()
    parts = [order(rank=rank, world_size=2) for rank in range(2)]
    for each in (whole, *parts):
        each.success = dict(success)
    halves = zip(*parts, strict=True)
    assert [first + second for first, second in halves] == list(whole)


def test_extra_rows_are_chosen_in_the_same_way_and_resumed():
    batches = loader(curriculum=Curriculum(easy_prob=0.01))
    batches.sampler.success = dict.fromkeys(range(COUNT - 2), 1.0)
    rows = [row for _ in range(20) for row in batches.draw(3).tolist()]
    assert sum(row >= COUNT - 2 for row in rows) >= 50  # of 60
    state = batches.state_dict()
    resumed = loader(curriculum=Curriculum(easy_prob=0.01))
    resumed.load_state_dict(state)
    assert resumed.draw(3).tolist() == batches.draw(3).tolist()


def test_what_is_recorded_counts():
    found = order()
    found.record(torch.tensor([0, 1, 2, 3 + COUNT]), torch.tensor([1.0, 0.0, torch.nan, 0.5]))
    assert found.success == {0: 1.0, 1: 0.0, 3: 0.5}  # a repetition is its prompt
    stats = {name: round(float(value) * COUNT) for name, value in found.stats().items()}
    assert stats == {
        "curriculum/measured_frac": 3,
        "curriculum/easy_frac": 1,
        "curriculum/hard_frac": 1,
    }


@pytest.mark.parametrize(
    "settings",
    [
        dict(easy_prob=0.0),
        dict(hard_prob=1.5),
        dict(easy_threshold=0.0),
        dict(hard_threshold=-0.1),
        dict(easy_threshold=1.1),
    ],
)
def test_ranges_are_checked(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Curriculum(**settings)
