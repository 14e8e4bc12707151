import io
import tokenize
from pathlib import Path

import pytest
import torch

from litgrpo.parallel import device as devices
from litgrpo.parallel.cuda_graphs import Replayed
from litgrpo.parallel.device import (
    Backend,
    CudaBackend,
    backend,
    check_machine,
    install,
    random_state,
    set_random_state,
    threads,
    to_host,
)

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
    monkeypatch.setattr(devices, "PREFLIGHTS", ("litgrpo.parallel.device.noted",))
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


OLD_NAMES = SOURCE / "cli" / "old_names.py"
FILES = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if "parallel/xla" not in path.as_posix() and path not in (Path(devices.__file__), OLD_NAMES)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_one_room_and_one_table_know_the_compiler(path):
    words = words_of(path).lower().replace("xlabel", "")
    assert not [name for name in ("xla", "spmd", "pjrt") if name in words]


def test_the_table_is_the_only_place_of_the_device_file():
    lines = Path(devices.__file__).read_text().splitlines()
    tables = [line.strip() for line in lines if "xla" in line.lower()]
    assert len(tables) == 2
    assert tables[0] == '"xla": "litgrpo.parallel.xla.backend.XlaBackend",'
    assert tables[1].startswith("PREFLIGHTS = ")


def test_the_old_names_know_where_its_strategy_went_and_nothing_else():
    lines = [line.strip() for line in OLD_NAMES.read_text().splitlines() if "xla" in line.lower()]
    assert lines == ['"litgrpo.strategies.xla": "litgrpo.parallel.xla.strategy",']
