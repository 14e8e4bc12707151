"""The rules: what is wrong with a run, since which iteration, and what to change.

A check is a function of a `Run` that returns what is wrong, or None. `RULES` has a row per rule.
Thresholds were fixed on one half of the labelled runs and measured on the other; see
docs/reference/tools.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from litgrpo.runs.config import is_number
from litgrpo.runs.doctor.finding import Finding, Severity
from litgrpo.runs.run import Row, Run

WINDOW = 10  # iterations of a moving average; the start and the end of a run are judged by as many
SHORT_WINDOW = 3  # the same for metrics whose start may be over after a few iterations
LONG_WINDOW = 20  # iterations in which a component must have no spread
MEAN_LAG = 2  # iterations by which the mean of WINDOW values crosses a threshold late
SIGNIFICANT_SIGMAS = 3.0  # standard errors from which on a change is more than noise
MANY_GROUPS, MOST_GROUPS = 0.5, 0.75  # fractions of groups: warning, critical
TRUNCATED, OFTEN_TRUNCATED = 0.1, 0.25  # fractions of completions: warning, critical
FAILED, OFTEN_FAILED = 0.05, 0.2  # fractions of completions: warning, critical
HARDLY_ANY_END = 0.05  # fraction of completions
TWO_BEGIN_TOKENS = 1.5  # between one and two
LOW_TEMPERATURE = 0.7
MIN_EPOCHS, ACCURACY_GAP = 3.0, 0.2  # of overfitting
FULL_REWARD = 0.95
DOMINATING_SHARE, CONFLICT_COSINE = 0.9, -0.5
CONTRADICTED, MIN_CONTRADICTED = 0.1, 3  # fraction and number of samples
CORRECT_LOST = 0.08  # correct completions as a fraction of all
GAINED = 0.1  # fraction of the incorrect completions that became correct
SKIPPED_STEPS = 3  # critical
NO_MOVEMENT, SLOW_MOVEMENT = 1e-6, 3e-5  # relative change of the weights: critical, warning
STANDSTILL = 3e-8  # a twentieth of float32's at the lowest usual learning rate, 1e-6
LOW_PRECISION = ("bfloat16", "float16")
MOVEMENT_ITERATIONS = 30
ROUNDING = 1e-3  # relative to a reward
REWARD_DROP, DROP_SIGMAS = 0.4, 4.0  # fraction of what was reached; standard errors
ROOT_OF_BATCH = 8.0  # square root of the completions that a first reward is at least the mean of
MISMATCH, LARGE_MISMATCH = 0.05, 0.15  # nats per token: warning, critical
ENTROPY_GROWTH, ENTROPY_GAIN = 1.5, 0.3  # times the entropy at the start; nats above it
ENTROPY_LEFT = 0.1  # times the entropy at the start
# Requirements of a rule that are not the name of one metric.
HELD_OUT, SAMPLES = "val/", "samples"
COMPONENTS, COSINES = "reward/<component>_std", "reward/cosine_<component>_<component>"
COSINE = "reward/cosine_"
ZERO_VARIANCE, CORRECT = "reward/zero_variance_groups_frac", "reward/correct_frac"


@dataclass(frozen=True)
class CheckResult:
    """What is wrong with a run, by one check.

    Args:
        problem: one sentence.
        severity: of the finding.
        since: first iteration that shows it.
        evidence: sentences; without them, the changes of the metrics that the rule needs.
        samples: completions that show it; without them, the last three.
        setting: config key to change, if it depends on the run.
        value: value of that setting, if it depends on the run.
    """

    problem: str
    severity: Severity
    since: int
    evidence: tuple[str, ...] = ()
    samples: tuple[Row, ...] | None = None
    setting: str | None = None
    value: str | None = None


Check = Callable[[Run], CheckResult | None]


@dataclass(frozen=True)
class Rule:
    """A rule of the doctor.

    Args:
        name: its name in logs, and the section of docs/reference/tools.md.
        check: returns what is wrong, or None.
        passed: sentence printed if it finds nothing.
        needs: metrics without which it cannot be checked; or `HELD_OUT`, `SAMPLES`, ...
        setting: config key to change; "" if no setting helps.
        value: suggested value of that setting; "" if there is no general one.
        min_iterations: iterations before which it is not checked.
        explains: rules whose findings are symptoms of this one.
    """

    name: str
    check: Check
    passed: str
    needs: tuple[str, ...] = ()
    setting: str = ""
    value: str = ""
    min_iterations: int = 20
    explains: tuple[str, ...] = ()

    def missing(self, run: Run) -> list[str]:
        """Return the requirements that a run does not meet."""
        available: Mapping[str, Any] = {
            HELD_OUT: run.held_out_accuracy,
            SAMPLES: run.samples,
            COMPONENTS: run.reward_components,
            COSINES: [name for name in run.names if name.startswith(COSINE)],
        }
        missing = [name for name in self.needs if not available.get(name, name in run)]
        if not missing and run.iterations < self.min_iterations:
            return [f"{self.min_iterations} iterations"]
        return missing

    def apply(self, run: Run) -> Finding | None:
        """Return the finding with its evidence and the command that makes the change."""
        result = self.check(run)
        if result is None:
            return None
        setting = self.setting if result.setting is None else result.setting
        value = self.value if result.value is None else result.value
        return Finding(
            self.name,
            result.problem,
            result.severity,
            result.since,
            result.evidence or changes(run, *(name for name in self.needs if name in run)),
            tuple(run.samples[-3:]) if result.samples is None else result.samples,
            setting,
            value,
            run.config.fix_command(setting, value),
        )


# --- measures of a series ---


def smooth(series: pd.Series, width: int = WINDOW) -> pd.Series:
    """Average `width` neighbors; each mean has the iteration of its last value."""
    if len(series) < width:
        return series.iloc[:0]
    # Not `rolling`, whose running sum carries rounding errors from window to window.
    windows = np.lib.stride_tricks.sliding_window_view(series.to_numpy(), width)
    return pd.Series(windows.mean(axis=1), series.index[width - 1 :])


def start_mean(series: pd.Series, width: int = SHORT_WINDOW) -> float:
    """Mean of the first values."""
    return float(series.iloc[:width].mean())


def recent_mean(series: pd.Series, width: int = WINDOW) -> float:
    """Mean of the last values."""
    return float(series.iloc[-width:].mean())


def start_of_last_period(condition: pd.Series) -> int:
    """First iteration of the last unbroken period; a single False does not break it.

    Example:
        >>> start_of_last_period(pd.Series([True, False, False, True, False, True]))
        3
    """
    where = np.flatnonzero(condition)
    if not len(where):
        return int(condition.index[-1])
    longest_step = 2  # one False in between
    breaks = [later for earlier, later in pairwise(where) if later - earlier > longest_step]
    return int(condition.index[breaks[-1] if breaks else where[0]])


def onset(condition: pd.Series) -> int:
    """Iteration at which a condition on a moving average of WINDOW began."""
    step = start_of_last_period(condition)
    # If it held for the first mean of all, it began with the run.
    began_with_run = step == int(condition.index[0])
    return max(1, step - (WINDOW - 1 if began_with_run else MEAN_LAG))


def estimate_noise(series: pd.Series) -> float:
    """Standard deviation around a trend, from the differences of neighbors.

    For normal noise of deviation s, a difference of neighbors has deviation s * sqrt(2), and the
    median of its absolute value is 0.6745 * s * sqrt(2). The median ignores outliers.

    Example:
        >>> round(estimate_noise(pd.Series([0.0, 1.0, 0.0, 1.0])), 2)
        1.05
    """
    steps = series.diff().abs().dropna()
    return float(steps.median() / (0.6745 * np.sqrt(2))) if len(steps) else 0.0


def trend(series: pd.Series) -> tuple[float, float, float]:
    """Mean at the start, mean at the end, and the largest change that noise explains."""
    count = max(1, min(WINDOW, len(series) // 2))
    error = estimate_noise(series) * float(np.sqrt(2 / count))
    first, last = start_mean(series, count), recent_mean(series, count)
    return first, last, SIGNIFICANT_SIGMAS * error


def rose(series: pd.Series) -> bool:
    """Whether a metric rose by more than noise explains."""
    first, last, explained = trend(series)
    return last - first > explained


def fell(series: pd.Series) -> bool:
    """Whether a metric fell by more than noise explains."""
    return rose(-series)


def accuracy_rose(run: Run) -> bool:
    """Whether correct completions became notably more frequent, beyond noise.

    Many patterns are normal in a run that improves, so most rules ask this. Runs that do not log
    correctness are judged by their reward.
    """
    correct = run[CORRECT]
    if len(correct) <= 1:
        return rose(run["reward/mean"])
    first, last, _ = trend(correct)
    return last > FULL_REWARD or (rose(correct) and last - first > GAINED * (1 - first))


def changes(run: Run, *names: str) -> tuple[str, ...]:
    """Describe the change of each metric from the start to recent iterations."""
    return tuple(
        f"{name}: {start_mean(run[name]):.3g} at the start, {recent_mean(run[name]):.3g} recently"
        for name in names
    )


def scale_lr(run: Run, factor: float) -> str:
    """Return the learning rate times a factor; "" if it is not known."""
    lr = run.config.get("model.optimizer.lr")
    return f"{float(lr) * factor:g}" if is_number(lr) else ""


# --- prompts and groups ---


def check_double_begin(run: Run) -> CheckResult | None:
    """Two begin tokens. Source: open-r1 #462, vllm #27515."""
    begin_tokens = run["prompt/begin_tokens"]
    count = start_mean(begin_tokens)
    if count < TWO_BEGIN_TOKENS:
        return None
    problem = f"Prompts start with {count:.2g} begin tokens; expected 1."
    return CheckResult(
        problem, "critical", int(begin_tokens.index[0]), samples=tuple(run.samples[:1])
    )


