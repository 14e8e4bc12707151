"""Reward functions in the training process, and what all runners share."""

import asyncio
import copy
import logging
import pickle
import threading
import time

import pytest
import torch

from litgrpo.rewards import (
    Reward,
    RewardFailure,
    Scorer,
    Scoring,
    whole_batch,
)
from litgrpo.rewards.calls import Call
from litgrpo.rewards.runner import Runner
from tests.rewards import faulty

TEXTS = ["a", "b", "bad", "d"]
IN_PROCESS = Scoring(num_workers=0)


def score(function, scoring=IN_PROCESS, times=1, texts=TEXTS, **columns):
    scorer = Scorer({"r": Reward(function)}, scoring)
    for _ in range(times):
        table = scorer(["p"] * len(texts), list(texts), columns, len(texts))
    return table, scorer


def raises_on_bad(completions):
    if "bad" in completions:
        raise KeyError("bad")
    return [1.0] * len(completions)


def test_a_raising_call_loses_only_the_rows_that_raise() -> None:
    table, scorer = score(raises_on_bad)
    assert table.valid.tolist() == [[True, True, False, True]]
    assert table.total.tolist() == [[1, 1, 0, 1]]
    assert scorer.failures == {"r": {"KeyError": 1}}


def test_the_advantages_of_other_samples_do_not_change() -> None:
    def fair(completions):
        return [float(len(text)) for text in completions]

    def faulty(completions):
        return [
            None if text == "bad" else "?" if text == "b" else len(text) for text in completions
        ]

    honest, _ = score(fair)
    masked, _ = score(faulty)
    kept = masked.valid
    assert kept.tolist() == [[True, False, False, True]]
    assert torch.equal(honest.total[kept], masked.total[kept])


def test_a_whole_batch_function_is_masked_whole() -> None:
    calls = []

    @whole_batch
    def compare(completions):
        calls.append(len(completions))
        raise KeyError

    table, scorer = score(compare, Scoring(num_workers=0, max_failed_frac=1.0))
    assert calls == [4]
    assert not table.valid.any()
    assert scorer.failures == {"r": {"KeyError": 4}}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "returned nan"), (float("-inf"), "returned -inf"), (10**400, "returned inf"),
        ("1", "returned str"), ([1], "returned list"), (1j, "returned complex"),
        (torch.tensor(float("nan")), "returned nan"), (torch.tensor([1.0, 2.0]), "returned list"),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_fails_its_row(value: object, reason: str) -> None:
    table, scorer = score(lambda completions: [1, 2, value, 3])
    assert table.valid.tolist() == [[True, True, False, True]]
    assert scorer.failures == {"r": {reason: 1}}


def test_inputs_are_protected_from_changes() -> None:
    ids, facts = [[1], [2], [3], [4]], [{"a": [1]} for _ in range(4)]

    def vandal(prompts, completions, completion_ids, facts):
        total = [
            float(sum(ids) + sum(fact["a"]))
            for ids, fact in zip(completion_ids, facts, strict=True)
        ]
        completions.clear()
        completion_ids[0].append(9)
        facts[0]["a"].append(9)
        return total

    table, _ = score(vandal, times=2, completion_ids=ids, facts=facts)
    assert table.total.tolist() == [[2, 3, 4, 5]]
    assert ids == [[1], [2], [3], [4]]
    assert facts == [{"a": [1]}] * 4


