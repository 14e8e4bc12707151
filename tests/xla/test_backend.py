"""The capabilities of XLA devices, on torch_xla's processor back-end; see tests/xla for more."""

from tests.xla.own_process import own_process


def half(module, rows, zeros):
    """A program: rows that it computes, zeros that it makes, and what it is given."""
    return rows / 2, rows.new_zeros(rows.shape), zeros


@own_process()
def test_an_xla_device_has_the_capabilities_of_a_compiler():
    import torch
    import torch_xla

    from litgrpo.distributed.device import backend
    from litgrpo.distributed.random_state import random_state, set_random_state
    from litgrpo.xla.backend import XlaBackend

    there = torch_xla.device()
    device = backend(there)
    assert type(device) is XlaBackend
    assert (device.static_shapes, device.num_chips) == (True, 1)

    for _ in range(2):
        device.prepare()  # twice: as for a second model
    from torch_xla import backends

    assert backends.get_mat_mul_precision() == "highest"

    rows = device.rows_to(torch.arange(8.0).view(4, 2))
    assert rows.device == there
    (copy,) = device.to_host([rows.requires_grad_()])
    assert copy.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not copy.requires_grad
    assert float(device.number_to(torch.tensor(2.5))) == 2.5
    kept = device.optimization_barrier(rows)
    assert kept is not rows
    assert kept.requires_grad
    assert torch.equal(*device.to_host([kept, rows]))

    compiled = device.compile(half)
    assert device.compile(half) is compiled
    with torch.no_grad():
        assert compiled(None, rows.detach(), rows.detach())[0].sum().item() == 14
    device.flush()
    device.synchronize()
    assert device.counters()["compilations"] > 0
    assert device.counters()["cpu_fallbacks"] == 0

    state = random_state()
    assert isinstance(state["xla"], int)
    device.seed(3)
    assert random_state()["xla"] == 3
    set_random_state(state)
    assert random_state()["xla"] == state["xla"]
    set_random_state({"cpu": state["cpu"]})  # of a run on another device


@own_process()
def test_new_shapes_are_reported_once_and_their_list_is_bounded():
    import torch

    from litgrpo.xla import backend as xla

    device = xla.XlaBackend(torch.device("xla", 0))
    for _ in range(2):
        device.note_shapes("micro-batch", ids=torch.zeros(4, 96), mask=torch.zeros(4))
    assert device.new_shapes() == ["micro-batch: ids [4, 96], mask [4]"]
    assert device.new_shapes() == []
    for number in range(3 * xla.MAX_GRAPHS):
        device.note_shapes("program", ids=torch.zeros(number))
    assert len(device.new_shapes()) == xla.MAX_GRAPHS + 1


@own_process(CPU_NUM_DEVICES="4")
def test_rows_inputs_and_outputs_are_sharded_over_chips():
    import torch

    from litgrpo.distributed.device import backend
    from litgrpo.xla.strategy import XLASPMDStrategy

    strategy = XLASPMDStrategy()
    device = backend(strategy.root_device)
    assert device.num_chips == strategy.num_chips == 4

    def cut(tensor):
        import torch_xla

        spec = torch_xla._XLAC._get_xla_sharding_spec(tensor)
        return "devices=" in spec and "replicated" not in spec

    rows, other = (device.rows_to(torch.arange(16.0).view(8, 2) + n) for n in (0, 1))
    uneven = device.rows_to(torch.arange(3.0))
    assert cut(rows)
    assert not cut(uneven)
    computed, made, given = device.compile(half)(None, rows, other)
    assert cut(computed)
    assert cut(made)
    assert given is other
    fetched = device.to_host([computed, made, uneven, rows.bfloat16()])
    assert fetched[0].tolist() == (torch.arange(16.0).view(8, 2) / 2).tolist()
    assert not fetched[1].any()
    assert fetched[2].tolist() == [0, 1, 2]
    assert fetched[3].dtype == torch.bfloat16
