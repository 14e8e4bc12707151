"""Shared by tests of checks.invariants."""

from lightning import Trainer
from torch.utils.data import DataLoader

from litgrpo.algorithms.objective import Objective
from litgrpo.models.reference import FrozenReference
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from tests.support.models import prompt_batch, tiny_policy

TEXTS = ("a", "hello there", "xyz")


KL = Objective(kl_coef=0.1)


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def module(architecture="qwen2", *, policy=None, **settings):
    chosen = dict(group_size=4, max_completion_length=12, max_iterations=1) | settings
    grpo = GRPO("", {"letters": Reward(letters)}, **chosen)
    grpo.policy = tiny_policy(architecture) if policy is None else policy
    if grpo.objective.needs_reference:
        grpo.reference = FrozenReference(tiny_policy(architecture))
    return grpo


def runner(**settings):
    silent = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    plain = dict(accelerator="cpu", max_epochs=-1, enable_model_summary=False)
    return Trainer(**silent | plain | settings)


def fit(grpo, data=None, ckpt_path=None, **settings):
    trainer = runner(**settings)
    data = DataLoader([prompt_batch(*TEXTS)] * 9, batch_size=None) if data is None else data
    trainer.fit(grpo, data, ckpt_path=ckpt_path)
    return trainer
