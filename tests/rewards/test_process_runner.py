"""Worker processes: each fault loses its own rows; which rows run, and for how long."""

import logging
import math
import os
import threading

import pytest
import torch

from litgrpo.algorithms.losses import Objective
from litgrpo.rewards import (
    InProcessRunner,
    ProcessRunner,
    Reward,
    Scorer,
    pure,
    whole_batch,
)
from litgrpo.rewards.builtin.math import correctness
from litgrpo.rewards.calls import Call, Scores, make_failed_scores
from litgrpo.rewards.process_runner import (
    HANDLER,
    Attempt,
    Batch,
    Task,
    split_rows,
    stays_in_process,
)
from litgrpo.rewards.worker_pool import FunctionPool
from litgrpo.workers.failures import WorkerError
from tests.rewards import faulty

TEXTS = ["a", "bb", "bad", "dddd", "e", "ff", "ggg", "hhhh"]


@pytest.fixture
def runner():
    runner = ProcessRunner(num_workers=2)
    yield runner
    runner.close()


def score(runner, function, texts=TEXTS, columns=None, **kwargs):
    scorer = Scorer({"r": Reward(function, kwargs=kwargs)}, runner=runner)
    table = scorer(["p"] * len(texts), list(texts), columns or {}, len(texts) // 2)
    return table, scorer


def advantages(table):
    mask = torch.ones(table.total.numel(), 1, dtype=torch.bool)
    return Objective().token_advantages(table, mask)[:, 0]


FAULTS = {
    "sleeps": "TimeoutError",
    "loops_in_c": "TimeoutError",
    "loops_in_python": "TimeoutError",
    "catastrophic_regex": "TimeoutError",
    "async_hangs": "TimeoutError",
    "async_blocks": "TimeoutError",
    "async_crashes": "exited with 7",
    "pure_hangs": "TimeoutError",
    "segfaults": "died of SIGSEGV",
    "exits_at_once": "exited with 7",
    "leaves": "SystemExit",
    "interrupts": "KeyboardInterrupt",
    "raises": "KeyError",
    "wrong_length_for_the_bad": "wrong length",
}
VALUES = {"returned nan": math.nan, "returned list": [1]}


def test_faults_of_several_functions_cost_their_sample_their_time_and_nothing_else(caplog) -> None:
    """All at once; the other rows, functions and iterations do not notice."""
    runner = ProcessRunner(timeout_s=2.0, num_workers=8)
    parts = {name: Reward(vars(faulty)[name]) for name in FAULTS}
    parts |= {why: Reward(faulty.odd_values, kwargs={"value": VALUES[why]}) for why in VALUES}
    scorer = Scorer(parts, runner=runner)
    with caplog.at_level(logging.WARNING):
        table = scorer(["p"] * len(TEXTS), list(TEXTS), {}, 4)
    assert table.valid.flatten().tolist() == [text != "bad" for text in TEXTS]
    reasons = FAULTS | {why: why for why in VALUES}
    assert scorer.failures == {name: {reason: 1} for name, reason in reasons.items()}
    for name in parts:
        (warning,) = [one for one in caplog.messages if f"reward '{name}': " in one]
        assert "row 2" in warning
        assert "'bad'" in warning
    assert "in catastrophic_regex" in caplog.text  # where it hangs
    assert 'raise KeyError("bad")' in caplog.text  # the traceback of the worker
    honest = Scorer({"r": Reward(faulty.lengths, weight=len(parts))}, runner=runner)
    fair = honest(["p"] * len(TEXTS), list(TEXTS), {}, 4)
    assert fair.valid.all()
    assert torch.equal(table.total[table.valid], fair.total[table.valid])
    # The other group is the same to the last bit; the rest of this one is compared without the row.
    assert torch.equal(advantages(table)[4:], advantages(fair)[4:])
    assert advantages(table)[2] == 0
    assert abs(advantages(table)[:4].sum()) < 1e-6
    runner.close()


def test_an_abstention_is_no_failure_and_teaches_nothing(runner) -> None:
    table, scorer = score(runner, faulty.odd_values, value=None)
    assert table.valid.flatten().tolist() == [text != "bad" for text in TEXTS]
    assert not scorer.failures


def test_a_wrong_length_of_the_batch_is_asked_again_row_by_row(runner) -> None:
    table, scorer = score(runner, faulty.wrong_length)
    assert table.total.flatten().tolist() == [len(text) for text in TEXTS]
    assert not scorer.failures


def test_inputs_that_a_function_changes_are_copies(runner) -> None:
    facts = [{"a": [0.0]} for _ in TEXTS]
    for _ in range(2):
        table, _ = score(runner, faulty.vandal, columns={"facts": facts})
        assert table.total.flatten().tolist() == [len(text) for text in TEXTS]
    assert facts == [{"a": [0.0]}] * len(TEXTS)


def test_every_row_has_its_turn_however_many_hang() -> None:
    runner = ProcessRunner(timeout_s=2.0, num_workers=6)
    texts = (["bad"] * 8 + [f"a{n}" for n in range(8)]) * 2  # in each half they come first
    functions = ("sleeps", "loops_in_c", "pure_hangs")
    scorer = Scorer({name: Reward(vars(faulty)[name]) for name in functions}, runner=runner)
    table = scorer(["p"] * len(texts), texts, {}, len(texts) // 2)
    runner.close()
    assert table.valid.flatten().tolist() == [text != "bad" for text in texts]
    assert scorer.failures == {name: {"TimeoutError": 16} for name in functions}


def test_what_a_function_prints_is_seen(runner, capfd) -> None:
    score(runner, faulty.prints)
    printed = capfd.readouterr()
    assert "judging 8" in printed.out
    assert "a complaint" in printed.err


def test_independent_functions_run_side_by_side(runner, tmp_path, caplog) -> None:
    # each answers only when the other has begun, too
    meet = {name: Reward(faulty.meeting(str(tmp_path), name, 2)) for name in ("a", "b")}
    scorer = Scorer(meet, runner=runner)
    assert scorer(["p"] * 2, ["a", "b"], {}, 2).valid.all()
    assert not caplog.text


def test_rows_of_a_pure_function_run_side_by_side(runner, tmp_path, caplog) -> None:
    columns = {"path": [str(tmp_path)] * 2}
    assert score(runner, faulty.pure_meeting, ["a", "b"], columns)[0].valid.all()
    assert not caplog.text


def test_a_warm_worker_goes_on_with_its_state(runner) -> None:
    """Workers are started once, not for each iteration."""
    first, scorer = score(runner, faulty.its_process)
    again = scorer(["p"] * len(TEXTS), TEXTS, {}, 4)
    assert torch.equal(first.total, again.total)


def test_a_slow_sample_is_told_once(runner, caplog) -> None:
    runner.slow_warning_s = 0.04
    for _ in range(2):
        score(runner, faulty.pure_waits, ["a", "b"])
    assert caplog.text.count("reward 'r' took ") == 1
    assert "s for 1 rows, the first of them '" in caplog.text


def test_slow_imports_of_workers_are_explained(runner, caplog, monkeypatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("litgrpo.rewards.process_runner.SLOW_IMPORT_S", -1.0)
    score(runner, faulty.pure_waits, ["a", "b"])
    assert "imported the modules of the rewards r in" in caplog.text


def test_coroutines_run_together(tmp_path, caplog) -> None:
    runner = ProcessRunner(timeout_s=60.0, num_workers=1)
    parts = {n: Reward(faulty.async_meeting, kwargs={"name": n, "of": 3}) for n in "abc"}
    columns = {"path": [str(tmp_path)] * 2}
    table = Scorer(parts, runner=runner)(["p"] * 2, ["a", "b"], columns, 2)
    runner.close()
    assert table.valid.all()
    assert not caplog.text


def test_functions_of_a_script_or_notebook_travel_whole(runner) -> None:
    scale = 3.0

    def local(completions):
        return [scale * os.getpid() for _ in completions]

    table, _ = score(runner, local)
    assert (table.total != scale * os.getpid()).all()
    assert score(runner, lambda completions: [2.0] * len(completions))[0].valid.all()


def test_what_cannot_travel_runs_here_with_a_warning(runner, caplog) -> None:
    lock = threading.Lock()

    def holds_a_lock(completions):
        with lock:
            return [float(os.getpid())] * len(completions)

    for _ in range(2):
        table, _ = score(runner, holds_a_lock)
        assert (table.total == os.getpid()).all()
    assert caplog.text.count("cannot be sent to another process (TypeError") == 1


def test_our_own_functions_run_here_but_not_a_judge_that_they_are_given() -> None:
    def call(function, **settings):
        return Call("r", function, {"completions": TEXTS}, settings, len(TEXTS))

    assert stays_in_process(call(correctness, require_tags=False))
    assert not stays_in_process(call(correctness, judge=faulty.lengths))
    assert not stays_in_process(call(correctness, judges={"x": [faulty.lengths]}))
    assert not stays_in_process(call(faulty.lengths))
    assert not stays_in_process(call(len))


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"timeout_s": 0}])
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match="reward_runner"):
        ProcessRunner(**settings)