def check_no_end_token(run: Run) -> CheckResult | None:
    """Completions without an end token. Source: TRL #1623, torchtune #949."""
    name, truncated = "completion/eos_frac", run["completion/truncated_frac"]
    ended = smooth(run[name])
    if ended.empty or ended.iloc[-1] >= HARDLY_ANY_END:
        return None
    # A stop sequence ends a completion without the end token.
    if run.config.get("model.sampling.stop") and recent_mean(truncated) < TRUNCATED:
        return None
    return CheckResult(
        f"Only {ended.iloc[-1]:.0%} of the completions end with an end token.",
        "critical",
        onset(ended < HARDLY_ANY_END),
        (
            *changes(run, name),
            "either the model never learned to stop (padding token = end token in supervised "
            "training), or the length limit is below what any answer needs; the samples show which",
        ),
        _pick_truncated(run),
        value=_double_length(run),
    )


def check_truncation(run: Run) -> CheckResult | None:
    """Completions cut off by the length limit. Source: verl's best practices; TRL #5697."""
    problem = "The length limit cuts off {:.0%} of the completions."
    return find_above(
        run["completion/truncated_frac"],
        (TRUNCATED, OFTEN_TRUNCATED),
        problem,
        samples=_pick_truncated(run),
        value=_double_length(run),
    )


