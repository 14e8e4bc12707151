"""Start-up check of supervised fine-tuning: its targets against a plain forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from litgrpo.arguments import require
from litgrpo.checks.dry_run import restore_modes, tolerance
from litgrpo.checks.invariants import CheckResult, Invariant, reduce_over_ranks
from litgrpo.data.pairs import PairBatch
from litgrpo.distributed.collectives import Comm
from litgrpo.models.adapters import perturb_adapters
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import Policy
from litgrpo.tensors import widen

# A few short rows, independent of the size of the run.
ROWS, SPAN_LEN, ROW_LEN = 4, 32, 256


def measure_targets(
    policy: Policy, score: Callable[[PairBatch], Tensor], batch: PairBatch, comm: Comm
) -> list[CheckResult]:
    """Measure that targets have the log-probabilities [K] of `score` in a plain forward pass."""
    first = bool(batch.loss_mask[:, 0].any())
    require(not first, "the first token of a row is a target, and nothing is before it")
    # New adapters add 0, so code that leaves one out would be noticed only during training.
    adapters = perturb_adapters(policy.model) if policy.has_adapter else nullcontext()
    with restore_modes(policy), adapters:
        policy.eval()  # dropout differs between two passes
        error = target_error(policy, score, select_short_rows(batch))
    return reduce_over_ranks(comm, {Invariant.TARGETS: error}, tolerance(policy))


def select_short_rows(batch: PairBatch) -> PairBatch:
    """Select the rows with the most spans of targets; of each span and prompt the first tokens."""
    starts = functional.pad(batch.loss_mask, (1, 0)).int().diff(dim=1)
    rows = (starts > 0).sum(1).argsort(descending=True, stable=True)[:ROWS]
    ids, real, targets = (
        tensor[rows] for tensor in (batch.input_ids, batch.attention_mask, batch.loss_mask)
    )
    column = torch.arange(ids.shape[1], device=ids.device)
    start = torch.where(starts[rows] != 0, column, 0).cummax(1).values
    keep = real & (column - start < SPAN_LEN)
    keep &= keep.cumsum(1) <= ROW_LEN
    ids, real = pack_left(ids, keep)
    return PairBatch(ids, real, pack_left(targets.long(), keep)[0].bool() & real)


def target_error(policy: Policy, score: Callable[[PairBatch], Tensor], batch: PairBatch) -> float:
    """Return the largest distance (nats) of a row, mean over its targets."""
    expected, length = plain_logprobs(policy, batch), batch.input_ids.shape[1]
    # A policy computes rows with much padding in another way: score them as they are and with as
    # much padding again, which is filled with a real token.
    filled = batch.input_ids.where(batch.attention_mask, batch.input_ids[0, 0])
    padded = PairBatch(
        functional.pad(filled, (0, length), value=int(batch.input_ids[0, 0])),
        functional.pad(batch.attention_mask, (0, length)),
        functional.pad(batch.loss_mask, (0, length)),
    )
    sizes = [len(row) for row in expected]
    gaps = [
        (logprobs - plain).abs().mean()
        for rows in (replace(batch, input_ids=filled), padded)
        for logprobs, plain in zip(score(rows).detach().split(sizes), expected, strict=True)
        if len(plain)
    ]
    return float(torch.stack(gaps).nan_to_num(torch.inf).max()) if gaps else 0.0


@torch.no_grad()
def plain_logprobs(policy: Policy, batch: PairBatch) -> list[Tensor]:
    """Compute each row's log-probabilities of its targets, row by row and without padding."""
    rows = []
    for row, real in enumerate(batch.attention_mask):
        ids, targets = batch.input_ids[row, real], batch.loss_mask[row, real]
        start = int(targets.int().argmax())
        prompt, continuation = ids[None, :start], ids[None, start:]
        logits = policy.dense_logits(
            prompt, torch.ones_like(prompt, dtype=torch.bool), continuation
        )
        logprobs = (
            widen(logits[0, :-1]).log_softmax(-1).gather(-1, continuation[0, :, None]).squeeze(-1)
        )
        rows.append(logprobs[targets[start:]])
    return rows
