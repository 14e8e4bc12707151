from types import SimpleNamespace

import pytest

from litgrpo.parallel.xla import recompilation
from litgrpo.parallel.xla.recompilation import Recompilation


class Module:
    """Knows its iteration and keeps what is logged."""

    device = None
    iteration = 0

    def __init__(self):
        self.logged = []

    def log_dict(self, numbers):
        self.logged.append(numbers)


def run(monkeypatch, callback, compilations, shapes=()):
    """Iterations that compile so many programs each, the last one for new shapes."""
    module, total = Module(), [5]
    names = ("compilations", "host_reads", "cpu_fallbacks")
    monkeypatch.setattr(
        recompilation, "counters", lambda _: dict.fromkeys(names, 0) | {"compilations": total[0]}
    )
    told = [[], *([] for _ in compilations[:-1]), list(shapes)]
    monkeypatch.setattr(recompilation, "new_shapes", lambda: told.pop(0))
    callback.on_train_start(SimpleNamespace(), module)
    for number in compilations:
        total[0] += number
        module.iteration += 1
        callback.on_train_batch_end(SimpleNamespace(), module, None, None, 0)
    return module


def test_each_iteration_logs_what_it_took(monkeypatch):
    module = run(monkeypatch, Recompilation(), [7, 3, 0])
    assert [each["perf/compilations"] for each in module.logged] == [7, 3, 0]
    assert module.logged[0]["perf/host_reads"] == 0


def test_compiling_on_and_on_warns_with_the_new_shape(monkeypatch):
    callback = Recompilation(warm_up=2, allowed=1)
    with pytest.warns(UserWarning, match=r"2 programs .* New shapes: micro-batch: ids \[4, 96\]"):
        run(monkeypatch, callback, [7, 3, 0, 2], ["micro-batch: ids [4, 96]"])


def test_or_stops_when_the_recipe_says_so(monkeypatch):
    callback = Recompilation(warm_up=1, allowed=0, stop=True)
    with pytest.raises(ValueError, match="Stopped at iteration 2: 1 programs"):
        run(monkeypatch, callback, [7, 1])


def test_what_is_allowed_is_not_mentioned(monkeypatch):
    run(monkeypatch, Recompilation(warm_up=1, allowed=3), [7, 1, 2])


def test_a_device_that_does_not_compile_logs_nothing(monkeypatch):
    module = Module()
    monkeypatch.setattr(recompilation, "counters", lambda _: {})
    callback = Recompilation()
    callback.on_train_start(SimpleNamespace(), module)
    callback.on_train_batch_end(SimpleNamespace(), module, None, None, 0)
    assert module.logged == []


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="must be 0 or more"):
        Recompilation(warm_up=-1)