def find_above(
    fractions: pd.Series, limits: tuple[float, float], problem: str, **parts: Any
) -> CheckResult | None:
    """Find a fraction whose moving average ends above a limit: warning, critical."""
    means = smooth(fractions)
    if means.empty or means.iloc[-1] < limits[0]:
        return None
    severity: Severity = "critical" if means.iloc[-1] >= limits[1] else "warning"
    return CheckResult(problem.format(means.iloc[-1]), severity, onset(means >= limits[0]), **parts)


def _pick_truncated(run: Run) -> tuple[Row, ...]:
    return tuple([row for row in run.samples if row.get("truncated")][-3:])


def _double_length(run: Run) -> str:
    limit = run.config.get("model.max_completion_length")
    return str(2 * limit) if isinstance(limit, int) and is_number(limit) else ""


def check_duplicates(run: Run) -> CheckResult | None:
    """Groups of identical completions. Source: TRL #3452, unsloth #2291."""
    unique = run["completion/unique_frac"]
    temperature = run.config.number("model.sampling.temperature", 1.0)
    group_size = max(1.0, run.config.number("model.group_size", 8))
    # With one distinct completion per group, unique_frac is 1 / group_size.
    nearly_one = start_mean(unique, WINDOW) < 1 / group_size + 1 / 8
    if temperature >= LOW_TEMPERATURE or not nearly_one:
        return None
    if start_mean(run[ZERO_VARIANCE], WINDOW) < MANY_GROUPS:
        return None
    problem = f"The {group_size:.0f} completions of a prompt are identical"
    return CheckResult(
        f"{problem}: the temperature is {temperature:g}.",
        "critical",
        int(unique.index[0]),
        samples=tuple(run.samples[:3]),
    )