def test_a_runner_can_be_copied_and_starts_its_own_workers(runner) -> None:
    import copy

    score(runner, faulty.lengths)
    twin = copy.deepcopy(runner)
    assert twin.pool.launcher is None
    assert score(twin, faulty.lengths)[0].valid.all()
    twin.close()
    assert isinstance(copy.deepcopy(InProcessRunner()), InProcessRunner)


def test_a_recipe_chooses_its_runner(tmp_path) -> None:
    import jsonargparse

    from litgrpo.training.grpo import GRPO

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GRPO, "model")
    rewards = '--model.rewards={"r": {"function": "litgrpo.rewards.correctness"}}'
    words = ["--model.pretrained=none", rewards, "--model.reward_runner=ProcessRunner"]
    module = parser.instantiate(
        parser.parse_args([*words, "--model.reward_runner.timeout_s=7"])
    ).model
    assert isinstance(module.scorer.runner, ProcessRunner)
    assert module.scorer.runner.timeout_s == 7
    words[2] = "--model.reward_runner=litgrpo.rewards.runner.InProcessRunner"
    module = parser.instantiate(parser.parse_args(words)).model
    assert isinstance(module.scorer.runner, InProcessRunner)


def batch(function=len, rows=4, num_workers=2) -> Batch:
    call = Call("r", function, {"completions": ["x"] * rows}, {}, rows)
    return Batch(InProcessRunner(timeout_s=64.0), FunctionPool(num_workers, HANDLER), {0: call})


