"""Metrics of an iteration that need no model, and a warning when there is no learning signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from litgrpo.callbacks.protocol import RolloutModule
from litgrpo.distributed.device import backend, to_host
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.models.policy import Policy
from litgrpo.tensors import local
from litgrpo.training.iteration_metrics import average_over_ranks
from litgrpo.training.lightning_compat import log_numbers
from litgrpo.types import RewardTable, Rollout, Stats, StepReport, mean_and_extremes

LOOP_TOKENS, LOOP_TIMES = 4, 4
ENTRIES = 1024  # sampled from a tensor to measure its change


class IterationMetrics(Callback):
    """Logs success, length, text and weight metrics of an iteration; see docs/reference/metrics.md.

    The change of the weights is measured on 1,024 evenly spread entries of each tensor; for sharded
    weights it is the mean over the ranks.

    Example:
        `Trainer(callbacks=[IterationMetrics()])`; `GRPO.configure_callbacks` adds it.
    """

    def __init__(self) -> None:
        self.entries: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample the weights before the first step."""
        self.entries = sample_weights(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RolloutModule, outputs: Any, *_: Any
    ) -> None:
        """Log the metrics of the iteration."""
        if not isinstance(outputs, dict) or "rollout" not in outputs:
            return  # a training step of the user's own class
        rollout, rewards = outputs["rollout"], outputs["rewards"]
        evaluator, comm = pl_module.evaluator, pl_module.learner.comm
        success = evaluator.find_correct(rewards).cpu()
        stats = success_stats(success) | length_stats(rollout, success)
        stats |= text_stats(rollout, rewards) | token_stats(rollout, pl_module.policy)
        stats |= clip_stats(outputs["reports"], pl_module.update.max_grad_norm)
        if self.entries is not None:
            stats |= self._measure_change(pl_module)
        stats |= task_stats(pl_module.task_names, rollout, rewards, success)
        numbers = average_over_ranks(stats, [], comm, backend(pl_module.device).data_device)
        for task in pl_module.task_names:
            if not numbers[f"task/{task}/frac"]:  # no prompt of it in this iteration
                numbers = {n: v for n, v in numbers.items() if not n.startswith(f"task/{task}/")}
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

    Args:
        patience: consecutive iterations until the first warning.

    Example:
        >>> NoLearningSignal(patience=5).patience
        5
    """

    def __init__(self, patience: int = 10) -> None:
        self.patience = self.next = patience
        self.in_a_row = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the count."""
        self.next, self.in_a_row = self.patience, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count iterations in which every advantage is zero, on all ranks."""
        if not isinstance(outputs, dict) or "advantages" not in outputs:
            return  # a training step of the user's own class
        is_zero = not bool(outputs["advantages"].any())
        if not trainer.strategy.reduce_boolean_decision(is_zero, all=True):
            self.next, self.in_a_row = self.patience, 0
            return
        self.in_a_row += 1
        if self.in_a_row == self.next:
            self.next *= 2
            rank_zero_info(self.message(outputs["rewards"]))

    def message(self, rewards: RewardTable) -> str:
        """The warning: cause and remedy.

        Args:
            rewards: table of the last iteration.
        """
        if not rewards.valid.any():
            return (
                f"No learning signal for {self.in_a_row} iterations: no completion got a reward "
                "(None). Add a reward function that scores these completions, which samples/ shows."
            )
        return (
            f"No learning signal for {self.in_a_row} iterations: all rewards within each group "
            f"were identical (last mean {rewards.stats()['reward/mean']:.3g}). Use easier prompts, "
            "a reward with partial credit, a larger model.group_size or a higher "
            "model.sampling.temperature; samples/ shows the completions."
        )


def sample_weights(module: Any) -> Tensor | None:
    """Evenly spread entries of each trained tensor; None on devices that compile every shape."""
    if backend(module.device).static_shapes:
        return None
    weights = [each for each in module.parameters() if each.requires_grad]
    trained = [local(each.detach()).flatten() for each in weights]
    spread = [each[:: max(1, len(each) // ENTRIES)].float() for each in trained]
    return torch.cat(spread) if spread else None


def success_stats(success: Tensor) -> Stats:
    """Fractions of correct completions, and of groups that are all correct or all incorrect.

    Args:
        success: [B, G] True where the reward that counts in evaluations reaches its threshold.

    Example:
        >>> stats = success_stats(torch.tensor([[True, True], [True, False]]))
        >>> float(stats["reward/correct_frac"]), float(stats["reward/all_correct_frac"])
        (0.75, 0.5)
    """
    return {
        "reward/correct_frac": success.double().mean(),
        "reward/all_correct_frac": success.all(1).double().mean(),
        "reward/all_incorrect_frac": (~success.any(1)).double().mean(),
    }


def length_stats(rollout: Rollout, success: Tensor) -> Stats:
    """Mean tokens of correct and of incorrect completions; 0 if there are none.

    Args:
        rollout: N completions.
        success: [B, G] True where a completion is correct.
    """
    lengths, correct = rollout.lengths.cpu().float(), success.flatten()
    stats = mean_and_extremes("completion/correct_len", lengths, correct)
    stats |= mean_and_extremes("completion/incorrect_len", lengths, ~correct)
    return {name: value for name, value in stats.items() if name.endswith("_mean")}


def task_stats(
    names: Sequence[str], rollout: Rollout, rewards: RewardTable, success: Tensor
) -> Stats:
    """Return {name: [2] sum and count} of each task: share of the groups, reward, success, length.

    Args:
        names: tasks of the run, the same ones on all ranks.
        rollout: N completions.
        rewards: [B, G] theirs.
        success: [B, G] True where a completion is correct.

    """
    stats: Stats = {}
    spread = rewards.total.std(1, correction=0)
    lengths = rollout.lengths.cpu().view(success.shape).double()
    for name in names:
        own = torch.tensor([task == name for task in rewards.tasks])
        rows = own[:, None].expand(success.shape)
        values = {
            "frac": (own.double(), torch.ones_like(own)),
            "reward": (rewards.total, rows & rewards.valid),
            "correct_frac": (success.double(), rows),
            "zero_variance_groups_frac": ((spread == 0).double(), own),
            "completion_len": (lengths, rows),
        }
        for key, (value, counted) in values.items():
            pair = torch.stack([value.where(counted, 0.0).sum(), counted.sum()])
            stats[f"task/{name}/{key}"] = pair
    return stats


def text_stats(rollout: Rollout, rewards: RewardTable) -> Stats:
    """Fraction of distinct completions in a group, mean over groups."""
    size = rollout.group_size
    texts = rollout.completions
    groups = [texts[start : start + size] for start in range(0, len(texts), size)]
    distinct = [len(set(group)) / len(group) for group in groups]
    return {"completion/unique_frac": torch.tensor(distinct, dtype=torch.float64).mean()}


def token_stats(rollout: Rollout, policy: Policy) -> Stats:
    """Fractions of completions with an end token and with a loop; begin tokens of prompts."""
    prompts = rollout.prompts
    given = [rollout.completion_ids, rollout.loss_mask, prompts.prompt_ids, prompts.prompt_mask]
    ids, mask, prompt_ids, prompt_mask = to_host(given)
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

    Example:
        >>> ids = torch.tensor([[1, 2] * 6, list(range(12))])
        >>> has_loop(ids, torch.ones_like(ids, dtype=torch.bool))
        tensor([ True, False])
    """
    windows = ids.shape[1] - LOOP_TOKENS + 1
    if windows < LOOP_TIMES:
        return torch.zeros(len(ids), dtype=torch.bool)
    # Hash each window of four tokens to one number; windows with padding get distinct negative
    # numbers. After sorting, LOOP_TIMES equal numbers are adjacent.
    number = torch.zeros(len(ids), windows, dtype=torch.int64)
    whole = torch.ones(len(ids), windows, dtype=torch.bool)
    for shift in range(LOOP_TOKENS):
        number = number * 1_000_003 + ids[:, shift : shift + windows].long()
        whole &= mask[:, shift : shift + windows]
    own = -1 - torch.arange(windows).expand_as(number)
    ordered = torch.where(whole, number & (2**62 - 1), own).sort(1).values
    return (ordered[:, LOOP_TIMES - 1 :] == ordered[:, : 1 - LOOP_TIMES]).any(1)


def clip_stats(reports: list[StepReport], limit: float | None) -> Stats:
    """Fraction of optimizer steps whose gradient was clipped.

    Args:
        reports: one per optimizer step.
        limit: largest norm; None does not clip.
    """
    key = "optim/grad_norm"
    norms = [float(each.sums[key][0]) for each in reports if key in each.sums]
    over = [limit is not None and norm > limit for norm in norms]
    return {"optim/clipped_frac": torch.tensor([float(sum(over)), float(len(over))])}
