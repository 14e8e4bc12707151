"""Whose time passes: worked out by hand, with answers in place of workers."""

import math

import pytest

from litgrpo.rewards import InProcessRunner, pure, whole_batch
from litgrpo.rewards.runner.batch import Attempt, Batch, Task, stripes
from litgrpo.rewards.runner.calls import Call, Scores, failed
from litgrpo.rewards.runner.process_runner import HANDLER
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.pool import WorkerPool


def batch(function=len, rows=4, workers=2) -> Batch:
    call = Call("r", function, {"completions": ["x"] * rows}, {}, rows)
    return Batch(InProcessRunner(timeout_s=64.0), WorkerPool(workers, HANDLER), {0: call}, {})


def fail(asked, task) -> list[Task]:
    """What is asked where a task fails for everything."""
    asked.queue.clear()
    rows = task.unanswered[0][1]
    asked._enter(task, 0, failed(len(rows), KeyError("?")), 1.0)
    return list(asked.queue)


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
    assert fail(asked, asked.queue[0]) == []
    assert asked.results[0].failures == dict.fromkeys(range(4), "KeyError")


def test_after_a_failure_rows_are_asked_one_by_one_with_equal_shares():
    asked = batch()
    tasks = fail(asked, asked.queue[0])
    assert [list(task.unanswered.values()) for task in tasks] == [[(0, [n])] for n in range(4)]
    assert [asked._limit_s(task) for task in tasks] == [16.0] * 4  # half, by two workers
    asked._enter(tasks[0], 0, Scores([1.0]), 0.0)  # quick: the others have its share
    assert asked._limit_s(tasks[1]) == 64.0 / 3
    asked._enter(tasks[1], 0, failed(1, KeyError()), 64.0 / 3)  # hung: the others keep theirs
    assert asked._limit_s(tasks[2]) == pytest.approx(64.0 / 3)


def test_the_last_row_gets_no_more_than_all_workers_could_have_spent():
    asked = batch(rows=1, workers=4)
    (last,) = fail(asked, asked.queue[0])
    assert asked._limit_s(last) == 32.0


def test_rows_of_coroutines_wait_together_and_are_asked_alone_where_their_worker_was_lost():
    async def waits(completions):
        return completions

    asked = batch(waits)
    (whole,) = asked.queue
    (together,) = fail(asked, whole)
    assert together.together
    assert list(together.unanswered.values()) == [(0, [n]) for n in range(4)]
    assert asked._limit_s(together) == 16.0
    asked._enter(together, 0, failed(1, KeyError()), 1.0)  # by itself
    asked._enter(together, 1, failed(1, WorkerError("exited with 7")), 1.0, lost=True)
    assert asked.results[0].failures == {0: "KeyError"}
    assert [task.attempt for task in asked.queue][-1] is Attempt.ROW


def test_remembered_rows_are_not_asked():
    call = Call("r", len, {"completions": ["x"] * 3}, {}, 3)
    asked = Batch(InProcessRunner(), WorkerPool(1, HANDLER), {0: call}, {0: {1: 5.0}})
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
    assert asked._limit_s(first) == asked._limit_s(second) == 32.0
