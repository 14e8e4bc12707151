import ctypes
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from litgrpo.callbacks import guards
from litgrpo.callbacks.guards import NonFinite, Recompilation, TimeBudget, Watchdog
from litgrpo.distributed.device import Backend
from litgrpo.types import StepReport
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*eval mode")


class Skips(StandIn):
    """Reports given steps, one list for each iteration."""

    def __init__(self, *iterations):
        super().__init__(len(iterations))
        self.skipped = iterations

    def training_step(self, batch, batch_idx):
        steps = [StepReport(lr=0.1, skipped=rows) for rows in self.skipped[self.iteration]]
        iteration = super().training_step(batch, batch_idx)["iteration"]
        return {"iteration": replace(iteration, steps=steps)}


@pytest.mark.filterwarnings("ignore:.*optimizer steps skipped because of NaN")
def test_a_step_that_is_taken_resets_the_count(tmp_path):
    callback = NonFinite(stop_after=2)
    module = fit(tmp_path, callback, module=Skips([{}], [None, {}], [None]))
    assert module.trainer.logged_metrics["optim/skipped_steps"] == 2
    state = callback.state_dict()
    assert state == {"skipped": 2, "in_a_row": 0}
    other = NonFinite()
    other.load_state_dict(state)
    assert other.state_dict() == state


@pytest.mark.filterwarnings("ignore:.*optimizer steps skipped because of NaN")
def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path):
    with raises_for("iteration 2", "non_finite.stop_after"):
        fit(tmp_path, NonFinite(stop_after=3), module=Skips([{}], [{}, {}], [None]))
    with raises_for("non_finite.stop_after", "0"):
        NonFinite(stop_after=0)


def test_the_rows_behind_a_skipped_step_are_named_and_written(tmp_path):
    with pytest.warns(UserWarning, match="iteration 1: .*non_finite"):
        fit(tmp_path, NonFinite(), module=Skips([{2: "loss"}, None]))
    (line,) = (tmp_path / "non_finite/iteration-000001.jsonl").read_text().splitlines()
    assert '"not_finite": "loss"' in line
    assert '"prompt": "B"' in line


class Hangs(StandIn):
    def __init__(self, holds_gil):
        super().__init__(4)
        self.holds_gil = holds_gil

    def training_step(self, batch, batch_idx):
        if self.iteration == 1:
            # A function of a `PyDLL` runs without releasing the GIL.
            ctypes.PyDLL(None).sleep(600) if self.holds_gil else time.sleep(600)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize(
    ("holds_gil", "reason"),
    [(False, "error: rank 0 made no progress for 1 s (watchdog.timeout_s)"), (True, "Timeout")],
    ids=["releases the GIL", "holds the GIL"],
)
def test_a_run_that_hangs_prints_its_stacks_and_exits(holds_gil, reason, tmp_path, monkeypatch):
    if holds_gil:
        monkeypatch.setattr(guards, "GIL_S", 0.0)
    said = tmp_path / "stderr"
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            fit(tmp_path, Watchdog(1.0), module=Hangs(holds_gil))
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert reason in said.read_text()
    assert "in training_step" in said.read_text()


def test_a_run_that_makes_progress_is_not_terminated(tmp_path):
    assert fit(tmp_path, Watchdog(30.0), module=StandIn(3)).iteration == 3
    with raises_for("watchdog.timeout_s", "0"):
        Watchdog(0)


class Slow(StandIn):
    """By the clock of the callback an iteration takes 100 s, a validation 600 s."""

    now = 0.0

    def training_step(self, batch, batch_idx):
        self.now += 100.0
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.now += 600.0
        super().on_validation_epoch_end()


def test_a_run_stops_early_enough_for_the_last_validation(tmp_path, monkeypatch):
    module = Slow(None)
    monkeypatch.setattr(guards, "time", SimpleNamespace(monotonic=lambda: module.now))
    fit(tmp_path, TimeBudget({"seconds": 3000}), module=module)
    # One validation before and one after leave 1800 s. After 17 iterations another one would fit,
    # but then nothing would be left for the next: 600 + 1700 + 100 + 600 s.
    assert module.evaluations == 2
    assert module.iteration == 18
    assert module.now == 3000


def test_the_duration_is_written_as_lightning_does():
    assert TimeBudget("00:01:00:30").limit_s == 3630


