"""Statements that must be true before training starts, each with its measured error.

They are asked of the run itself: its policy, engine, sampling, objective and reference, in its
precision, on the first prompts of its training data. What they compare with is the library's own
forward pass, one row at a time, without padding and without any code of ours around it.
Nothing is left behind: no parameter, gradient, random state or position in the data changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litgrpo.algorithms.losses import MicroBatchTokenMean
from litgrpo.checks.dry_run import (
    EXTRA_PADDING,
    FULL_TOLERANCE,
    DryRun,
    few_prompts,
    modes_kept,
    padded,
    restore_end_tokens,
    some_ends,
    tolerance,
)
from litgrpo.checks.episode_checks import bad_turns, overheard, stopped, turns_error, unrepeated
from litgrpo.checks.reference_forward import ReferenceForward, reference_forward, row_gaps
from litgrpo.distributed.collectives import Comm
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.template_probes import count_mismatches
from litgrpo.rollout.turn_format import TemplateFormat
from litgrpo.tensors import widened
from litgrpo.training.learner import Learner
from litgrpo.training.micro_batches import BatchLimits
from litgrpo.types import PromptBatch, Rollout, TokenLogprobs, TrainingBatch

ROUNDING = 4  # times its tolerance an error in lower precision may still be rounding
WATCHED = 2**24  # numbers of a gradient to compare at most; it is held twice

LEARNED, SEEN = "8 an episode is learned as its turns", "11 rewards see only what was said"
BRIDGE = "9 the turn_format is the template's own"
REPEATED = "10 the environment's answers can be repeated"

# What is true, and what is likely wrong where it is not. In the order in which one failure explains
# those after it: a wrong head makes decoding differ, too.
LIKELY = {
    "5 a completion ends with its end token, once": (
        "the completion mask leaves the end token out, or goes on after it"
    ),
    "2 chunked head equals the dense one": (
        "the learning step's log-probabilities are not the model's: its soft-cap, logit scale or "
        "bias is not applied, the temperature is missing, or tokens are shifted by one"
    ),
    "1 cached decoding equals the full forward": (
        "the engine's log-probabilities are not those of what it drew from: its cache or positions "
        "are off, temperature, top_k, top_p or min_p is ignored, or dropout is on while it samples"
    ),
    "6 groups are contiguous": (
        "completions belong to other prompts than n // group_size says: groups are interleaved"
    ),
    "4 padding and batch change nothing": (
        "padding is attended to, or positions count it: attention mask or position ids are "
        "missing; or rows see another prompt (precision.share_prompts: false reads each by itself)"
    ),
    "3 the first ratio is 1": (
        "the policy that learns is not the one that sampled: dropout is on in the update, or old "
        "log-probabilities are of other weights, another temperature, other tokens, or not over "
        "those that top_k, top_p and min_p left"
    ),
    "3 the reference stays where it is": (
        "the reference is not frozen: it shares weights with the policy, or is trained itself"
    ),
    "3 KL to the fresh reference is 0": (
        "the reference has other weights than the start of training"
    ),
    "7 the gradient does not depend on micro-batches": (
        "micro-batches are averaged, a mean of means, or weights are computed inside each of them"
    ),
}
LIKELY |= {
    LEARNED: (
        "what was heard is learned from, or counts in lengths, denominators, discounts or the KL "
        "term: a mask of all tokens stands where `loss_mask` belongs"
    ),
    SEEN: (
        "rewards are given what the environment said as the policy's words: texts are decoded from "
        "whole rows"
    ),
    BRIDGE: (
        "what stands between two turns has other tokens than the chat template's own rendering of "
        "the conversation: a line break behind an end token is lost, or history was encoded again"
    ),
    REPEATED: (
        "the environment keeps something outside of an episode (an attribute of its class, a list "
        "of its module), or reads a clock, a disk or a network; `episode.record_responses: "
        "true` is for "
        "tools that do so on purpose"
    ),
}
COUNTED = {
    "5 a completion ends with its end token, once",
    "6 groups are contiguous",
    SEEN,
    BRIDGE,
    REPEATED,
}


@dataclass(frozen=True)
class Finding:
    """What one check measured.

    Args:
        name: a key of `LIKELY`.
        error: largest deviation. Of log-probabilities: nats, mean over the tokens of a row; of
            gradients: norm of the difference over norm; else the number of wrong rows.
        tolerance: how large it may be.
    """

    name: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the statement is true; NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        """One line of the log."""
        verdict = "holds" if self.holds else "FAILS"
        return f"{verdict}  {self.name:<48} error {self.error:.1e}, tolerance {self.tolerance:.1e}"


@dataclass(frozen=True)
class Conditions:
    """What the checks must know of a run.

    Args:
        dropout: the update computes with dropout, which sampling does not.
        fresh_reference: the reference is the start of training, and the run begins there.
    """

    dropout: bool = False
    fresh_reference: bool = False


def measured(
    rollouter: Rollouter, learner: Learner, prompts: PromptBatch, conditions: Conditions
) -> list[Finding]:
    """Measure all; the last three where rows are episodes.

    Args:
        rollouter: of the run.
        learner: of the run; its `comm` makes all processes find the same.
        prompts: the first of the training data, where rollouts are.
        conditions: of the run.
    """
    limit = tolerance(learner)
    with modes_kept(learner.policy, learner.reference), restore_end_tokens(learner.policy):
        dry = DryRun.of(rollouter, learner)
        rollout, errors = sampling_errors(dry, few_prompts(prompts), limit)
        errors |= bridge_errors(rollouter)
        findings = agreed(learner.comm, errors, limit)
        if not all(finding.holds for finding in findings):
            return findings  # there is no sound rollout to learn from
        errors = learning_errors(dry, rollout, conditions)
        if rollouter.episodes is not None:
            errors[REPEATED] = unrepeated(rollouter.episodes, few_prompts(prompts))
        learned = agreed(learner.comm, errors, limit)
    names = {finding.name for finding in learned}
    return learned + [finding for finding in findings if finding.name not in names]


def refuse(findings: list[Finding]) -> None:
    """Refuse to train if a statement is not true.

    Raises:
        ValueError: with the failure that explains the others, and what is likely wrong.
    """
    failed = [finding for finding in findings if not finding.holds]
    if failed:
        worst = min(failed, key=lambda finding: list(LIKELY).index(finding.name))
        raise ValueError(
            f'Not trained: the invariant "{worst.name}" fails with error {worst.error:.2g} '
            f"(tolerance {worst.tolerance:.1e}); {likely(worst)} (`check_invariants: false` trains "
            "regardless)."
        )


def likely(finding: Finding) -> str:
    """What may be wrong where a statement is not true.

    Where the run computes with few digits, the error of a large or deep model may be rounding, and
    naming a mistake would lead astray.
    """
    if FULL_TOLERANCE < finding.tolerance < finding.error < ROUNDING * finding.tolerance:
        return (
            "that may be rounding, for this run computes with few digits: the same command with "
            "precision.dtype float32, precision.autocast_dtype null, engine.dtype null and "
            "trainer.precision 32-true tells rounding from a mistake"
        )
    return f"likely {LIKELY[finding.name]}"


def agreed(comm: Comm, errors: dict[str, float], limit: float) -> list[Finding]:
    """Findings with the largest errors of all processes, so that all go on or none.

    Args:
        comm: of the processes.
        errors: {name: error}, the same names on every process.
        limit: tolerance of what is not a count.
    """
    mine = torch.tensor(list(errors.values()), dtype=torch.float32)
    worst = comm.max(mine.nan_to_num(math.inf, posinf=math.inf)).tolist()
    return [
        Finding(name, error, 0.0 if name in COUNTED else limit)
        for name, error in zip(errors, worst, strict=True)
    ]


def sampling_errors(
    dry: DryRun, prompts: PromptBatch, limit: float
) -> tuple[Rollout, dict[str, float]]:
    """What is wrong with completions and their log-probabilities.

    Args:
        dry: the run in small.
        prompts: a few.
        limit: tolerance of log-probabilities.

    Returns:
        A rollout to learn from, with padding on both sides, and {name: error}.
    """
    policy = dry.learner.policy
    policy.train()  # as an update leaves it; sampling has to change that
    alone = dry.sample(prompts.select([0]))
    true = true_logprobs(dry, alone, limit)
    errors = {
        "5 a completion ends with its end token, once": bad_ends(dry, alone),
        "2 chunked head equals the dense one": learner_error(dry.learner, alone, true),
        "1 cached decoding equals the full forward": true.sampler_error(alone),
    }
    policy.train().eos_ids = some_ends(policy, alone)
    rollout = dry.sample(padded(prompts))
    true = true_logprobs(dry, rollout, limit)
    errors["5 a completion ends with its end token, once"] += bad_ends(dry, rollout)
    errors["6 groups are contiguous"] = mismatched_rows(dry, rollout, true, limit)
    errors["4 padding and batch change nothing"] = padding_error(dry.learner, rollout, true)
    return rollout, errors


def learning_errors(dry: DryRun, rollout: Rollout, conditions: Conditions) -> dict[str, float]:
    """What is wrong with what is learned from a rollout: {name: error}.

    Args:
        dry: the run in small.
        rollout: N completions.
        conditions: of the run.
    """
    learner = dry.learner
    batch = dry.build_batch(rollout)
    learner.policy.train(not conditions.dropout)
    limits = learner.limits
    now = learner.micro_batching.compute_logprobs(batch.tokens, learner.logprobs, limits)
    errors = {
        "6 groups are contiguous": dry.probe.misplaced(rollout, batch),
        "3 the first ratio is 1": ratio_error(batch, now),
    }
    if rollout.turns is not None:
        errors |= episode_errors(dry, rollout)
    if learner.reference is not None:
        errors |= reference_errors(learner, batch, now, conditions)
    if not isinstance(learner.objective.aggregation, MicroBatchTokenMean):  # defined by the split
        errors["7 the gradient does not depend on micro-batches"] = split_error(learner, batch)
    return errors


def bridge_errors(rollouter: Rollouter) -> dict[str, float]:
    """Conversations with other tokens between turns than the chat template's: {name: number}."""
    turn_format = None if rollouter.episodes is None else rollouter.episodes.turn_format
    return (
        {BRIDGE: count_mismatches(turn_format)} if isinstance(turn_format, TemplateFormat) else {}
    )