def check_too_hard(run: Run) -> CheckResult | None:
    """Prompts with no correct completion. Source: TRL #3857, DAPO arXiv:2503.14476."""
    # Groups that are all incorrect still give a gradient if their rewards differ.
    # An iteration that logs only one of them, because nothing was scored, does not count.
    names = ("reward/all_incorrect_frac", ZERO_VARIANCE)
    useless = pd.concat([run[name] for name in names], axis=1, join="inner").min(axis=1)
    problem = "In {:.0%} of groups every completion is wrong, so they give no gradient."
    return find_above(useless, (MANY_GROUPS, MOST_GROUPS), problem)


def check_too_easy(run: Run) -> CheckResult | None:
    """Prompts that are solved from the start. Source: DAPO, arXiv:2503.14476."""
    correct = run["reward/all_correct_frac"]
    solved = start_mean(correct, WINDOW)
    if min(solved, start_mean(run[ZERO_VARIANCE], WINDOW)) < MOST_GROUPS:
        return None
    return CheckResult(
        f"In {solved:.0%} of groups every completion is correct from the start, so they give no "
        "gradient.",
        "warning",
        int(correct.index[0]),
        samples=tuple(run.samples[:1]),
    )


def check_no_signal(run: Run) -> CheckResult | None:
    """Groups without reward variance from the start. Source: TRL #3857, ms-swift #4570."""
    zero_variance = run[ZERO_VARIANCE]
    at_start = start_mean(zero_variance, WINDOW)
    if min(at_start, recent_mean(zero_variance)) < MOST_GROUPS or rose(run["reward/mean"]):
        return None
    return CheckResult(
        f"{at_start:.0%} of groups have zero reward variance from the start, so they give no "
        "gradient.",
        "critical",
        int(zero_variance.index[0]),
        samples=tuple(run.samples[:3]),
    )


def check_overfitting(run: Run) -> CheckResult | None:
    """Training prompts learned by heart. Source: ConvSearch-R1 #6."""
    name, epochs = run.held_out_accuracy, run["data/epoch"]
    if epochs.iloc[-1] < MIN_EPOCHS:
        return None
    held_out = float(run[name].iloc[-1])
    gap = recent_mean(run[CORRECT]) - held_out
    error = recent_mean(run[f"{name}_high"], 1) - held_out
    if not gap > ACCURACY_GAP + error:  # also false if there is no upper bound, which gives NaN
        return None
    since = int(epochs.index[np.argmax(epochs >= MIN_EPOCHS)])
    return CheckResult(
        f"Accuracy on training prompts is {gap:.0%} above that on held-out prompts.",
        "warning",
        since,
        changes(run, "data/epoch", CORRECT, name),
        (),
        value=str(since),
    )


# --- rewards ---


def check_failed_rewards(run: Run) -> CheckResult | None:
    """Completions without a reward. Source: TRL #3714."""
    problem = "{:.0%} of the completions have no reward."
    unscored = [row for row in run.samples if row.get("reward") is None]
    return find_above(
        run["reward/failed_frac"], (FAILED, OFTEN_FAILED), problem, samples=tuple(unscored[-3:])
    )


def check_contradictions(run: Run) -> CheckResult | None:
    """Samples that contradict the correctness reward. Source: arXiv:2505.22203; NeMo-RL #3635.

    Three kinds: a completion that equals the reference answer has reward 0, one that lacks the
    reference answer has reward 1, or identical completions of a prompt have different rewards.
    """
    component = run.correctness
    scored = [
        (row, reward)
        for row in run.samples
        if "messages" not in row
        and isinstance(reward := row["rewards"].get(component), int | float)
    ]
    rewards = defaultdict(set)
    for row, reward in scored:
        rewards[row.get("prompt"), row.get("completion")].add(reward)
    against, reasons = [], set()
    for row, reward in scored:
        answer = str(row["columns"].get("answer") or "")
        text = _letters_and_digits(str(row.get("completion", "")))
        if len(rewards[row.get("prompt"), row.get("completion")]) > 1:
            reason = "identical completions of a prompt have different rewards"
        elif answer and reward == 0 and text == _letters_and_digits(answer):
            reason = "a completion that equals the reference answer has reward 0"
        elif reward == 1 and any(_letters_and_digits(word) not in text for word in answer.split()):
            reason = "a completion without the reference answer has reward 1"
        else:
            continue
        against.append(row)
        reasons.add(reason)
    if len(against) < max(MIN_CONTRADICTED, CONTRADICTED * len(scored)):
        return None
    return CheckResult(
        f"The reward {component!r} contradicts {len(against)} of {len(scored)} samples.",
        "critical",
        int(min(row.get("iteration", 1) for row in against)),
        tuple(sorted(reasons)),
        tuple(against[:3]),
        setting=f"model.rewards.{component}.function",
    )


