"""The future that a runner gives back."""

import copy
import pickle
import threading
from concurrent.futures import CancelledError, Future

import pytest

from litgrpo.rewards import InProcessRunner, ProcessRunner, RewardFailure
from litgrpo.rewards.runner.calls import Call
from litgrpo.rewards.runner.runner import LazyFuture
from tests.rewards import faulty


def call(function, texts=("a", "bb")) -> Call:
    return Call("r", function, {"completions": list(texts)}, {}, len(texts))


def test_a_lazy_future_is_finished_once_by_who_asks_in_that_thread():
    threads = []
    future = LazyFuture(lambda: threads.append(threading.current_thread()))
    assert isinstance(future, Future)
    assert not future.done()
    assert future.result() is future.result() is None
    assert threads == [threading.main_thread()]
    assert future.done()


def test_a_lazy_future_keeps_type_and_message_of_an_error():
    future = LazyFuture(lambda: {}["missing"])
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            future.result()
    assert isinstance(future.exception(), KeyError)


def test_the_error_of_too_many_failures_comes_with_the_result_and_its_cause():
    future = InProcessRunner().submit([call(faulty.raises, ["bad", "bad"])])
    with pytest.raises(RewardFailure, match="2 of 2") as caught:
        future.result()
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_was_not_waited_for_is_given_up_at_the_next_submit_and_at_close():
    runner = InProcessRunner()
    first, second = (runner.submit([call(faulty.lengths)]) for _ in range(2))
    with pytest.raises(CancelledError):
        first.result()
    runner.close()
    assert second.cancelled()
    third = runner.submit([call(faulty.lengths)])
    assert third.result()[0].values == [1.0, 2.0]
    runner.close()
    assert third.result()[0].values == [1.0, 2.0]


def test_what_runs_in_this_process_runs_in_the_callers_thread():
    threads = set()
    lock = threading.Lock()

    def here(completions):
        with lock:  # cannot be sent to another process
            threads.add(threading.current_thread())
        return [0.0] * len(completions)

    for runner in (InProcessRunner(), ProcessRunner(workers=1)):
        runner.submit([call(here)]).result()
        runner.close()
    assert threads == {threading.main_thread()}


def test_a_runner_with_something_pending_can_be_copied():
    runner = InProcessRunner()
    runner.submit([call(faulty.lengths)])
    for twin in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        assert twin.submit([call(faulty.lengths)]).result()[0].values == [1.0, 2.0]


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
