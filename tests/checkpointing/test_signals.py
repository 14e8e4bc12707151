import signal
from types import SimpleNamespace

import pytest

from litgrpo.checkpointing.signals import Stopped, StopRequest


def one_process():
    return SimpleNamespace(world_size=1)


def several(others_asked):
    """One of two processes; the other was asked to stop, or not."""
    agree = lambda mine, all: mine or others_asked  # noqa: E731
    return SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce_boolean_decision=agree))


@pytest.fixture(autouse=True)
def old_handlers():
    known = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for each, handler in known.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_can_be_dropped_stops_at_once_and_the_rest_at_the_next_check(signum, code):
    request = StopRequest()
    request.listen(one_process())
    signal.raise_signal(signum)  # nothing can be dropped: noted
    with pytest.raises(Stopped) as stop:
        request.check(one_process())
    assert stop.value.code == code
    request = StopRequest()
    request.listen(one_process())
    request.droppable = True
    with pytest.raises(Stopped):
        signal.raise_signal(signum)


def test_several_processes_stop_together_at_a_check():
    request = StopRequest()
    request.listen(several(False))
    request.droppable = True
    request.check(several(False))
    with pytest.raises(Stopped) as stop:
        request.check(several(True))
    assert stop.value.code == 143


def test_no_reward_function_takes_it_for_an_error_of_its_own():
    assert not issubclass(Stopped, Exception)