def _letters_and_digits(text: str) -> str:
    return re.sub(r"\W+", "", text.casefold())


def check_constant_rewards(run: Run) -> CheckResult | None:
    """A component with the same low reward for every completion. Source: open-r1 #235."""
    for name in run.reward_components:
        spread, mean = run[f"reward/{name}_std"], recent_mean(run[f"reward/{name}"])
        weight = run.config.number(f"model.rewards.{name}.weight", 1.0)
        constant = len(spread) >= LONG_WINDOW and not spread.iloc[-LONG_WINDOW:].any()
        if not constant or not weight or mean >= FULL_REWARD:
            continue
        nonzero = np.flatnonzero(spread)
        return CheckResult(
            f"The reward {name!r} is {mean:.3g} for every completion.",
            "warning",
            int(spread.index[nonzero[-1] + 1 if len(nonzero) else 0]),
            (f"reward/{name}_std: 0 in the last {LONG_WINDOW} iterations",),
            setting=f"model.rewards.{name}.function",
        )
    return None


def check_dominating_reward(run: Run) -> CheckResult | None:
    """A component that alone decides the advantages, other than correctness. Source: GDPO."""
    for name in run.reward_components:
        share = run[f"reward/{name}_share"]
        if name == run.correctness or len(share) < WINDOW:  # no share where nothing differs
            continue
        if start_mean(share, LONG_WINDOW) < DOMINATING_SHARE or accuracy_rose(run):
            continue
        weight = run.config.number(f"model.rewards.{name}.weight", 1.0)
        return CheckResult(
            f"The reward {name!r} alone decides the advantages; {run.correctness!r} has no effect.",
            "warning",
            int(share.index[0]),
            changes(run, f"reward/{name}_share", CORRECT),
            setting=f"model.rewards.{name}.weight",
            value=f"{weight / 10:g}",
        )
    return None


def check_conflicting_rewards(run: Run) -> CheckResult | None:
    """Two components that prefer opposite completions. Source: GDPO, arXiv:2601.05242."""
    for name in run.names:
        cosine = run[name]
        if not name.startswith(COSINE) or len(cosine) < WINDOW or accuracy_rose(run):
            continue
        if recent_mean(cosine, LONG_WINDOW) < CONFLICT_COSINE:
            pair = name.removeprefix(COSINE)
            return CheckResult(
                f"Two rewards prefer opposite completions ({pair}).",
                "warning",
                int(cosine.index[0]),
                changes(run, name),
            )
    return None


def check_format_only(run: Run) -> CheckResult | None:
    """Runs that learn the format and not the answer. Source: open-r1 #255, TRL #3903."""
    for name in run.reward_components:
        reward = run[f"reward/{name}"]
        is_learned = recent_mean(reward) >= FULL_REWARD and rose(reward)
        if name == run.correctness or not is_learned or accuracy_rose(run):
            continue
        return CheckResult(
            f"The reward {name!r} reached its maximum, and correct completions are not more "
            "frequent.",
            "warning",
            onset(smooth(reward) >= FULL_REWARD),
            changes(run, f"reward/{name}", CORRECT),
            setting=f"model.rewards.{name}.weight",
            value="0.1",
        )
    return None


