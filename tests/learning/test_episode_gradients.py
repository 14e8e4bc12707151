"""The gradient of an episode is that of its turns, and rewards receive generated text only.

Each planted bug (B3 to B7) is found.
"""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.checks.dry_run import DryRun
from litgrpo.learning.learner import Learner
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.episodes import EpisodeListener
from litgrpo.rollout.sampling import Sampling
from tests.learning.parts import learner_of, rollouter_of
from tests.support.algorithms import PUBLISHED
from tests.support.episode_gradients import count_rewards_of_other_text, turns_error
from tests.support.models import ARCHITECTURES, prompt_batch, tiny_policy
from tests.support.playing import Echo, episodes_of

PROMPTS = prompt_batch("a", "hello there", "what is it?")
OBJECTIVE = Objective(gamma=0.9, kl_coef=0.1, entropy_coef=0.01)


def measure(architecture="llama", sampling=None, objective=OBJECTIVE):
    """Relative error of the gradient of small episodes, and rewards of other texts."""
    policy, sampling = tiny_policy(architecture), sampling or Sampling()
    rollouter = rollouter_of(
        policy, episodes=episodes_of(Echo()), max_completion_length=40, sampling=sampling
    )
    reference = FrozenReference(tiny_policy(architecture)) if objective.needs_reference else None
    learner = learner_of(policy, objective, sampling=sampling, reference=reference)
    learner = replace(learner, max_completion_length=40, reuse_sampler_logprobs=False)
    return measure_episodes(DryRun.from_run(rollouter, learner))


def measure_episodes(dry):
    rollout = dry.generate(PROMPTS)
    dry.learner.policy.train()
    rewards = dry.rewards(rollout)
    others = count_rewards_of_other_text(rollout, dry.probe.inputs, dry.rollouter)
    # An encoder-decoder reads earlier turns in its decoder: they cannot be moved to the prompt.
    if dry.learner.policy.bare_model.config.is_encoder_decoder:
        return 0.0, others
    return turns_error(dry.learner, rollout, rewards), others


TOP_K = {"sampling": Sampling(top_k=9, temperature=0.8)}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((name, TOP_K) for name in ARCHITECTURES),
        ("llama", {"sampling": Sampling(stop="e")}),
        ("llama", {"objective": Objective()}),
        *(
            ("llama", {"objective": PUBLISHED[name]})
            for name in ("bnpo", "dapo", "gspo", "gigpo", "gtpo", "rebn")
        ),
    ],
)
def test_an_episode_has_the_gradient_of_its_turns(architecture, settings):
    error, others = measure(architecture, **settings)
    assert error < 1e-4
    assert others == 0


def test_identical_episodes_have_a_gradient_of_rounding():
    """Gradients of copies cancel; the remaining rounding is not an error."""
    policy = tiny_policy("llama", tie_word_embeddings=False)
    with torch.no_grad():
        policy.bare_model.lm_head.weight.mul_(300)
    learner = replace(learner_of(policy), max_completion_length=11, reuse_sampler_logprobs=False)
    rollouter = rollouter_of(policy, episodes=episodes_of(Echo()), max_completion_length=11)
    dry = DryRun.from_run(rollouter, learner)
    same = dry.generate(PROMPTS).completion_ids.unflatten(0, (3, -1))
    assert (same == same[:, :1]).all()
    assert measure_episodes(dry)[0] < 1e-5


def plant(monkeypatch, change):
    """Plant a bug in the training batches of the learner."""
    right = Learner.build_batch

    def wrong(self, rollout, rewards, logprobs):
        return change(self, right, rollout, rewards, logprobs)

    monkeypatch.setattr(Learner, "build_batch", wrong)


def observations_in_the_loss(learner, right, rollout, rewards, logprobs):
    """B3: a loss path forgets the mask."""
    forgetful = replace(rollout)
    vars(forgetful)["loss_mask"] = rollout.completion_mask
    return right(learner, forgetful, rewards, logprobs)


def discount_by_all_tokens(learner, right, rollout, rewards, logprobs):
    """B4: observations count in the discount."""
    found = right(learner, rollout, rewards, logprobs)
    advantages = learner.objective.token_advantages(rewards, rollout.completion_mask, learner.comm)
    return replace(found, advantages=advantages * rollout.loss_mask)


def kl_of_observations(learner, right, rollout, rewards, logprobs):
    """B5: observations enter the KL term."""
    found = right(learner, rollout, rewards, logprobs)
    observed = rollout.completion_mask & ~rollout.loss_mask
    extra = found.ref_logprobs + 0.5 * observed.float().sum(1, keepdim=True)
    return replace(found, ref_logprobs=extra * rollout.loss_mask)


def denominators_of_all_tokens(learner, right, rollout, rewards, logprobs):
    """B7: denominators count tokens that the loss does not."""
    found = right(learner, rollout, rewards, logprobs)
    weights = learner.objective.loss_weights(
        rollout.completion_mask, rollout.truncated, learner.max_completion_length, learner.comm
    )
    return replace(found, loss_weights=weights * rollout.loss_mask)


BUGS = [
    observations_in_the_loss,
    discount_by_all_tokens,
    kl_of_observations,
    denominators_of_all_tokens,
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_gradient_of_episodes_is_found(bug, monkeypatch):
    plant(monkeypatch, bug)
    assert measure()[0] > 1e-2


def test_observations_in_reward_inputs_are_found(monkeypatch):
    """B6: texts are decoded from whole rows."""
    right = EpisodeListener.complete_rollout

    def wrong(self, rollout):
        texts = self.tokenizer.batch_decode(rollout.token_lists(), skip_special_tokens=True)
        return replace(right(self, rollout), completions=texts)

    monkeypatch.setattr(EpisodeListener, "complete_rollout", wrong)
    assert measure(objective=Objective())[1] > 0