def episode_errors(dry: DryRun, rollout: Rollout) -> dict[str, float]:
    """What is wrong with the learning and judging of episodes: {name: error}."""
    learner, rewards = dry.learner, dry.rewards(rollout)

    def gradient_of(learner: Learner, batch: TrainingBatch) -> list[Tensor]:
        return gradient(learner, batch, BatchLimits(shared=learner.policy.shares_prompts))

    def cut(text: str) -> str:
        stops, include = dry.rollouter.stop_strings, dry.rollouter.sampling
        return text if stops is None else stops.cut(text, include.include_stop_str_in_output)

    errors = {SEEN: overheard(rollout, dry.probe.asked, learner.policy, cut)}
    # An encoder-decoder reads earlier turns in its decoder: there is no such prompt.
    if not learner.policy.bare_model.config.is_encoder_decoder:
        errors[LEARNED] = turns_error(learner, rollout, rewards, gradient_of)
    return errors


# --- what is measured ---


def true_logprobs(
    dry: DryRun, rollout: Rollout, limit: float, prompt_of: Tensor | None = None
) -> ReferenceForward:
    """The library's view of a rollout; see `reference_forward`."""
    policy, sampling = dry.learner.policy, dry.rollouter.sampling
    return reference_forward(policy, rollout, sampling, limit, prompt_of)


