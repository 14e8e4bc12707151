"""An episode is its own: generators, copies, what is checked and cut."""

import random

import numpy as np
import pytest
import torch

from litgrpo.environments.base import EnvironmentFailure, Failed, Start, StepResult
from litgrpo.environments.episode import (
    EpisodesHere,
    Stage,
    Turns,
    answered,
    generators,
    put_generators,
    seed_generators,
    shortened,
)
from litgrpo.environments.workers import EpisodeWorkers
from tests.support.faulty import Dice, Echo
from tests.support.workers import answers, starts, texts


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
    return Start({"prompt": "p"}, seed, (0, 0, 0, 0))


def test_global_generators_are_each_episodes_own() -> None:
    stage = Stage(Draws())
    alone = [stage.play(Turns(1, 0, start(), ())), *(go(stage, 1, 0) for _ in range(2))]
    stage = Stage(Draws())
    mixed = [stage.play(Turns(1, 0, start(), ()))]
    assert stage.play(Turns(1, 1, start(4), ())) != mixed[0]
    mixed.append(go(stage, 1, 0))
    go(stage, 1, 1)
    mixed.append(go(stage, 1, 0))
    assert mixed == alone
    assert stage.play(Turns(1, 2, start(), ("a", "b"))) == alone[2]  # said again from the seed


def go(stage, batch, episode):
    return stage.play(Turns(batch, episode, None, ("x",)))


def test_states_are_put_back_to_the_bit() -> None:
    seed_generators(5)
    states = generators()
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    put_generators(states, 0)
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn


def test_a_row_is_a_copy_and_episodes_that_are_over_are_closed() -> None:
    stage, begin, closed = Stage(Draws()), start(), Draws.closed
    for batch in (1, 2):
        stage.play(Turns(batch, 0, begin, ()))
    assert begin.row == {"prompt": "p"}
    assert Draws.closed == closed + 1
    stage.close()
    assert Draws.closed == closed + 2


def test_what_an_environment_raises_names_its_own_line() -> None:
    stage = Stage(Echo())
    failed = stage.play(Turns(1, 0, start(), ("raise",)))
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("KeyError: 'bad' (faulty.py, line")


def test_ctrl_c_is_for_the_run_where_that_is_asked_for() -> None:
    class Interrupted(Echo):
        def step(self, action):
            raise KeyboardInterrupt

    asked = Turns(1, 0, start(), ("x",))
    assert isinstance(Stage(Interrupted()).play(asked), Failed)
    with pytest.raises(KeyboardInterrupt):
        Stage(Interrupted(), None, (Exception,)).play(asked)


def test_a_worker_keeps_its_episodes_between_messages() -> None:
    loaded = {"environment": (Echo(), None)}
    assert answered(loaded, Turns(1, 0, start(), ()), None) == "seed 3"
    assert answered(loaded, Turns(1, 0, None, ("a",)), None).observation == "1 a"
    assert answered(loaded, Turns(1, 0, None, ("b",)), None).observation == "2 b"


def test_long_texts_are_cut_in_the_middle_wherever_they_are() -> None:
    cut = "ab ... (6 characters left out) ... ij"
    assert shortened("abcdefghij", None) == shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghij", 1) == "a ... (9 characters left out) ... "
    message = {"role": "tool", "content": "abcdefghij", "n": 1}
    assert shortened([message], 4) == [{"role": "tool", "content": cut, "n": 1}]


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
