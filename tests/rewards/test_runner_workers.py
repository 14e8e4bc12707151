"""Worker processes: each fault loses its own rows; which rows run, and for how long."""

import logging
import math
import os
import pickle
import threading

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.rewards import Reward, Scorer, Scoring, pure, whole_batch
from litgrpo.rewards.builtin.math import correctness
from litgrpo.rewards.calls import Call, MalformedResult, Scores, UnusableReward, limit_rows
from litgrpo.rewards.runner import FunctionInWorker, Runner, plan_tasks, stays_in_process
from litgrpo.workers import process
from litgrpo.workers.failures import WorkerError
from tests.rewards import faulty

TEXTS = ["a", "bb", "bad", "dddd", "e", "ff", "ggg", "hhhh"]


@pytest.fixture
def runner():
    runner = Runner(Scoring(num_workers=2))
    yield runner
    runner.close()


def scorer_of(parts, runner):
    scorer = Scorer(parts)
    scorer.runner = runner  # whose workers have run before
    return scorer


def score(runner, function, texts=TEXTS, columns=None, **kwargs):
    scorer = scorer_of({"r": Reward(function, kwargs=kwargs)}, runner)
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
    runner = Runner(Scoring(timeout_s=2.0, num_workers=8))
    parts = {name: Reward(vars(faulty)[name]) for name in FAULTS}
    parts |= {why: Reward(faulty.odd_values, kwargs={"value": VALUES[why]}) for why in VALUES}
    scorer = scorer_of(parts, runner)
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
    honest = scorer_of({"r": Reward(faulty.lengths, weight=len(parts))}, runner)
    fair = honest(["p"] * len(TEXTS), list(TEXTS), {}, 4)
    assert fair.valid.all()
    assert torch.equal(table.total[table.valid], fair.total[table.valid])
    # The other group is the same to the last bit; the rest of this one is compared without the row.
    assert torch.equal(advantages(table)[4:], advantages(fair)[4:])
    assert advantages(table)[2] == 0
    assert abs(advantages(table)[:4].sum()) < 1e-6
    runner.close()


def test_a_wrong_length_of_the_batch_is_asked_again_row_by_row(runner) -> None:
    table, scorer = score(runner, faulty.wrong_length)
    assert table.total.flatten().tolist() == [len(text) for text in TEXTS]
    assert not scorer.failures


