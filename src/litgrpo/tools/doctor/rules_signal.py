"""Rules about what there is to learn from: equal groups, prompts, completions that do not end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.metrics import EARLY, Metrics, Series
from litgrpo.tools.doctor.trend import both, lately, start, trend

Rows = Sequence[dict[str, Any]]
# Fixed on the half of the runs that was looked at; see docs/doctor.md.
MOST, MUCH = 0.75, 0.5  # shares of groups
CUT, CUT_OFTEN = 0.1, 0.25  # shares of completions
NEVER = 0.05
PASSES, GAP = 3.0, 0.2  # passes over the data; training over held-out accuracy
COLD = 0.7  # temperature
LAG = 2  # iterations that a mean of ten crosses a bound later than its numbers


def double_begin(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Prompts begin with two begin tokens. Source: open-r1 #462, vllm #27515."""
    begins = metrics["prompt/begin_tokens"]
    if start(begins) < 1.5:  # noqa: PLR2004 (between one and two)
        return None
    return Finding(
        "double_begin",
        f"Prompts have {start(begins):.2g} begin tokens in front; one is usual.",
        "critical",
        int(begins.steps[0]),
        (f"prompt/begin_tokens: {start(begins):.3g}",),
        tuple(samples[:1]),
        "data.chat",
        "false",
    )


