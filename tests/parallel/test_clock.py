import pytest

from litgrpo.parallel import clock as clocks
from litgrpo.parallel.clock import Clock, timed


class Ticking:
    """A clock whose every look is a second later."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(clocks, "time", Ticking())
    return Clock()


def test_seconds_of_a_phase_add_up_until_the_next_iteration(clock):
    for _ in range(2):
        with clock.phase("time/learn_s"):
            pass
    with clock.phase("time/rollout_s"):
        pass
    assert clock.seconds == {"time/learn_s": 2.0, "time/rollout_s": 1.0}
    logged = clock.stats(tokens=6)
    assert logged["perf/tokens_per_s"] == 2
    assert logged["time/step_s"] == 7  # six looks at the clock, and this one
    clock.restart()
    assert clock.seconds == {}


def test_a_method_is_timed_on_the_clock_of_its_object(clock):
    class Part:
        def __init__(self):
            self.clock = clock

        @timed("time/learn_s")
        def work(self, one, *, other):
            """What it does."""
            return one + other

    assert Part().work(1, other=2) == 3
    assert clock.seconds == {"time/learn_s": 1.0}
    assert Part.work.__doc__ == "What it does."


def test_the_device_is_waited_for_before_the_clock_is_read(clock, monkeypatch):
    order = []

    class Device:
        def synchronize(self):
            order.append("synchronized")

    monkeypatch.setattr(clocks, "backend", lambda device: Device())
    with clock.phase("time/learn_s"):
        order.append("asked for")
    assert order == ["asked for", "synchronized"]
