import gc
import io
import tokenize
import weakref
from pathlib import Path

import pytest
import torch

from litgrpo.distributed import device as devices
from litgrpo.distributed.cuda import CudaBackend
from litgrpo.distributed.device import (
    Backend,
    Clock,
    backend,
    check_machine,
    set_backend,
    threads,
    time_phase,
    to_host,
)
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


def test_only_a_gpu_records_steps():
    def run():
        pass

    assert backend(torch.device("cuda", 0)).records_steps
    assert not backend(CPU).records_steps
    assert backend(CPU).record(run) is run


def test_a_strategy_can_install_a_backend_that_knows_more(monkeypatch):
    monkeypatch.setattr(devices, "_backends", {})

    class Four(Backend):
        num_chips = 4

    set_backend(Four(CPU))
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
    monkeypatch.setattr(devices, "_backends", {CPU: device})
    state = random_state()
    assert state["counting"] == 7
    device.at = 9
    set_random_state(state)
    assert device.at == 7


def test_states_from_before_cuda_was_there_are_read():
    state = random_state()
    expected = torch.rand(3)
    set_random_state({"cpu": state["cpu"]})
    assert torch.equal(torch.rand(3), expected)


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


COMPILER = ("xla", "spmd", "pjrt")


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
    words = " ".join(word for word in " ".join(kept).split() if "configs/hardware/" not in word)
    return words.lower().replace("xlabel", "")


def test_one_room_and_one_table_know_the_compiler():
    for path in SOURCE.rglob("*.py"):
        text, name = path.read_text().lower(), path.relative_to(SOURCE).as_posix()
        # The planner names the kinds of sharding that it counts.
        known = name.startswith(("xla/", "plan/")) or path == Path(devices.__file__)
        if not known and any(word in text for word in COMPILER):
            assert not [word for word in COMPILER if word in words_of(path)], name


def test_the_table_is_the_only_place_of_the_device_file():
    lines = Path(devices.__file__).read_text().splitlines()
    tables = [line.strip() for line in lines if "xla" in line.lower()]
    assert [line.partition("=")[0] for line in tables] == [
        'BACKENDS["xla"] ',
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

        @time_phase("time/learn_s")
        def work(self, one, *, other):
            """Docstring of the method."""
            return one + other

    assert Part().work(1, other=2) == 3
    assert clock.seconds == {"time/learn_s": 1.0}
    assert Part.work.__doc__ == "Docstring of the method."


def test_the_device_is_waited_for_before_the_clock_is_read(clock, monkeypatch):
    order = []

    class Device:
        def synchronize(self):
            order.append("synchronized")

    monkeypatch.setattr(devices, "backend", lambda device: Device())
    with clock.phase("time/learn_s"):
        order.append("asked for")
    assert order == ["asked for", "synchronized"]


def test_each_way_to_say_that_memory_is_short_is_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for message in (
        "RESOURCE_EXHAUSTED: Attempting to reserve 4.00G",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "HIP error: out of memory",
        "MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: 1.0 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY",
        "NCCL error: unhandled cuda error, NCCL version 2.27\nLast error:\nCuda failure 2 "
        "'out of memory'",
    ):
        assert is_out_of_memory(RuntimeError(message)), message
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    for message in ("shape mismatch", "CUDA error: an illegal memory access was encountered"):
        assert not is_out_of_memory(RuntimeError(message))
    # Errors of this package after the last attempt are final.
    final = RuntimeError("Out of memory with 1 row(s) at once (model.engine.max_rows): buy some.")
    assert not is_out_of_memory(final)
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_memory_of_a_cycle_of_objects_is_freed():
    class Node:
        pass

    node = Node()
    node.itself, reference = node, weakref.ref(node)
    gc.disable()
    try:
        del node
        assert reference() is not None
        free_memory()
        assert reference() is None
    finally:
        gc.enable()


def test_data_stay_on_the_host_of_a_compiling_device_and_go_to_others():
    there = Backend(torch.device("meta"))
    assert there.data_device == torch.device("meta")
    there.static_shapes = True
    assert there.data_device == torch.device("cpu")
