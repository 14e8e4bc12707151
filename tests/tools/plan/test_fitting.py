"""The smallest change that makes a recipe fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import load_devices
from litgrpo.tools.plan.fitting import MemoryBudget, propose_change
from litgrpo.tools.plan.memory import peak_bytes
from litgrpo.tools.plan.sizes import read_sizes

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
WORDS = ["-c", QUICKSTART, "--data.max_prompt_length", "32", "--data.eval_batch_size", "16"]


@pytest.fixture(scope="module")
def recipe():
    settings = PlanCLI([*WORDS, "--model.objective.kl_coef", "0.1"]).config
    return read_sizes(settings, static_shapes=False)


def budget(format_gb, chip="h100"):
    return MemoryBudget(replace(load_devices().device(chip), memory=format_gb * 1e9))


def test_the_smallest_change_comes_first_and_each_fits(recipe):
    needed = peak_bytes(recipe.count_memory(1)) / 1e9 / 0.9
    found = [propose_change(budget(share * needed), recipe, 1) for share in (0.9, 0.4, 0.055, 0.02)]
    micro, checkpointing = "--model.update.micro_batch_size", "--model.precision"
    assert [len(each) for each in found] == sorted(len(each) for each in found)
    assert len(found[0]) == 2
    assert found[0][0].startswith((micro, checkpointing))
    assert found[-1][0] == "--trainer.strategy"
    assert found[-1][2] == "--chips"


def test_a_device_without_sharding_gets_no_more_chips(recipe):
    assert propose_change(budget(0.001, "cpu"), recipe, 1) is None


def test_the_program_takes_memory(recipe):
    device = load_devices().device("cpu")
    needed = peak_bytes(recipe.count_memory(1))
    assert peak_bytes(MemoryBudget(device, 10**9).items(recipe, 1)) == needed + 10**9