class Module:
    """Keeps the logged numbers."""

    device = torch.device("cpu")
    iteration = 0

    def __init__(self):
        self.logged = []

    def log_dict(self, numbers):
        self.logged.append(numbers)


class Compiling(Backend):
    """A device with given counts of programs and given new shapes."""

    compiled, shapes = 5, ()

    def counters(self):
        return {"compilations": self.compiled, "host_reads": 0, "cpu_fallbacks": 0}

    def new_shapes(self):
        return list(self.shapes)


def run(monkeypatch, callback, compilations, shapes=()):
    """Run iterations that compile these numbers of programs, the last one for new shapes."""
    module, device = Module(), Compiling(Module.device)
    monkeypatch.setattr(guards, "backend", lambda _: device)
    callback.on_train_start(SimpleNamespace(), module)
    for number in compilations:
        device.compiled += number
        module.iteration += 1
        device.shapes = shapes if module.iteration == len(compilations) else ()
        callback.on_train_batch_end(SimpleNamespace(), module, None, None, 0)
    return module


def test_each_iteration_logs_its_counts(monkeypatch):
    module = run(monkeypatch, Recompilation(), [7, 3, 0])
    assert [each["perf/compilations"] for each in module.logged] == [7, 3, 0]
    assert module.logged[0]["perf/host_reads"] == 0


def test_repeated_compilation_warns_with_the_new_shape(monkeypatch):
    callback = Recompilation(warm_up=2, allowed=1)
    with pytest.warns(UserWarning, match=r"micro-batch: ids \[4, 96\]"):
        run(monkeypatch, callback, [7, 3, 0, 2], ["micro-batch: ids [4, 96]"])


def test_many_new_shapes_are_counted_and_some_are_named(monkeypatch):
    callback = Recompilation(warm_up=0, allowed=0)
    with pytest.warns(UserWarning, match="a; b; c; and 2 more"):
        run(monkeypatch, callback, [1], list("abcde"))


def test_without_a_new_shape_the_cause_is_outside_of_the_programs(monkeypatch):
    with pytest.warns(UserWarning, match="No program has a new shape"):
        run(monkeypatch, Recompilation(warm_up=0, allowed=0), [1])


def test_repeated_compilation_stops_the_run_if_asked(monkeypatch):
    callback = Recompilation(warm_up=1, allowed=0, stop=True)
    with raises_for("iteration 2", "recompilation.allowed"):
        run(monkeypatch, callback, [7, 1])


def test_allowed_compilation_does_not_warn(monkeypatch, recwarn):
    module = run(monkeypatch, Recompilation(warm_up=1, allowed=3), [7, 1, 2])
    assert [each["perf/compilations"] for each in module.logged] == [7, 1, 2]
    assert not recwarn.list
    with pytest.warns(UserWarning, match="compil"):
        run(monkeypatch, Recompilation(warm_up=1, allowed=3), [7, 1, 3])


def test_a_device_that_does_not_compile_logs_nothing():
    module, callback = Module(), Recompilation()
    callback.on_train_start(SimpleNamespace(), module)
    callback.on_train_batch_end(SimpleNamespace(), module, None, None, 0)
    assert not any(module.logged)


@pytest.mark.parametrize("name", ["warm_up", "allowed"])
def test_negative_numbers_raise(name):
    with raises_for(f"recompilation.{name}", "-1"):
        Recompilation(**{name: -1})


def no_thread(*_, **__):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    "where", ["faulthandler.dump_traceback_later", "threading.Thread.start", "both"]
)
def test_a_watchdog_that_cannot_start_does_not_end_the_training(where, monkeypatch):
    watchdog = Watchdog(30.0)
    with monkeypatch.context() as limited:
        for name in ("faulthandler.dump_traceback_later", "threading.Thread.start"):
            if where in (name, "both"):
                limited.setattr(name, no_thread)
        with pytest.warns(UserWarning, match="can't start new thread"):
            watchdog.on_train_batch_start()
        watchdog.on_train_batch_end()  # warns once; pytest turns a second warning into an error
    assert watchdog._cancelled is None
    watchdog.on_train_batch_start()  # the limit is not reached any more
    assert watchdog._cancelled is not None
    watchdog.on_fit_end()