def check_reward_hacking(run: Run) -> CheckResult | None:
    """A rising reward with fewer correct completions. Source: open-r1 #407, arXiv:2606.04923."""
    reward, correct = run["reward/mean"], run[CORRECT]
    first, last, _ = trend(correct)
    is_rarer = fell(correct) and last - first < -CORRECT_LOST
    if not rose(reward) or not (is_rarer or _held_out_accuracy_fell(run)):
        return None
    below = smooth(correct) < first - CORRECT_LOST
    # The component to blame is one that rose, other than correctness.
    rising = [
        name
        for name in run.reward_components
        if name != run.correctness and rose(run[f"reward/{name}"])
    ]
    blamed = [*rising, *run.config.rewards][:1]
    before, after, _ = trend(reward)
    scored = [row for row in run.samples if row.get("reward") is not None]
    return CheckResult(
        f"The reward rose from {before:.3g} to {after:.3g} while correct completions became less "
        "frequent.",
        "critical",
        onset(below) if below.any() else int(reward.index[-1]),
        samples=tuple(sorted(scored, key=lambda row: -row["reward"])[:3]),
        setting=f"model.rewards.{blamed[0]}.weight" if blamed else None,
        value="0.1" if blamed else "",
    )


def _held_out_accuracy_fell(run: Run) -> bool:
    """Whether the intervals of the first and the last evaluation do not overlap."""
    low, high = (run[f"{run.held_out_accuracy}_{bound}"] for bound in ("low", "high"))
    return min(len(low), len(high)) > 1 and bool(high.iloc[-1] < low.iloc[0])


# --- updates ---


def check_finite(run: Run) -> CheckResult | None:
    """Skipped steps and metrics that are not finite. Source: TRL #3714, verl #2505."""
    skipped = run["optim/skipped_steps"]
    names = ("policy/loss", "optim/grad_norm", "reward/mean")
    logged = [run.metrics[name] for name in names if name in run.metrics]
    not_finite = [series.index[series.abs() == np.inf] for series in logged]
    iterations = [*skipped.index, *(step for steps in not_finite for step in steps)]
    if not iterations:
        return None
    count = int(skipped.iloc[-1]) if len(skipped) else len(iterations)
    return CheckResult(
        f"{count} optimizer steps were skipped because a value was not finite.",
        "critical" if count >= SKIPPED_STEPS else "warning",
        int(min(iterations)),
        (
            f"optim/skipped_steps: {count}",
            "non_finite/ in the run folder has the completions of these steps",
        ),
        (),
        value=scale_lr(run, 0.1),
    )


def check_movement(run: Run) -> CheckResult | None:
    """Weights that hardly change. Source: open-r1 #474, X-R1 #66."""
    change, dtype = run["optim/update_rel"], run.config.get("model.precision.dtype")
    usual, since = float(change.median()), int(change.index[0])
    if len(change) < MOVEMENT_ITERATIONS or usual > SLOW_MOVEMENT:
        return None
    if usual <= STANDSTILL and dtype in LOW_PRECISION:
        # Even if the accuracy happens to be higher than before.
        return CheckResult(
            f"The weights do not change: {dtype} rounds steps of this learning rate away.",
            "critical",
            since,
            samples=(),
            setting="model.precision.dtype",
            value="float32",
        )
    # Small steps do change the output of a pretrained model; then its entropy moves.
    entropy = run["policy/entropy"]
    has_effect = usual > NO_MOVEMENT and len(entropy) > 1 and (rose(entropy) or fell(entropy))
    if has_effect or accuracy_rose(run):
        return None
    return CheckResult(
        "The weights hardly change, and the reward does not improve.",
        "critical" if usual <= NO_MOVEMENT else "warning",
        since,
        samples=(),
        value=scale_lr(run, 100 if usual <= NO_MOVEMENT else 10),
    )


def check_collapse(run: Run) -> CheckResult | None:
    """A reward that fell far below its best and stays there. Source: hello-agents #770."""
    reward = run["reward/mean"]
    means = smooth(reward)
    if len(means) < WINDOW:
        return None
    # A policy may break in its first step, so the very first reward counts as reached.
    best = means.clip(lower=reward.iloc[0]).cummax()
    lowest = min([*run["reward/min"], *reward])
    # Standard error of a mean of WINDOW rewards, at least that of the first batch.
    first_spread = float(run["reward/std"].iloc[:1].sum())
    noise = max(estimate_noise(reward) * np.sqrt(2 / WINDOW), first_spread / ROOT_OF_BATCH)
    threshold = np.maximum(DROP_SIGMAS * noise, ROUNDING * best.abs())
    is_low = best - means > np.maximum(threshold, REWARD_DROP * (best - lowest))
    if not is_low.iloc[-1]:
        return None
    top, now = float(best.iloc[-1]), float(means.iloc[-1])
    # The fall began after the last reward within a third of the way from the best one.
    above = np.flatnonzero(reward > top - (top - now) / 3)
    start = min(above[-1] + 1, len(reward) - 1) if len(above) else 0
    related = ("optim/update_rel", "policy/log_ratio", "policy/entropy")
    return CheckResult(
        f"The reward fell from {top:.3g} to {now:.3g} and has not recovered.",
        "critical",
        int(reward.index[start]),
        changes(run, "reward/mean", *(name for name in related if name in run)),
        value=scale_lr(run, 0.1),
    )