def test_every_row_has_its_turn_however_many_hang() -> None:
    runner = Runner(Scoring(timeout_s=2.0, num_workers=6))
    texts = (["bad"] * 8 + [f"a{n}" for n in range(8)]) * 2  # in each half they come first
    functions = ("sleeps", "loops_in_c", "pure_hangs")
    scorer = scorer_of({name: Reward(vars(faulty)[name]) for name in functions}, runner)
    table = scorer(["p"] * len(texts), texts, {}, len(texts) // 2)
    runner.close()
    assert table.valid.flatten().tolist() == [text != "bad" for text in texts]
    assert scorer.failures == {name: {"TimeoutError": 16} for name in functions}


def test_independent_functions_run_side_by_side(runner, tmp_path, caplog) -> None:
    # each answers only when the other has begun, too
    meet = {name: Reward(faulty.meeting(str(tmp_path), name, 2)) for name in ("a", "b")}
    scorer = scorer_of(meet, runner)
    caplog.set_level(logging.WARNING, "litgrpo")
    assert scorer(["p"] * 2, ["a", "b"], {}, 2).valid.all()
    assert not caplog.text


def test_rows_of_a_pure_function_run_side_by_side(runner, tmp_path, caplog) -> None:
    columns = {"path": [str(tmp_path)] * 2}
    caplog.set_level(logging.WARNING, "litgrpo")
    assert score(runner, faulty.pure_meeting, ["a", "b"], columns)[0].valid.all()
    assert not caplog.text


def test_a_warm_worker_goes_on_with_its_state(runner) -> None:
    """Workers are started once, not for each iteration."""
    first, scorer = score(runner, faulty.its_process)
    again = scorer(["p"] * len(TEXTS), TEXTS, {}, 4)
    assert torch.equal(first.total, again.total)


def test_a_slow_sample_is_told_once(runner, caplog, monkeypatch) -> None:
    monkeypatch.setattr("litgrpo.rewards.runner.SLOW_S", 0.04)
    for _ in range(2):
        score(runner, faulty.pure_waits, ["a", "b"])
    assert caplog.text.count("reward 'r' took ") == 1
    assert "s for 1 rows, the first of them '" in caplog.text


def test_slow_imports_of_workers_are_explained(runner, caplog, monkeypatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("litgrpo.rewards.runner.SLOW_IMPORT_S", -1.0)
    score(runner, faulty.pure_waits, ["a", "b"])
    assert "imported the modules of the rewards r in" in caplog.text


def test_coroutine_functions_run_in_this_process(runner) -> None:
    async def its_process(completions):
        return faulty.its_process(completions)

    assert (score(runner, its_process)[0].total == os.getpid()).all()


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


def test_a_runner_can_be_copied_and_starts_its_own_workers(runner) -> None:
    import copy

    score(runner, faulty.lengths)
    twin = copy.deepcopy(runner)
    assert not twin.workers
    assert score(twin, faulty.lengths)[0].valid.all()
    twin.close()


def test_a_recipe_sets_its_runner() -> None:
    import jsonargparse

    from litgrpo.modules.grpo import GRPO

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GRPO, "model")
    rewards = '--model.rewards={"r": {"function": "litgrpo.rewards.correctness"}}'
    words = [
        "--model.pretrained=none",
        rewards,
        "--model.scoring.timeout_s=7",
        "--model.scoring.num_workers=3",
    ]
    runner = parser.instantiate(parser.parse_args(words)).model.scorer.runner
    assert (runner.timeout_s, runner.num_workers) == (7, 3)


def test_a_function_that_breaks_its_process_while_loading_fails_alone():
    """Its rows fail with the reason; it never runs in this process, and other functions work."""
    runner = Runner(Scoring(num_workers=1, max_failed_frac=1.0))
    fatal, fine = (
        Call(name, function, {"completions": ["a", "b"]}, {}, 2)
        for name, function in (("fatal", Fatal()), ("fine", faulty.lengths))
    )
    for _ in range(2):
        first, second = runner.start([fatal, fine]).wait()
        reason = "exited with 3 while loading"
        assert first.failures == {0: reason, 1: reason}
        assert second.values == [1.0, 1.0]
    runner.close()


class Fatal:
    """Function that kills the process that unpickles it."""

    def __reduce__(self):
        return os._exit, (3,)

    def __call__(self, completions):
        raise AssertionError("it must not run in the training process")


def call(function, rows=4, **settings) -> Call:
    return Call("r", function, {"completions": ["x"] * rows}, settings, rows)


def rows_and_limits(function, rows=4, num_workers=2):
    tasks = plan_tasks(0, call(function, rows), 64.0, num_workers)
    return [(list(task.rows), task.limit_s, task.is_first) for task in tasks]


def test_the_first_task_has_all_rows_and_half_of_the_time():
    assert rows_and_limits(len) == [([0, 1, 2, 3], 32.0, True)]


def test_no_time_is_kept_for_single_rows_if_rows_are_compared():
    assert rows_and_limits(whole_batch(lambda completions: completions)) == [
        ([0, 1, 2, 3], 64.0, False)
    ]


def test_rows_of_a_pure_function_are_shared_out_and_leave_half_of_their_time():
    function = pure(lambda completions: completions)
    assert rows_and_limits(function, rows=3) == [([0, 1], 32.0, True), ([2], 32.0, True)]


def with_own_limit(row_timeout_s):
    def function(completions):
        return faulty.sleeps(completions)

    function.row_timeout_s = row_timeout_s
    return function


def test_a_functions_own_limit_holds_for_each_row_within_the_time_of_all():
    assert rows_and_limits(with_own_limit(2.0), rows=2) == [([0], 2.0, False), ([1], 2.0, False)]
    assert rows_and_limits(with_own_limit(99.0), rows=4)[0] == ([0], 32.0, False)
    assert rows_and_limits(with_own_limit(99.0), rows=1)[0] == ([0], 64.0, False)
    assert rows_and_limits(whole_batch(with_own_limit(2.0)), rows=2) == [([0, 1], 64.0, False)]
    with pytest.raises(ValueError, match="row_timeout_s of reward 'r' is 0"):
        rows_and_limits(with_own_limit(0))


def test_a_row_that_exceeds_the_functions_own_limit_scores_zero(runner) -> None:
    table, scorer = score(runner, with_own_limit(0.5))
    assert table.valid.all()
    lengths = [0.0 if text == "bad" else len(text) for text in TEXTS]
    assert table.total.flatten().tolist() == lengths
    assert not scorer.failures


def test_a_row_with_own_limits_that_crashes_scores_zero_and_one_that_raises_fails(runner) -> None:
    prepared = []

    @limit_rows(20.0, 1 << 28, lambda: prepared.append(1))
    def hostile(completions):
        assert prepared == [1]
        (text,) = completions
        if text == "memory":
            bytearray(1 << 29)
        if text == "raises":
            raise KeyError
        return faulty.exits_at_once(completions)

    table, scorer = score(runner, hostile, ["a", "bad", "raises", "memory", "bb", "c"])
    assert table.valid.flatten().tolist() == [True, True, False, False, True, True]
    assert table.total.flatten().tolist() == [1.0, 0.0, 0.0, 0.0, 2.0, 1.0]
    assert scorer.failures == {"r": {"KeyError": 1, "MemoryError": 1}}


class LoadedHereOnly:
    """Value of a column that raises where a worker unpickles it."""

    def __reduce__(self):
        return exec, ("raise ImportError('not here')",)


def test_a_row_with_an_own_limit_fails_if_its_worker_survives(runner) -> None:
    def counts(completions, values):
        return faulty.lengths(completions)

    counts.row_timeout_s = 20.0
    values = [LoadedHereOnly() if text == "bad" else 0 for text in TEXTS]
    table, scorer = score(runner, counts, columns={"values": values})
    assert table.valid.flatten().tolist() == [text != "bad" for text in TEXTS]
    assert sum(scorer.failures["r"].values()) == 1


def test_a_function_with_other_settings_is_loaded_again(runner) -> None:
    for value in (2.0, 3.0):
        table, _ = score(runner, faulty.odd_values, value=value)
        assert table.total.flatten()[2] == value


def test_scores_are_entered_by_row():
    scores = Scores([math.nan] * 3)
    scores.put(
        [2, 0], Scores([7.0, math.nan], {1: "KeyError"}, None, {"m": [1.0]}, {"c": {1: "x"}})
    )
    assert scores.values[2] == 7.0
    assert scores.failures == {0: "KeyError"}
    assert (scores.metrics, scores.extras) == ({"m": [1.0]}, {"c": {0: "x"}})


def send(call):
    """The scores, after the journeys there and back."""
    target = pickle.loads(process.dump(FunctionInWorker(call)))
    message = pickle.loads(pickle.dumps((call.rows, call.num_rows, call.context)))
    return pickle.loads(pickle.dumps(target(message, None)[0]))


def test_a_worker_scores_with_the_settings_that_were_sent_before():
    settings = Call("r", faulty.odd_values, {"completions": ["a", "bad"]}, {"value": 2.0}, 2)
    assert send(settings).values == [1.0, 2.0]


def test_an_exception_travels_as_the_text_of_its_traceback():
    scores = send(Call("r", faulty.raises, {"completions": ["bad"]}, {}, 1))
    assert scores.failures == {0: "KeyError"}
    assert isinstance(scores.error, WorkerError)
    assert 'raise KeyError("bad")' in str(scores.error)


def test_mistakes_in_code_or_data_keep_their_kind():
    scores = send(Call("r", faulty.lengths, {"completions": ["a"]}, {}, 2))
    assert scores.failures == {0: "wrong length", 1: "wrong length"}
    assert isinstance(scores.error, MalformedResult)

    def unusable(completions):
        raise UnusableReward("no package")

    assert isinstance(send(call(unusable)).error, UnusableReward)


def test_what_a_function_logs_travels_with_its_scores():
    def logs(completions, log_metric, log_extra):
        log_metric("words", 3)
        log_extra("first", [text[0] for text in completions])
        return [0.0] * len(completions)

    columns = {"completions": ["ab", "cd"]}
    scores = send(Call("r", logs, columns, {}, 2, notes=("log_metric", "log_extra")))
    assert scores.metrics == {"words": [3.0]}
    assert scores.extras == {"first": {0: "a", 1: "c"}}
