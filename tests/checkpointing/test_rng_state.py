import random

import numpy as np
import torch

from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.rng_state import RngState, all_random_state, set_all_random_state
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn


def drawn() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), float(torch.randn(()))]


def test_every_generator_goes_on_where_it_stood():
    drawn()  # half a pair of normal numbers is left over
    state = all_random_state()
    expected = [drawn(), drawn()]
    set_all_random_state(state)
    assert [drawn(), drawn()] == expected


class Draws(StandIn):
    """Remembers what its training steps draw."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(drawn())
        return super().training_step(batch, batch_idx)


def test_a_resumed_run_draws_what_the_whole_run_drew(tmp_path):
    def run(iterations, folder, resume=None):
        module = Draws(iterations)
        fit(folder, IterationCheckpoint(2), RngState(), module=module, resume=resume)
        return module.seen

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    whole = run(5, tmp_path / "whole")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = run(2, tmp_path / "parts")
    drawn()
    second = run(5, tmp_path / "parts", tmp_path / "parts/checkpoints/last.ckpt")
    assert first + second == whole
