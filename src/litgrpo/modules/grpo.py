"""GRPO as a LightningModule: the walk from prompts to a better policy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from litgrpo.algorithm.objective import Objective
from litgrpo.checks import invariants
from litgrpo.data.sampler import BatchLoader
from litgrpo.learner.config import Evaluation, UpdateConfig
from litgrpo.learner.learner import LearningModule
from litgrpo.learner.metrics import Clock, Totals
from litgrpo.learner.schedules import Controllers, Steering
from litgrpo.models.loading import LoRA, Precision, check_weights, load_policy, load_reference
from litgrpo.models.reference import FrozenModel
from litgrpo.modules import machine
from litgrpo.parallel.device import compiles_shapes, peak_memory_gib
from litgrpo.rewards.library import format as formats
from litgrpo.rewards.runner.in_process import RewardRunner
from litgrpo.rewards.scorer import Reward, RewardFormat, Scorer
from litgrpo.rollout.dynamic_sampling import redrawn
from litgrpo.rollout.engines.interface import RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch, RewardTable, Rollout, Stats


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
        update: how the optimizer uses one rollout.
        evaluation: how held-out prompts are answered and counted.
        optimizer: as in torch, without parameters.
        lr_scheduler: as in torch, without optimizer; stepped once per optimizer step.
        max_iterations: stop after so many iterations; None leaves it to the trainer.
        max_generated_tokens: stop after so many tokens were sampled for training, by all processes.
        max_resamples: where all completions of a prompt are equally good, sample another prompt, at
            most so many times per iteration (DAPO's dynamic sampling); 0 learns from what there is.
        soft_overlong: share of max_completion_len, at its end, over which a completion loses up to
            1 point of reward (DAPO's soft overlong punishment); 0 punishes nothing.
        reference: model that the KL term refers to; None takes the start (with LoRA: the model
            without adapters). Nothing is loaded when the KL coefficient is 0.
        controllers: steer the coefficients of entropy and KL, let the reference follow the policy.
        precision: dtype of the weights, gradient checkpointing, dropout.
        lora: train adapters instead of the weights.
        check_invariants: before training, measure on a few short prompts that sampling, learning
            and reference agree, and refuse to train where they do not; skipped on devices that
            compile a program for each shape.
        reward_format: `text`, or `chat` for functions that expect lists of messages.
        reward_runner: how reward functions are run: `ProcessRunner` (default) in processes that
            are ended when they hang, or `InProcessRunner`.
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
        engine: RolloutEngine = LocalEngine(),  # noqa: B008 (frozen)
        update: UpdateConfig = UpdateConfig(),  # noqa: B008 (frozen)
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_iterations: int | None = None,
        max_generated_tokens: int | None = None,
        max_resamples: int = 0,
        soft_overlong: float = 0.0,
        reference: str | None = None,
        controllers: Controllers = Controllers(),  # noqa: B008 (frozen)
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        lora: LoRA | None = None,
        check_invariants: bool = True,
        reward_format: RewardFormat = "text",
        reward_runner: RewardRunner | None = None,
        seed: int = 0,
    ) -> None:
        """Check the choices; weights are loaded in `configure_model`."""
        super().__init__(
            objective=objective,
            group_size=group_size,
            sampling=sampling.remembered(),
            learning=update,
            precision=precision,
            pretrained=pretrained,
            rewards=Scorer(
                rewards | overlong(soft_overlong, max_completion_len), reward_format, reward_runner
            ),
            engine=engine,
            evaluation=evaluation,
            max_completion_len=max_completion_len,
            max_iterations=max_iterations,
            seed=seed,
        )
        _check_sizes(group_size, max_completion_len, max_iterations, objective)
        self.strict_loading = False  # a checkpoint holds what is trained and nothing else
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.reference_path = reference
        self.lora = lora
        self.check_invariants = check_invariants
        self.max_generated_tokens = max_generated_tokens
        self.max_resamples = max_resamples
        self.generated_tokens = 0
        controllers.check(objective)
        self.controllers = controllers
        self.steering = Steering(controllers, objective)

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
        if self.controllers.reference is not None and self.reference is not None:
            self.reference.check_follows(self.policy)
        self.use_shapes_of_engine()
        if self.fixed_on is None:
            self.learning = self.learning.fitted(self.policy.linear_outputs)

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
        self.draw_anew()
        clock = Clock(self.device)
        rollout = self.sample(prompts, clock)  # who said what
        gather = self.start_reward(rollout)  # how good it was, told by other processes ...
        clock.stop("time/reward_s")
        # ... and meanwhile the models are asked; all for nothing if groups are replaced.
        unjudged = None if self.max_resamples else self.unjudged(rollout)
        clock.stop("time/reference_s")
        rewards = gather()
        clock.stop("time/reward_s")
        seen = rewards.stats() | rollout.stats()
        if self.max_resamples:
            rollout, rewards, redraws = self.redraw(rollout, rewards, clock)
            seen |= redraws
        if self.controllers.entropy is not None:
            seen |= self.steer(rollout)
        experience = self.collect(rollout, rewards, unjudged)  # what to learn from it
        advantages = experience.advantages[:, 0].view(len(prompts), -1)
        seen["policy/advantage_mean"] = advantages.mean()
        seen["policy/advantage_std"] = advantages.std(correction=0)
        learned = self.update(experience)  # learn
        clock.stop("time/learn_s")
        self.iteration += 1
        self.generated_tokens += int(self._sum(torch.tensor(clock.tokens)))
        logged = self._log(seen | clock.stats(), learned)
        if self.objective.needs_reference:
            self.follow(logged)
        self._stop_when_done()
        self.draw_anew()
        return {"rollout": rollout, "rewards": rewards, "advantages": advantages.cpu()}

    def sample(self, prompts: PromptBatch, clock: Clock, attempt: int = 0) -> Rollout:
        """Sample completions of prompts.

        Args:
            prompts: B prompts.
            clock: counts seconds and tokens.
            attempt: number of the redraw.
        """
        rollout = self.generate(prompts, "train", self.group_size, self.sampling, attempt)
        clock.tokens += int(rollout.lengths.sum())
        clock.stop("time/rollout_s")
        return rollout

    def ask(
        self, prompts: PromptBatch, clock: Clock, attempt: int = 0
    ) -> tuple[Rollout, RewardTable]:
        """Sample completions of prompts and reward them; see `sample`."""
        rollout = self.sample(prompts, clock, attempt)
        rewards = self.reward(rollout)
        clock.stop("time/reward_s")
        return rollout, rewards

    def redraw(
        self, rollout: Rollout, rewards: RewardTable, clock: Clock
    ) -> tuple[Rollout, RewardTable, Stats]:
        """Ask other prompts in place of those whose completions were all equally good.

        Args:
            rollout: B groups.
            rewards: theirs.
            clock: counts seconds and tokens.
        """
        loader: Any = self.trainer.train_dataloader
        return redrawn(
            rollout,
            rewards,
            more=lambda count: self.placed(loader.more(count)),
            ask=lambda prompts, attempt: self.ask(prompts, clock, attempt),
            most=lambda number: int(self._gathered(torch.tensor([float(number)])).max()),
            max_resamples=self.max_resamples,
            whole=self.fixed_on is not None,
        )

    def steer(self, rollout: Rollout) -> Stats:
        """Set the entropy bonus by the entropy at sampling.

        That is the mean of -log p of what was said, over all rows and processes: unbiased, free.

        Args:
            rollout: N completions.
        """
        said = torch.stack([-rollout.sampler_logprobs.sum().double(), rollout.lengths.sum()])
        surprise, count = self._sum(said).tolist()
        self.objective = self.steering.by_entropy(self.objective, surprise / count)
        numbers = {
            "policy/sampled_entropy": surprise / count,
            "policy/entropy_coef": self.objective.entropy_coef,
        }
        return {name: torch.tensor(number) for name, number in numbers.items()}

    def follow(self, stats: Stats) -> None:
        """Set the KL coefficient for the next iteration, and let the reference follow the policy.

        Args:
            stats: of this iteration.
        """
        if "policy/kl" in stats:  # it is not where every step was skipped
            self.objective = self.steering.by_kl(self.objective, float(stats["policy/kl"]))
        sync = self.controllers.reference
        if sync is not None and self.iteration % sync.every == 0:
            assert isinstance(self.reference, FrozenModel)
            assert self.policy is not None
            self.reference.follow(self.policy, sync.share)

    def _log(self, seen: Stats, learned: Totals) -> Stats:
        """Log one iteration; its number is the loggers' x-axis."""
        totals = Totals()
        for name, value in seen.items():
            totals.add_value(name, value.to(self.counts_on))
        totals.sums |= learned.sums
        stats = totals.averages(self._sum)
        stats["perf/tokens_per_s"] *= self.trainer.world_size
        stats["perf/peak_memory_gib"] = torch.tensor(peak_memory_gib(self.device))
        stats["perf/generated_tokens"] = torch.tensor(float(self.generated_tokens))
        if self.objective.needs_reference:
            stats["policy/kl_coef"] = torch.tensor(self.objective.kl_coef)
        self.log("step", float(self.iteration))
        self.log_dict(stats)
        return stats

    # --- starting, stopping, saving ---

    def on_fit_start(self) -> None:
        """Before anything is believed, measure whether it may be."""
        machine.agree(self)
        self.draw_anew()
        if self.check_invariants and not compiles_shapes(self.device):
            invariants.check(self)
        elif self.check_invariants:
            rank_zero_info(
                "Invariants are not measured here, because every row of theirs would be compiled; "
                "a fit of the same recipe with configs/hardware/cpu.yaml measures them."
            )

    def on_train_start(self) -> None:
        """A resumed run may be done already.

        Raises:
            ValueError: dynamic sampling of data that cannot give prompts out of turn.
        """
        if self.max_resamples and not isinstance(self.trainer.train_dataloader, BatchLoader):
            raise ValueError(
                f"max_resamples is {self.max_resamples}, but the training data cannot give prompts "
                "out of turn. Use litgrpo.data.prompts.PromptData, or set max_resamples to 0."
            )
        self._stop_when_done()

    def _stop_when_done(self) -> None:
        """Stop after `max_iterations` or `max_generated_tokens`."""
        iterations, tokens = self.max_iterations, self.max_generated_tokens
        if iterations is not None and self.iteration >= iterations:
            self.trainer.should_stop = True
        if tokens is not None and self.generated_tokens >= tokens:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what changes: no frozen reference, no weights under adapters."""
        kept, weights = self._changing(), checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: weights[name] for name in weights if name in kept}
        checkpoint["iteration"] = self.iteration
        checkpoint["generated_tokens"] = self.generated_tokens
        checkpoint["coefficients"] = self.steering.state_dict()
        machine.save(self, checkpoint)
        checkpoint["lowered"] = self.lowered

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up where the checkpoint was taken.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        check_weights(checkpoint["state_dict"], self._changing())
        self.iteration = checkpoint["iteration"]
        self.generated_tokens = checkpoint["generated_tokens"]
        self.objective = self.steering.load_state_dict(checkpoint["coefficients"], self.objective)
        machine.restore(self, checkpoint)
        self.lower(checkpoint["lowered"])

    def _changing(self) -> dict[str, Tensor]:
        """{name: tensor} of the weights that training changes."""
        return {
            name: parameter.data
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
            or (self.controllers.reference is not None and name.startswith("reference."))
        }


def overlong(share: float, max_completion_len: int) -> dict[str, Reward]:
    """The soft overlong punishment over the last share of the tokens; none for a share of 0."""
    if not 0 <= share <= 1:
        raise ValueError(f"soft_overlong is {share}; it must be between 0 (off) and 1.")
    if not share:
        return {}
    limits = {
        "max_completion_len": max_completion_len,
        "soft_punish_cache": max(1, round(share * max_completion_len)),
    }
    return {"soft_overlong": Reward(formats.soft_overlong, kwargs=limits)}


def _check_sizes(
    group_size: int, max_completion_len: int, max_iterations: int | None, objective: Objective
) -> None:
    sizes = {"group_size": group_size, "max_completion_len": max_completion_len}
    if max_iterations is not None:
        sizes["max_iterations"] = max_iterations
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")
    if group_size == 1 and objective.advantages.compares:
        raise ValueError(
            "group_size is 1, but this objective compares completions of the same prompt. Take 2 "
            "or more, or a baseline without a group: objective.advantages.baseline batch or none."
        )
