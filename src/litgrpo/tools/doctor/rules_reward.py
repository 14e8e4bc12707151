"""Rules about the learning signal: prompts, groups, completions that do not end, rewards.

Every rule is a function of a `RunLog`. Thresholds were fixed on one half of the labelled runs and
measured on the other; see docs/reference/doctor.md. The functions at the end are shared with
`rules_policy`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.run import (
    WINDOW,
    MetricSeries,
    RunConfig,
    RunLog,
    RunMetrics,
    Samples,
    measure_trend,
)

MANY_GROUPS, MOST_GROUPS = 0.5, 0.75  # fractions of groups: warning, critical
TRUNCATED, OFTEN_TRUNCATED = 0.1, 0.25  # fractions of completions: warning, critical
HARDLY_ANY_END = 0.05  # fraction of completions
MIN_EPOCHS, ACCURACY_GAP = 3.0, 0.2  # of overfitting
LOW_TEMPERATURE = 0.7
FAILED, OFTEN_FAILED = 0.05, 0.2  # fractions of completions: warning, critical
LONG_WINDOW = 20  # iterations in which a component must have no spread
FULL_REWARD = 0.95
DOMINATING_SHARE, CONFLICT_COSINE = 0.9, -0.5
CONTRADICTED, MIN_CONTRADICTED = 0.1, 3  # fraction and number of samples
CORRECT_LOST = 0.08  # correct completions as a fraction of all
GAINED = 0.1  # fraction of the incorrect completions that became correct


# --- prompts and groups ---


def check_double_begin(run: RunLog) -> Finding | None:
    """Find prompts with two begin tokens. Source: open-r1 #462, vllm #27515."""
    begin_tokens = run.metrics["prompt/begin_tokens"]
    if begin_tokens.start_mean < 1.5:  # noqa: PLR2004 (between one and two)
        return None
    return Finding(
        rule="double_begin",
        problem=f"Prompts start with {begin_tokens.start_mean:.2g} begin tokens; expected 1.",
        severity="critical",
        first_iteration=int(begin_tokens.steps[0]),
        evidence=(f"prompt/begin_tokens: {begin_tokens.start_mean:.3g}",),
        samples=tuple(run.samples[:1]),
        setting="data.chat",
        value="false",
    )


def check_no_end_token(run: RunLog) -> Finding | None:
    """Find completions without an end token. Source: TRL #1623, torchtune #949."""
    metrics, config = run.metrics, run.config
    ended = metrics["completion/eos_frac"].moving_average()
    if not len(ended) or ended.values[-1] >= HARDLY_ANY_END:
        return None
    # A stop sequence ends a completion without the end token.
    has_stop = bool(config.get("model.sampling.stop"))
    if has_stop and metrics["completion/truncated_frac"].recent_mean() < TRUNCATED:
        return None
    return Finding(
        rule="no_end_token",
        problem=f"Only {ended.values[-1]:.0%} of the completions end with an end token.",
        severity="critical",
        first_iteration=ended.onset(ended.values < HARDLY_ANY_END),
        evidence=(
            metrics["completion/eos_frac"].describe_change("completion/eos_frac"),
            "either the model never learned to stop (padding token = end token in supervised "
            "training), or the length limit is below what any answer needs; the samples show which",
        ),
        samples=_pick_truncated(run.samples),
        setting="model.max_completion_length",
        value=_double_length(config),
    )


def check_truncation(run: RunLog) -> Finding | None:
    """Find completions cut off by the length limit. Source: verl's best practices; TRL #5697."""
    truncated = run.metrics["completion/truncated_frac"].moving_average()
    if not len(truncated) or truncated.values[-1] < TRUNCATED:
        return None
    return Finding(
        rule="truncated",
        problem=f"The length limit cuts off {truncated.values[-1]:.0%} of the completions.",
        severity="critical" if truncated.values[-1] >= OFTEN_TRUNCATED else "warning",
        first_iteration=truncated.onset(truncated.values >= TRUNCATED),
        evidence=describe_changes(run.metrics, "completion/truncated_frac"),
        samples=_pick_truncated(run.samples),
        setting="model.max_completion_length",
        value=_double_length(run.config),
    )


