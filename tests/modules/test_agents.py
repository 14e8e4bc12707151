"""Training inside of agents."""

from functools import partial

import torch

from litgrpo.data.modules import PromptData
from litgrpo.environments.agent import Agent
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sources.ahead import Ahead
from tests.support.agents import play
from tests.support.training import module, train

EPISODE = EpisodeSettings(turn_format="inline", max_turns=8, max_turn_tokens=6)


def train_agents(*agents, **settings):
    """Weights and metrics of a run whose rows are these agents."""
    given = {"max_completion_length": 64, "max_iterations": 2, "environment": Agent(play)}
    given |= {"check_invariants": False, "optimizer": partial(torch.optim.AdamW, lr=1e-3)}
    grpo = module("llama", **(given | {"episode": EPISODE} | settings))
    rows = [{"prompt": f"q{n}?", "agent": name} for n, name in enumerate(agents)]
    trainer = train(grpo, PromptData(rows, batch_size=len(rows), shuffle=False))
    weights = torch.cat([p.detach().flatten() for p in grpo.policy.parameters()])
    return weights, trainer.callback_metrics


def test_two_runs_end_with_equal_weights_in_any_order_of_parallel_calls():
    one, metrics = train_agents("branch", "parallel", "later")
    other, _ = train_agents("branch", "parallel", "later")
    assert torch.equal(one, other)
    assert metrics["env/segments"] > 2
    assert metrics["env/failed_frac"] == 0
    assert metrics["policy/sampler_mismatch"] < 1e-4
    assert metrics["reward/std"] > 0


def test_a_run_continues_without_the_agents_that_fail_after_all_invariants_hold():
    weights, metrics = train_agents(
        "talk", "raises", "talk", max_iterations=1, check_invariants=True
    )
    assert metrics["env/failed_frac"] == torch.tensor(1 / 3)
    assert weights.isfinite().all()


def test_agents_are_trained_off_policy_with_the_versions_of_their_tokens():
    weights, metrics = train_agents("talk", "branch", "once", max_iterations=3, source=Ahead())
    assert metrics["env/segments"] > 1
    assert weights.isfinite().all()
    assert metrics["async/staleness_max"] == 1
