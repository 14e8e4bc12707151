"""Metrics that need more than the tensors of an iteration; a warning without a learning signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from litgrpo.distributed.collectives import all_gather_object
from litgrpo.distributed.device import backend, to_host
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.lightning_compat import log_numbers
from litgrpo.metrics import average_over_ranks, reward_stats
from litgrpo.models.policy import Policy
from litgrpo.protocol import RolloutModule, TrainedModule
from litgrpo.tensors import local
from litgrpo.text.tables import plural
from litgrpo.types import Iteration, RewardTable, Rollout, Stats, StepReport

LOOP_TOKENS, LOOP_TIMES = 4, 4
REMEDY = (
    "Use easier prompts, a reward with partial credit, a larger model.group_size or a higher "
    "model.sampling.temperature"
)
ENTRIES = 1024  # sampled from a tensor to measure its change


class StepTime(Callback):
    """Logs `time/step_s` of modules that do not log it with their phases, such as `SFT`."""

    def __init__(self) -> None:
        self.iteration, self.began = -1, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainedModule, *_: Any) -> None:
        # A step may have several batches (accumulate_grad_batches).
        if pl_module.iteration != self.iteration:
            self.iteration, self.began = pl_module.iteration, time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        # `GRPO` logs the seconds of an iteration itself.
        if "iteration" not in (outputs or {}):
            pl_module.log("time/step_s", time.monotonic() - self.began)


class IterationMetrics(Callback):
    """Logs success, length, text and weight metrics of an iteration; see docs/reference/metrics.md.

    They are of the completions as they were sampled: those with which dynamic sampling replaces
    groups were selected for their rewards.

    The change of the weights is measured on 1,024 evenly spread entries of each tensor; for sharded
    weights it is the mean over the ranks.
    """

    def __init__(self) -> None:
        self.entries: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.entries = sample_weights(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RolloutModule, outputs: Any, *_: Any
    ) -> None:
        if not isinstance(outputs, dict) or "iteration" not in outputs:
            return  # a training step of the user's own class
        iteration = outputs["iteration"]
        rollout, rewards = iteration.experience.sampled[0]
        evaluator, comm = pl_module.evaluator, pl_module.learner.comm
        success = evaluator.find_correct(rewards).cpu()
        stats = success_stats(success) | length_stats(rollout, success)
        stats |= text_stats(rollout) | token_stats(rollout, pl_module.policy)
        stats |= clip_stats(iteration.steps, pl_module.update.max_grad_norm)
        if self.entries is not None:
            stats |= self._measure_change(pl_module)
        stats |= task_stats(pl_module.task_names, rollout, rewards, success)
        numbers = average_over_ranks(stats, [], comm, backend(pl_module.device).data_device)
        prompts = len(rollout.prompts) * comm.world_size * pl_module.iteration
        log_numbers(pl_module, numbers | {"data/prompts_seen": torch.tensor(float(prompts))})

    def _measure_change(self, module: Any) -> Stats:
        """Norm of the iteration's change of the weights, relative to their norm."""
        before, self.entries = self.entries, sample_weights(module)
        assert before is not None
        assert self.entries is not None
        if before.shape != self.entries.shape:  # parameters were frozen or unfrozen
            return {}
        norm = before.norm().clamp(min=torch.finfo(before.dtype).tiny)
        return {"optim/update_rel": ((self.entries - before).norm() / norm).cpu()}


