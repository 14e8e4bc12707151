"""Pools of workers that have loaded several objects."""

import os
import signal
import time

import pytest

from litgrpo.rewards import ProcessRunner
from litgrpo.rewards.calls import Call, Message, Question
from litgrpo.rewards.process_runner import HANDLER
from litgrpo.rewards.worker_pool import FunctionPool
from litgrpo.workers import process
from tests.rewards import faulty

PART = {"r": (faulty.lengths, {})}
ONE_ROW = Message([Question("r", {"completions": ["a"]}, 1)], False, 60.0)


@pytest.fixture
def pool():
    pool = FunctionPool(2, HANDLER)
    yield pool
    pool.close()


def test_take_returns_at_most_size_workers(pool):
    assert pool.register(PART) == {}
    workers = []
    for _ in range(2):
        workers.append(pool.take())
        workers[-1].send(ONE_ROW, 60.0)
    assert pool.take() is None
    replies = []
    while len(replies) < 2:
        replies += pool.receive(wait=True)
    assert {worker for worker, _, _ in replies} == set(workers)
    assert [scores.values for _, (_, scores, _), _ in replies] == [[1.0], [1.0]]
    assert pool.take() in workers


def test_registering_the_same_objects_keeps_the_workers(pool):
    pool.register(PART)
    (worker,), launcher = pool.workers, pool.launcher
    pool.register(PART)
    assert (pool.workers, pool.launcher) == ([worker], launcher)


def test_register_returns_the_loading_error_and_the_other_objects_work(pool):
    class Unloadable:
        def __reduce__(self):
            return (exec, ("raise OSError('no licence')",))

    (reason,) = pool.register({"x": (Unloadable(), {}), **PART}).values()
    assert "no licence" in reason
    assert not pool.failed
    pool.take().send(ONE_ROW, 60.0)
    ((_, (_, scores, _), _),) = pool.receive(wait=True)
    assert scores.values == [1.0]


class Fatal:
    """Function that kills or blocks the process that unpickles it."""

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
        ("import sys; sys.exit(4)", "SystemExit: 4 (<string>, line 1)"),
        ("while True: pass", "TimeoutError while loading"),
    ],
)
def test_a_function_that_breaks_its_process_while_loading_fails_alone(code, reason, monkeypatch):
    """Its rows fail with the reason; it never runs in this process, and other functions work."""
    if "Timeout" in reason:
        monkeypatch.setattr(process, "LOAD_S", 3.0)
    runner = ProcessRunner(num_workers=1, max_failed_frac=1.0)
    fatal, fine = (
        Call(name, function, {"completions": ["a", "b"]}, {}, 2)
        for name, function in (("fatal", Fatal(code)), ("fine", faulty.lengths))
    )
    for _ in range(2):
        first, second = runner.start([fatal, fine]).wait()
        assert first.failures == {0: reason, 1: reason}
        assert second.values == [1.0, 1.0]
    runner.close()


def test_kill_busy_keeps_idle_workers(pool):
    pool.register(PART)
    busy, waiting = pool.take(), pool.launch()
    busy.send(ONE_ROW, 60.0)
    pool.kill_busy()
    assert pool.workers == [waiting]
    assert busy.is_lost


def test_a_worker_that_died_while_idle_is_replaced(pool):
    pool.register(PART)
    worker = pool.take()
    os.kill(worker.pid, signal.SIGKILL)
    while worker.is_idle:
        time.sleep(0.01)
    assert pool.take() is not worker
    assert worker not in pool.workers
