"""Whose time passes: worked out by hand."""

import pytest

from litgrpo.rewards.runner.calls import Call
from litgrpo.rewards.runner.progress import PAUSES_S, Progress, Task, stripes


def progress(**settings) -> Progress:
    call = Call("r", len, {"completions": ["a", "b", "c"]}, {}, 3)
    return Progress(call, retriable=True, **settings)


def test_a_clock_runs_while_a_worker_computes() -> None:
    state = progress(ends_at=10.0)
    state.count(3.0, 3.0, waits=False)
    assert (state.ends_at, state.pauses_s) == (10.0, PAUSES_S)
    assert state.left(4.0, 60.0) == 6.0
    assert state.left(11.0, 60.0) == 0.0


def test_a_clock_stands_while_a_worker_is_started_but_not_for_long() -> None:
    state = progress(ends_at=10.0)
    state.count(0.125, 0.0, waits=False)
    assert (state.ends_at, state.pauses_s) == (10.125, PAUSES_S - 0.125)
    state.count(5.0, 1.0, waits=False)
    assert (state.ends_at, state.pauses_s) == (10.0 + PAUSES_S, 0.0)


def test_a_clock_stands_while_others_have_the_workers_or_nobody_looks() -> None:
    state = progress(ends_at=10.0)
    state.count(100.0, 1.0, waits=True)
    assert (state.ends_at, state.pauses_s) == (109.0, PAUSES_S)


def test_there_is_no_clock_before_the_first_question() -> None:
    state = progress()
    state.count(100.0, 0.0, waits=False)
    assert state.ends_at is None
    assert state.left(1000.0, 60.0) == 60.0


@pytest.mark.parametrize(
    ("began_at", "since", "now", "expected"),
    [
        (None, 0.0, 9.0, 0.0),  # the worker has not begun
        (2.0, 0.0, 5.0, 3.0),  # it began after the last look
        (2.0, 4.0, 5.0, 1.0),
        (2.0, 4.0, 9.0, 2.0),  # it should have been ended at 6
        (2.0, 7.0, 9.0, 0.0),
    ],
)
def test_a_worker_computes_from_its_beginning_to_its_end(began_at, since, now, expected) -> None:
    task = Task([(3, [0, 1])], split=True, share=4.0, until=6.0, began_at=began_at)
    assert task.computed(3, since, now) == expected
    assert task.computed(1, since, now) == 0.0


def test_stripes_hold_every_row_once() -> None:
    assert stripes([3, 4, 5], 2) == [[3, 4], [5]]
    assert stripes([], 2) == []
