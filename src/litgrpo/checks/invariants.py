"""Start-up checks: statements that must be true before training, each with its measured error.

They are measured on the run itself: its policy, engine, sampling, objective and reference, in its
precision, on the first prompts of its training data. The baseline is the forward pass of
transformers, one row at a time, without padding and without code of litgrpo around it.
The checks leave no trace: no parameter, gradient, random state or position in the data changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.checks.dry_run import (
    EXTRA_PADDING,
    FULL_TOLERANCE,
    DryRun,
    pad_prompts,
    pick_end_tokens,
    restore_end_tokens,
    restore_modes,
    select_few_prompts,
    tolerance,
)
from litgrpo.checks.episode_checks import (
    count_bad_turns,
    count_unreproducible_responses,
    mark_stop_strings,
)
from litgrpo.checks.reference_forward import ReferenceForward, reference_forward, row_gaps
from litgrpo.distributed.collectives import Comm
from litgrpo.distributed.memory import Attempt
from litgrpo.learning.learner import Learner
from litgrpo.learning.micro_batches import BatchLimits
from litgrpo.models.adapters import perturb_adapters
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.tensors import widen
from litgrpo.types import PromptBatch, Rollout, TokenLogprobs, TokenRows, TrainingBatch

Result = TypeVar("Result")

# In lower precision an error of up to this many tolerances may still be rounding.
ROUNDING = 4
# Largest number of gradient entries to compare: two gradients are in memory at once.
MAX_GRADIENT_NUMBERS = 2**24


class Invariant(Enum):
    """Statements that must be true, in the order in which one failure explains later ones."""

    # A wrong head, for example, makes cached decoding differ as well.
    END_TOKEN = (
        5,
        "a completion ends with its end token, once",
        "the completion mask leaves the end token out, or continues after it",
        True,
    )
    HEAD = (
        2,
        "chunked head equals the dense one",
        "the learner's log-probabilities are not the model's: its soft-cap, logit scale or bias is "
        "not applied, the temperature is missing, or tokens are shifted by one",
    )
    DECODING = (
        1,
        "cached decoding equals the full forward",
        "the engine's log-probabilities are not those of the distribution that it sampled from: "
        "its cache or positions are off, temperature, top_k, top_p or min_p is ignored, dropout is "
        "on during generation, or a server holds another model than model.pretrained",
    )
    GROUPS = (
        6,
        "groups are contiguous",
        "completions belong to other prompts than n // group_size: groups are interleaved",
        True,
    )
    PADDING = (
        4,
        "padding and batch change nothing",
        "padding is attended to, or positions count it: attention mask or position ids are "
        "missing; or rows see another prompt (model.precision.share_prompts: false reads rows "
        "separately)",
    )
    RATIO = (
        3,
        "the first ratio is 1",
        "the policy in the update is not the one that generated: dropout is on in the update, or "
        "old log-probabilities are of other weights, another temperature, other tokens, or another "
        "candidate set than that of top_k, top_p and min_p",
    )
    FROZEN_REFERENCE = (
        3,
        "the reference stays where it is",
        "the reference is not frozen: it shares weights with the policy, or is trained itself",
    )
    INITIAL_KL = (
        3,
        "KL to the fresh reference is 0",
        "the reference has other weights than the initial policy",
    )
    SPLIT = (
        7,
        "the gradient does not depend on micro-batches",
        "micro-batches are averaged, a mean of means, or loss weights are computed inside each of "
        "them",
    )
    REPRODUCIBLE = (
        8,
        "the environment is reproducible",
        "the environment keeps state outside of an episode (an attribute of its class, a list of "
        "its module), or reads a clock, a disk or a network",
        True,
    )

    TARGETS = (
        9,
        "targets equal those of a plain forward",
        "the log-probabilities of targets are not the model's: rows are computed in another order "
        "than they are written, tokens are shifted by one, padding is attended to, or soft-cap, "
        "logit scale or bias of the head are not applied",
    )

    # `number` is that of the log and of docs/project/design.md; a count must be 0.
    def __init__(
        self, number: int, statement: str, likely_cause: str, counts: bool = False
    ) -> None:
        self.number, self.statement = number, statement
        self.likely_cause, self.counts = likely_cause, counts

    def __str__(self) -> str:
        return f"{self.number} {self.statement}"


@dataclass(frozen=True)
class CheckResult:
    """Measured error of one invariant; as text a line of the log."""

    invariant: Invariant
    # nats, mean over a row's tokens; gradients: norm over norm; counts: incorrect rows
    error: float
    tolerance: float  # the largest error for which the invariant holds

    @property
    def holds(self) -> bool:
        """True if the error is within the tolerance; False for NaN."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        sign = "<=" if self.holds else "> "
        return f"{verdict}  {self.invariant!s:<48} {self.error:.1e} {sign} {self.tolerance:.1e}"


