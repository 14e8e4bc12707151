"""Trainings of small models by one process or by several."""

from dataclasses import replace

import torch
from lightning import Trainer

from litgrpo.modules.grpo import GRPO
from litgrpo.tensors import full_tensor
from tests.support.algorithms import DISTILLING, PUBLISHED

TEXTS = ["a", "hello there", "xyz", "what is 3+4?", "b", "cd", "some more", "the end"]
# The loss of BNPO is defined by the split into micro-batches.
ALGORITHMS = {name: each for name, each in (PUBLISHED | DISTILLING).items() if name != "bnpo"}


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def trainer(processes, **settings):
    """Return a trainer without output for this number of processes."""
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    defaults = dict.fromkeys(quiet, False) | {"strategy": "ddp" if processes > 1 else "auto"}
    return Trainer(
        accelerator="cpu",
        devices=processes,
        use_distributed_sampler=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        **defaults | settings,
    )


class Gradients(GRPO):
    """Takes the gradient of every algorithm on one rollout instead of learning."""

    algorithms = ALGORITHMS

    def training_step(self, prompts, batch_idx):
        rollout = self.rollouter.generate(prompts, "train", self.iteration)
        rewards = self.scorer.start(rollout, self.iteration).wait()
        self.learner.objective = DISTILLING["gkd"]  # keeps hidden states of the reference
        hidden = self.learner.old_and_reference_logprobs(rollout).ref_hidden
        self.learner.objective = PUBLISHED["otb"]
        norms = self.learner.old_and_reference_logprobs(rollout).score_norms
        self.learner.objective = DISTILLING["on_policy"]
        logprobs = self.learner.old_and_reference_logprobs(rollout)
        logprobs = replace(logprobs, ref_hidden=hidden, score_norms=norms)
        self.policy.train()
        self.found = {}
        for name, objective in self.algorithms.items():
            self.learner.objective = objective
            training_batch = self.learner.build_batch(rollout, rewards, logprobs)
            # A policy that has moved since: ratios off 1 by what depends on the token only.
            moved = 0.3 * torch.sin(1.7 * training_batch.tokens.completion_ids)
            old = training_batch.sampler_logprobs + moved
            self.name = name
            self.learner.take_optimizer_step(
                replace(training_batch, old_logprobs=old), self.stepper
            )
        if self.global_rank == 0:
            torch.save(self.found, self.file)
        self.iteration += 1
        self.stop_if_done()

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        gradients = [full_tensor(p.grad).double().flatten() for p in self.policy.parameters()]
        self.found[self.name] = torch.cat(gradients).clone()