def no_end_token(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Hardly any completion has an end token. Source: TRL #1623, torchtune #949."""
    ends = metrics["completion/eos_frac"].means()
    if not len(ends) or ends.values[-1] >= NEVER:
        return None
    cut = metrics["completion/truncated_frac"]
    stopped = bool(config.get("model.sampling.stop"))
    if stopped and lately(cut) < CUT:
        return None
    limit = config.get("model.max_completion_length")
    return Finding(
        "no_end_token",
        f"Only {ends.values[-1]:.0%} of the completions end with an end token.",
        "critical",
        first_of(ends, ends.values < NEVER),
        (
            both("completion/eos_frac", metrics["completion/eos_frac"]),
            "either the model never learned to end (padding token = end token in its supervised "
            "training), or the limit is below what any answer needs: the samples tell which",
        ),
        cut_off(samples),
        "model.max_completion_length",
        str(2 * int(limit)) if limit else "",
    )


def truncated(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The length limit cuts completions off. Source: verl's best practices; TRL #5697."""
    share = metrics["completion/truncated_frac"].means()
    if not len(share) or share.values[-1] < CUT:
        return None
    limit = config.get("model.max_completion_length")
    return Finding(
        "truncated",
        f"The length limit cuts off {share.values[-1]:.0%} of the completions.",
        "critical" if share.values[-1] >= CUT_OFTEN else "warning",
        first_of(share, share.values >= CUT),
        (both("completion/truncated_frac", metrics["completion/truncated_frac"]),),
        cut_off(samples),
        "model.max_completion_length",
        str(2 * int(limit)) if limit else "",
    )


def copies(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The completions of a group are the same from the start. Source: TRL #3452, unsloth #2291."""
    unique, equal = metrics["completion/unique_frac"], metrics["reward/zero_variance_groups_frac"]
    temperature = config.number("model.sampling.temperature", 1.0)
    size = config.number("model.group_size", 8)
    alone = np.mean(unique.first()) < 1 / size + 1 / 8
    if not alone or np.mean(equal.first()) < MUCH or temperature >= COLD:
        return None
    return Finding(
        "copies",
        f"The {size:.0f} completions of a prompt are copies of each other.",
        "critical",
        int(unique.steps[0]),
        (
            f"completion/unique_frac: {np.mean(unique.first()):.2f} at the start "
            f"(1 of {size:.0f} is {1 / size:.2f})",
            f"model.sampling.temperature: {temperature:g}",
        ),
        tuple(samples[:3]),
        "model.sampling.temperature",
        "1.0",
    )


def too_hard(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """No completion of most prompts is right. Source: TRL #3857, DAPO arXiv:2503.14476."""
    pairs = metrics["reward/all_incorrect_frac"], metrics["reward/zero_variance_groups_frac"]
    useless = Series(pairs[0].steps, np.minimum(pairs[0].values, aligned(pairs[1], pairs[0])))
    share = useless.means()
    if not len(share) or share.values[-1] < MUCH:
        return None
    return Finding(
        "too_hard",
        f"In {share.values[-1]:.0%} of the groups no completion is right: they teach nothing.",
        "critical" if share.values[-1] >= MOST else "warning",
        first_of(share, share.values >= MUCH),
        tuple(
            both(name, metrics[name])
            for name in ("reward/all_incorrect_frac", "reward/correct_frac")
        ),
        tuple(samples[-3:]),
        "model.dynamic_sampling_attempts",
        "4",
    )


def too_easy(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """From the start all completions of most prompts are right. Source: DAPO, arXiv:2503.14476."""
    share = metrics["reward/all_correct_frac"]
    equal = np.mean(metrics["reward/zero_variance_groups_frac"].first())
    if min(np.mean(share.first()), equal) < MOST:
        return None
    return Finding(
        "too_easy",
        f"From the start {np.mean(share.first()):.0%} of the groups are right throughout: there is "
        "little to learn.",
        "warning",
        int(share.steps[0]),
        (both("reward/all_correct_frac", share),),
        tuple(samples[:1]),
        "model.dynamic_sampling_attempts",
        "4",
    )


def no_signal(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Most groups are equal from the start. Source: TRL #3857, ms-swift #4570."""
    equal, reward = metrics["reward/zero_variance_groups_frac"], metrics["reward/mean"]
    from_start = np.mean(equal.first())
    if from_start < MOST or lately(equal) < MOST or trend(reward).rose:
        return None
    return Finding(
        "no_signal",
        f"{from_start:.0%} of the groups have equal rewards from the start: they teach nothing.",
        "critical",
        int(equal.steps[0]),
        (both("reward/zero_variance_groups_frac", equal), both("reward/mean", reward)),
        tuple(samples[:3]),
        "model.dynamic_sampling_attempts",
        "4",
    )


def memorised(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Training prompts are known by heart, held-out ones are not. Source: ConvSearch-R1 #6."""
    name = metrics.success()
    passes, train = metrics["data/epoch"], metrics["reward/correct_frac"]
    held_out = metrics[name]
    if not name or float(passes.values[-1]) < PASSES:
        return None
    gap = lately(train) - float(held_out.known.values[-1])
    error = lately(metrics[f"{name}_high"], 1) - float(held_out.known.values[-1])
    if not gap > GAP + error:
        return None
    return Finding(
        "memorised",
        f"The training prompts are answered {gap:.0%} better than held-out ones.",
        "warning",
        int(passes.steps[np.argmax(passes.values >= PASSES)]),
        (
            f"data/epoch: {passes.values[-1]:.3g}",
            f"reward/correct_frac: {lately(train):.2f} lately, {name}: "
            f"{held_out.known.values[-1]:.2f}",
        ),
        (),
        "model.max_iterations",
        str(int(passes.steps[np.argmax(passes.values >= PASSES)])),
    )


def cut_off(samples: Rows) -> tuple[dict[str, Any], ...]:
    """Late samples that the limit cut off."""
    return tuple([row for row in samples if row.get("truncated")][-3:])


def first_of(means: Series, held: Any) -> int:
    """Iteration in which what holds of a mean of ten began; the first where it held at once."""
    since = means.since(held)
    return max(1, since - EARLY + 1 if since == int(means.steps[0]) else since - LAG)


def aligned(series: Series, other: Series) -> Any:
    """Values of a series at the iterations of another one, 0 where it has none."""
    known = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    return np.array([known.get(step, 0.0) for step in other.steps.tolist()])
