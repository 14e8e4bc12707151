"""Worker processes: loading, answering, losing and ending them."""

import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.workers import process
from litgrpo.workers.failures import TIMEOUT, WorkerError
from litgrpo.workers.process import MAX_PICKLED, Launcher, dump, receive
from litgrpo.workers.server import descendants


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids):
    for _ in range(1500):
        if not any(map(alive, pids)):
            return
        time.sleep(0.02)
    pytest.fail("a worker outlived its parent")


def answers_of(workers):
    """Return the last answer of each busy worker, in the order of `workers`."""
    answers = {}
    while len(answers) < len(workers):
        answers |= {each.worker: each.answer for each in receive(workers, wait=True)}
    return [answers[worker] for worker in workers]


def ask(worker, message, limit_s=60.0):
    worker.send(message, limit_s)
    return answers_of([worker])[0]


def run(message, send):
    """Do what the message says."""
    kind, *given = message
    if kind == "late":
        given[0].write_text(str(subprocess.Popen(["setsid", "sleep", "600"]).pid))
        sum(range(10**15))  # holds the interpreter: no signal handler of Python gets a turn
    if kind == "exit":
        os._exit(3)
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "raise":
        raise given[0]
    if kind == "lambda":
        return lambda: 1
    if kind == "send":
        send(1)
    return eval(given[0]) if kind == "eval" else given


class Unloadable(Exception):
    """Exception that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


class LoadedByWorkersOnly:
    """Answer that raises where it is unpickled."""

    def __reduce__(self):
        return exec, ("raise ImportError('not here')",)


@pytest.fixture
def launcher():
    launcher = Launcher(run)
    yield launcher
    launcher.close()


FAILURES = {
    ("raise", KeyError("bad")): r"KeyError: 'bad' \(test_process.py, line ",
    ("raise", SystemExit(3)): "SystemExit: 3",
    ("raise", KeyboardInterrupt()): "KeyboardInterrupt",
    ("raise", GeneratorExit()): "GeneratorExit",
    ("eval", "1 / 0"): "ZeroDivisionError",
    ("eval", "(_ for _ in ()).throw(Unloadable('a', 'b'))"): ".*Unloadable: a",
    ("lambda",): "AttributeError: Can't pickle|PicklingError",
    ("eval", "LoadedByWorkersOnly()"): "ImportError: not here",
    ("exit",): "exited with 3$",
    ("crash",): "died of SIGSEGV$",
}


def test_each_failure_has_its_cause_and_is_that_of_its_worker_only(launcher):
    workers = [launcher.start() for _ in FAILURES]
    for worker, message in zip(workers, FAILURES, strict=True):
        worker.send(message, 60.0)
    for worker, answer, (message, cause) in zip(
        workers, answers_of(workers), FAILURES.items(), strict=True
    ):
        assert isinstance(answer, WorkerError)
        assert re.match(cause, answer.cause), answer
        assert worker.is_lost == (message[0] in ("exit", "crash"))
        if not worker.is_lost:
            assert "Traceback" in str(answer)
            assert ask(worker, ("say", 7)) == [7]
        elif message[0] == "crash":
            assert "in run" in str(answer)  # the place of it


def test_partial_answers_come_before_the_last(launcher):
    worker = launcher.start()
    worker.send(("send", 2), 60.0)
    replies = []
    while not (replies and replies[-1].is_last):
        replies += receive([worker], wait=True)
    assert [(answer, is_last) for _, answer, is_last in replies] == [(1, False), ([2], True)]


def test_what_a_late_worker_started_ends_with_it_and_its_stack_is_shown(launcher, tmp_path):
    """Also a program in a session of its own, which no process group reaches."""
    worker, other = launcher.start(), launcher.start()
    other.send(("say", 1), 60.0)
    started = time.monotonic()
    answer = ask(worker, ("late", tmp_path / "pid"), 1.0)
    assert time.monotonic() - started < 20
    assert answer.cause == TIMEOUT
    assert "in run" in str(answer)
    assert worker.is_lost
    wait_until_gone([worker.pid, int((tmp_path / "pid").read_text())])
    assert answers_of([other]) == [[1]]


def test_a_worker_has_path_folder_environment_and_output_of_the_caller(
    launcher, tmp_path, monkeypatch, capfd
):
    launcher.start().load()  # the server runs already
    (tmp_path / "only_here.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "6")
    worker = launcher.start()
    seen = ask(worker, ("eval", "__import__('only_here').value, os.getcwd(), dict(os.environ)"))
    assert seen[:2] == (5, str(tmp_path))
    names = {"PYTHONPATH", "PYTHONSAFEPATH"} | {n for n in seen[2] if n.startswith("LITGRPO_")}
    assert seen[2]["MINE"] == "6"
    assert {n: seen[2].get(n) for n in names} == {n: os.environ.get(n) for n in names}
    assert seen[2]["OMP_NUM_THREADS"] == "1"
    ask(worker, ("eval", "print('said') or os.write(2, b'complained')"))
    assert capfd.readouterr() == ("said\n", "complained")


def test_workers_share_what_the_server_has_loaded(launcher, tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text(
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file: file.write('x')\n"
        "print('imported')\n"
        "def answer(message, send):\n    return message\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import counted

    launcher = Launcher(counted.answer)
    workers = [launcher.start() for _ in range(3)]
    assert [ask(worker, 1) for worker in workers] == [1, 1, 1]
    assert launcher.preloads
    assert (tmp_path / "imports").read_text() == "xx"  # here and in the server
    launcher.close()


THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def answer(message, send):
    return message
"""