def _pick_truncated(samples: Samples) -> Samples:
    return tuple([row for row in samples if row.get("truncated")][-3:])


def _double_length(config: RunConfig) -> str:
    limit = config.get("model.max_completion_length")
    return str(2 * int(limit)) if limit else ""


def check_duplicates(run: RunLog) -> Finding | None:
    """Find groups of identical completions. Source: TRL #3452, unsloth #2291."""
    unique = run.metrics["completion/unique_frac"]
    zero_variance = run.metrics["reward/zero_variance_groups_frac"]
    temperature = run.config.number("model.sampling.temperature", 1.0)
    group_size = run.config.number("model.group_size", 8)
    # With one distinct completion per group, unique_frac is 1 / group_size.
    nearly_one = np.mean(unique.first()) < 1 / group_size + 1 / 8
    if temperature >= LOW_TEMPERATURE or not nearly_one:
        return None
    if np.mean(zero_variance.first()) < MANY_GROUPS:
        return None
    return Finding(
        rule="duplicate_completions",
        problem=f"The {group_size:.0f} completions of a prompt are identical.",
        severity="critical",
        first_iteration=int(unique.steps[0]),
        evidence=(
            f"completion/unique_frac: {np.mean(unique.first()):.2f} at the start "
            f"(1 of {group_size:.0f} is {1 / group_size:.2f})",
            f"model.sampling.temperature: {temperature:g}",
        ),
        samples=tuple(run.samples[:3]),
        setting="model.sampling.temperature",
        value="1.0",
    )


def check_too_hard(run: RunLog) -> Finding | None:
    """Find prompts with no correct completion. Source: TRL #3857, DAPO arXiv:2503.14476."""
    incorrect = run.metrics["reward/all_incorrect_frac"]
    zero_variance = run.metrics["reward/zero_variance_groups_frac"]
    # Groups that are all incorrect still give a gradient if their rewards differ.
    # An iteration that logs only one of them, because nothing was scored, says nothing.
    steps, own, other = np.intersect1d(incorrect.steps, zero_variance.steps, return_indices=True)
    useless = np.minimum(incorrect.values[own], zero_variance.values[other])
    frac = MetricSeries(steps, useless).moving_average()
    if not len(frac) or frac.values[-1] < MANY_GROUPS:
        return None
    return Finding(
        rule="too_hard",
        problem=f"In {frac.values[-1]:.0%} of groups every completion is wrong, so they give no "
        "gradient.",
        severity="critical" if frac.values[-1] >= MOST_GROUPS else "warning",
        first_iteration=frac.onset(frac.values >= MANY_GROUPS),
        evidence=describe_changes(run.metrics, "reward/all_incorrect_frac", "reward/correct_frac"),
        samples=tuple(run.samples[-3:]),
        setting="model.dynamic_sampling_attempts",
        value="4",
    )


def check_too_easy(run: RunLog) -> Finding | None:
    """Find prompts that are solved from the start. Source: DAPO, arXiv:2503.14476."""
    correct = run.metrics["reward/all_correct_frac"]
    zero_variance = np.mean(run.metrics["reward/zero_variance_groups_frac"].first())
    if min(np.mean(correct.first()), zero_variance) < MOST_GROUPS:
        return None
    return Finding(
        rule="too_easy",
        problem=f"In {np.mean(correct.first()):.0%} of groups every completion is correct from the "
        "start, so they give no gradient.",
        severity="warning",
        first_iteration=int(correct.steps[0]),
        evidence=describe_changes(run.metrics, "reward/all_correct_frac"),
        samples=tuple(run.samples[:1]),
        setting="model.dynamic_sampling_attempts",
        value="4",
    )