@torch.no_grad()
def learner_error(
    learner: Learner, rollout: Rollout, true: ReferenceForward, padding: int = 0
) -> float:
    """Distance of the learning step's log-probabilities from the true ones.

    Args:
        learner: computes them, among all tokens.
        rollout: N completions.
        true: of the rollout.
        padding: columns to add to the completions; all padding is filled with a real token.
    """
    tokens = rollout.tokens
    mask = torch.nn.functional.pad(tokens.completion_mask, (0, padding))
    spoken = torch.nn.functional.pad(rollout.loss_mask, (0, padding))
    ids = torch.nn.functional.pad(tokens.completion_ids, (0, padding))
    if padding:
        ids = ids.masked_fill(~mask, int(ids[0, 0]))
    given = {"completion_ids": ids, "completion_mask": mask, "loss_mask": spoken}
    tokens = replace(tokens, candidate_ids=None, **given)
    new = learner.logprobs(tokens).logprobs
    expected = torch.nn.functional.pad(true.logprobs, (0, padding))
    return float(row_gaps(new - expected, spoken).max())


def padding_error(learner: Learner, rollout: Rollout, true: ReferenceForward) -> float:
    """What padding and other rows change, in sampling and in learning."""
    return max(true.sampler_error(rollout), learner_error(learner, rollout, true, EXTRA_PADDING))


def mismatched_rows(dry: DryRun, rollout: Rollout, true: ReferenceForward, limit: float) -> float:
    """Number of rows that continue another prompt than their own."""
    num_prompts = len(rollout.prompts)
    own = torch.arange(len(rollout.lengths)) // rollout.group_size
    misfits = ~(true.sampler_gaps(rollout) <= limit)
    found = torch.zeros_like(misfits)
    for away in range(1, num_prompts if bool(misfits.any()) else 1):
        other = true_logprobs(dry, rollout, limit, (own + away) % num_prompts)
        found |= misfits & (other.sampler_gaps(rollout) <= limit)
    return float(found.sum())


