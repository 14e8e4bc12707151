import gc
import io
import tokenize
import weakref
from pathlib import Path

import pytest
import torch

from litgrpo.distributed import device as devices
from litgrpo.distributed.cuda import CudaBackend, Replayed
from litgrpo.distributed.device import (
    Backend,
    Clock,
    backend,
    install,
    threads,
    timed,
    to_host,
    with_halving,
)
from litgrpo.distributed.machine import check_machine
from litgrpo.distributed.memory import free_memory, is_out_of_memory
from litgrpo.distributed.random_state import random_state, set_random_state

CPU = torch.device("cpu")
SOURCE = Path(devices.__file__).parents[1]


def test_a_backend_is_made_once_for_each_device():
    assert type(backend(CPU)) is Backend
    assert backend(torch.device("cpu")) is backend(CPU)
    assert backend(CPU).device == CPU
    assert backend(torch.device("meta")) is not backend(CPU)


def test_a_gpu_has_a_backend_of_its_own_without_being_touched():
    first, second = (backend(torch.device("cuda", number)) for number in (0, 1))
    assert type(first) is type(second) is CudaBackend
    assert (first.device.index, second.device.index) == (0, 1)
    assert not first.static_shapes


def test_functions_to_be_replayed_are_recorded_once_on_a_gpu():
    def function(module, tensor):
        return tensor

    gpu = backend(torch.device("cuda", 0))
    assert gpu.compile(function) is function
    assert isinstance(gpu.compile(function, replay=True), Replayed)
    assert gpu.compile(function, replay=True) is gpu.compile(function, replay=True)


def test_a_strategy_can_install_a_backend_that_knows_more(monkeypatch):
    monkeypatch.setattr(devices, "_known", {})

    class Four(Backend):
        num_chips = 4

    install(Four(CPU))
    assert backend(CPU).num_chips == 4


def test_the_cpu_computes_at_once_and_compiles_nothing():
    cpu, tensor = backend(CPU), torch.ones(2, 3)
    for nothing in (cpu.prepare, cpu.synchronize, cpu.flush):
        assert nothing() is None
    cpu.seed(3)
    cpu.note_shapes("program", tensor=tensor)
    assert (cpu.static_shapes, cpu.num_chips) == (False, 1)
    assert (cpu.counters(), cpu.new_shapes()) == ({}, [])
    for same in (cpu.optimization_barrier, cpu.rows_to, cpu.number_to):
        assert same(tensor) is tensor
    assert cpu.compile(max) is max
    assert 0 < cpu.peak_memory_gib() < 1000


def test_copies_on_the_host_need_no_gradient_and_there_may_be_none():
    weight = torch.ones(2, requires_grad=True)
    (copy,) = to_host([weight])
    assert torch.equal(copy, weight)
    assert not copy.requires_grad
    assert to_host([]) == []


def test_random_numbers_go_on_where_they_were():
    state = random_state()
    drawn = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)


def test_each_backend_keeps_its_random_numbers_in_the_state(monkeypatch):
    class Counting(Backend):
        at = 7

        def random_state(self):
            return {"counting": self.at}

        def set_random_state(self, state):
            self.at = state["counting"]

    device = Counting(CPU)
    monkeypatch.setattr(devices, "_known", {CPU: device})
    state = random_state()
    assert state["counting"] == 7
    device.at = 9
    set_random_state(state)
    assert device.at == 7


def test_states_from_before_cuda_was_there_are_read():
    state = random_state()
    set_random_state({"cpu": state["cpu"]})


def test_no_more_threads_than_there_were():
    before = torch.get_num_threads()
    with threads(before + 5):
        assert torch.get_num_threads() == before
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_machine_is_checked_for_every_kind_of_device(monkeypatch):
    asked = []
    monkeypatch.setattr(devices, "PREFLIGHTS", ("litgrpo.distributed.device.noted",))
    monkeypatch.setattr(devices, "noted", lambda *given: asked.append(given), raising=False)
    check_machine("trainer", 12)
    assert asked == [("trainer", 12)]


def words_of(path: Path) -> str:
    """The code of a file without comments and docstrings, names of files in messages left out."""
    kept, last = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        docstring = token.type == tokenize.STRING and last in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.NL,
        )
        if token.type != tokenize.COMMENT and not (docstring and token.string.startswith('"""')):
            kept.append(token.string)
        last = token.type
    return " ".join(word for word in " ".join(kept).split() if "configs/hardware/" not in word)


