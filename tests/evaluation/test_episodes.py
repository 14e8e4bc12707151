from dataclasses import replace

import pytest
import torch

from litgrpo.evaluation.episodes import Played
from litgrpo.rollout.episodes import Episode
from tests.support.standin import prompts, rollout_of

SAID = {"role": "assistant", "content": "a"}


def played(*turns):
    """Two prompts with two episodes each, of so many turns; all but the last call a tool."""
    rollout = rollout_of(prompts("A", "B"))
    episodes = [Episode([SAID] * n, calls={"f": (n - 1, 0)} if n > 1 else {}) for n in turns]
    rewards = torch.zeros(4, max(turns), dtype=torch.float64)
    more = {"turn_rewards": rewards, "turn_states": [[]] * 4, "episodes": episodes}
    numbers = torch.zeros_like(rollout.completion_ids, dtype=torch.int16)
    return replace(rollout, turns=numbers, **more)


def test_turns_and_calls_are_averaged_over_prompts():
    metric = Played("greedy_")
    metric.update(torch.tensor([0, 1]), played(1, 3, 2, 2))
    metric.update(torch.tensor([1, 2]), played(4, 4, 1, 1))  # prompt 1 comes again
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == {
        "greedy_turns": pytest.approx((2 + 2 + 1) / 3),
        "greedy_called_frac": pytest.approx((0.5 + 1 + 0) / 3),
    }


def test_single_turns_say_nothing():
    metric = Played()
    metric.update(torch.tensor([0, 1]), rollout_of(prompts("A", "B")))
    assert metric.compute() == {}