@dataclass(frozen=True)
class Conditions:
    """Properties of a run that decide which checks apply."""

    dropout: bool = False  # in the update, not in generation
    fresh_reference: bool = False  # the reference is the initial policy, and the run starts from it


def measure_invariants(
    rollouter: Rollouter, learner: Learner, prompts: PromptBatch, conditions: Conditions
) -> list[CheckResult]:
    """Measure all invariants; those of episodes only if the run has an environment."""
    limit = tolerance(learner.policy, rollouter.engine.exact_logprobs)
    with restore_modes(learner.policy, learner.reference), restore_end_tokens(learner.policy):
        dry, first_prompts = DryRun.from_run(rollouter, learner), select_few_prompts(prompts)
        adapter = adapter_errors(dry, first_prompts, limit)
        rollout, errors = sampling_errors(dry, first_prompts, limit)
        # Not `max`, which may return the other number if one is NaN.
        errors |= {name: error for name, error in adapter.items() if not error <= errors[name]}
        results = reduce_over_ranks(learner.comm, errors, limit)
        if not all(result.holds for result in results):
            return results  # an incorrect rollout would fail all later checks as well
        errors = learning_errors(dry, rollout, conditions)
        if rollouter.episodes is not None:
            errors[Invariant.REPRODUCIBLE] = count_unreproducible_responses(
                rollouter.episodes, select_few_prompts(prompts)
            )
        learning_results = reduce_over_ranks(learner.comm, errors, limit)
    remeasured = {result.invariant for result in learning_results}
    return learning_results + [result for result in results if result.invariant not in remeasured]


def adapter_errors(dry: DryRun, prompts: PromptBatch, limit: float) -> dict[Invariant, float]:
    """Measure `sampling_errors` with adapters that change the model; {} without adapters."""
    policy = dry.learner.policy
    if not policy.has_adapter:
        return {}
    # New adapters add 0: sampling that leaves one out would be noticed only during training.
    with torch.no_grad(), perturb_adapters(policy.model), restore_end_tokens(policy):
        dry.rollouter.forget_weights()
        errors = sampling_errors(dry, prompts, limit)[1]
    dry.rollouter.forget_weights()
    return errors


def raise_if_violated(results: list[CheckResult]) -> None:
    """Raise a ValueError that names the failure that explains the others, and its likely cause."""
    failed = {result.invariant: result for result in results if not result.holds}
    if failed:
        worst = next(failed[invariant] for invariant in Invariant if invariant in failed)
        raise ValueError(
            f'Not trained: the invariant "{worst.invariant}" fails with error {worst.error:.2g} '
            f"(tolerance {worst.tolerance:.1e}); {explain(worst)} (`check_invariants: false` "
            "trains regardless)."
        )