def bad_ends(dry: DryRun, rollout: Rollout) -> float:
    """Number of rows whose mask is not: tokens, then one end token or the length limit.

    A token that completes a stop string is an end token, too.
    """
    rollouter, stops = dry.rollouter, dry.rollouter.stop_strings
    limit, eos_ids = rollouter.max_completion_length, list(rollouter.policy.eos_ids)
    eos_ids += rollouter.sampling.stop_token_ids
    mask = rollout.completion_mask
    lengths = mask.sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    ends = mask & torch.isin(rollout.completion_ids, torch.tensor(eos_ids, device=mask.device))
    if rollout.turns is not None:
        return bad_turns(rollout, ends | stopped(rollout, stops), limit)
    if stops is not None:
        first = torch.tensor([stops.length(ids) for ids in rollout.token_lists()])
        ends |= mask & (places == first[:, None].to(mask.device) - 1)
    ends_last = ends == (places == lengths[:, None] - 1)
    right = torch.where(rollout.truncated[:, None], ~ends & (lengths[:, None] == limit), ends_last)
    right &= mask == (places < lengths[:, None])
    return float((~right.all(1) | (lengths == 0)).sum())


def ratio_error(batch: TrainingBatch, now: TokenLogprobs) -> float:
    """Log-ratio of the first optimizer step: of the learning policy to the one that sampled.

    Args:
        batch: N rows.
        now: the policy's view of them in the mode that it learns in.
    """
    old = batch.old_logprobs
    old = batch.sampler_logprobs if old is None else old
    return float(row_gaps(now.logprobs - old, batch.loss_mask).max())


def reference_errors(
    learner: Learner, batch: TrainingBatch, now: TokenLogprobs, conditions: Conditions
) -> dict[str, float]:
    """How far the reference is from the start of training, and whether it stays where it is.

    Args:
        learner: with a reference.
        batch: N rows, scored by the reference.
        now: the policy's view of them.
        conditions: of the run.
    """
    errors = {}
    before, mask = batch.ref_logprobs, batch.loss_mask
    assert before is not None
    assert learner.reference is not None
    with moved(learner):
        after = learner.reference_logprobs(batch.tokens)
    assert after is not None
    movement = float(row_gaps(after - before, mask).max())
    trained = any(p.requires_grad for p in learner.reference.parameters())
    errors["3 the reference stays where it is"] = math.inf if trained else movement
    if conditions.fresh_reference:
        gap = row_gaps(now.logprobs - before, mask).max()
        errors["3 KL to the fresh reference is 0"] = float(gap)
    return errors


@contextmanager
def moved(learner: Learner) -> Iterator[None]:
    """The policy after a step in its last trained parameter, which is taken back exactly."""
    last = [p for p in learner.policy.parameters() if p.requires_grad][-1].data
    before = last.clone()
    last += torch.linspace(-1, 1, last.numel(), dtype=last.dtype, device=last.device).view_as(last)
    torch.clear_autocast_cache()  # or the parameter in lower precision would stay
    try:
        yield
    finally:
        last.copy_(before)
        torch.clear_autocast_cache()


def split_error(learner: Learner, batch: TrainingBatch) -> float:
    """Norm of the difference of two gradients over their norm: all rows at once, and one by one.

    The advantages are positive and unequal: identical completions would otherwise cancel.
    """
    weight = torch.arange(len(batch), device=batch.advantages.device)[:, None] % 3
    batch = replace(batch, advantages=(1 + weight) * batch.loss_mask.float())
    shared = learner.policy.shares_prompts
    at_once = gradient(learner, batch, BatchLimits(shared=shared))
    one_by_one = gradient(learner, batch, BatchLimits(max_rows=1, shared=shared))
    off = sum(float((a - b).square().sum()) for a, b in zip(at_once, one_by_one, strict=True))
    size = sum(float(a.square().sum()) for a in at_once)
    return math.sqrt(off / size) if off else 0.0


def gradient(learner: Learner, batch: TrainingBatch, limits: BatchLimits) -> list[Tensor]:
    """The gradient of one optimizer step, smallest parameters first, up to `WATCHED` numbers.

    It goes to no `.grad`, and past the hooks that reduce it over processes.
    """
    parameters = [p for p in learner.policy.parameters() if p.requires_grad]
    parameters.sort(key=Tensor.numel)
    sizes = torch.tensor([p.numel() for p in parameters]).cumsum(0)
    parameters = parameters[: max(1, int((sizes <= WATCHED).sum()))]
    total = [widened(torch.zeros_like(p)) for p in parameters]
    for output, _ in learner.losses(batch, limits):
        found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        for part, gained in zip(total, found, strict=True):
            if gained is not None:
                part.add_(gained)
    return total
