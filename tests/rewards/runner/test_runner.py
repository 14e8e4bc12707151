"""Calls that a runner started."""

import copy
import pickle
import threading

import pytest

from litgrpo.rewards import InProcessRunner, ProcessRunner, RewardFailure
from litgrpo.rewards.runner.calls import Call
from tests.rewards import faulty


def call(function, texts=("a", "bb")) -> Call:
    return Call("r", function, {"completions": list(texts)}, {}, len(texts))


def test_scores_are_computed_once_and_kept():
    calls = []

    def counting(completions):
        calls.append(len(completions))
        return [1.0] * len(completions)

    started = InProcessRunner().start([call(counting)])
    assert not calls
    assert started.wait() is started.wait()
    assert calls == [2]


def test_too_many_failures_raise_from_the_first_error_each_time_one_waits():
    started = InProcessRunner().start([call(faulty.raises, ["bad", "bad"])])
    for _ in range(2):
        with pytest.raises(RewardFailure, match="2 of 2") as caught:
            started.wait()
        assert isinstance(caught.value.__cause__, KeyError)


def test_started_calls_are_cancelled_by_the_next_start_and_by_close():
    runner = InProcessRunner()
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

    for runner in (InProcessRunner(), ProcessRunner(workers=1)):
        runner.start([call(here)]).wait()
        runner.close()
    assert threads == {threading.main_thread()}


def test_a_runner_with_started_calls_can_be_copied():
    runner = InProcessRunner()
    runner.start([call(faulty.lengths)])
    for twin in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        assert twin.start([call(faulty.lengths)]).wait()[0].values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "reward_runner.timeout_s is 0; it must be above 0"),
        ({"max_failed_frac": 1.5}, "reward_runner.max_failed_frac is 1.5; it must be at most 1"),
        ({"slow_s": 0}, "reward_runner.slow_s is 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        InProcessRunner(**settings)