def check_no_signal(run: RunLog) -> Finding | None:
    """Find groups without reward variance from the start. Source: TRL #3857, ms-swift #4570."""
    zero_variance = run.metrics["reward/zero_variance_groups_frac"]
    at_start = np.mean(zero_variance.first())
    if at_start < MOST_GROUPS or zero_variance.recent_mean() < MOST_GROUPS:
        return None
    if measure_trend(run.metrics["reward/mean"]).rose:
        return None
    return Finding(
        rule="no_signal",
        problem=f"{at_start:.0%} of groups have zero reward variance from the start, so they give "
        "no gradient.",
        severity="critical",
        first_iteration=int(zero_variance.steps[0]),
        evidence=describe_changes(run.metrics, "reward/zero_variance_groups_frac", "reward/mean"),
        samples=tuple(run.samples[:3]),
        setting="model.dynamic_sampling_attempts",
        value="4",
    )


def check_overfitting(run: RunLog) -> Finding | None:
    """Find training prompts learned by heart. Source: ConvSearch-R1 #6."""
    name = run.metrics.held_out_accuracy()
    epochs, train = run.metrics["data/epoch"], run.metrics["reward/correct_frac"]
    if not name or float(epochs.values[-1]) < MIN_EPOCHS:
        return None
    held_out = float(run.metrics[name].finite.values[-1])
    gap = train.recent_mean() - held_out
    error = run.metrics[f"{name}_high"].recent_mean(1) - held_out
    if not gap > ACCURACY_GAP + error:  # also false if there is no upper bound, which gives NaN
        return None
    since = int(epochs.steps[np.argmax(epochs.values >= MIN_EPOCHS)])
    return Finding(
        rule="overfitting",
        problem=f"Accuracy on training prompts is {gap:.0%} above that on held-out prompts.",
        severity="warning",
        first_iteration=since,
        evidence=(
            f"data/epoch: {epochs.values[-1]:.3g}",
            f"reward/correct_frac: {train.recent_mean():.2f} recently, {name}: {held_out:.2f}",
        ),
        setting="model.max_iterations",
        value=str(since),
    )


# --- rewards ---


def check_failed_rewards(run: RunLog) -> Finding | None:
    """Find completions without a reward. Source: TRL #3714."""
    failed = run.metrics["reward/failed_frac"].moving_average()
    if not len(failed) or failed.values[-1] < FAILED:
        return None
    rows = [row for row in run.samples if row.get("reward") is None]
    return Finding(
        rule="rewards_fail",
        problem=f"{failed.values[-1]:.0%} of the completions have no reward.",
        severity="critical" if failed.values[-1] >= OFTEN_FAILED else "warning",
        first_iteration=failed.onset(failed.values >= FAILED),
        evidence=describe_changes(run.metrics, "reward/failed_frac"),
        samples=tuple(rows[-3:]),
        setting="model.rewards",
    )


def check_contradictions(run: RunLog) -> Finding | None:
    """Find samples that contradict the correctness reward. Source: arXiv:2505.22203; NeMo-RL #3635.

    Three kinds: a completion that equals the reference answer has reward 0, one that lacks the
    reference answer has reward 1, or identical completions of a prompt have different rewards.
    """
    component = correctness_component(run)
    rows = [
        row
        for row in run.samples
        if "messages" not in row and _component_reward(row, component) is not None
    ]
    contradictions = _find_contradictions(rows, component)
    if len(contradictions) < max(MIN_CONTRADICTED, CONTRADICTED * len(rows)):
        return None
    against = [row for row, _ in contradictions]
    return Finding(
        rule="reward_contradicts",
        problem=f"The reward {component!r} contradicts {len(against)} of {len(rows)} samples.",
        severity="critical",
        first_iteration=int(min(row.get("iteration", 1) for row in against)),
        evidence=tuple(sorted({reason for _, reason in contradictions})),
        samples=tuple(against[:3]),
        setting=f"model.rewards.{component}.function",
    )


