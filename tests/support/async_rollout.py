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

    batches, steps = (), 1

    def training_step(self, prompts, batch_idx):
        n, kept = self.iteration, vars(self).setdefault("kept", {})
        generate = self.rollouter.generate
        for ahead in range(self.steps + 1):
            if n + ahead not in kept:
                rollout = generate(self.batches[n + ahead], "train", n + ahead)
                kept[n + ahead] = rollout
        current = kept[n]

        def learn_from_it(asked, purpose, iteration, *, attempt=0):
            if attempt:
                return generate(asked, purpose, iteration, attempt=attempt)
            return current

        self.rollouter.generate = learn_from_it
        try:
            return super().training_step(prompts, batch_idx)
        finally:
            del self.rollouter.generate


class Recording(GRPO):
    """Notes whose weights it learned from, and saves a checkpoint after `save_after` iterations."""

    save_after, file = 0, None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.iteration == self.save_after:
            self.trainer.save_checkpoint(self.file)

    def training_step(self, prompts, batch_idx):
        shown = super().training_step(prompts, batch_idx)
        self.versions = [*vars(self).get("versions", []), shown["rollout"].policy_version]
        self.rollouts = [*vars(self).get("rollouts", []), shown["rollout"]]
        return shown


def data():
    return PromptData(ROWS, batch_size=2)


def run(kind=Recording, staleness=1, engine=None, ckpt=None, saved=None, **settings):
    """A finished run.

    Args:
        ckpt: checkpoint that it continues.
        saved: (iterations, file) of a checkpoint that it writes.
    """
    settings = {"update": UpdateConfig(staleness=staleness)} | settings
    sizes = {"group_size": GROUP, "max_completion_length": LENGTH, "max_iterations": ITERATIONS}
    given = {"engine": engine or LocalEngine(), "rewards": {"letters": Reward(letters)}}
    grpo = kind("", **given | sizes | settings)
    grpo.policy = tiny_policy("qwen2")
    if saved is not None:
        grpo.save_after, grpo.file = saved
    train(grpo, data(), ckpt)
    return grpo


def sequential(steps, **settings):
    """A finished run of the sequential schedule, `steps` iterations off-policy."""
    Sequential.batches, Sequential.steps = all_batches(steps), steps
    return run(Sequential, staleness=0, **settings)


def assert_same_weights(one, other):
    weights, others = one.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)


def all_batches(steps=1):
    """Return the batches of the first epochs, in order."""

    class Seen(GRPO):
        def training_step(self, prompts, batch_idx):
            found.append(prompts)
            return super().training_step(prompts, batch_idx)

    found = []
    run(Seen, staleness=0, max_iterations=ITERATIONS + steps)
    return found
