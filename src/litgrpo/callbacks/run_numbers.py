"""Numbers that need no model: what was right, what the texts are like, how far weights moved."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from litgrpo.callbacks.nothing_learned import NothingLearned
from litgrpo.distributed.device import backend, to_host
from litgrpo.tensors import local
from litgrpo.training.learner import averages
from litgrpo.training.lightning_compat import log_numbers
from litgrpo.types import RewardTable, Rollout, Stats, StepReport, mean_and_extremes

LOOP_TOKENS, LOOP_TIMES = 4, 4
ENTRIES = 1024  # of a tensor, that its movement is measured by


def watching() -> list[Callback]:
    """What every module that samples brings to its trainer."""
    return [RunNumbers(), NothingLearned()]


class RunNumbers(Callback):
    """Logs what an iteration says besides its averages; see docs/metrics.md.

    The movement of the weights is that of 1,024 evenly spread entries of each tensor; where
    weights are divided among processes, the mean of theirs.
    """

    def __init__(self) -> None:
        self.entries: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the weights before the first step."""
        self.entries = entries_of(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Log the numbers of the iteration."""
        if not isinstance(outputs, dict) or "rollout" not in outputs:
            return  # a training step of the user's own
        rollout, rewards = outputs["rollout"], outputs["rewards"]
        evaluator, comm = pl_module.evaluator, pl_module.learner.comm
        success = rewards.parts[evaluator.success].cpu() >= evaluator.settings.threshold
        seen = of_success(success) | of_lengths(rollout, success)
        seen |= of_texts(rollout, rewards) | of_tokens(rollout, pl_module.policy)
        seen |= clipped(outputs["reports"], pl_module.settings.update.max_grad_norm)
        moved = {} if self.entries is None else self.moved(pl_module)
        stats = averages(seen | moved, [], comm, backend(pl_module.device).data_device)
        prompts = len(rollout.prompts) * comm.world_size * pl_module.iteration
        seen_so_far = {"data/prompts_seen": torch.tensor(float(prompts))}
        log_numbers(pl_module, stats | seen_so_far)

    def moved(self, module: LightningModule) -> Stats:
        """Length of the iteration's change of the weights over their own."""
        before, self.entries = self.entries, entries_of(module)
        assert before is not None
        assert self.entries is not None
        if before.shape != self.entries.shape:  # something was frozen, or is trained from now on
            return {}
        length = before.norm().clamp(min=torch.finfo(before.dtype).tiny)
        return {"optim/update_rel": ((self.entries - before).norm() / length).cpu()}


def entries_of(module: LightningModule) -> Tensor | None:
    """Some entries of each tensor that is trained; None on devices that compile every shape."""
    if backend(module.device).static_shapes:
        return None
    weights = [each for each in module.parameters() if each.requires_grad]
    trained = [local(each.detach()).flatten() for each in weights]
    spread = [each[:: max(1, len(each) // ENTRIES)].float() for each in trained]
    return torch.cat(spread) if spread else None


def of_success(success: Tensor) -> Stats:
    """Shares of right completions, and of groups in which all are right, or none.

    Args:
        success: [B, G] True where the reward that counts in evaluations reaches its threshold.
    """
    return {
        "reward/correct_frac": success.double().mean(),
        "reward/all_correct_frac": success.all(1).double().mean(),
        "reward/all_incorrect_frac": (~success.any(1)).double().mean(),
    }


def of_lengths(rollout: Rollout, success: Tensor) -> Stats:
    """Mean tokens of right and of wrong completions; 0 where there are none.

    Args:
        rollout: N completions.
        success: [B, G] whether they are right.
    """
    lengths, right = rollout.lengths.cpu().float(), success.flatten()
    found = mean_and_extremes("completion/right_len", lengths, right)
    found |= mean_and_extremes("completion/wrong_len", lengths, ~right)
    return {name: value for name, value in found.items() if name.endswith("_mean")}


def of_texts(rollout: Rollout, rewards: RewardTable) -> Stats:
    """Share of different completions in a group."""
    size = rollout.group_size
    texts = rollout.completions
    groups = [texts[start : start + size] for start in range(0, len(texts), size)]
    distinct = [len(set(group)) / len(group) for group in groups]
    return {"completion/unique_frac": torch.tensor(distinct, dtype=torch.float64).mean()}


def of_tokens(rollout: Rollout, policy: Any) -> Stats:
    """Shares of completions with an end token, and of those that loop; begin tokens of prompts."""
    prompts = rollout.prompts
    given = [rollout.completion_ids, rollout.loss_mask, prompts.prompt_ids, prompts.prompt_mask]
    ids, mask, prompt_ids, prompt_mask = to_host(given)
    ended = torch.isin(ids, torch.tensor(policy.eos_ids)) & mask
    begin = policy.tokenizer.bos_token_id
    begins = (prompt_ids == (-1 if begin is None else begin)) & prompt_mask
    # Chat formats begin each message with one; only those in front are one too many.
    begins &= (prompt_mask & ~begins).cumsum(1) == 0
    return {
        "completion/eos_frac": ended.any(1).double().mean(),
        "completion/loop_frac": loops(ids, mask).double().mean(),
        "prompt/begin_tokens": begins.sum(1).double().mean(),
    }


def loops(ids: Tensor, mask: Tensor) -> Tensor:
    """[N] True where a row of four tokens stands in a completion at least four times.

    Args:
        ids: [N, C] tokens.
        mask: [N, C] True where one counts.

    Example:
        >>> ids = torch.tensor([[1, 2] * 6, list(range(12))])
        >>> loops(ids, torch.ones_like(ids, dtype=torch.bool))
        tensor([ True, False])
    """
    places = ids.shape[1] - LOOP_TOKENS + 1
    if places < LOOP_TIMES:
        return torch.zeros(len(ids), dtype=torch.bool)
    # The tokens of each place and the three behind it as one number; padding gives numbers of its
    # own, which differ. Sorted, what is repeated stands side by side.
    number = torch.zeros(len(ids), places, dtype=torch.int64)
    whole = torch.ones(len(ids), places, dtype=torch.bool)
    for shift in range(LOOP_TOKENS):
        number = number * 1_000_003 + ids[:, shift : shift + places].long()
        whole &= mask[:, shift : shift + places]
    own = -1 - torch.arange(places).expand_as(number)
    ordered = torch.where(whole, number & (2**62 - 1), own).sort(1).values
    return (ordered[:, LOOP_TIMES - 1 :] == ordered[:, : 1 - LOOP_TIMES]).any(1)


def clipped(reports: list[StepReport], limit: float | None) -> Stats:
    """Share of the optimizer steps whose gradient was longer than it may be.

    Args:
        reports: of the steps.
        limit: longest gradient; None: any.
    """
    norms = [
        float(pair[0])
        for each in reports
        for pair in [each.sums.get("optim/grad_norm")]
        if pair is not None
    ]
    over = [limit is not None and norm > limit for norm in norms]
    return {"optim/clipped_frac": torch.tensor([float(sum(over)), float(len(over))])}