def explain(result: CheckResult) -> str:
    """Return the likely cause of a violated invariant."""
    # In low precision the error of a large or deep model may be rounding; a cause in the code
    # would be misleading.
    if FULL_TOLERANCE < result.tolerance < result.error < ROUNDING * result.tolerance:
        return (
            "that may be rounding, because this run computes in low precision: run the same "
            "command with model.precision.dtype float32, model.precision.autocast_dtype null, "
            "trainer.precision 32-true and, for GRPO, model.engine.dtype null to distinguish "
            "rounding from a mistake"
        )
    return f"likely {result.invariant.likely_cause}"


def reduce_over_ranks(
    comm: Comm, errors: dict[Invariant, float], limit: float
) -> list[CheckResult]:
    """Return results with the largest errors of all ranks, so that all of them stop or none."""
    local_errors = torch.tensor(list(errors.values()), dtype=torch.float32)
    worst = comm.max(local_errors.nan_to_num(math.inf, posinf=math.inf)).tolist()
    return [
        CheckResult(invariant, error, 0.0 if invariant.counts else limit)
        for invariant, error in zip(errors, worst, strict=True)
    ]


def sampling_errors(
    dry: DryRun, prompts: PromptBatch, limit: float
) -> tuple[Rollout, dict[Invariant, float]]:
    """Measure completions and their log-probabilities; return a padded rollout and the errors."""
    policy = dry.learner.policy
    policy.train()  # the mode after an update; generation must switch to eval mode
    alone = dry.generate(prompts.select([0]))
    true = true_logprobs(dry, alone, limit)
    errors = {
        Invariant.END_TOKEN: count_bad_ends(dry, alone),
        Invariant.HEAD: learner_error(dry.learner, alone, true),
        Invariant.DECODING: true.sampler_error(alone),
    }
    policy.train().eos_ids = pick_end_tokens(policy, alone)
    rollout = dry.generate(pad_prompts(prompts))
    true = true_logprobs(dry, rollout, limit)
    errors[Invariant.END_TOKEN] += count_bad_ends(dry, rollout)
    errors[Invariant.GROUPS] = count_mismatched_rows(dry, rollout, true, limit)
    errors[Invariant.PADDING] = padding_error(dry.learner, rollout, true)
    return rollout, errors


def learning_errors(
    dry: DryRun, rollout: Rollout, conditions: Conditions
) -> dict[Invariant, float]:
    """Measure errors of the update on a rollout, as {invariant: error}."""
    learner = dry.learner
    batch = dry.build_batch(rollout)
    learner.policy.train(not conditions.dropout)
    now = learner.retry(partial(learner.policy_logprobs, batch.tokens), batch.tokens)
    errors = {
        Invariant.GROUPS: dry.probe.count_misplaced(rollout, batch),
        Invariant.RATIO: ratio_error(batch, now),
    }
    if learner.reference is not None and not learner.reference.computes_elsewhere:
        errors |= reference_errors(learner, batch, now, conditions)
    if not isinstance(
        learner.objective.resolved_aggregation, MicroBatchTokenMean
    ):  # that loss is defined by the split
        errors[Invariant.SPLIT] = split_error(learner, batch)
    return errors


# --- measurements ---


def true_logprobs(
    dry: DryRun, rollout: Rollout, limit: float, prompt_of: Tensor | None = None
) -> ReferenceForward:
    """Score a rollout with the model's own forward pass; see `reference_forward`."""
    policy, sampling = dry.learner.policy, dry.rollouter.sampling

    def score(max_rows: int | None) -> ReferenceForward:
        return reference_forward(policy, rollout, sampling, limit, prompt_of)

    return retry_all_rows(dry.learner, score, rows=1)