def test_a_target_that_starts_threads_is_loaded_by_each_worker(tmp_path, monkeypatch):
    (tmp_path / "threaded.py").write_text(THREADED)
    monkeypatch.syspath_prepend(tmp_path)
    import threaded

    launcher = Launcher(threaded.answer)
    workers = [launcher.start() for _ in range(2)]
    assert not launcher.preloads
    assert [ask(worker, 1) for worker in workers] == [1, 1]
    launcher.close()


class Fatal:
    """Target that kills or blocks the process that unpickles it, or raises there."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "exited with 3 while loading"),
        ("import os, signal; os.kill(os.getpid(), 11)", "died of SIGSEGV while loading"),
        ("while True: pass", "TimeoutError while loading"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("raise OSError('no licence')", "OSError: no licence"),
    ],
)
def test_a_target_that_breaks_its_process_fails_with_the_reason(code, cause, monkeypatch):
    if "Timeout" in cause:
        monkeypatch.setattr(process, "LOAD_S", 3.0)
    launcher = Launcher(Fatal(code))
    worker = launcher.start()
    with pytest.raises(WorkerError) as caught:
        worker.load()
    assert caught.value.cause.startswith(cause)
    assert worker.is_lost
    waiting = launcher.start()
    assert ask(waiting, 1).cause.startswith(cause)  # also where a message waits
    launcher.close()


def test_a_message_longer_than_a_pipe_does_not_wait_for_a_worker_that_loads(monkeypatch):
    monkeypatch.setattr(process, "LOAD_S", 2.0)
    launcher = Launcher(Fatal("import time; time.sleep(600)"))
    worker = launcher.start()
    worker.send(bytes(10_000_000), 60.0)
    assert answers_of([worker])[0].cause == "TimeoutError while loading"
    launcher.close()


def test_workers_and_servers_that_are_killed_from_outside_are_replaced(launcher):
    worker, idle = launcher.start(), launcher.start()
    idle.load()
    assert idle.is_idle
    os.kill(idle.pid, signal.SIGKILL)
    while idle.is_idle:
        time.sleep(0.01)
    assert ask(idle, ("say", 1)).cause == "died of SIGKILL"
    assert ask(worker, ("say", 1)) == [1]
    os.kill(launcher.server.pid, signal.SIGKILL)
    wait_until_gone([worker.pid])  # it ends with its server
    assert ask(worker, ("say", 1)).cause == "died of SIGKILL"
    assert ask(launcher.start(), ("say", 1)) == [1]
    assert launcher.preloads


def test_no_descriptor_is_left(launcher):
    def num_open():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    launcher.start().kill()
    before = num_open()
    for _ in range(5):
        worker = launcher.start()
        ask(worker, ("say", 1))
        worker.kill()
        ask(launcher.start(), ("exit",))
    assert num_open() == before
    inside = ask(launcher.start(), ("eval", "len(os.listdir('/proc/self/fd'))"))
    others = [launcher.start() for _ in range(5)]
    assert ask(others[-1], ("eval", "len(os.listdir('/proc/self/fd'))")) == inside


PARENT = """
import subprocess, sys, time
print("runs", flush=True)  # once: the script is not run again
from litgrpo.workers.process import Launcher, receive
def target(message, send):
    if message == "start":
        print(subprocess.Popen(["setsid", "sleep", "600"]).pid, flush=True)
    while message != "answer":
        pass
    return 1
