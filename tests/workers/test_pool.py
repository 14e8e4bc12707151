"""Worker pool: starting, sending, receiving, losing and killing workers."""

import os
import pickle
import signal

import pytest

from litgrpo.rewards import ProcessRunner
from litgrpo.rewards.calls import Call, Message, Question
from litgrpo.rewards.process_runner import HANDLER
from litgrpo.workers import pool as pool_module
from litgrpo.workers.pool import MAX_PICKLED, WorkerPool, pickle_objects
from tests.rewards import faulty

PART = {"r": (faulty.lengths, {})}
ONE_ROW = Message([Question("r", {"completions": ["a"]}, 1)], False, 60.0)


@pytest.fixture
def pool():
    pool = WorkerPool(2, HANDLER)
    yield pool
    pool.close()


def test_take_returns_at_most_size_workers(pool):
    assert pool.register(PART) == {}
    workers = []
    for _ in range(2):
        workers.append(pool.take())
        pool.send(workers[-1], ONE_ROW, 60.0)
    assert pool.take() is None
    replies = []
    while len(replies) < 2:
        replies += pool.receive(wait=True)
    assert {worker for worker, _, _ in replies} == set(workers)
    assert [scores.values for _, (_, scores, _), _ in replies] == [[1.0], [1.0]]
    assert pool.take() in workers


def test_registering_the_same_objects_keeps_the_launcher(pool):
    pool.register(PART)
    (launcher,) = pool.launchers
    pool.register(PART)
    assert pool.launchers == [launcher]


def test_register_returns_the_loading_error(pool):
    class Unloadable:
        def __reduce__(self):
            return (exec, ("raise OSError('no licence')",))

    (reason,) = pool.register({"r": (Unloadable(), {})}).values()
    assert "no licence" in reason
    assert not pool.failed


class Fatal:
    """Function that kills, blocks or floods the process that unpickles it."""

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
    """Its rows fail with the reason; it never runs in this process, and other functions work."""
    if "Timeout" in reason:
        monkeypatch.setattr(pool_module, "LOAD_S", 12.0)  # `fine` takes a few if busy
    runner = ProcessRunner(num_workers=1, max_failed_frac=1.0)
    fatal, fine = (
        Call(name, function, {"completions": ["a", "b"]}, {}, 2)
        for name, function in (("fatal", Fatal(code)), ("fine", faulty.lengths))
    )
    for _ in range(2):
        first, second = runner.start([fatal, fine]).wait()
        assert first.failures == {0: reason, 1: reason}
        assert second.values == [1.0, 1.0]
    assert len(runner.pool.launchers) == 1
    runner.close()


def test_kill_busy_keeps_idle_workers(pool):
    pool.register(PART)
    busy, waiting = pool.launch(), pool.launch()
    pool.send(busy, ONE_ROW, 60.0)
    pool.kill_busy()
    assert pool.workers == [waiting]
    assert busy.connection.closed


def test_a_worker_that_died_while_idle_is_removed(pool):
    pool.register(PART)
    worker = pool.take()
    os.kill(worker.pid, signal.SIGKILL)
    while pool.workers:
        assert pool.receive(wait=False) == []
    assert pool.take() is not worker


def test_waiting_for_a_cpu_extends_the_deadline(pool, tmp_path):
    pool.register(PART)
    worker = pool.take()
    schedule = tmp_path / "schedstat"
    schedule.write_text("5 1000000000 7\n")
    worker.schedule = os.open(schedule, os.O_RDONLY)
    worker.begin(0.0)
    now = worker.deadline + 1.0
    assert worker.is_late(now)
    schedule.write_text("5 3000000000 7\n")
    assert not worker.is_late(now)  # two seconds more
    assert worker.is_late(now + 1.0)
    os.close(worker.schedule)


def test_objects_as_large_as_a_model_are_rejected():
    with pytest.raises(ValueError, match="64 MB"):
        pickle_objects((bytes(MAX_PICKLED + 1), {}))
    function, settings = pickle.loads(pickle_objects((faulty.lengths, {"a": 1})))
    assert (function, settings) == (faulty.lengths, {"a": 1})