def _find_contradictions(
    rows: Iterable[dict[str, Any]], component: str
) -> list[tuple[dict[str, Any], str]]:
    """Return rows that contradict a reward, each with the reason."""
    rows = list(rows)
    rewards = defaultdict(set)
    for row in rows:
        completion = row.get("prompt"), row.get("completion")
        rewards[completion].add(_component_reward(row, component))
    found = []
    for row in rows:
        answer = str(row.get("columns", {}).get("answer") or "")
        text = _letters_and_digits(str(row.get("completion", "")))
        reward = _component_reward(row, component)
        if len(rewards[row.get("prompt"), row.get("completion")]) > 1:
            found.append((row, "identical completions of a prompt have different rewards"))
        elif answer and reward == 0 and text == _letters_and_digits(answer):
            found.append((row, "a completion that equals the reference answer has reward 0"))
        elif reward == 1 and any(_letters_and_digits(word) not in text for word in answer.split()):
            found.append((row, "a completion without the reference answer has reward 1"))
    return found


def _letters_and_digits(text: str) -> str:
    return re.sub(r"\W+", "", text.casefold())


def _component_reward(row: dict[str, Any], component: str) -> float | None:
    value = row.get("rewards", {}).get(component)
    return float(value) if isinstance(value, int | float) else None


def check_constant_rewards(run: RunLog) -> Finding | None:
    """Find a component with the same low reward for every completion. Source: open-r1 #235."""
    for name in run.metrics.reward_components():
        spread, mean = run.metrics[f"reward/{name}_std"], run.metrics[f"reward/{name}"]
        weight = run.config.number(f"model.rewards.{name}.weight", 1.0)
        constant = len(spread.finite) >= LONG_WINDOW and not np.any(spread.last(LONG_WINDOW))
        if not constant or not weight or mean.recent_mean() >= FULL_REWARD:
            continue
        nonzero = np.flatnonzero(spread.finite.values)
        return Finding(
            rule="constant_reward",
            problem=f"The reward {name!r} is {mean.recent_mean():.3g} for every completion.",
            severity="warning",
            first_iteration=int(spread.finite.steps[nonzero[-1] + 1 if len(nonzero) else 0]),
            evidence=(f"reward/{name}_std: 0 in the last {LONG_WINDOW} iterations",),
            samples=tuple(run.samples[-3:]),
            setting=f"model.rewards.{name}.function",
        )
    return None


def check_dominating_reward(run: RunLog) -> Finding | None:
    """Find a component that alone decides the advantages, other than correctness. Source: GDPO."""
    correctness = correctness_component(run)
    if accuracy_rose(run.metrics):
        return None
    for name in run.metrics.reward_components():
        share = run.metrics[f"reward/{name}_share"]
        if name == correctness or len(share.finite) < WINDOW:  # no share where nothing differs
            continue
        if np.mean(share.first(LONG_WINDOW)) < DOMINATING_SHARE:
            continue
        weight = run.config.number(f"model.rewards.{name}.weight", 1.0)
        return Finding(
            rule="dominating_reward",
            problem=f"The reward {name!r} alone decides the advantages; {correctness!r} has no "
            "effect.",
            severity="warning",
            first_iteration=int(share.steps[0]),
            evidence=describe_changes(run.metrics, f"reward/{name}_share", "reward/correct_frac"),
            samples=tuple(run.samples[-3:]),
            setting=f"model.rewards.{name}.weight",
            value=f"{weight / 10:g}",
        )
    return None


def check_conflicting_rewards(run: RunLog) -> Finding | None:
    """Find two components that prefer opposite completions. Source: GDPO, arXiv:2601.05242."""
    if accuracy_rose(run.metrics):
        return None
    for name in sorted(run.metrics.series):
        cosine = run.metrics[name]
        if not name.startswith("reward/cosine_") or len(cosine.finite) < WINDOW:
            continue
        if cosine.recent_mean(LONG_WINDOW) < CONFLICT_COSINE:
            return Finding(
                rule="conflicting_rewards",
                problem="Two rewards prefer opposite completions "
                f"({name.removeprefix('reward/cosine_')}).",
                severity="warning",
                first_iteration=int(cosine.steps[0]),
                evidence=(cosine.describe_change(name),),
                samples=tuple(run.samples[-3:]),
                setting="model.rewards",
            )
    return None


