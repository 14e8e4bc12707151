"""Each planted bug (B10) violates the invariant that covers it."""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.checks import dry_run
from litgrpo.checks.episode_checks import count_unreproducible_responses, find_deviations
from litgrpo.checks.invariants import (
    Conditions,
    Invariant,
    measure_invariants,
)
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.workers import EpisodeWorkers
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.sampling import Sampling
from tests.learning.parts import learner_of, rollouter_of
from tests.support import faulty
from tests.support.algorithms import PUBLISHED
from tests.support.models import ARCHITECTURES, prompt_batch, tiny_policy
from tests.support.playing import Echo, episodes_of
from tests.support.workers import starts

PROMPTS = prompt_batch("a", "hello there", "what is it?")
OBJECTIVE = Objective(gamma=0.9, kl_coef=0.1, entropy_coef=0.01)


def findings_of(architecture="llama", sampling=None, objective=OBJECTIVE, **settings):
    policy = tiny_policy(architecture)
    sampling = sampling or Sampling()
    rollouter = rollouter_of(
        policy,
        episodes=episodes_of(Echo()),
        max_completion_length=40,
        sampling=sampling,
        **settings,
    )
    reference = FrozenReference(tiny_policy(architecture)) if objective.needs_reference else None
    learner = learner_of(policy, objective, sampling=sampling, reference=reference)
    learner = replace(learner, max_completion_length=40, reuse_sampler_logprobs=False)
    found = measure_invariants(rollouter, learner, PROMPTS, Conditions(fresh_reference=True))
    return {finding.invariant: finding for finding in found}


TOP_K = {"sampling": Sampling(top_k=9, temperature=0.8)}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((name, TOP_K) for name in ARCHITECTURES),
        ("llama", {"sampling": Sampling(stop="e")}),
        ("llama", {"objective": Objective()}),
    ],
)
def test_everything_holds_with_turns(architecture, settings):
    found = findings_of(architecture, **settings)
    assert all(finding.holds for finding in found.values()), [*map(str, found.values())]
    assert Invariant.REPRODUCIBLE in found


@pytest.mark.parametrize("name", ["bnpo", "dapo", "gspo", "gigpo", "gtpo", "rebn"])
def test_everything_holds_with_turns_for_published_algorithms(name):
    found = findings_of(objective=PUBLISHED[name])
    assert all(finding.holds for finding in found.values()), [*map(str, found.values())]


def test_the_small_episodes_have_turns_and_hear():
    policy = tiny_policy("llama")
    rollouter = rollouter_of(policy, episodes=episodes_of(Echo()), max_completion_length=40)
    dry = dry_run.DryRun.from_run(rollouter, replace(learner_of(policy), max_completion_length=40))
    rollout = dry.generate(PROMPTS)
    assert rollout.turns.max() == 2
    assert (rollout.completion_mask & ~rollout.loss_mask).any()


def test_a_turn_that_continues_after_its_end_is_found(monkeypatch):
    from litgrpo.rollout.engines.local import TurnRows

    right = TurnRows.__init__

    def late(self, request, buffer):
        right(self, request, buffer)
        self.is_end = torch.zeros_like(request.is_end)

    monkeypatch.setattr(TurnRows, "__init__", late)
    found = findings_of(objective=Objective())
    assert not found[Invariant.END_TOKEN].holds


@pytest.mark.parametrize("environment", [faulty.Dice, faulty.Counting, faulty.ModuleState])
def test_an_environment_with_hidden_state_is_found(environment, caplog) -> None:
    episodes = episodes_of(environment())
    assert count_unreproducible_responses(episodes, PROMPTS) > 0
    assert ", played again" in caplog.text
    assert count_unreproducible_responses(episodes_of(Echo()), PROMPTS) == 0
    assert count_unreproducible_responses(None, PROMPTS) == 0


SAID = ("1", "two", "three words now")


def test_processes_seed_the_global_generators_and_keep_the_state_of_a_module() -> None:
    for environment, turns in ((faulty.Dice(), 0), (faulty.ModuleState(), 6)):
        pool = EpisodeWorkers(environment)
        assert len(find_deviations(pool, starts(3), SAID)) == turns
        pool.close()


def test_a_clock_is_found() -> None:
    found = find_deviations(InProcessEpisodes(faulty.Clock()), starts(2), SAID)
    assert found[-1].startswith("turn 3, played after others: got StepResult(observation='")


def test_state_left_by_other_episodes_is_found() -> None:
    seeds = set()

    class Shared(faulty.Echo):
        def step(self, action):
            seeds.add(self.actions[0])
            return super().step(f"{action} {len(seeds)}")

    found = find_deviations(InProcessEpisodes(Shared()), starts(4)[1:], SAID)
    assert [line[: line.index(":")] for line in found] == [
        f"turn {n}, played after others" for n in (1, 2, 3)
    ]


def test_an_episode_that_ends_earlier_is_a_difference() -> None:
    class Tired(faulty.Echo):
        left = 2

        def step(self, action):
            Tired.left -= 1
            return super().step("raise" if Tired.left < 0 else action)

    found = find_deviations(InProcessEpisodes(Tired()), starts(1), SAID)
    assert "KeyError" in found[0]
