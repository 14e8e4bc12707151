import os
import pty
import signal
import time
from types import SimpleNamespace

import pytest

from litgrpo.checkpointing.signals import SIGNALS, Stopped, StopRequest, detach_from_terminal


def one_process():
    return SimpleNamespace(world_size=1)


def several(others_asked):
    """One of two ranks; the other received a signal, or not."""
    agree = lambda mine, all: mine or others_asked  # noqa: E731
    return SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce_boolean_decision=agree))


@pytest.fixture(autouse=True)
def old_handlers():
    known = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in known.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_a_droppable_iteration_stops_at_once_and_others_at_the_next_check(signum, code):
    request = StopRequest()
    request.install(one_process())
    signal.raise_signal(signum)  # not droppable: remembered
    with pytest.raises(Stopped) as stop:
        request.check(one_process())
    assert stop.value.code == code
    request = StopRequest()
    request.install(one_process())
    request.droppable = True
    with pytest.raises(Stopped):
        signal.raise_signal(signum)


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGTERM, "once more exits at once"),
        (signal.SIGHUP, "SIGTERM exits at once"),
        (signal.SIGUSR1, "SIGTERM exits at once"),  # SLURM sends it to srun and to its tasks
    ],
)
def test_the_message_about_a_second_signal_is_true(signum, said, capfd, monkeypatch):
    request, ended = StopRequest(), []
    monkeypatch.setattr(os, "_exit", ended.append)
    request.install(one_process())
    signal.raise_signal(signum)
    assert said in capfd.readouterr().err
    signal.raise_signal(signum)
    assert bool(ended) == (signum == signal.SIGTERM)  # a terminal that closes sends SIGHUP twice
    signal.raise_signal(signal.SIGTERM)
    assert ended


def test_a_hangup_leaves_no_file_open():
    before = sorted(os.listdir("/proc/self/fd"))
    detach_from_terminal()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_several_processes_stop_together_at_a_check():
    request = StopRequest()
    request.install(several(False))
    request.droppable = True
    request.check(several(False))
    with pytest.raises(Stopped) as stop:
        request.check(several(True))
    assert stop.value.code == 143


def test_a_reward_function_cannot_catch_it_as_an_exception():
    assert not issubclass(Stopped, Exception)


def test_an_ignored_hangup_stays_ignored_and_other_handlers_are_restored():
    request = StopRequest()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    request.install(one_process())
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request.install(one_process())
    request.install(one_process())
    assert signal.getsignal(signal.SIGHUP) == request._receive
    request.restore()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def saves_after_hangup(file) -> None:
    """Run in a terminal that closes: the signal arrives twice, and writing continues."""
    request = StopRequest()
    request.install(one_process())
    signal.alarm(20)  # no test waits for ever
    os.write(1, b"ready")
    while not request.signum:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGHUP)
    os.write(1, b"a line without a reader")
    try:
        request.check(one_process())
    except Stopped as stop:
        file.write_text(str(stop.code))


def test_a_run_saves_if_its_terminal_is_closed(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        saves_after_hangup(tmp_path / "saved")
        os._exit(0)
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "saved").read_text() == "129"