def check_format_only(run: RunLog) -> Finding | None:
    """Find runs that learn the format and not the answer. Source: open-r1 #255, TRL #3903."""
    correctness = correctness_component(run)
    if accuracy_rose(run.metrics):
        return None
    for name in run.metrics.reward_components():
        reward = run.metrics[f"reward/{name}"]
        if (
            name == correctness
            or reward.recent_mean() < FULL_REWARD
            or not measure_trend(reward).rose
        ):
            continue
        averages = reward.moving_average()
        return Finding(
            rule="format_only",
            problem=f"The reward {name!r} reached its maximum, and correct completions are not "
            "more frequent.",
            severity="warning",
            first_iteration=averages.onset(averages.values >= FULL_REWARD),
            evidence=describe_changes(run.metrics, f"reward/{name}", "reward/correct_frac"),
            samples=tuple(run.samples[-3:]),
            setting=f"model.rewards.{name}.weight",
            value="0.1",
        )
    return None


def check_reward_hacking(run: RunLog) -> Finding | None:
    """Find a rising reward with fewer correct completions.

    Source: open-r1 #407, arXiv:2606.04923.
    """
    metrics = run.metrics
    reward, correct = (
        measure_trend(metrics["reward/mean"]),
        measure_trend(metrics["reward/correct_frac"]),
    )
    fewer = correct.fell and correct.change < -CORRECT_LOST
    if not reward.rose or not (fewer or _held_out_accuracy_fell(metrics)):
        return None
    averages = metrics["reward/correct_frac"].moving_average()
    below = averages.values < correct.first - CORRECT_LOST
    # The component to blame is one that rose, other than correctness.
    rising = [
        name
        for name in metrics.reward_components()
        if measure_trend(metrics[f"reward/{name}"]).rose and name != correctness_component(run)
    ]
    rising = rising or list(run.config.get("model.rewards", {}))
    return Finding(
        rule="reward_hacking",
        problem=f"The reward rose from {reward.first:.3g} to {reward.last:.3g} while correct "
        "completions became less frequent.",
        severity="critical",
        first_iteration=averages.onset(below)
        if below.any()
        else int(metrics["reward/mean"].steps[-1]),
        evidence=describe_changes(metrics, "reward/mean", "reward/correct_frac"),
        samples=tuple(sorted(_keep_scored(run.samples), key=lambda row: -row["reward"])[:3]),
        setting=f"model.rewards.{rising[0]}.weight" if rising else "model.rewards",
        value="0.1" if rising else "",
    )


def _keep_scored(samples: Samples) -> Samples:
    return tuple(row for row in samples if row.get("reward") is not None)


def _held_out_accuracy_fell(metrics: RunMetrics) -> bool:
    """Return whether the intervals of the first and the last evaluation do not overlap."""
    name = metrics.held_out_accuracy()
    lows, highs = metrics[f"{name}_low"].finite.values, metrics[f"{name}_high"].finite.values
    return min(len(lows), len(highs)) > 1 and bool(highs[-1] < lows[0])


# --- shared with rules_policy ---


def accuracy_rose(metrics: RunMetrics) -> bool:
    """Return whether correct completions became notably more frequent, beyond noise.

    Many patterns are normal in a run that improves, so most rules ask this first. Runs that do not
    log correctness are judged by their reward.
    """
    correct = metrics["reward/correct_frac"]
    if len(correct.finite) <= 1:
        return measure_trend(metrics["reward/mean"]).rose
    trend = measure_trend(correct)
    return trend.last > FULL_REWARD or (trend.rose and trend.change > GAINED * (1 - trend.first))


def correctness_component(run: RunLog) -> str:
    """Return the reward component that measures correctness.

    It is that of the config; without one, the first that was logged.
    """
    names = [*run.metrics.reward_components(), ""]
    return run.config.success_rewards.get("", names[0])


def describe_changes(metrics: RunMetrics, *names: str) -> tuple[str, ...]:
    """Describe the change of each metric from the start to recent iterations."""
    return tuple(metrics[name].describe_change(name) for name in names)
