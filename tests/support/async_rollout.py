"""Shared by tests of rollout.async_rollout."""

import torch

from litgrpo.data.modules import PromptData
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.training.grpo import GRPO
from litgrpo.training.update_config import UpdateConfig
from tests.support.models import tiny_policy
from tests.support.training import GROUP, LENGTH, letters, train

ROWS = [{"prompt": text} for text in ("a", "hello there", "what is it?", "7", "xy")]


ITERATIONS = 5  # over two epochs of three batches


class Sequential(GRPO):
    """The schedule written down with nothing beside anything, from the list of all batches."""

    batches, kept = (), None

    def training_step(self, prompts, batch_idx):
        n = self.iteration
        current = self.kept or self.rollouter.generate(prompts, "train", n)
        following = self.batches[n + 1]
        self.kept = self.rollouter.generate(following, "train", n + 1)
        self.rollouter.generate = lambda *_: current  # what this iteration learns from
        try:
            return super().training_step(prompts, batch_idx)
        finally:
            del self.rollouter.generate


class Recording(GRPO):
    """Notes whose weights it learned from."""

    def training_step(self, prompts, batch_idx):
        shown = super().training_step(prompts, batch_idx)
        self.versions = [*vars(self).get("versions", []), shown["rollout"].policy_version]
        return shown


def data():
    return PromptData(ROWS, batch_size=2)


def run(kind=Recording, staleness=1, engine=None, ckpt=None, iterations=ITERATIONS, **settings):
    """A finished run."""
    settings = {"update": UpdateConfig(staleness=staleness)} | settings
    sizes = {"group_size": GROUP, "max_completion_length": LENGTH, "max_iterations": iterations}
    grpo = kind(
        "", {"letters": Reward(letters)}, **sizes, **settings, engine=engine or LocalEngine()
    )
    grpo.policy = tiny_policy("qwen2")
    train(grpo, data(), ckpt)
    return grpo


def assert_same_weights(one, other):
    weights, others = one.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)


def all_batches():
    """Return the batches of the first epochs, in order."""

    class Seen(GRPO):
        def training_step(self, prompts, batch_idx):
            found.append(prompts)
            return super().training_step(prompts, batch_idx)

    found = []
    run(Seen, staleness=0, iterations=ITERATIONS + 1)
    return found
