from types import SimpleNamespace

import pytest
import torch

from litgrpo.callbacks import recompilation
from litgrpo.callbacks.recompilation import Recompilation
from litgrpo.distributed.device import Backend


class Module:
    """Knows its iteration and keeps what is logged."""

    device = torch.device("cpu")
    iteration = 0

    def __init__(self):
        self.logged = []

    def log_dict(self, numbers):
        self.logged.append(numbers)


class Compiling(Backend):
    """A device that compiled so many programs, and was given new shapes."""

    compiled, shapes = 5, ()

    def counters(self):
        return {"compilations": self.compiled, "host_reads": 0, "cpu_fallbacks": 0}

    def new_shapes(self):
        return list(self.shapes)


def run(monkeypatch, callback, compilations, shapes=()):
    """Iterations that compile so many programs each, the last one for new shapes."""
    module, device = Module(), Compiling(Module.device)
    monkeypatch.setattr(recompilation, "backend", lambda _: device)
    callback.on_train_start(SimpleNamespace(), module)
    for number in compilations:
        device.compiled += number
        module.iteration += 1
        device.shapes = shapes if module.iteration == len(compilations) else ()
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


def test_many_new_shapes_are_counted_and_some_are_named(monkeypatch):
    callback = Recompilation(warm_up=0, allowed=0)
    with pytest.warns(UserWarning, match=r"New shapes: a; b; c; and 2 more\. Give fewer widths"):
        run(monkeypatch, callback, [1], list("abcde"))


def test_without_a_new_shape_the_cause_is_outside_of_the_programs(monkeypatch):
    with pytest.warns(UserWarning, match="No program was given a new shape"):
        run(monkeypatch, Recompilation(warm_up=0, allowed=0), [1])


def test_or_stops_when_the_recipe_says_so(monkeypatch):
    callback = Recompilation(warm_up=1, allowed=0, stop=True)
    with pytest.raises(ValueError, match="Stopped at iteration 2: 1 programs"):
        run(monkeypatch, callback, [7, 1])


def test_what_is_allowed_is_not_mentioned(monkeypatch):
    run(monkeypatch, Recompilation(warm_up=1, allowed=3), [7, 1, 2])


def test_a_device_that_does_not_compile_logs_nothing():
    module, callback = Module(), Recompilation()
    callback.on_train_start(SimpleNamespace(), module)
    callback.on_train_batch_end(SimpleNamespace(), module, None, None, 0)
    assert not any(module.logged)


@pytest.mark.parametrize("name", ["warm_up", "allowed"])
def test_negative_numbers_are_refused(name):
    with pytest.raises(ValueError, match=f"recompilation.{name} is -1; it must be at least 0"):
        Recompilation(**{name: -1})