@torch.no_grad()
def learner_error(
    learner: Learner, rollout: Rollout, true: ReferenceForward, padding: int = 0
) -> float:
    """Return the distance (nats) of the learner's log-probabilities from the true ones.

    `padding` columns are added to the completions.
    """
    tokens = rollout.tokens
    mask = torch.nn.functional.pad(tokens.completion_mask, (0, padding))
    generated = torch.nn.functional.pad(rollout.loss_mask, (0, padding))
    ids = torch.nn.functional.pad(tokens.completion_ids, (0, padding))
    if padding:  # a real token, so that attending to it shows
        ids = ids.masked_fill(~mask, int(ids[0, 0]))
    changed = {"completion_ids": ids, "completion_mask": mask, "predicted": generated}
    tokens = replace(tokens, candidate_ids=None, **changed)
    new = logprobs_at_once(learner, tokens)
    expected = torch.nn.functional.pad(true.logprobs, (0, padding))
    return float(row_gaps(new - expected, generated).max())


def logprobs_at_once(learner: Learner, tokens: TokenRows) -> Tensor:
    """Compute [N, C] log-probabilities in one pass, or in several after out-of-memory errors."""

    def compute(max_rows: int | None) -> Tensor:
        if max_rows is None or max_rows >= len(tokens):
            return learner.logprobs(tokens).logprobs
        limits = BatchLimits(max_rows, shared=learner.policy.computes_prompts_once)
        return learner.micro_batching.compute_logprobs(tokens, learner.logprobs, limits).logprobs

    return retry_all_rows(learner, compute, len(tokens))


def retry_all_rows(learner: Learner, attempt: Attempt[Result], rows: int) -> Result:
    """Return the result of an attempt with all rows at once, or with fewer if they do not fit."""
    limit = learner.row_limit
    return limit.run(
        attempt,
        lambda: min(rows, limit.max_rows or rows),
        comm=learner.comm,
        computes_alone=learner.micro_batching.computes_alone,
    )


def padding_error(learner: Learner, rollout: Rollout, true: ReferenceForward) -> float:
    """Return the error that padding and other rows cause, in generation and in the update."""
    return max(true.sampler_error(rollout), learner_error(learner, rollout, true, EXTRA_PADDING))


def count_mismatched_rows(
    dry: DryRun, rollout: Rollout, true: ReferenceForward, limit: float
) -> float:
    """Count rows that continue another prompt than their own."""
    num_prompts = len(rollout.prompts)
    prompt_of = torch.arange(len(rollout.lengths)) // rollout.group_size
    misfits = ~(true.sampler_gaps(rollout) <= limit)
    misplaced = torch.zeros_like(misfits)
    for away in range(1, num_prompts if bool(misfits.any()) else 1):
        shifted = true_logprobs(dry, rollout, limit, (prompt_of + away) % num_prompts)
        misplaced |= misfits & (shifted.sampler_gaps(rollout) <= limit)
    return float(misplaced.sum())


