"""An episode is its own: copies, what is checked and cut."""

import random

import numpy as np
import pytest
import torch

from litgrpo.environments.base import EpisodeStart, FailedEpisode, StepResult
from litgrpo.environments.episode import EpisodePlayer, InProcessEpisodes, seed_rngs, shorten
from litgrpo.environments.workers import EpisodeWorkers
from tests.support.faulty import Echo
from tests.support.workers import starts, step_all, texts


class Draws:
    """Draws from all three generators."""

    closed = 0

    def reset(self, row, seed):
        self.row = row
        row["prompt"] = "changed"
        return self.step("").observation

    def step(self, action):
        return StepResult(f"{random.random()} {np.random.rand()} {torch.rand(1).item()}")

    def close(self):
        Draws.closed += 1


def start(seed=3):
    return EpisodeStart({"prompt": "p"}, seed, (0, 0, 0, 0))


def test_seeding_reaches_all_three_generators() -> None:
    player = EpisodePlayer(Draws())
    seen = []
    for seed in (3, 4, 3):
        seed_rngs(seed)
        seen.append(player.play(start(), ("x", "x")))
    assert seen[0] == seen[2] != seen[1]


def test_a_row_is_a_copy_and_episodes_that_are_over_are_closed() -> None:
    player, begin, closed = EpisodePlayer(Draws()), start(), Draws.closed
    for _ in range(2):
        player.play(begin, ())
    assert begin.row == {"prompt": "p"}
    assert Draws.closed == closed + 1
    player.close()
    assert Draws.closed == closed + 2


def test_what_an_environment_raises_names_its_own_line() -> None:
    failed = EpisodePlayer(Echo()).play(start(), ("raise",))
    assert isinstance(failed, FailedEpisode)
    assert failed.reason.startswith("KeyError: 'bad' (faulty.py, line")


def test_ctrl_c_is_for_the_run_where_that_is_asked_for() -> None:
    class Interrupted(Echo):
        def step(self, action):
            raise KeyboardInterrupt

    assert isinstance(EpisodePlayer(Interrupted()).play(start(), ("x",)), FailedEpisode)
    with pytest.raises(KeyboardInterrupt):
        EpisodePlayer(Interrupted(), None, (Exception,)).play(start(), ("x",))


def test_an_episode_goes_on_and_the_next_one_begins_anew() -> None:
    player = EpisodePlayer(Echo())
    assert player.play(start(), ()) == "seed 3"
    assert player.play(None, ("a",)).observation == "1 a"
    assert player.play(None, ("b", "c")).observation == "3 c"
    assert player.play(start(), ("d",)).observation == "1 d"


def test_long_texts_are_cut_in_the_middle_wherever_they_are() -> None:
    cut = "ab ... (6 characters left out) ... ij"
    assert shorten("abcdefghij", None) == shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 1) == "a ... (9 characters left out) ... "
    message = {"role": "tool", "content": "abcdefghij", "n": 1}
    assert shorten([message], 4) == [{"role": "tool", "content": cut, "n": 1}]


def test_both_pools_hear_the_same() -> None:
    here = InProcessEpisodes(Echo(), max_observation_chars=10)
    workers = EpisodeWorkers(Echo(), num_workers=2, max_observation_chars=10)
    seen = []
    for pool in (here, workers):
        seen.append(pool.reset(starts()))
        for n in range(4):
            seen.append(step_all(pool, {n: "long"}))
            pool.end(n)
    workers.close()
    assert seen[:5] == seen[5:]
    assert texts(seen[1]) == {0: "ababa ... (90 characters left out) ... babab"}


def test_what_raises_in_this_process_fails_its_episode() -> None:
    pool = InProcessEpisodes(Echo())
    pool.reset(starts())
    heard = step_all(pool, {0: "raise", 1: "leave", 2: "x"})
    assert [type(heard[n]) for n in (0, 1)] == [FailedEpisode, FailedEpisode]
    assert texts(heard)[2] == "1 x"
    assert pool.reset(starts(1)) == ["seed 0"]
    pool.close()