def check_sampler(run: Run) -> CheckResult | None:
    """Log-probabilities that differ between sampler and trainer.

    Source: TRL #5312, AReaL #1290, open-instruct #1473.
    """
    gap = smooth(run["policy/sampler_mismatch"], SHORT_WINDOW)
    if gap.empty or (level := float(gap.iloc[-WINDOW:].median())) < MISMATCH:
        return None
    problem = f"Log-probabilities of sampler and trainer differ by {level:.3g} nats per token"
    if level > 2 * gap.iloc[0]:
        problem += ", and the difference grows: the sampler has outdated weights"
    return CheckResult(
        f"{problem}.",
        "critical" if level >= LARGE_MISMATCH else "warning",
        max(1, start_of_last_period(gap >= MISMATCH) - SHORT_WINDOW + 1),
        samples=(),
    )


def check_entropy_growth(run: Run) -> CheckResult | None:
    """A policy that becomes random. Source: arXiv:2511.05993, rllm #116."""
    entropy = run["policy/entropy"]
    start, means = start_mean(entropy), smooth(entropy)
    limit = max(ENTROPY_GROWTH * start, start + ENTROPY_GAIN)
    if means.empty or means.iloc[-1] < limit or accuracy_rose(run):
        return None
    has_bonus = bool(run.config.number("model.objective.entropy_coef", 0))
    return CheckResult(
        f"The entropy rose from {start:.3g} to {means.iloc[-1]:.3g} nats, and correct completions "
        "are not more frequent.",
        "critical",
        onset(means >= limit),
        setting="model.objective.entropy_coef" if has_bonus else "",
        value="0.0" if has_bonus else "",
    )


def check_entropy_collapse(run: Run) -> CheckResult | None:
    """A policy that repeats one answer, not a better one. Source: arXiv:2505.22617, verl #5953."""
    entropy = run["policy/entropy"]
    limit = ENTROPY_LEFT * start_mean(entropy)
    if recent_mean(entropy) >= limit or not fell(run["completion/unique_frac"]):
        return None
    if accuracy_rose(run):
        return None
    return CheckResult(
        "The policy repeats one answer per prompt, and correct completions are not more frequent.",
        "warning",
        onset(smooth(entropy) < limit),
    )


# --- the table ---

