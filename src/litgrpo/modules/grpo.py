"""GRPO as a LightningModule: the walk from prompts to a better policy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from litgrpo.device import peak_memory_gib
from litgrpo.modules import invariants, machine
from litgrpo.modules.learning import LearningModule
from litgrpo.modules.measures import Clock, Totals
from litgrpo.modules.settings import Evaluation, Learning
from litgrpo.objectives.objective import Objective
from litgrpo.policies.loading import LoRA, Precision, check_weights, load_policy, load_reference
from litgrpo.rewards.composite import Composite, Reward, RewardFormat
from litgrpo.rollout.eager_engine import EagerEngine
from litgrpo.rollout.engine import RolloutEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch, Stats


class GRPO(LearningModule):
    """Group Relative Policy Optimization of a language model.

    One training step is one iteration: sample a group of completions of each prompt, reward them,
    and learn from how each compares with its group.

    Args:
        pretrained: the model to train: a hub id, a folder, or `builtin:<name>`.
        rewards: {name: reward function, weight, arguments}; their weighted sum is maximized.
        objective: what is maximized: advantages, surrogate, weighting and KL term.
        group_size: completions of each prompt, G.
        max_completion_len: tokens of a completion at most, C.
        sampling: temperature and filters of the rollout.
        engine: how the rollout is computed.
        learning: how the optimizer uses one rollout.
        evaluation: how held-out prompts are answered and counted.
        optimizer: as in torch, without parameters.
        lr_scheduler: as in torch, without optimizer; stepped once per optimizer step.
        max_iterations: stop after so many iterations; None leaves it to the trainer.
        reference: model that the KL term refers to; None takes the start (with LoRA: the model
            without adapters). Nothing is loaded when the KL coefficient is 0.
        precision: dtype of the weights, gradient checkpointing, dropout.
        lora: train adapters instead of the weights.
        check_invariants: before training, measure on a few short prompts that sampling, learning
            and reference agree, and refuse to train where they do not.
        reward_format: `text`, or `chat` for functions that expect lists of messages.
        seed: names the random numbers of all rollouts.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        pretrained: str,
        rewards: dict[str, Reward],
        *,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        group_size: int = 8,
        max_completion_len: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        engine: RolloutEngine = EagerEngine(),  # noqa: B008 (frozen)
        learning: Learning = Learning(),  # noqa: B008 (frozen)
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_iterations: int | None = None,
        reference: str | None = None,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        lora: LoRA | None = None,
        check_invariants: bool = True,
        reward_format: RewardFormat = "text",
        seed: int = 0,
    ) -> None:
        """Check the choices; weights are loaded in `configure_model`."""
        super().__init__(
            objective=objective,
            group_size=group_size,
            sampling=sampling.remembered(),
            learning=learning,
            precision=precision,
            pretrained=pretrained,
            rewards=Composite(rewards, reward_format),
            engine=engine,
            evaluation=evaluation,
            max_completion_len=max_completion_len,
            max_iterations=max_iterations,
            seed=seed,
        )
        _check_sizes(group_size, max_completion_len, max_iterations)
        if group_size == 1 and objective.advantages.compares:
            raise ValueError(
                "group_size is 1, but this objective compares completions of the same prompt. Take "
                "2 or more, or a baseline without a group: objective.advantages.baseline batch or "
                "none."
            )
        self.strict_loading = False  # a checkpoint holds what is trained and nothing else
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.reference_path = reference
        self.lora = lora
        self.check_invariants = check_invariants

    # --- setting up ---

    def configure_model(self) -> None:
        """Load the policy and, where the objective has a KL term, its reference; once."""
        if self.policy is None:
            tokenizer = self.fit_tokenizer()
            self.policy = load_policy(
                self.pretrained, tokenizer=tokenizer, precision=self.precision, lora=self.lora
            )
        if self.objective.needs_reference and self.reference is None:
            self.reference = load_reference(
                self.policy, self.reference_path, self.pretrained, self.precision
            )

    def configure_optimizers(self) -> Any:
        """The optimizer over what is trained, and its schedule in optimizer steps."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    # --- one iteration ---

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """One iteration: sample, reward, and learn from the comparison.

        Args:
            prompts: B prompts.
            batch_idx: unused.

        Returns:
            The rollout, its rewards and the [B, G] advantages, for callbacks to show.
        """
        clock = Clock(self.device)
        rollout = self.generate(prompts, "train", self.group_size, self.sampling)  # who said what
        clock.stop("time/rollout_s")
        rewards = self.reward(rollout)  # how good it was
        clock.stop("time/reward_s")
        experience = self.collect(rollout, rewards)  # what to learn from it
        stats = self.update(experience)  # learn
        clock.stop("time/learn_s")
        self.iteration += 1
        seen = rewards.stats() | rollout.stats() | clock.stats(int(rollout.lengths.sum()))
        self._log(seen, stats)
        advantages = experience.advantages[:, 0].view(len(prompts), -1).cpu()
        return {"rollout": rollout, "rewards": rewards, "advantages": advantages}

    def _log(self, seen: Stats, learned: Totals) -> None:
        """Log one iteration; its number is the loggers' x-axis."""
        totals = Totals()
        for name, value in seen.items():
            totals.add_value(name, value.to(self.device))
        totals.sums |= learned.sums
        stats = totals.averages(self._sum)
        stats["perf/tokens_per_s"] *= self.trainer.world_size
        stats["perf/peak_memory_gib"] = torch.tensor(peak_memory_gib(self.device))
        self.log("step", float(self.iteration))
        self.log_dict(stats)

    # --- starting, stopping, saving ---

    def on_fit_start(self) -> None:
        """Before anything is believed, measure whether it may be."""
        machine.agree(self)
        if self.check_invariants:
            invariants.check(self)

    def on_train_start(self) -> None:
        """A resumed run may be done already."""
        self._stop_when_done()

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        """Stop after `max_iterations`."""
        self._stop_when_done()

    def _stop_when_done(self) -> None:
        if self.max_iterations is not None and self.iteration >= self.max_iterations:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what is trained: no frozen reference, no weights under adapters."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: weights[name] for name in weights if name in trained}
        checkpoint["iteration"] = self.iteration
        machine.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up where the checkpoint was taken.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        trained = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        check_weights(checkpoint["state_dict"], trained)
        self.iteration = checkpoint["iteration"]
        machine.restore(self, checkpoint)


def _check_sizes(group_size: int, max_completion_len: int, max_iterations: int | None) -> None:
    sizes = {"group_size": group_size, "max_completion_len": max_completion_len}
    if max_iterations is not None:
        sizes["max_iterations"] = max_iterations
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")
