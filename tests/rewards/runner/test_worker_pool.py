"""Processes that are started, taken, released and ended."""

import pickle

import pytest

from litgrpo.rewards import ProcessRunner
from litgrpo.rewards.runner import worker_pool
from litgrpo.rewards.runner.calls import Call
from litgrpo.rewards.runner.worker_pool import MAX_PICKLED, WorkerPool, packed
from tests.rewards import faulty

CALL = Call("r", faulty.lengths, {"completions": ["a"]}, {}, 1)


@pytest.fixture
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


def test_no_more_workers_are_given_than_may_run(pool):
    assert pool.register([CALL]) == {}
    workers = [pool.take() for _ in range(3)]
    assert workers[2] is None
    pool.release(workers[0])
    assert pool.take() is workers[0]


def test_functions_that_are_registered_already_start_nothing(pool):
    pool.register([CALL])
    (launcher,) = pool.launchers
    pool.register([CALL])
    assert pool.launchers == [launcher]


def test_a_function_that_cannot_be_loaded_is_named_with_the_reason(pool):
    class Unloadable:
        def __reduce__(self):
            return (exec, ("raise OSError('no licence')",))

    (reason,) = pool.register([Call("r", Unloadable(), {}, {}, 1)]).values()
    assert "no licence" in reason
    assert not pool.failed


class Fatal:
    """A function whose loading ends, blocks or floods the process that loads it."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)

    def __call__(self, completions):
        raise AssertionError("it must not run in the training process")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "exited with 3 while loading"),
        ("import sys; sys.exit(4)", "exited with 4 while loading"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "died of SIGSEGV while loading",
        ),
        ("while True: pass", "TimeoutError while loading"),
        ("while True: print('x' * 65536)", "printed more than 5 MB while loading"),
    ],
)
def test_a_function_that_breaks_its_process_while_loading_fails_alone(code, reason, monkeypatch):
    """Its rows fail with that reason; it never runs here, and the other function works."""
    if "Timeout" in reason:
        monkeypatch.setattr(worker_pool, "LOAD_S", 3.0)
    runner = ProcessRunner(workers=1, max_failed_frac=1.0)
    fatal, fine = (
        Call(name, function, {"completions": ["a", "b"]}, {}, 2)
        for name, function in (("fatal", Fatal(code)), ("fine", faulty.lengths))
    )
    for _ in range(2):
        first, second = runner.submit([fatal, fine]).result()
        assert first.failures == {0: reason, 1: reason}
        assert second.values == [1.0, 1.0]
    assert len(runner.pool.launchers) == 1
    runner.close()


def test_ending_the_busy_leaves_the_idle(pool):
    pool.register([CALL])
    busy, idle = pool.take(), pool.take()
    pool.release(idle)
    pool.end_busy()
    assert (pool.busy, pool.idle) == ([], [idle])
    assert busy.connection.closed


def test_what_must_hold_a_model_is_not_sent():
    with pytest.raises(ValueError, match="it holds 64 MB"):
        packed(bytes(MAX_PICKLED + 1), {})
    function, settings = pickle.loads(packed(faulty.lengths, {"a": 1}))
    assert (function, settings) == (faulty.lengths, {"a": 1})
