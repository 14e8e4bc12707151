"""Shared by tests of training.processes."""

import multiprocessing
from dataclasses import replace

import torch
from lightning import Trainer

from litgrpo.training.grpo import GRPO
from tests.support.algorithms import DISTILLING, PUBLISHED

TEXTS = ["a", "hello there", "xyz", "what is 3+4?", "b", "cd", "some more", "the end"]


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def trainer(num_processes, folder=None, strategy="ddp_fork"):
    """Return a trainer without output for this number of processes, and a run folder."""
    return Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=strategy if num_processes > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )


class Gradients(GRPO):
    """Takes the gradient of every published algorithm on one rollout instead of learning."""

    def training_step(self, prompts, batch_idx):
        rollout = self.rollouter.generate(prompts, "train", self.iteration)
        rewards = self.scorer.start(rollout, self.iteration).wait()
        self.coefficients.objective = DISTILLING["gkd"]  # keeps hidden states of the reference
        hidden = self.learner.old_and_reference_logprobs(rollout).ref_hidden
        self.coefficients.objective = PUBLISHED["otb"]
        norms = self.learner.old_and_reference_logprobs(rollout).score_norms
        self.coefficients.objective = DISTILLING["on_policy"]
        logprobs = self.learner.old_and_reference_logprobs(rollout)
        logprobs = replace(logprobs, ref_hidden=hidden, score_norms=norms)
        self.policy.train()
        self.found = {}
        for name, objective in (PUBLISHED | DISTILLING).items():
            if name == "bnpo":
                continue  # defined by the split
            self.coefficients.objective = objective
            training_batch = self.learner.build_batch(rollout, rewards, logprobs)
            # A policy that has moved since: ratios off 1 by what depends on the token only.
            moved = 0.3 * torch.sin(1.7 * training_batch.completion_ids)
            old = training_batch.sampler_logprobs + moved
            self.name = name
            self.learner.take_optimizer_step(
                replace(training_batch, old_logprobs=old), self.stepper
            )
        if self.global_rank == 0:
            torch.save(self.found, self.file)
        self.iteration += 1
        self._stop_if_done()

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        gradients = [p.grad.double().flatten() for p in self.policy.parameters()]
        self.found[self.name] = torch.cat(gradients).clone()


def in_a_process_of_one_thread(function, folder, *words):
    """Run for 1 and 2 processes; a fork of several threads can wait for some it does not have.

    The processes are forked from one that has imported everything, which takes seconds.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    child = server.Process(target=once_alone_and_once_in_two, args=(function, folder, *words))
    child.start()
    child.join()
    assert child.exitcode == 0


def once_alone_and_once_in_two(function, folder, *words):
    """Call `function` for 1 process and for 2."""
    for number in (1, 2):
        function(number, folder, *words)