def count_bad_ends(dry: DryRun, rollout: Rollout) -> float:
    """Count rows whose mask is not: tokens, then one end token or the length limit."""
    rollouter, stops = dry.rollouter, dry.rollouter.stop_strings
    limit, eos_ids = rollouter.max_completion_length, list(rollouter.policy.eos_ids)
    eos_ids += rollouter.sampling.stop_token_ids
    mask = rollout.completion_mask
    lengths = mask.sum(1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    ends = mask & torch.isin(rollout.completion_ids, torch.tensor(eos_ids, device=mask.device))
    if rollout.turns is not None:
        return count_bad_turns(rollout, ends | mark_stop_strings(rollout, stops), limit)
    if stops is not None:  # a token that completes a stop string counts as an end token
        stop_lengths = torch.tensor([stops.length(ids) for ids in rollout.token_lists()])
        ends |= mask & (positions == stop_lengths[:, None].to(mask.device) - 1)
    ends_last = ends == (positions == lengths[:, None] - 1)
    correct = torch.where(
        rollout.truncated[:, None], ~ends & (lengths[:, None] == limit), ends_last
    )
    correct &= mask == (positions < lengths[:, None])
    return float((~correct.all(1) | (lengths == 0)).sum())


def ratio_error(batch: TrainingBatch, now: TokenLogprobs) -> float:
    """Return the log-ratio of the first optimizer step, which must be 0."""
    old = batch.old_logprobs
    old = batch.sampler_logprobs if old is None else old
    return float(row_gaps(now.logprobs - old, batch.loss_mask).max())


def reference_errors(
    learner: Learner, batch: TrainingBatch, now: TokenLogprobs, conditions: Conditions
) -> dict[Invariant, float]:
    """Measure the distance of the reference from the initial policy, and that it stays fixed."""
    errors: dict[Invariant, float] = {}
    mask, temperature = batch.loss_mask, learner.sampling.policy_temperature
    assert learner.reference is not None
    before = batch.ref_logprobs
    if before is None:  # a divergence does not need them
        before = learner.logprobs_under(learner.reference, batch.tokens, temperature)
    with moved_policy(learner):
        after = learner.logprobs_under(learner.reference, batch.tokens, temperature)
    movement = float(row_gaps(after - before, mask).max())
    trained = any(p.requires_grad for p in learner.reference.parameters())
    errors[Invariant.FROZEN_REFERENCE] = math.inf if trained else movement
    if conditions.fresh_reference:
        gap = row_gaps(now.logprobs - before, mask).max()
        errors[Invariant.INITIAL_KL] = float(gap)
    return errors


@contextmanager
def moved_policy(learner: Learner) -> Iterator[None]:
    """Move the last trained parameter of the policy, and restore it exactly."""
    weight = [p for p in learner.policy.parameters() if p.requires_grad][-1].data
    before = weight.clone()
    steps = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype, device=weight.device)
    weight += steps.view_as(weight)
    torch.clear_autocast_cache()  # autocast caches a copy of the parameter in lower precision
    try:
        yield
    finally:
        weight.copy_(before)
        torch.clear_autocast_cache()


def split_error(learner: Learner, batch: TrainingBatch) -> float:
    """Return the distance of one-row micro-batches' gradient from a large one's, norm over norm."""
    # Positive and unequal advantages: those of identical completions would otherwise cancel.
    weight = torch.arange(len(batch), device=batch.advantages.device)[:, None] % 3
    batch = replace(batch, advantages=(1 + weight) * batch.loss_mask.float())
    shared = learner.policy.computes_prompts_once
    at_once = gradient(learner, batch, BatchLimits(shared=shared))
    one_by_one = gradient(learner, batch, BatchLimits(max_rows=1, shared=shared))
    off = sum(float((a - b).square().sum()) for a, b in zip(at_once, one_by_one, strict=True))
    size = sum(float(a.square().sum()) for a in at_once)
    return math.sqrt(off / size) if off else 0.0


def gradient(learner: Learner, batch: TrainingBatch, limits: BatchLimits) -> list[Tensor]:
    """Compute the gradient of one optimizer step, of the smallest parameters, without `.grad`."""
    rows = limits.max_rows or len(batch)

    def compute(max_rows: int | None) -> list[Tensor]:
        if max_rows is None or max_rows >= rows:
            return _sum_gradients(learner, batch, limits)
        return _sum_gradients(learner, batch, replace(limits, max_rows=max_rows))

    return retry_all_rows(learner, compute, rows)


def _sum_gradients(learner: Learner, batch: TrainingBatch, limits: BatchLimits) -> list[Tensor]:
    parameters = [p for p in learner.policy.parameters() if p.requires_grad]
    parameters.sort(key=Tensor.numel)
    sizes = torch.tensor([p.numel() for p in parameters]).cumsum(0)
    parameters = parameters[: max(1, int((sizes <= MAX_GRADIENT_NUMBERS).sum()))]
    total = [widen(torch.zeros_like(p)) for p in parameters]
    for output, _ in learner.losses(batch, limits):
        # `autograd.grad` does not call the hooks that reduce gradients over ranks.
        gradients = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        for part, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                part.add_(gradient)
    return total
