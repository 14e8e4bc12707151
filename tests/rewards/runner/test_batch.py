"""Whose time passes: worked out by hand, with answers in place of workers."""

import math

from litgrpo.rewards import InProcessRunner, pure, whole_batch
from litgrpo.rewards.runner.batch import NO_TURN, TIMEOUT, Attempt, Batch, Request, stripes
from litgrpo.rewards.runner.calls import Call, Scores, WorkerError, failed
from litgrpo.rewards.runner.worker_pool import WorkerPool


def batch(function=len, rows=4, workers=2) -> Batch:
    call = Call("r", function, {"completions": ["x"] * rows}, {}, rows)
    return Batch(InProcessRunner(timeout_s=64.0), WorkerPool(workers), {0: call}, {})


def request(attempt=Attempt.SHORT, left_s=32.0, share=1 / 32) -> Request:
    return Request(attempt, {0: (0, [0]), 1: (0, [1])}, left_s, share)


def test_the_first_question_is_for_all_rows_and_may_take_half_of_the_time():
    (first,) = batch().queue
    assert first.unanswered == {0: (0, [0, 1, 2, 3])}
    assert first.limit_s == 32.0


def test_no_time_is_kept_for_single_rows_where_rows_are_compared():
    @whole_batch
    def compare(completions):
        return completions

    (first,) = batch(compare).queue
    assert first.limit_s == 64.0


def test_after_a_failure_rows_are_shared_out_with_the_time_that_is_left():
    asked = batch()
    first = asked.queue.popleft()
    first.begin(100.0)
    asked._enter(first, (0, [0, 1, 2, 3]), failed(4, "KeyError", WorkerError("?")), 24.0)
    assert [list(r.unanswered.values()) for r in asked.queue] == [
        [(0, [0]), (0, [1])],
        [(0, [2]), (0, [3])],
    ]
    assert [r.left_s for r in asked.queue] == [40.0, 40.0]
    assert [r.limit_s for r in asked.queue] == [40.0 / 32] * 2


def test_waiting_for_a_worker_takes_no_time():
    waiting = request()
    assert waiting.until == math.inf
    assert waiting.stop(1e9) == 0.0
    assert waiting.left_s == 32.0


def test_what_passes_after_the_limit_is_not_the_rows_time():
    hanging = request()
    hanging.begin(100.0)
    assert hanging.until == 101.0
    assert hanging.stop(100.5) == 0.5
    assert hanging.left_s == 31.5
    hanging.begin(200.0)
    limit = hanging.limit_s
    assert hanging.stop(900.0) == limit
    assert hanging.left_s == 31.5 - limit


def test_a_row_gets_a_minimum_while_there_is_time_and_nothing_after():
    assert request(left_s=0.1).limit_s == 0.02
    assert request(left_s=0.01).limit_s == 0.01
    assert request(left_s=-1.0).limit_s == 0.0


def test_rows_that_were_set_aside_share_what_is_left_once_the_others_had_their_turn():
    asked = batch()
    asked.queue.clear()
    asked._ask(Attempt.SHORT, [], 12.0, set_aside=[(0, [1]), (0, [2])])
    (last,) = asked.queue
    assert (last.attempt, last.limit_s) == (Attempt.LAST, 6.0)


def test_rows_without_time_say_whose_fault_it_was():
    asked = batch()
    asked._ask(Attempt.SHORT, [(0, [0])], 0.0, set_aside=[(0, [1])])
    assert asked.results[0].failures == {0: NO_TURN, 1: TIMEOUT}


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
    scores.put([2, 0], Scores([7.0, math.nan], {1: "KeyError"}, 1e-3))
    assert scores.values[2] == 7.0
    assert (scores.failures, scores.precision) == ({0: "KeyError"}, 1e-3)


def test_rows_of_a_pure_function_are_shared_out_at_once_and_leave_half_of_their_time():
    first, second = batch(pure(lambda completions: completions)).queue
    assert list(first.unanswered.values()) == [(0, [0]), (0, [1])]
    assert (first.limit_s, second.limit_s) == (32.0, 32.0)