def fail(asked, task) -> list[Task]:
    """Tasks that follow the failure of a task."""
    asked.queue.clear()
    rows = task.unanswered[0][1]
    asked._record(task, 0, make_failed_scores(len(rows), KeyError("?")), 1.0)
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
    asked._record(tasks[0], 0, Scores([1.0]), 0.0)  # quick: the others have its share
    assert asked._limit_s(tasks[1]) == 64.0 / 3
    asked._record(
        tasks[1], 0, make_failed_scores(1, KeyError()), 64.0 / 3
    )  # hung: the others keep theirs
    assert asked._limit_s(tasks[2]) == pytest.approx(64.0 / 3)


def test_the_last_row_gets_no_more_than_all_workers_could_have_spent():
    asked = batch(rows=1, num_workers=4)
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
    asked._record(together, 0, make_failed_scores(1, KeyError()), 1.0)  # one row
    asked._record(together, 1, make_failed_scores(1, WorkerError("exited with 7")), 1.0, lost=True)
    assert asked.results[0].failures == {0: "KeyError"}
    assert [task.attempt for task in asked.queue][-1] is Attempt.ROW


def test_stripes_hold_every_row_once() -> None:
    assert split_rows([3, 4, 5], 2) == [[3, 4], [5]]
    assert split_rows([], 2) == []


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
