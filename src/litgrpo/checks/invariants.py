"""Seven statements that must be true before training starts, each with its measured error.

They are asked of the run itself: its policy, engine, sampling, objective and reference, in its
precision, on the first prompts of its training data. What they compare with is the library's own
forward pass, one row at a time, without padding and without any code of ours around it.
Nothing is left behind: no parameter, gradient, random state or position in the data changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from litgrpo.algorithm.weighting import PerTokenOfMicroBatch
from litgrpo.checks.dry_run import (
    EXTRA_PADDING,
    Probe,
    first_prompts,
    has_dropout,
    in_small,
    modes_kept,
    padded,
    some_ends,
    tolerance,
)
from litgrpo.checks.reference_forward import Truth, row_gaps, truth_of
from litgrpo.learner.config import UpdateConfig
from litgrpo.learner.micro_batches import scored
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rewards.runner.in_process import InProcessRunner
from litgrpo.rewards.scorer import Reward, Scorer
from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import widened
from litgrpo.types import Experience, PromptBatch, Rollout, TokenLogprobs

if TYPE_CHECKING:
    from litgrpo.modules.grpo import GRPO

WATCHED = 2**24  # numbers of a gradient to compare at most; it is held twice

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
COUNTED = {"5 a completion ends with its end token, once", "6 groups are contiguous"}


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
        return f"{verdict}  {self.name:<48} error {self.error:.1e}, tolerance {self.tolerance:.0e}"


def check(module: GRPO) -> None:
    """Measure all seven at the start of a fit, log them, and refuse to train if one fails.

    Args:
        module: attached to its trainer, on its device.

    Raises:
        ValueError: a statement is not true.
    """
    started = time.perf_counter()
    with isolate_rng(include_cuda=module.device.type != "cpu"), modes_kept(module):
        prompts = first_prompts(module)
        if prompts is None:
            return
        with module.trainer.precision_plugin.train_step_context():
            small, limit = in_small(module), tolerance(module)
            rollout, errors = sampling_errors(small, prompts, limit)
            findings = agreed(module, errors, limit)
            if all(finding.holds for finding in findings):  # else there is nothing to learn from
                learned = agreed(module, learning_errors(small, rollout), limit)
                names = {finding.name for finding in learned}
                findings = learned + [each for each in findings if each.name not in names]
    rank_zero_info(f"Invariants, checked in {time.perf_counter() - started:.1f} s:")
    for finding in sorted(findings, key=lambda finding: finding.name):
        rank_zero_info(f"  {finding}")
    failed = [finding for finding in findings if not finding.holds]
    if failed:
        worst = min(failed, key=lambda finding: list(LIKELY).index(finding.name))
        raise ValueError(
            f'Not trained: the invariant "{worst.name}" fails with error {worst.error:.2g} '
            f"(tolerance {worst.tolerance:.0e}); likely {LIKELY[worst.name]} (`check_invariants: "
            "false` trains regardless)."
        )


def agreed(module: GRPO, errors: dict[str, float], limit: float) -> list[Finding]:
    """Findings with the largest errors of all processes, so that all go on or none.

    Args:
        module: attached to its trainer.
        errors: {name: error}, the same names on every process.
        limit: tolerance of what is not a count.
    """
    mine = torch.tensor(list(errors.values()), dtype=torch.float32, device=module.device)
    mine = mine.nan_to_num(math.inf, posinf=math.inf)
    worst = module.trainer.strategy.reduce(mine, reduce_op="max").tolist()
    return [
        Finding(name, error, 0.0 if name in COUNTED else limit)
        for name, error in zip(errors, worst, strict=True)
    ]


def sampling_errors(
    small: GRPO, prompts: PromptBatch, limit: float
) -> tuple[Rollout, dict[str, float]]:
    """What is wrong with completions and their log-probabilities.

    Args:
        small: the run in small.
        prompts: a few, on its device.
        limit: tolerance of log-probabilities.

    Returns:
        A rollout to learn from, with padding on both sides, and {name: error}.
    """
    policy, sampling = small.policy, small.sampling
    assert policy is not None
    policy.train()  # as an update leaves it; sampling has to change that
    alone = small.generate(prompts.select([0]), "train", small.group_size, sampling)
    truth = truth_of(policy, alone, sampling, limit)
    errors = {
        "5 a completion ends with its end token, once": bad_ends(small, alone),
        "2 chunked head equals the dense one": learner_error(policy, alone, truth, sampling),
        "1 cached decoding equals the full forward": truth.sampler_error(alone),
    }
    policy.train().eos_ids = some_ends(policy, alone)
    rollout = small.generate(padded(prompts), "train", small.group_size, sampling)
    truth = truth_of(policy, rollout, sampling, limit)
    errors["5 a completion ends with its end token, once"] += bad_ends(small, rollout)
    errors["6 groups are contiguous"] = strangers(policy, rollout, truth, sampling, limit)
    errors["4 padding and batch change nothing"] = padding_error(policy, rollout, truth, sampling)
    return rollout, errors


def learning_errors(small: GRPO, rollout: Rollout) -> dict[str, float]:
    """What is wrong with what is learned from a rollout: {name: error}.

    Args:
        small: the run in small.
        rollout: N completions.
    """
    assert small.policy is not None
    probe = Probe()
    small.rewards = Scorer({"probe": Reward(probe)}, runner=InProcessRunner())
    experience = small.collect(rollout, small.reward(rollout))
    small.policy.train(not has_dropout(small))
    now = scored(experience, small.learning, small._logprobs, shared=small._shared)
    errors = {
        "6 groups are contiguous": probe.misplaced(rollout, experience),
        "3 the first ratio is 1": ratio_error(experience, now),
    }
    if small.reference is not None:
        errors |= reference_errors(small, small.reference, experience, now)
    if not isinstance(small.objective.weighting, PerTokenOfMicroBatch):  # defined by the split
        errors["7 the gradient does not depend on micro-batches"] = split_error(small, experience)
    return errors


# --- the seven ---


@torch.no_grad()
def learner_error(
    policy: Policy, rollout: Rollout, truth: Truth, sampling: Sampling, padding: int = 0
) -> float:
    """Distance of the learning step's log-probabilities from the true ones.

    Args:
        policy: the policy.
        rollout: N completions.
        truth: of the rollout.
        sampling: the temperature.
        padding: columns to add to the completions; all padding is filled with a real token.
    """
    mask = torch.nn.functional.pad(rollout.completion_mask, (0, padding))
    ids = torch.nn.functional.pad(rollout.completion_ids, (0, padding))
    if padding:
        ids = ids.masked_fill(~mask, int(ids[0, 0]))
    prompt_of = torch.arange(len(ids), device=ids.device) // rollout.group_size
    prompts = rollout.prompts.prompt_ids, rollout.prompts.prompt_mask
    temperature = sampling.policy_temperature
    new = policy.logprobs(*prompts, prompt_of, ids, mask, temperature=temperature).logprobs
    true = torch.nn.functional.pad(truth.logprobs, (0, padding))
    return float(row_gaps(new - true, mask).max())


def padding_error(policy: Policy, rollout: Rollout, truth: Truth, sampling: Sampling) -> float:
    """What padding and company change, in sampling and in learning."""
    learner = learner_error(policy, rollout, truth, sampling, EXTRA_PADDING)
    return max(truth.sampler_error(rollout), learner)


def strangers(
    policy: Policy, rollout: Rollout, truth: Truth, sampling: Sampling, limit: float
) -> float:
    """Number of rows that continue another prompt than their own."""
    num_prompts = len(rollout.prompts)
    own = torch.arange(len(rollout.lengths)) // rollout.group_size
    misfits = ~(truth.sampler_gaps(rollout) <= limit)
    found = torch.zeros_like(misfits)
    for away in range(1, num_prompts if bool(misfits.any()) else 1):
        other = truth_of(policy, rollout, sampling, limit, (own + away) % num_prompts)
        found |= misfits & (other.sampler_gaps(rollout) <= limit)
    return float(found.sum())


def bad_ends(module: GRPO, rollout: Rollout) -> float:
    """Number of rows whose mask is not: tokens, then one end token or the length limit."""
    assert module.policy is not None
    eos_ids, limit = module.policy.eos_ids, module.max_completion_len
    mask, lengths = rollout.completion_mask, rollout.lengths
    places = torch.arange(mask.shape[1], device=mask.device)
    ends = mask & torch.isin(rollout.completion_ids, torch.tensor(eos_ids, device=mask.device))
    ends_last = ends == (places == lengths[:, None] - 1)
    right = torch.where(rollout.truncated[:, None], ~ends & (lengths[:, None] == limit), ends_last)
    right &= mask == (places < lengths[:, None])
    return float((~right.all(1) | (lengths == 0)).sum())


def ratio_error(experience: Experience, now: TokenLogprobs) -> float:
    """Log-ratio of the first optimizer step: of the learning policy to the one that sampled.

    Args:
        experience: N rows.
        now: the policy's view of them in the mode that it learns in.
    """
    old = experience.old_logprobs
    old = experience.sampler_logprobs if old is None else old
    return float(row_gaps(now.logprobs - old, experience.completion_mask).max())


def reference_errors(
    module: GRPO, reference: Reference, experience: Experience, now: TokenLogprobs
) -> dict[str, float]:
    """How far the reference is from the start of training, and whether it stays where it is.

    The first is asked only of a run that starts, and only if its reference is the start.

    Args:
        module: the policy.
        reference: its reference.
        experience: N rows, scored by the reference.
        now: the policy's view of them.
    """
    errors = {}
    before, mask = experience.ref_logprobs, experience.completion_mask
    assert before is not None
    with moved(module):
        after = module._ref_logprobs(experience)
    assert after is not None
    movement = float(row_gaps(after - before, mask).max())
    trained = any(p.requires_grad for p in reference.parameters())
    errors["3 the reference stays where it is"] = math.inf if trained else movement
    if module.reference_path is None and module.iteration == 0:
        errors["3 KL to the fresh reference is 0"] = float(
            row_gaps(now.logprobs - before, mask).max()
        )
    return errors


@contextmanager
def moved(module: GRPO) -> Iterator[None]:
    """The policy after a step in its last trained parameter, which is taken back exactly."""
    last = [p for p in module.policy.parameters() if p.requires_grad][-1].data  # type: ignore[union-attr]
    before = last.clone()
    last += torch.linspace(-1, 1, last.numel(), dtype=last.dtype, device=last.device).view_as(last)
    torch.clear_autocast_cache()  # or the parameter in lower precision would stay
    try:
        yield
    finally:
        last.copy_(before)
        torch.clear_autocast_cache()


def split_error(module: GRPO, experience: Experience) -> float:
    """Norm of the difference of two gradients over their norm: all rows at once, and one by one.

    Every row is praised, some more than others: were equal completions of a group compared, their
    gradients would cancel and leave rounding.
    """
    praise = 1 + torch.arange(len(experience), device=module.device)[:, None] % 3
    experience = replace(experience, advantages=praise * experience.completion_mask.float())
    whole = replace(module.learning, micro_batch_size=None, micro_batch_tokens=None)
    at_once = gradient(module, experience, whole)
    one_by_one = gradient(module, experience, replace(whole, micro_batch_size=1))
    off = sum(float((a - b).square().sum()) for a, b in zip(at_once, one_by_one, strict=True))
    size = sum(float(a.square().sum()) for a in at_once)
    return math.sqrt(off / size) if off else 0.0


def gradient(module: GRPO, experience: Experience, learning: UpdateConfig) -> list[Tensor]:
    """The gradient of one optimizer step, smallest parameters first, up to `WATCHED` numbers.

    It goes to no `.grad`, and past the hooks that reduce it over processes.
    """
    parameters = [p for p in module.policy.parameters() if p.requires_grad]  # type: ignore[union-attr]
    parameters.sort(key=Tensor.numel)
    sizes = torch.tensor([p.numel() for p in parameters]).cumsum(0)
    parameters = parameters[: max(1, int((sizes <= WATCHED).sum()))]
    total = [widened(torch.zeros_like(p)) for p in parameters]
    for output, _ in module.losses(experience, learning):
        found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        for part, gained in zip(total, found, strict=True):
            if gained is not None:
                part.add_(gained)
    return total
