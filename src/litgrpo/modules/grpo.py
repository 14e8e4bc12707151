"""GRPO as a LightningModule: the walk from prompts to a better policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from litgrpo.device import peak_memory_gib
from litgrpo.modules import invariants
from litgrpo.modules.answering import AnsweringModule
from litgrpo.modules.batching import (
    check_centered,
    micro_batches,
    mini_batches,
    rows_that_teach,
    scored,
)
from litgrpo.modules.measures import Clock, Totals
from litgrpo.modules.settings import Evaluation, Learning
from litgrpo.objectives.objective import Objective, Whole
from litgrpo.policies.loading import LoRA, Precision, check_weights, load_policy, load_reference
from litgrpo.rewards.composite import Composite, Reward, RewardFormat
from litgrpo.rewards.guard import Guard
from litgrpo.rollout.eager_engine import EagerEngine
from litgrpo.rollout.engine import RolloutEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import (
    Experience,
    LossOutput,
    PromptBatch,
    RewardTable,
    Rollout,
    Stats,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from litgrpo.policies.reference import Reference

# The sampler's log-probabilities are the learning step's only where both compute in full precision.
EXACT_DTYPES = ("float32", "float64")


class GRPO(AnsweringModule):
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
        guard: how reward functions are run: `ProcessGuard` (default) in processes that are ended
            when they hang, or `InProcessGuard`.
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
        guard: Guard | None = None,
        seed: int = 0,
    ) -> None:
        """Check the choices; weights are loaded in `configure_model`."""
        super().__init__(
            pretrained,
            Composite(rewards, reward_format, guard),
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
        self.automatic_optimization = False
        self.strict_loading = False  # a checkpoint holds what is trained and nothing else
        self.objective = objective
        self.group_size = group_size
        self.sampling = sampling
        self.learning = learning
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.reference_path = reference
        self.precision = precision
        self.lora = lora
        self.check_invariants = check_invariants
        self.reference: Reference | None = None
        self.grad_norm = torch.zeros(())

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

    def collect(self, rollout: Rollout, rewards: RewardTable) -> Experience:
        """Everything that the optimizer steps of this iteration need.

        Args:
            rollout: N completions.
            rewards: [B, G] their rewards.

        Returns:
            Experience of all N rows.
        """
        mask = rollout.completion_mask
        weights = torch.zeros_like(rollout.sampler_logprobs)
        for rows in mini_batches(len(mask), self.group_size, self.learning.num_mini_batches):
            weights[rows] = self.objective.token_weights(
                mask[rows], rollout.truncated[rows], self.max_completion_len, self._sum
            )
        advantages = self.objective.token_advantages(rewards, mask, self._sum)
        check_centered(advantages[:, 0].view(rewards.total.shape), self.objective)
        experience = Experience(
            prompt_ids=rollout.prompts.prompt_ids,
            prompt_mask=rollout.prompts.prompt_mask,
            prompt_of=torch.arange(len(mask), device=mask.device) // rollout.group_size,
            completion_ids=rollout.completion_ids,
            completion_mask=mask,
            sampler_logprobs=rollout.sampler_logprobs,
            advantages=advantages,
            weights=weights,
        )
        return replace(
            experience,
            old_logprobs=self._old_logprobs(experience),
            ref_logprobs=self._ref_logprobs(experience),
        )

    def update(self, experience: Experience) -> Totals:
        """All optimizer steps of this iteration.

        Args:
            experience: N rows.

        Returns:
            Sums and counts over everything that was learned from.
        """
        assert self.policy is not None
        self.policy.train()
        totals = Totals()
        steps = mini_batches(len(experience), self.group_size, self.learning.num_mini_batches)
        for _ in range(self.learning.inner_epochs):
            for rows in steps:
                self._optimizer_step(experience.select(rows), totals)
        return totals

    def _optimizer_step(self, experience: Experience, totals: Totals) -> None:
        """One step on the exact gradient of these rows, micro-batch by micro-batch."""
        optimizer: Any = self.optimizers()
        for output, is_last in self.losses(experience, self.learning):
            with optimizer.toggle_model(sync_grad=is_last):
                # Gradients are averaged over processes, but the weights count all of them.
                self.manual_backward(output.loss * self.trainer.world_size)
            totals.add(output.stats)
        learning_rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        totals.add_value("optim/grad_norm", self.grad_norm)
        totals.add_value("optim/lr", torch.as_tensor(learning_rate, device=self.device))

    def losses(
        self, experience: Experience, learning: Learning
    ) -> Iterator[tuple[LossOutput, bool]]:
        """What each micro-batch of one optimizer step adds to its loss, and whether it is the last.

        Args:
            experience: M rows that share the step.
            learning: the limits of a micro-batch.
        """
        whole = self._whole(experience)
        if not self.objective.needs_all_rows:
            experience = experience.select(rows_that_teach(experience))
        buckets = micro_batches(experience, learning)
        for number, rows in enumerate(buckets, start=1):
            micro = experience.select(rows)
            yield self.objective.loss(self._logprobs(micro), micro, whole), number == len(buckets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here: gradients are unscaled and reduced over processes by now."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.learning.max_grad_norm
        limit = float("inf") if limit is None else limit
        self.grad_norm = torch.nn.utils.clip_grad_norm_(trained, limit)

    # --- parts of an iteration ---

    def _logprobs(self, rows: Experience) -> TokenLogprobs:
        """The policy's view of these rows, with gradient."""
        assert self.policy is not None
        return self.policy.logprobs(
            *rows.tokens,
            temperature=self.sampling.policy_temperature,
            entropy_grad=self.objective.entropy_coef != 0,
        )

    def _old_logprobs(self, experience: Experience) -> Tensor | None:
        """Log-probabilities before the update: none on-policy, the sampler's if exact."""
        if self.learning.num_steps == 1:
            return None
        full = self.trainer.precision == "32-true" and self.precision.dtype in EXACT_DTYPES
        if full and not (self.sampling.truncated or self.sampling.greedy):
            return experience.sampler_logprobs
        return scored(experience, self.learning, self._logprobs).logprobs

    def _ref_logprobs(self, experience: Experience) -> Tensor | None:
        """Log-probabilities under the reference, if there is one."""
        reference = self.reference
        if reference is None:
            return None
        temperature = self.sampling.policy_temperature

        def logprobs_of(rows: Experience) -> TokenLogprobs:
            return reference.logprobs(*rows.tokens, temperature=temperature)

        return scored(experience, self.learning, logprobs_of).logprobs

    def _whole(self, experience: Experience) -> Whole:
        """What all micro-batches of one optimizer step must agree on."""
        entropy = experience.sampler_logprobs  # looked at only if the objective needs it
        if self.objective.needs_entropy:
            entropy = scored(experience, self.learning, self._logprobs).entropy
        return self.objective.whole(experience.weights, entropy, self._sum, self._gathered)

    def _sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return self.trainer.strategy.reduce(value.to(self.device), reduce_op="sum").to(value.device)

    def _gathered(self, values: Tensor) -> Tensor:
        """A flat tensor of every process, one after another, filled up with NaN."""
        if self.trainer.world_size == 1:
            return values
        gather: Any = self.all_gather
        longest = int(gather(torch.tensor(len(values), device=self.device)).max())
        return gather(
            torch.nn.functional.pad(values, (0, longest - len(values)), value=torch.nan)
        ).flatten()

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

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up where the checkpoint was taken.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        trained = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        check_weights(checkpoint["state_dict"], trained)
        self.iteration = checkpoint["iteration"]


def _check_sizes(group_size: int, max_completion_len: int, max_iterations: int | None) -> None:
    sizes = {"group_size": group_size, "max_completion_len": max_completion_len}
    if max_iterations is not None:
        sizes["max_iterations"] = max_iterations
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")
