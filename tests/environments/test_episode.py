"""An episode is its own: generators, copies, what is checked and cut."""

import random

import numpy as np
import pytest
import torch

from litgrpo.environments.base import EnvironmentFailure, EpisodeStart, FailedEpisode, StepResult
from litgrpo.environments.episode import (
    EpisodePlayer,
    InProcessEpisodes,
    PlayRequest,
    get_rng_states,
    handle_request,
    seed_rngs,
    set_rng_states,
    shorten,
)
from litgrpo.environments.workers import EpisodeWorkers
from tests.support.faulty import Dice, Echo
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


def test_global_generators_are_each_episodes_own() -> None:
    stage = EpisodePlayer(Draws())
    alone = [stage.play(PlayRequest(1, 0, start(), ())), *(go(stage, 1, 0) for _ in range(2))]
    stage = EpisodePlayer(Draws())
    mixed = [stage.play(PlayRequest(1, 0, start(), ()))]
    assert stage.play(PlayRequest(1, 1, start(4), ())) != mixed[0]
    mixed.append(go(stage, 1, 0))
    go(stage, 1, 1)
    mixed.append(go(stage, 1, 0))
    assert mixed == alone
    assert (
        stage.play(PlayRequest(1, 2, start(), ("a", "b"))) == alone[2]
    )  # said again from the seed


def go(stage, batch, episode):
    return stage.play(PlayRequest(batch, episode, None, ("x",)))


def test_states_are_put_back_to_the_bit() -> None:
    seed_rngs(5)
    states = get_rng_states()
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    set_rng_states(states, 0)
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn


def test_a_row_is_a_copy_and_episodes_that_are_over_are_closed() -> None:
    stage, begin, closed = EpisodePlayer(Draws()), start(), Draws.closed
    for batch in (1, 2):
        stage.play(PlayRequest(batch, 0, begin, ()))
    assert begin.row == {"prompt": "p"}
    assert Draws.closed == closed + 1
    stage.close()
    assert Draws.closed == closed + 2


def test_what_an_environment_raises_names_its_own_line() -> None:
    stage = EpisodePlayer(Echo())
    failed = stage.play(PlayRequest(1, 0, start(), ("raise",)))
    assert isinstance(failed, FailedEpisode)
    assert failed.reason.startswith("KeyError: 'bad' (faulty.py, line")


def test_ctrl_c_is_for_the_run_where_that_is_asked_for() -> None:
    class Interrupted(Echo):
        def step(self, action):
            raise KeyboardInterrupt

    asked = PlayRequest(1, 0, start(), ("x",))
    assert isinstance(EpisodePlayer(Interrupted()).play(asked), FailedEpisode)
    with pytest.raises(KeyboardInterrupt):
        EpisodePlayer(Interrupted(), None, (Exception,)).play(asked)


def test_a_worker_keeps_its_episodes_between_messages() -> None:
    loaded = {"environment": (Echo(), None)}
    assert handle_request(loaded, PlayRequest(1, 0, start(), ()), None) == "seed 3"
    assert handle_request(loaded, PlayRequest(1, 0, None, ("a",)), None).observation == "1 a"
    assert handle_request(loaded, PlayRequest(1, 0, None, ("b",)), None).observation == "2 b"


def test_long_texts_are_cut_in_the_middle_wherever_they_are() -> None:
    cut = "ab ... (6 characters left out) ... ij"
    assert shorten("abcdefghij", None) == shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 1) == "a ... (9 characters left out) ... "
    message = {"role": "tool", "content": "abcdefghij", "n": 1}
    assert shorten([message], 4) == [{"role": "tool", "content": cut, "n": 1}]


def test_both_pools_hear_the_same() -> None:
    here, workers = InProcessEpisodes(Dice()), EpisodeWorkers(Dice(), num_workers=2)
    for pool in (here, workers):
        pool.began = pool.reset(starts())  # type: ignore[attr-defined]
        pool.first = step_all(pool, dict.fromkeys(range(4), "x"))  # type: ignore[attr-defined]
    workers.close()
    assert (here.began, here.first) == (workers.began, workers.first)  # type: ignore[attr-defined]


def test_the_generators_of_the_run_are_left_as_they_were() -> None:
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    pool = InProcessEpisodes(Dice())
    pool.reset(starts())
    step_all(pool, {0: "x"})
    assert states == [
        *(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
    ]


def test_what_raises_fails_its_episode_and_too_many_stop_the_run() -> None:
    pool = InProcessEpisodes(Echo(), max_observation_chars=10)
    pool.reset(starts())
    heard = step_all(pool, {0: "raise", 1: "leave", 2: "long"})
    assert [type(heard[n]) for n in (0, 1)] == [FailedEpisode, FailedEpisode]
    assert texts(heard)[2] == "ababa ... (90 characters left out) ... babab"
    with pytest.raises(EnvironmentFailure, match="3 of 4 episodes failed"):
        step_all(pool, {3: "raise"})
    assert pool.reset(starts(1)) == ["seed 0"]
    pool.close()
