"""Worker pool: starting, sending, receiving, losing and killing workers."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.rewards import ProcessRunner
from litgrpo.rewards.calls import Call, Message, Question
from litgrpo.rewards.process_runner import HANDLER
from litgrpo.workers import pool as pool_module
from litgrpo.workers.failures import TIMEOUT, WorkerError
from litgrpo.workers.pool import MAX_PICKLED, WorkerPool, pickle_objects
from tests.rewards import faulty

PART = {"r": (faulty.lengths, {})}
ONE_ROW = Message([Question("r", {"completions": ["a"]}, 1)], False, 60.0)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids):
    for _ in range(6000):
        if not any(map(alive, pids)):
            return
        time.sleep(0.02)
    pytest.fail("a worker outlived its parent")


def processes_under(pid):
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in task.read_text().split()]
    return pids[1:]


def receive_one(pool):
    """Return the answer of the only worker that is busy."""
    replies = []
    while not replies:
        replies = pool.receive(wait=True)
    ((_, answer, is_last),) = replies
    assert is_last
    return answer


def ask_for_bad(path=""):
    return Message([Question("r", {"completions": ["bad"], "path": [str(path)]}, 1)], False, 60.0)


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
        monkeypatch.setattr(pool_module, "LOAD_S", 6.0)  # `fine` takes a few if busy
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


def test_workers_and_launchers_that_are_killed_from_outside_are_replaced(pool):
    pool.register(PART)
    worker = pool.take()
    os.kill(worker.pid, signal.SIGKILL)
    pool.send(worker, ONE_ROW, 60.0)
    answer = receive_one(pool)
    assert isinstance(answer, WorkerError)
    assert answer.cause == "died of SIGKILL"
    assert pool.take() is not worker
    launcher = pool.launchers[0].process
    launcher.kill()
    launcher.wait()
    while pool.workers:  # they end with their launcher
        assert pool.receive(wait=False) == []
    pool.send(pool.take(), ONE_ROW, 60.0)
    assert receive_one(pool)[1].values == [1.0]


def test_what_a_late_worker_started_ends_with_it_and_its_stack_is_shown(pool, tmp_path):
    """Also a program in a session of its own, which no process group reaches."""
    pool.register({"r": (faulty.starts_a_program, {})})
    pool.send(pool.take(), ask_for_bad(tmp_path / "pid"), 1.0)
    answer = receive_one(pool)
    assert answer.cause == TIMEOUT
    assert "in starts_a_program" in str(answer)
    wait_until_gone([int((tmp_path / "pid").read_text())])


def test_a_process_with_threads_is_not_forked(tmp_path, monkeypatch, pool):
    (tmp_path / "threaded.py").write_text(
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def mine(completions, path):\n"
        "    while 'bad' in completions: pass\n"
        "    return [float(os.getpid())] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import threaded

    pool.register({"r": (threaded.mine, {})})
    for _ in range(2):  # the second by a new launcher
        worker = pool.take()
        assert worker.launcher.process.pid == worker.pid
        pool.send(worker, ask_for_bad(), 0.5)
        assert receive_one(pool).cause == TIMEOUT


PARENT = """
import sys, time
from litgrpo.rewards.calls import Message, Question
from litgrpo.workers.pool import WorkerPool
from tests.rewards import faulty
pool = WorkerPool(3, "litgrpo.rewards.calls:handle_message")
functions = [faulty.lengths, faulty.catastrophic_regex, faulty.starts_a_program]
pool.register({function.__name__: (function, {}) for function in functions})
for function in functions:
    given = {"completions": ["bad"], "path": [sys.argv[1]]}
    if function is not faulty.starts_a_program:
        del given["path"]
    worker = pool.take()
    pool.send(worker, Message([Question(function.__name__, given, 1)], False, 600.0), 600.0)
    if function is faulty.lengths:
        pool.receive(wait=True)
        worker.busy = True  # idle, but not to be taken again
time.sleep(600)
"""


def test_nothing_outlives_a_run_that_is_killed(tmp_path):
    """Idle and busy workers, their launcher, and a program in a session of its own."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid")])
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
        assert parent.poll() is None
        time.sleep(0.02)
    processes = processes_under(parent.pid)
    assert int((tmp_path / "pid").read_text()) in processes
    assert len(processes) == 5
    parent.kill()
    parent.wait()
    wait_until_gone(processes)


@pytest.mark.parametrize("forget", [False, True])
def test_closing_or_forgetting_a_pool_ends_its_processes(forget):
    runner = ProcessRunner(num_workers=2)
    call = Call("r", faulty.its_process, {"completions": ["a"]}, {}, 1)
    (scores,) = runner.start([call]).wait()
    pids = [int(scores.values[0]), runner.pool.launchers[0].process.pid]
    assert all(map(alive, pids))
    if forget:
        del runner
        gc.collect()
    else:
        runner.close()
    wait_until_gone(pids)


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
