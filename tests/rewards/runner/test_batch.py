"""Whose time passes: worked out by hand, with answers in place of workers."""

import math

import pytest

from litgrpo.rewards import InProcessRunner, pure, whole_batch
from litgrpo.rewards.runner.batch import NO_TURN, TIMEOUT, Attempt, Batch, Task, stripes
from litgrpo.rewards.runner.calls import Call, Scores, failed
from litgrpo.rewards.runner.failures import WorkerError
from litgrpo.rewards.runner.worker_pool import WorkerPool


def batch(function=len, rows=4, workers=2) -> Batch:
    call = Call("r", function, {"completions": ["x"] * rows}, {}, rows)
    return Batch(InProcessRunner(timeout_s=64.0), WorkerPool(workers), {0: call}, {})


def row(attempt=Attempt.SHORT) -> Task:
    return Task(attempt, {0: (0, [0])}, together=False, workers=1)


def test_the_first_question_is_for_all_rows_and_may_take_half_of_the_time():
    asked = batch()
    (first,) = asked.queue
    assert first.unanswered == {0: (0, [0, 1, 2, 3])}
    assert asked._limit_s(first) == 32.0


def test_no_time_is_kept_for_single_rows_where_rows_are_compared():
    @whole_batch
    def compare(completions):
        return completions

    asked = batch(compare)
    assert asked._limit_s(asked.queue[0]) == 64.0


def test_after_a_failure_rows_are_asked_one_by_one():
    asked = batch()
    asked.queue.clear()
    asked._retry(0, [0, 1, 2, 3], failed(4, "KeyError", WorkerError("?")))
    assert [list(task.unanswered.values()) for task in asked.queue] == [
        [(0, [n])] for n in range(4)
    ]
    asked.left_s[0] = 40.0
    assert asked._limit_s(asked.queue[0]) == 40.0 / 32


def test_waiting_for_a_worker_takes_no_time():
    waiting = row()
    assert waiting.until == math.inf
    waiting.stop(1e9)
    assert waiting.seconds == 0.0


def test_what_passes_after_the_limit_is_not_the_rows_time():
    hanging = row()
    hanging.limit_s = 1.0
    hanging.begin(100.0)
    assert hanging.until == 101.0
    hanging.stop(100.5)
    assert hanging.seconds == 0.5
    hanging.stop(900.0)
    assert hanging.seconds == 1.0


@pytest.mark.parametrize(("left_s", "limit_s"), [(0.1, 0.02), (0.01, 0.01), (-1.0, 0.0)])
def test_a_row_gets_a_minimum_while_there_is_time_and_nothing_after(left_s, limit_s):
    asked = batch()
    asked.left_s[0] = left_s
    assert asked._limit_s(row()) == limit_s


def test_rows_that_were_set_aside_share_what_is_left_once_the_others_had_their_turn():
    asked = batch()
    asked.aside[0], asked.left_s[0] = [1, 2], 12.0
    asked._settle(asked.queue[0])
    assert len(asked.queue) == 1  # others wait for their turn
    asked._settle(asked.queue.popleft())
    first = asked.queue.popleft()
    assert (first.attempt, asked._limit_s(first)) == (Attempt.LAST, 6.0)


def test_rows_without_time_say_whose_fault_it_was():
    asked = batch()
    asked.left_s[0] = 0.0
    for attempt, reason in ((Attempt.SHORT, NO_TURN), (Attempt.LAST, TIMEOUT)):
        asked._refuse(row(attempt))
        assert asked.results[0].failures == {0: reason}


def test_remembered_rows_are_not_asked():
    call = Call("r", len, {"completions": ["x"] * 3}, {}, 3)
    asked = Batch(InProcessRunner(), WorkerPool(1), {0: call}, {0: {1: 5.0}})
    assert asked.queue[0].unanswered == {0: (0, [0, 2])}
    assert asked.results[0].values[1] == 5.0


def test_stripes_hold_every_row_once() -> None:
    assert stripes([3, 4, 5], 2) == [[3, 4], [5]]
    assert stripes([], 2) == []


def test_scores_are_entered_by_row():
    scores = Scores([math.nan] * 3)
    scores.put(
        [2, 0], Scores([7.0, math.nan], {1: "KeyError"}, 1e-3, None, {"m": [1.0]}, {"c": {1: "x"}})
    )
    assert scores.values[2] == 7.0
    assert (scores.failures, scores.precision) == ({0: "KeyError"}, 1e-3)
    assert (scores.metrics, scores.extras) == ({"m": [1.0]}, {"c": {0: "x"}})


def test_rows_of_a_pure_function_are_shared_out_at_once_and_leave_half_of_their_time():
    asked = batch(pure(lambda completions: completions))
    first, second = asked.queue
    assert (list(first.unanswered.values()), list(second.unanswered.values())) == (
        [(0, [0, 1])],
        [(0, [2, 3])],
    )
    assert (asked._limit_s(first), first.workers) == (32.0, 1)