class NoLearningSignal(Callback):
    """Warns after 10 iterations in which every advantage is zero, then after 20, 40, ...

    It also warns if all held-out rewards are equal before training. A run in which no completion
    ever got a reward ends with an error: after as many iterations, or at its end.

    Args:
        patience: consecutive iterations until the first warning.
    """

    def __init__(self, patience: int = 10) -> None:
        self.patience = self.next = patience
        self.in_a_row = 0
        self.has_rewards = False  # some completion of the run, also before a resume
        self.unscored: list[str] = []  # rewards of an iteration without any
        self.held_out: list[float] = []  # smallest and largest rewards of the evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held_out = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        if isinstance(outputs, dict) and isinstance(outputs.get("rewards"), RewardTable):
            scored = outputs["rewards"].scored
            rewards = scored[~scored.isnan()].tolist()
            self.held_out += [min(rewards), max(rewards)] if rewards else []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            return
        rewards = {reward for of_rank in all_gather_object(self.held_out) for reward in of_rank}
        if len(rewards) == 1:
            rank_zero_info(
                f"All held-out rewards are {rewards.pop():.3g} before training. Groups of equal "
                f"rewards give no learning signal. {REMEDY}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.next, self.in_a_row, self.unscored = self.patience, 0, []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        if not isinstance(outputs, dict) or "iteration" not in outputs:
            return  # a training step of the user's own class
        everywhere = trainer.strategy.reduce_boolean_decision
        iteration: Iteration = outputs["iteration"]
        rewards = iteration.rewards
        if not everywhere(not bool(rewards.valid.any()), all=True):
            self.has_rewards = True
        self.unscored = [] if self.has_rewards else list(rewards.components)
        if not everywhere(not bool(iteration.batch.advantages.any()), all=True):
            self.next, self.in_a_row = self.patience, 0
            return
        self.in_a_row += 1
        if self.in_a_row >= self.patience or trainer.should_stop:
            self.on_train_end()
        if self.in_a_row == self.next:
            self.next *= 2
            rank_zero_info(self.message(rewards))

    def on_train_end(self, *_: Any) -> None:
        if self.unscored:
            raise ValueError(
                f"Nothing was learned: no completion of {plural(self.in_a_row, 'iteration')} got a "
                f"reward, {' and '.join(map(repr, self.unscored))} returned None or failed for all "
                "of them. A reward function must return a number for the completions that it "
                "scores; see samples/."
            )

    def state_dict(self) -> dict[str, bool]:
        return {"has_rewards": self.has_rewards}

    def load_state_dict(self, state_dict: dict[str, bool]) -> None:
        self.has_rewards = state_dict["has_rewards"]

    def message(self, rewards: RewardTable) -> str:
        """The warning: cause and remedy."""
        if not rewards.valid.any():
            return (
                f"No learning signal for {self.in_a_row} iterations: no completion got a reward "
                "(None). Add a reward function that scores these completions, which samples/ shows."
            )
        mean = reward_stats(rewards)["reward/mean"]
        return (
            f"No learning signal for {self.in_a_row} iterations: all rewards within each group "
            f"were identical (last mean {mean:.3g}). {REMEDY}; samples/ shows the completions."
        )


def sample_weights(module: Any) -> Tensor | None:
    """Evenly spread entries of each trained tensor; None on devices that compile every shape."""
    if backend(module.device).static_shapes:
        return None
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    trained = [local(parameter.detach()).flatten() for parameter in weights]
    spread = [tensor[:: max(1, len(tensor) // ENTRIES)].float() for tensor in trained]
    return torch.cat(spread) if spread else None


def success_stats(success: Tensor) -> Stats:
    """Fractions of correct completions, and of groups that are all correct or all incorrect.

    Completions without a reward are left out, and groups in which no completion has one.

    Args:
        success: [B, G] 1.0 where the reward that counts in evaluations reaches its threshold, 0.0
            where it does not, NaN where there is none.

    Returns:
        {name: [2] sum and count}.
    """
    scored = ~success.isnan()
    groups = scored.any(1)
    return {
        "reward/correct_frac": sum_and_count(success, scored),
        "reward/all_correct_frac": sum_and_count((success != 0).all(1), groups),
        "reward/all_incorrect_frac": sum_and_count((success != 1).all(1), groups),
    }


def sum_and_count(values: Tensor, counted: Tensor) -> Tensor:
    """Return [2] the sum of the values that are counted, and their number."""
    return torch.stack([values.double().where(counted, 0.0).sum(), counted.sum()])


def length_stats(rollout: Rollout, success: Tensor) -> Stats:
    """Mean tokens of correct and of incorrect completions, as {name: [2] sum and count}.

    Args:
        rollout: N completions.
        success: [B, G] as of `success_stats`.
    """
    lengths = rollout.lengths.cpu().view(success.shape)
    return {
        "completion/correct_len_mean": sum_and_count(lengths, success == 1),
        "completion/incorrect_len_mean": sum_and_count(lengths, success == 0),
    }


def task_stats(
    names: Sequence[str], rollout: Rollout, rewards: RewardTable, success: Tensor
) -> Stats:
    """Return {name: [2] sum and count} of each task: share of the groups, reward, success, length.

    Args:
        names: tasks of the run, the same ones on all ranks.
        rollout: N completions.
        rewards: [B, G] theirs.
        success: [B, G] as of `success_stats`.

    """
    stats: Stats = {}
    zero_variance = rewards.find_zero_variance()
    lengths = rollout.lengths.cpu().view(success.shape)
    for name in names:
        of_task = torch.tensor([task == name for task in rewards.tasks])
        rows = of_task[:, None].expand(success.shape)
        numbers = {
            "frac": sum_and_count(of_task, torch.ones_like(of_task)),
            "reward": sum_and_count(rewards.total, rows & rewards.valid),
            "correct_frac": sum_and_count(success, rows & ~success.isnan()),
            "zero_variance_groups_frac": sum_and_count(
                zero_variance, of_task & ~zero_variance.isnan()
            ),
            "completion_len": sum_and_count(lengths, rows),
        }
        stats |= {f"task/{name}/{key}": pair for key, pair in numbers.items()}
    return stats


def text_stats(rollout: Rollout) -> Stats:
    """Fraction of distinct completions in a group, mean over groups."""
    size = rollout.group_size
    texts = rollout.completions
    groups = [texts[start : start + size] for start in range(0, len(texts), size)]
    distinct = [len(set(group)) / len(group) for group in groups]
    return {"completion/unique_frac": torch.tensor(distinct, dtype=torch.float64).mean()}


def token_stats(rollout: Rollout, policy: Policy) -> Stats:
    """Fractions of completions with an end token and with a loop; begin tokens of prompts."""
    prompts = rollout.prompts
    tensors = [rollout.completion_ids, rollout.loss_mask, prompts.prompt_ids, prompts.prompt_mask]
    ids, mask, prompt_ids, prompt_mask = to_host(tensors)
    ended = torch.isin(ids, torch.tensor(policy.eos_ids)) & mask
    begin = policy.tokenizer.bos_token_id
    begins = (prompt_ids == (-1 if begin is None else begin)) & prompt_mask
    # Chat formats begin each message with such a token; only leading ones can be duplicates.
    begins &= (prompt_mask & ~begins).cumsum(1) == 0
    return {
        "completion/eos_frac": ended.any(1).double().mean(),
        "completion/loop_frac": has_loop(ids, mask).double().mean(),
        "prompt/begin_tokens": begins.sum(1).double().mean(),
    }


def has_loop(ids: Tensor, mask: Tensor) -> Tensor:
    """[N] True where the same four tokens in a row occur at least four times in a completion.

    Args:
        ids: [N, C] tokens.
        mask: [N, C] True for real tokens.
    """
    windows = ids.shape[1] - LOOP_TOKENS + 1
    if windows < LOOP_TIMES:
        return torch.zeros(len(ids), dtype=torch.bool)
    # Hash each window of four tokens to one number; windows with padding get distinct negative
    # numbers. After sorting, LOOP_TIMES equal numbers are adjacent.
    number = torch.zeros(len(ids), windows, dtype=torch.int64)
    is_complete = torch.ones(len(ids), windows, dtype=torch.bool)
    for shift in range(LOOP_TOKENS):
        number = number * 1_000_003 + ids[:, shift : shift + windows].long()
        is_complete &= mask[:, shift : shift + windows]
    unique = -1 - torch.arange(windows).expand_as(number)
    ordered = torch.where(is_complete, number & (2**62 - 1), unique).sort(1).values
    return (ordered[:, LOOP_TIMES - 1 :] == ordered[:, : 1 - LOOP_TIMES]).any(1)


def clip_stats(reports: list[StepReport], limit: float | None) -> Stats:
    """Fraction of optimizer steps whose gradient was clipped."""
    key = "optim/grad_norm"
    norms = [float(report.sums[key][0]) for report in reports if key in report.sums]
    over = [limit is not None and norm > limit for norm in norms]
    return {"optim/clipped_frac": torch.tensor([float(sum(over)), float(len(over))])}