launcher = Launcher(target)
workers = [launcher.start() for _ in range(3)]
for worker, message in zip(workers, ["answer", "wait", "start"]):
    worker.load()
    worker.send(message, 600.0)
answers = []
while not answers:
    answers += receive(workers, wait=True)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_run_that_is_killed(signum, tmp_path):
    """Idle and busy workers, their server, and a program in a session of its own."""
    (tmp_path / "script.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        lines = [parent.stdout.readline() for _ in range(3)]
        processes = descendants(parent.pid)
        parent.send_signal(signum)
        parent.wait()
    wait_until_gone(processes)
    assert len(processes) == 6  # with the resource tracker of the standard library
    (program,) = [int(line) for line in lines if line.strip().isdigit()]
    assert program in processes
    assert sorted(lines)[1:] == ["ready\n", "runs\n"]


def test_a_run_that_ends_while_it_asks_for_a_worker_leaves_no_traceback(capfd):
    launcher = Launcher(run)
    launcher.start().load()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(launcher.server._forkserver_address)
    wait_until_gone([launcher.server.pid])
    assert capfd.readouterr().err == ""
    assert ask(launcher.start(), ("say", 1)) == [1]
    launcher.close()


def test_ctrl_c_of_the_terminal_reaches_neither_server_nor_workers(launcher):
    worker = launcher.start()
    worker.load()
    groups = {os.getpgid(pid) for pid in (launcher.server.pid, worker.pid)}
    assert os.getpgrp() not in groups
    assert os.getsid(worker.pid) == os.getsid(launcher.server.pid) != os.getsid(0)


@pytest.mark.parametrize("forget", [False, True])
def test_closing_or_forgetting_a_launcher_ends_its_processes(forget):
    launcher = Launcher(run)
    worker = launcher.start()
    worker.send(("eval", "__import__('time').sleep(600)"), 600.0)
    pids = [worker.pid, launcher.server.pid]
    assert all(map(alive, pids))
    if forget:
        del launcher
        gc.collect()
    else:
        launcher.close()
    wait_until_gone(pids)


def test_a_fork_of_the_run_does_not_keep_its_processes(launcher):
    worker = launcher.start()
    worker.load()
    pids = [worker.pid, launcher.server.pid]
    if (fork := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    try:
        launcher.close()
        wait_until_gone(pids)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_a_fork_of_the_run_ends_nothing(launcher):
    worker = launcher.start()
    worker.load()
    if (pid := os.fork()) == 0:
        launcher.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert ask(worker, ("say", 1)) == [1]


def test_objects_as_large_as_a_model_are_rejected():
    with pytest.raises(ValueError, match="64 MB"):
        dump((bytes(MAX_PICKLED + 1), {}))
    assert pickle.loads(dump((ask, {"a": 1}))) == (ask, {"a": 1})
