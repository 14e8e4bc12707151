"""The check finds the environments that are no functions, and lets the others pass."""

import pytest

from litgrpo.environments.episode import EpisodesHere
from litgrpo.environments.response_log import deviations
from litgrpo.environments.workers import EpisodeWorkers
from tests.environments.faulty import Clock, Counting, Dice, Echo, Telling
from tests.support.workers import starts

SAID = ("1", "two", "three words now")


@pytest.mark.parametrize("pool_class", [EpisodesHere, EpisodeWorkers])
@pytest.mark.parametrize("environment", [Echo(), Dice()])
def test_a_function_also_one_that_draws_from_the_global_generators(environment, pool_class) -> None:
    pool = pool_class(environment)
    assert deviations(pool, starts(3), SAID) == []
    pool.close()


@pytest.mark.parametrize("environment", [Counting(), Telling(), Clock()])
def test_a_class_that_counts_a_module_that_keeps_and_a_clock_are_found(environment) -> None:
    pool = EpisodeWorkers(environment, workers=1)
    found = deviations(pool, starts(2), SAID)
    pool.close()
    assert found
    assert found[0].startswith("turn 1, played once more: StepResult(observation='")


def test_state_that_only_another_episode_leaves_is_found_beside_it() -> None:
    seeds = set()

    class Shared(Echo):
        def step(self, action):
            seeds.add(self.heard[0])
            return super().step(f"{action} {len(seeds)}")

    found = deviations(EpisodesHere(Shared()), starts(4)[1:], SAID)
    assert [line[: line.index(":")] for line in found] == [
        f"turn {n}, played beside others" for n in (2, 3)
    ]


def test_generators_that_are_not_kept_apart_are_found(monkeypatch) -> None:
    for name in ("episode.seed_generators", "episode.put_generators", "in_process.put_generators"):
        monkeypatch.setattr(f"litgrpo.environments.{name}", lambda *states: None)
    pool = EpisodesHere(Dice())
    found = deviations(pool, starts(2), SAID)
    assert found
    assert found[0].startswith("reset, played once more")


def test_an_episode_that_ends_earlier_is_a_difference() -> None:
    class Tired(Echo):
        left = 2

        def step(self, action):
            Tired.left -= 1
            return super().step("raise" if Tired.left < 0 else action)

    found = deviations(EpisodesHere(Tired(), max_failed_frac=1.0), starts(1), SAID)
    assert "KeyError" in found[0]
