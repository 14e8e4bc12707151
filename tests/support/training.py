"""Shared by tests of training.grpo."""

import re
from functools import partial

from lightning import Trainer
from torch.utils.data import DataLoader

from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from tests.support.models import prompt_batch, tiny_policy

GROUP, LENGTH = 4, 6


def vowels(prompts, completions):
    # Special tokens, such as `<pad>`, have letters, too.
    completions = [re.sub(r"<\w+>", "", text) for text in completions]
    return [sum(letter in "aeiou" for letter in text) / LENGTH for text in completions]


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / LENGTH for text in completions]


def always_half(prompts, completions):
    return [0.5 for _ in completions]


def module(architecture="qwen2", *, reward=letters, **settings):
    settings = {
        "group_size": GROUP,
        "max_completion_length": LENGTH,
        "max_iterations": 1,
    } | settings
    grpo = GRPO("", {"letters": Reward(reward)}, **settings)
    grpo.policy = tiny_policy(architecture)
    return grpo


# Without the checks at the start, which have tests of their own.
unchecked = partial(module, check_invariants=False)


def sample_rollout(grpo, batch, purpose="train", **settings):
    """Completions of a module that need not have a trainer."""
    grpo.configure_model()
    return grpo.rollouter.generate(batch, purpose, **settings)


def loader(batch, num=1000):
    """The same batch again and again."""
    return DataLoader([batch] * num, batch_size=None)


def batches(*texts):
    return loader(prompt_batch(*texts))


def train(grpo, data, ckpt=None, **trainer):
    silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    settings = silent | dict(accelerator="cpu", max_epochs=-1, enable_model_summary=False) | trainer
    runner = Trainer(**settings)
    runner.fit(grpo, data, ckpt_path=ckpt)
    return runner
