"""Episodes in this process answer as those in workers do."""

import random

import numpy as np
import pytest
import torch

from litgrpo.environments.base import EnvironmentFailure, Failed
from litgrpo.environments.episode import EpisodesHere
from litgrpo.environments.workers import EpisodeWorkers
from tests.environments.faulty import Dice, Echo
from tests.support.workers import answers, starts, texts


def test_both_pools_hear_the_same() -> None:
    here, workers = EpisodesHere(Dice()), EpisodeWorkers(Dice(), workers=2)
    for pool in (here, workers):
        pool.began = pool.begin(starts())  # type: ignore[attr-defined]
        pool.first = answers(pool, dict.fromkeys(range(4), "x"))  # type: ignore[attr-defined]
    workers.close()
    assert (here.began, here.first) == (workers.began, workers.first)  # type: ignore[attr-defined]


def test_the_generators_of_the_run_are_left_as_they_were() -> None:
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    pool = EpisodesHere(Dice())
    pool.begin(starts())
    answers(pool, {0: "x"})
    assert states == [
        *(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    ]


def test_what_raises_fails_its_episode_and_too_many_stop_the_run() -> None:
    pool = EpisodesHere(Echo(), max_observation_chars=10)
    pool.begin(starts())
    heard = answers(pool, {0: "raise", 1: "leave", 2: "long"})
    assert [type(heard[n]) for n in (0, 1)] == [Failed, Failed]
    assert texts(heard)[2] == "ababa ... (90 characters left out) ... babab"
    with pytest.raises(EnvironmentFailure, match="3 of 4 episodes failed"):
        answers(pool, {3: "raise"})
    assert pool.begin(starts(1)) == ["seed 0"]
    pool.close()