FILES = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if "litgrpo/xla" not in path.as_posix() and path != Path(devices.__file__)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_one_room_and_one_table_know_the_compiler(path):
    words = words_of(path).lower().replace("xlabel", "")
    assert not [name for name in ("xla", "spmd", "pjrt") if name in words]


def test_the_table_is_the_only_place_of_the_device_file():
    lines = Path(devices.__file__).read_text().splitlines()
    tables = [line.strip() for line in lines if "xla" in line.lower()]
    assert [line.partition("=")[0] for line in tables] == [
        'BACKENDS["xla"] ',
        'DIVIDING["tpu"] ',
        "PREFLIGHTS ",
    ]


class Ticking:
    """A clock whose every look is a second later."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(devices, "time", Ticking())
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

    monkeypatch.setattr(devices, "backend", lambda device: Device())
    with clock.phase("time/learn_s"):
        order.append("asked for")
    assert order == ["asked for", "synchronized"]


TEXTS = dict(
    what="the rollout", setting="engine.max_rows", unchanged="the completions", remedy="buy some"
)


class Memory:
    """Suffices for so many of 12 rows; notes the limits that it was asked to compute with."""

    def __init__(self, suffices, error=MemoryError):
        self.suffices, self.error = suffices, error
        self.limits, self.halved, self.rows = [], [], 0

    def attempt(self, limit):
        self.limits.append(limit)
        self.rows = 12 if limit is None else min(limit, 12)
        if self.rows > self.suffices:
            raise self.error
        return f"{self.rows} at once"

    def run(self, limit=None, least=1):
        return with_halving(
            self.attempt,
            rows=lambda: self.rows,
            limit=limit,
            least=least,
            on_halved=self.halved.append,
            **TEXTS,
        )


def test_enough_memory_is_one_attempt_without_a_word():
    memory = Memory(12)
    assert memory.run() == "12 at once"
    assert (memory.limits, memory.halved) == ([None], [])


def test_rows_are_halved_until_memory_suffices_and_each_limit_is_told():
    memory = Memory(3)
    with pytest.warns(UserWarning, match="engine.max_rows is . from now on") as warned:
        assert memory.run() == "3 at once"
    assert memory.limits == [None, 6, 3]
    assert memory.halved == [6, 3]
    said = [str(each.message) for each in warned]
    assert said == [
        f"out of memory in the rollout: engine.max_rows is {limit} from now on "
        "(the completions will be the same)"
        for limit in (6, 3)
    ]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_the_rows_that_failed_are_halved_not_a_limit_that_was_never_reached():
    memory = Memory(6)
    memory.run(limit=1000)
    assert memory.limits == [1000, 6]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_no_limit_is_below_the_least():
    memory = Memory(4)
    assert memory.run(limit=7, least=4) == "4 at once"
    assert memory.halved == [4]


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
@pytest.mark.parametrize(("least", "at_once"), [(1, "a single row"), (4, "4 rows")])
def test_where_nothing_is_left_to_halve_the_message_says_what_to_do(least, at_once):
    with pytest.raises(RuntimeError, match=f"with {at_once} at once: buy some.") as raised:
        Memory(0).run(least=least)
    assert isinstance(raised.value.__cause__, MemoryError)


def test_other_errors_pass():
    memory = Memory(0, ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        memory.run()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Memory(0, RuntimeError("mat1 and mat2 shapes")).run()
    assert memory.halved == []


@pytest.mark.filterwarnings("ignore:out of memory in the rollout")
def test_what_the_failed_attempt_held_is_gone_before_the_next_one():
    held = []

    def attempt(limit):
        gc.collect()
        assert not any(each() for each in held)
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        if limit is None:
            raise MemoryError
        return limit

    numbers = dict(rows=lambda: 2, limit=None, on_halved=lambda rows: None)
    assert with_halving(attempt, **numbers, **TEXTS) == 1


def test_each_way_to_say_that_memory_is_short_is_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Attempting to reserve 4.00G"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_freeing_memory_needs_no_device():
    free_memory()


def test_data_stay_on_the_host_of_a_compiling_device_and_go_to_others():
    there = Backend(torch.device("meta"))
    assert there.data_device == torch.device("meta")
    there.static_shapes = True
    assert there.data_device == torch.device("cpu")
