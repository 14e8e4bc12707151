"""A rollout and reward tables whose numbers are worked out by hand."""

from dataclasses import replace

import torch

from litgrpo.types import Episode, PromptBatch, RewardTable, Rollout, TokenRows, TrainingBatch


def prompts(rows=2, length=3) -> PromptBatch:
    ids = torch.arange(rows * length).view(rows, length)
    texts = [f"prompt {row}" for row in range(rows)]
    columns = {"answer": list(range(rows))}
    return PromptBatch(ids, ids >= 0, texts, columns, torch.arange(rows))


def rollout() -> Rollout:
    """Two prompts, two completions of each, of 1, 3, 2 and 3 tokens; the last was cut off."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    truncated = torch.tensor([False, False, False, True])
    return Rollout(prompts(), 2, mask.long() * 7, mask, mask * -0.5, truncated)


def with_observations(given: Rollout, mask: torch.Tensor) -> Rollout:
    """Return episodes of one turn, in which the policy sampled only the tokens of `mask` [N, C]."""
    turns = torch.where(mask, 0, -1).to(torch.int16)
    episodes = [Episode([{"role": "assistant", "content": "x"}], done=True) for _ in turns]
    return replace(given, turns=turns, episodes=episodes)


def with_turns() -> Rollout:
    """Return the same rollout; in rows 1 and 3 the second token is tool output."""
    mask = rollout().completion_mask.clone()
    mask[[1, 3], 1] = False
    return with_observations(rollout(), mask)


def table(total, valid=None, **components) -> RewardTable:
    total = torch.tensor(total, dtype=torch.float64)
    valid = torch.ones_like(total, dtype=torch.bool) if valid is None else torch.tensor(valid)
    columns = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in components.items()
    }
    return RewardTable(columns, dict.fromkeys(columns, 1.0), total, valid)


def change_columns(batch: TrainingBatch, change) -> TrainingBatch:
    """Return a batch whose row fields [M, C, ...] are `change(name, field)`."""
    tokens = {name: change(name, value) for name, value in batch.tokens.row_fields().items()}
    fields = {name: change(name, value) for name, value in batch.row_fields().items()}
    return replace(batch, tokens=replace(batch.tokens, **tokens), **fields)


def batch_of(
    mask: torch.Tensor,
    *,
    completion_ids: torch.Tensor | None = None,
    completion_mask: torch.Tensor | None = None,
    **fields,
) -> TrainingBatch:
    """Completions of one prompt of one token.

    Args:
        mask: [M, C] loss mask, and mask of the completions unless `completion_mask` is given.
        completion_ids: [M, C], default: zeros.
        completion_mask: [M, C].
        fields: of `TrainingBatch`.
    """
    tokens = TokenRows(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_of=torch.zeros(len(mask), dtype=torch.long),
        completion_ids=torch.zeros_like(mask).long() if completion_ids is None else completion_ids,
        completion_mask=mask if completion_mask is None else completion_mask,
    )
    return TrainingBatch(tokens, loss_mask=mask, **fields)