def test_too_many_failures_stop_the_run_with_the_reason() -> None:
    def broken(completions):
        raise ZeroDivisionError("division by zero")

    with pytest.raises(
        RewardFailure,
        match=r"'r': 4 of 4 .*ZeroDivisionError: 4.*division by zero.*max_failed_frac",
    ) as caught:
        score(broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    score(raises_on_bad, Scoring(num_workers=0, max_failed_frac=0.25))
    with pytest.raises(RewardFailure):
        score(raises_on_bad, Scoring(num_workers=0, max_failed_frac=0.24))


def test_the_first_traceback_is_whole_and_then_only_counts(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        score(raises_on_bad, times=4)
    first, second, third = caplog.records  # at 1, 2 and 4 failures
    assert "Traceback" in caplog.text
    assert "raise KeyError" in caplog.text
    assert "row 2" in first.getMessage()
    assert "'bad'" in first.getMessage()
    assert second.exc_info is None
    assert third.getMessage() == "reward 'r': 1 of 4 completions failed; so far 4 (KeyError: 4)"


def test_the_deadline_covers_the_rows() -> None:
    def slow(completions):
        time.sleep(0.05)
        raise KeyError

    _, scorer = score(
        slow, Scoring(num_workers=0, timeout_s=0.12, max_failed_frac=1.0), texts=["x"] * 50
    )
    assert scorer.failures["r"]["TimeoutError"] > 40


def test_a_wrong_length_is_forgiven_where_single_rows_get_an_answer(caplog) -> None:
    def for_one(completions):
        return [float(len(completions[0]))]

    def flaky(completions):
        return [1.0] if "bad" in completions and len(completions) > 1 else [1.0] * len(completions)

    table, scorer = score(for_one)
    assert table.total.tolist() == [[1, 1, 3, 1]]
    assert not scorer.failures
    assert "was called row by row: returned 1 rewards for 4 completions" in caplog.text
    assert score(flaky)[0].valid.all()


def test_leaving_the_program_costs_the_row_only() -> None:
    def leaves(completions):
        if "bad" in completions:
            raise SystemExit(3)
        return [1.0] * len(completions)

    table, scorer = score(leaves)
    assert table.valid.tolist() == [[True, True, False, True]]
    assert scorer.failures == {"r": {"SystemExit": 1}}


def test_a_slow_question_is_told_with_its_completion(caplog) -> None:
    def slow(completions):
        if len(completions) > 1:
            raise KeyError
        time.sleep(1.1 if "bad" in completions else 0)
        return [1.0]

    score(slow)
    assert "s for 1 rows, the first of them 'bad'" in caplog.text


def test_coroutine_functions_run_together_and_lose_only_bad_rows(caplog) -> None:
    begun = set()

    def meeting(name, score):
        async def judge(completions):
            begun.add(name)
            while len(begun) < 2:  # would never end one after the other
                await asyncio.sleep(0)
            return score(completions)

        return judge

    def twos(completions):
        return [2.0] * len(completions)

    functions = {"a": meeting("a", raises_on_bad), "b": meeting("b", twos), "c": raises_on_bad}
    parts = {name: Reward(function) for name, function in functions.items()}
    table = Scorer(parts, Scoring(num_workers=0))(["p"] * 4, TEXTS, {}, 4)
    assert table.total.tolist() == [[4, 4, 2, 4]]
    assert table.valid.tolist() == [[True, True, False, True]]
    assert "TimeoutError" not in caplog.text


def test_a_hanging_coroutine_is_stopped() -> None:
    async def hangs(completions):
        await asyncio.sleep(3600 if "bad" in completions else 0)
        return [1.0] * len(completions)

    table, scorer = score(hangs, Scoring(num_workers=0, timeout_s=2.0))
    assert table.valid.tolist() == [[True, True, False, True]]
    assert scorer.failures == {"r": {"TimeoutError": 1}}


def test_a_coroutine_that_blocks_its_thread_costs_its_rows_and_not_the_run(monkeypatch) -> None:
    monkeypatch.setattr("litgrpo.rewards.runner.GRACE_S", 0.1)
    released = threading.Event()

    async def blocks(completions):
        if "bad" in completions:
            released.wait()
        return [1.0] * len(completions)

    async def waits(completions):
        await asyncio.sleep(0.01)
        return [2.0] * len(completions)

    settings = Scoring(num_workers=1, timeout_s=0.5, max_failed_frac=1.0)
    scorer = Scorer({"blocks": Reward(blocks), "waits": Reward(waits)}, settings)
    try:
        table = scorer(["p"] * 4, TEXTS, {}, 4)
        assert table.components["blocks"].isnan().all()
        assert table.components["waits"].tolist() == [[2.0] * 4]
        assert scorer.failures == {"blocks": {"TimeoutError": 4}}
        assert scorer(["p"] * 2, ["a", "b"], {}, 2).valid.all()
    finally:
        released.set()


def test_coroutine_functions_work_where_an_event_loop_runs_already() -> None:
    async def judge(completions):
        return [1.0] * len(completions)

    async def notebook_cell():
        return score(judge)[0]

    assert asyncio.run(notebook_cell()).valid.all()


def call(function, texts=("a", "bb")) -> Call:
    return Call("r", function, {"completions": list(texts)}, {}, len(texts))


def test_scores_are_computed_once_and_kept():
    calls = []

    def counting(completions):
        calls.append(len(completions))
        return [1.0] * len(completions)

    started = Runner(IN_PROCESS).start([call(counting)])
    assert not calls
    assert started.wait() is started.wait()
    assert calls == [2]


def test_too_many_failures_raise_from_the_first_error_each_time_one_waits():
    started = Runner(IN_PROCESS).start([call(faulty.raises, ["bad", "bad"])])
    for _ in range(2):
        with pytest.raises(RewardFailure, match="2 of 2") as caught:
            started.wait()
        assert isinstance(caught.value.__cause__, KeyError)


def test_started_calls_are_cancelled_by_the_next_start_and_by_close():
    runner = Runner(IN_PROCESS)
    first, second = (runner.start([call(faulty.lengths)]) for _ in range(2))
    runner.close()
    for cancelled in (first, second):
        with pytest.raises(RuntimeError, match="cancelled"):
            cancelled.wait()
    third = runner.start([call(faulty.lengths)])
    assert third.wait()[0].values == [1.0, 2.0]
    runner.close()
    assert third.wait()[0].values == [1.0, 2.0]


def test_what_runs_in_this_process_runs_in_the_callers_thread():
    threads = set()
    lock = threading.Lock()

    def here(completions):
        with lock:  # cannot be sent to another process
            threads.add(threading.current_thread())
        return [0.0] * len(completions)

    for num_workers in (0, 1):
        runner = Runner(Scoring(num_workers=num_workers))
        runner.start([call(here)]).wait()
        runner.close()
    assert threads == {threading.main_thread()}


def test_a_runner_with_started_calls_can_be_copied():
    runner = Runner(IN_PROCESS)
    runner.start([call(faulty.lengths)])
    for twin in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        assert twin.start([call(faulty.lengths)]).wait()[0].values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "scoring.timeout_s is 0; it must be above 0"),
        ({"num_workers": -1}, "scoring.num_workers is -1; it must be at least 0"),
        ({"max_failed_frac": 1.5}, "scoring.max_failed_frac is 1.5; it must be at most 1"),
        ({"overlong_buffer_frac": -0.1}, "overlong_buffer_frac is -0.1; it must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Scoring(**settings)
