"""The smallest change that makes a recipe fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import devices
from litgrpo.tools.plan.fitting import Room, proposal
from litgrpo.tools.plan.memory import peak
from litgrpo.tools.plan.training import read

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")
WORDS = ["-c", QUICKSTART, "--data.max_prompt_length", "32", "--data.eval_batch_size", "16"]


@pytest.fixture(scope="module")
def training():
    settings = PlanCLI([*WORDS, "--model.objective.kl_coef", "0.1"]).config
    return read(settings, static_shapes=False)


def room(gigabytes, chip="h100"):
    return Room(replace(devices().device(chip), memory=gigabytes * 1e9))


def test_the_smallest_change_comes_first_and_each_fits(training):
    needed = peak(training.account(1)) / 1e9 / 0.9
    found = [proposal(room(share * needed), training, 1) for share in (0.9, 0.4, 0.055, 0.02)]
    micro, checkpointing = "--model.update.micro_batch_size", "--model.precision"
    assert [len(each) for each in found] == sorted(len(each) for each in found)
    assert len(found[0]) == 2
    assert found[0][0].startswith((micro, checkpointing))
    assert found[-1][0] == "--trainer.strategy"
    assert found[-1][2] == "--chips"


def test_a_device_without_a_way_to_share_gets_no_chips(training):
    assert proposal(room(0.001, "cpu"), training, 1) is None


def test_a_program_takes_room(training):
    device = devices().device("cpu")
    needed = peak(training.account(1))
    assert peak(Room(device, 10**9).items(training, 1)) == needed + 10**9