NO_LEARNING = ("too_hard", "no_signal", "nothing_moves", "constant_reward")
ENTROPY = ("entropy_explosion", "entropy_collapse")
TEXTS = ("truncated", "no_end_token")
OF_COMPONENTS = ("conflicting_rewards", "dominating_reward", "format_only")
LR, LENGTH = "model.optimizer.lr", "model.max_completion_length"
MORE_GROUPS = ("model.dynamic_sampling_attempts", "4")
# Causes come first: a finding is shown below the first rule that explains it.
RULES = (
    Rule(
        "not_finite",
        check_finite,
        "All values were finite; no step was skipped.",
        setting=LR,
        min_iterations=3,
        explains=("collapsed", *NO_LEARNING, *ENTROPY, *TEXTS, *OF_COMPONENTS),
    ),
    Rule(
        "sampler_mismatch",
        check_sampler,
        "Sampler and trainer log-probabilities agree.",
        ("policy/sampler_mismatch",),
        *("model.check_invariants", "true"),
        min_iterations=3,
        explains=("collapsed", "reward_hacking", *ENTROPY),
    ),
    Rule(
        "double_begin",
        check_double_begin,
        "Prompts have at most one begin token.",
        ("prompt/begin_tokens",),
        *("data.chat", "false"),
        min_iterations=3,
        explains=("too_hard", "no_signal"),
    ),
    Rule(
        "no_end_token",
        check_no_end_token,
        "Completions end with an end token.",
        ("completion/eos_frac", "completion/truncated_frac"),
        setting=LENGTH,
        min_iterations=10,
        explains=("truncated", *NO_LEARNING),
    ),
    Rule(
        "truncated",
        check_truncation,
        "Few completions reach the length limit.",
        ("completion/truncated_frac",),
        setting=LENGTH,
        min_iterations=10,
        explains=NO_LEARNING,
    ),
    Rule(
        "duplicate_completions",
        check_duplicates,
        "Completions of a group differ.",
        ("completion/unique_frac", ZERO_VARIANCE),
        *("model.sampling.temperature", "1.0"),
        min_iterations=10,
        explains=("too_easy", *NO_LEARNING),
    ),
    Rule(
        "rewards_fail",
        check_failed_rewards,
        "Completions have rewards.",
        ("reward/failed_frac",),
        setting="model.rewards",
        min_iterations=10,
        explains=NO_LEARNING,
    ),
    Rule(
        "reward_contradicts",
        check_contradictions,
        "The sampled completions agree with their correctness reward.",
        (SAMPLES,),
        min_iterations=3,
        explains=("reward_hacking", "collapsed", *OF_COMPONENTS),
    ),
    Rule(
        "conflicting_rewards",
        check_conflicting_rewards,
        "No two rewards prefer opposite completions.",
        (COSINES,),
        setting="model.rewards",
        explains=("dominating_reward", *NO_LEARNING),
    ),
    Rule(
        "too_hard",
        check_too_hard,
        "Most groups have a correct completion, or rewards that differ.",
        ("reward/all_incorrect_frac", ZERO_VARIANCE, CORRECT),
        *MORE_GROUPS,
        min_iterations=10,
        explains=("no_signal", "constant_reward", "nothing_moves"),
    ),
    Rule(
        "too_easy",
        check_too_easy,
        "Not all prompts were solved at the start; groups that become all correct are normal.",
        ("reward/all_correct_frac", ZERO_VARIANCE),
        *MORE_GROUPS,
        min_iterations=10,
        explains=("no_signal", "constant_reward", "nothing_moves"),
    ),
    Rule(
        "no_signal",
        check_no_signal,
        "Rewards differ within groups.",
        (ZERO_VARIANCE, "reward/mean"),
        *MORE_GROUPS,
        explains=("nothing_moves",),
    ),
    Rule(
        "dominating_reward",
        check_dominating_reward,
        "No other reward outweighs correctness, or correct completions become more frequent.",
        ("reward/mean", CORRECT),
        explains=("reward_hacking", "format_only", *TEXTS, *ENTROPY),
    ),
    Rule(
        "reward_hacking",
        check_reward_hacking,
        "Correct completions do not become rarer while the reward rises.",
        ("reward/mean", CORRECT),
        setting="model.rewards",
        explains=("format_only", "too_hard", *TEXTS, *ENTROPY),
    ),
    Rule(
        "format_only",
        check_format_only,
        "Format and answer improve together.",
        ("reward/mean", CORRECT),
    ),
    Rule(
        "constant_reward",
        check_constant_rewards,
        "Every reward component distinguishes completions.",
        (COMPONENTS,),
    ),
    Rule(
        "collapsed",
        check_collapse,
        "The reward is near its best.",
        ("reward/mean",),
        setting=LR,
        explains=(*NO_LEARNING, *ENTROPY, *TEXTS, *OF_COMPONENTS),
    ),
    Rule(
        "entropy_explosion",
        check_entropy_growth,
        "The entropy does not rise.",
        ("policy/entropy", "reward/mean"),
        explains=TEXTS,
    ),
    Rule(
        "entropy_collapse",
        check_entropy_collapse,
        "Falling entropy is normal while correct completions become more frequent.",
        ("policy/entropy", "completion/unique_frac", CORRECT),
        *("model.objective.surrogate.clip_high", "0.28"),
    ),
    Rule(
        "nothing_moves",
        check_movement,
        "The weights change.",
        ("optim/update_rel", "reward/mean"),
        setting=LR,
    ),
    Rule(
        "overfitting",
        check_overfitting,
        "Accuracy on held-out prompts is close to that on training prompts.",
        ("data/epoch", CORRECT, HELD_OUT),
        setting="model.max_iterations",
    ),
)
