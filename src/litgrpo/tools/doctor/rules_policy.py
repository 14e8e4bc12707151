"""Rules about the policy: broken or missing updates, entropy, KL, clipping, and its texts."""

from __future__ import annotations

import numpy as np

from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.rules_reward import accuracy_rose, describe_changes
from litgrpo.tools.doctor.run import (
    SHORT_WINDOW,
    WINDOW,
    MetricSeries,
    RunConfig,
    RunLog,
    estimate_noise,
    measure_trend,
)

SKIPPED_STEPS = 3  # critical
NO_MOVEMENT, SLOW_MOVEMENT = 1e-6, 3e-5  # relative change of the weights: critical, warning
STANDSTILL = 3e-8  # a twentieth of float32's at the lowest usual learning rate, 1e-6
LOW_PRECISION = ("bfloat16", "float16")
MOVEMENT_ITERATIONS = 30
ROUNDING = 1e-3  # relative to a reward
REWARD_DROP, DROP_SIGMAS = 0.4, 4.0  # fraction of what was reached; standard errors
ROOT_OF_BATCH = 8.0  # square root of the completions that a first reward is at least the mean of
CLIPPED, OFTEN_CLIPPED = 0.2, 0.4  # fractions of tokens: warning, critical
SEQUENCE_CLIP_FACTOR = 3  # GSPO's clip range is so narrow that 10 to 30 % are normal
MISMATCH, LARGE_MISMATCH = 0.05, 0.15  # nats per token: warning, critical
KL_GROWTH, LARGE_KL = 10.0, 0.5  # times the early median; nats per token
ENTROPY_GROWTH, ENTROPY_GAIN = 1.5, 0.3  # times the entropy at the start; nats above it
ENTROPY_LEFT = 0.1  # times the entropy at the start
LENGTH_GROWTH, LENGTH_SHRINKAGE = 1.5, 0.6  # times the length at the start
LOOPS, OFTEN_LOOPS = 0.1, 0.5  # fractions of completions: warning, critical


# --- updates ---


def check_finite(run: RunLog) -> Finding | None:
    """Find skipped steps and metrics that are not finite. Source: TRL #3714, verl #2505."""
    skipped = run.metrics["optim/skipped_steps"].finite
    logged = [run.metrics[name] for name in ("policy/loss", "optim/grad_norm", "reward/mean")]
    not_finite = [series.steps[~np.isfinite(series.values)] for series in logged]
    iterations = np.concatenate([*not_finite, skipped.steps])
    if not len(iterations):
        return None
    count = int(skipped.values[-1]) if len(skipped) else len(iterations)
    return Finding(
        rule="not_finite",
        problem=f"{count} optimizer steps were skipped because a value was not finite.",
        severity="critical" if count >= SKIPPED_STEPS else "warning",
        first_iteration=int(min(iterations)),
        evidence=(
            f"optim/skipped_steps: {count}",
            "non_finite/ in the run folder has the completions of these steps",
        ),
        setting="model.optimizer.lr",
        value=_scale_lr(run.config, 0.1),
    )


def _scale_lr(config: RunConfig, factor: float) -> str:
    """Return the learning rate times a factor; "" if it is not known."""
    lr = config.get("model.optimizer.lr")
    return f"{float(lr) * factor:g}" if isinstance(lr, int | float) else ""


def check_movement(run: RunLog) -> Finding | None:
    """Find weights that hardly change. Source: open-r1 #474, X-R1 #66."""
    change = run.metrics["optim/update_rel"]
    usual = float(np.median(change.finite.values))
    if len(change.finite) < MOVEMENT_ITERATIONS or usual > SLOW_MOVEMENT:
        return None
    if usual <= STANDSTILL and run.config.get("model.precision.dtype") in LOW_PRECISION:
        # Even if the accuracy happens to be higher than before.
        return _describe_standstill(run, int(change.steps[0]))
    if accuracy_rose(run.metrics):
        return None
    # Steps as small as this do change the output of a pretrained model; then its entropy moves.
    entropy = run.metrics["policy/entropy"]
    if usual > NO_MOVEMENT and len(entropy.finite) > 1:
        trend = measure_trend(entropy)
        if trend.rose or trend.fell:
            return None
    return Finding(
        rule="nothing_moves",
        problem="The weights hardly change, and the reward does not improve.",
        severity="critical" if usual <= NO_MOVEMENT else "warning",
        first_iteration=int(change.steps[0]),
        evidence=describe_changes(run.metrics, "optim/update_rel", "reward/mean"),
        setting="model.optimizer.lr",
        value=_scale_lr(run.config, 100 if usual <= NO_MOVEMENT else 10),
    )


def _describe_standstill(run: RunLog, first_iteration: int) -> Finding:
    """Return the finding for updates that low precision rounds away."""
    dtype = run.config.get("model.precision.dtype")
    return Finding(
        rule="nothing_moves",
        problem=f"The weights do not change: {dtype} rounds steps of this learning rate away.",
        severity="critical",
        first_iteration=first_iteration,
        evidence=describe_changes(run.metrics, "optim/update_rel", "reward/mean"),
        setting="model.precision.dtype",
        value="float32",
    )


def check_collapse(run: RunLog) -> Finding | None:
    """Find a reward that fell far below its best and stays there. Source: hello-agents #770."""
    metrics, reward = run.metrics, run.metrics["reward/mean"].finite
    averages = reward.moving_average()
    if len(averages) < WINDOW:
        return None
    # A policy may break in its first step, so the very first reward counts as reached.
    best = np.maximum.accumulate(np.maximum(averages.values, reward.values[0]))
    lowest = float(np.min(metrics["reward/min"].finite.values, initial=np.min(reward.values)))
    # Standard error of a mean of WINDOW rewards, at least that of the first batch.
    first_spread = float(np.sum(metrics["reward/std"].first(1)))
    noise = max(estimate_noise(reward) * np.sqrt(2 / WINDOW), first_spread / ROOT_OF_BATCH)
    threshold = np.maximum(DROP_SIGMAS * noise, ROUNDING * np.abs(best))
    fallen = best - averages.values > np.maximum(threshold, REWARD_DROP * (best - lowest))
    if not fallen[-1]:
        return None
    top, now = float(best[-1]), float(averages.values[-1])
    # The fall began after the last reward within a third of the way from the best one.
    above = np.flatnonzero(reward.values > top - (top - now) / 3)
    start = min(above[-1] + 1, len(reward) - 1) if len(above) else 0
    related = ("optim/update_rel", "policy/log_ratio", "policy/entropy")
    names = ["reward/mean", *(name for name in related if name in metrics)]
    return Finding(
        rule="collapsed",
        problem=f"The reward fell from {top:.3g} to {now:.3g} and has not recovered.",
        severity="critical",
        first_iteration=int(reward.steps[start]),
        evidence=describe_changes(metrics, *names),
        samples=tuple(run.samples[-3:]),
        setting="model.optimizer.lr",
        value=_scale_lr(run.config, 0.1),
    )


def check_clipping(run: RunLog) -> Finding | None:
    """Find updates that are mostly clipped. Source: verl PR #2775."""
    metrics, config = run.metrics, run.config
    low = metrics["policy/clip_low_frac"].finite
    high = metrics["policy/clip_high_frac"].finite
    # With one step per iteration the ratio is exactly 1, and nothing is clipped.
    if config.steps_per_iteration == 1 or len(low) != len(high) or len(low) < WINDOW:
        return None
    clipped = MetricSeries(low.steps, low.values + high.values).moving_average()
    level = config.get("model.objective.importance_sampling_level", "token")
    sequence = level in ("sequence", "sequence_token")
    allowed = SEQUENCE_CLIP_FACTOR * CLIPPED if sequence else CLIPPED
    if clipped.values[-1] < allowed:
        return None
    epochs = config.get("model.update.epochs_per_rollout", "?")
    mini_batches = config.get("model.update.num_mini_batches", "?")
    return Finding(
        rule="clip_saturated",
        problem=f"{clipped.values[-1]:.0%} of the tokens are clipped, so most of the later "
        "optimizer steps have no gradient.",
        severity="critical" if clipped.values[-1] >= 2 * allowed else "warning",
        first_iteration=clipped.onset(clipped.values >= allowed),
        evidence=(
            *describe_changes(metrics, "policy/clip_low_frac", "policy/clip_high_frac"),
            f"optimizer steps per iteration: {epochs} epochs x {mini_batches} mini-batches",
        ),
        setting="model.update.epochs_per_rollout",
        value="1",
    )


def check_sampler(run: RunLog) -> Finding | None:
    """Find log-probabilities that differ between sampler and trainer.

    Source: TRL #5312, AReaL #1290, open-instruct #1473.
    """
    gap = run.metrics["policy/sampler_mismatch"].moving_average(SHORT_WINDOW)
    if not len(gap) or np.median(gap.values[-WINDOW:]) < MISMATCH:
        return None
    level = float(np.median(gap.values[-WINDOW:]))
    problem = f"Log-probabilities of sampler and trainer differ by {level:.3g} nats per token"
    if level > 2 * float(gap.values[0]):
        problem += ", and the difference grows: the sampler has outdated weights"
    first = gap.first_step_of_last_run(gap.values >= MISMATCH) - SHORT_WINDOW + 1
    return Finding(
        rule="sampler_mismatch",
        problem=f"{problem}.",
        severity="critical" if level >= LARGE_MISMATCH else "warning",
        first_iteration=max(1, first),
        evidence=describe_changes(run.metrics, "policy/sampler_mismatch"),
        setting="model.check_invariants",
        value="true",
    )


def check_kl(run: RunLog) -> Finding | None:
    """Find a jump of the KL divergence to the reference. Source: torchforge #664, open-r1 #257."""
    kl = run.metrics["policy/kl"].finite
    if len(kl) < 2 * WINDOW:
        return None
    early = float(np.median(kl.values[SHORT_WINDOW : 2 * WINDOW]))
    high = kl.values > max(LARGE_KL, KL_GROWTH * early)
    if kl.recent_mean(SHORT_WINDOW) < LARGE_KL or not high[-WINDOW:].any():
        return None
    if accuracy_rose(run.metrics):
        return None
    largest = float(np.max(kl.moving_average(SHORT_WINDOW).values))
    return Finding(
        rule="kl_blowup",
        problem=f"The KL to the reference jumped to {kl.recent_mean(SHORT_WINDOW):.3g} nats per "
        "token.",
        severity="warning",
        first_iteration=int(kl.steps[np.argmax(high)]),
        evidence=(
            kl.describe_change("policy/kl"),
            f"largest mean of {SHORT_WINDOW} iterations: {largest:.3g}",
        ),
        setting="model.optimizer.lr",
        value=_scale_lr(run.config, 0.1),
    )


# --- entropy ---


def check_entropy_growth(run: RunLog) -> Finding | None:
    """Find a policy that becomes random. Source: arXiv:2511.05993, rllm #116."""
    entropy = run.metrics["policy/entropy"]
    start = entropy.start_mean
    limit = max(ENTROPY_GROWTH * start, start + ENTROPY_GAIN)
    averages = entropy.moving_average()
    if not len(averages) or averages.values[-1] < limit or accuracy_rose(run.metrics):
        return None
    has_bonus = bool(run.config.number("model.objective.entropy_coef", 0))
    return Finding(
        rule="entropy_explosion",
        problem=f"The entropy rose from {start:.3g} to {averages.values[-1]:.3g} nats, and correct "
        "completions are not more frequent.",
        severity="critical",
        first_iteration=averages.onset(averages.values >= limit),
        evidence=describe_changes(run.metrics, "policy/entropy", "reward/mean"),
        samples=tuple(run.samples[-3:]),
        setting="model.objective.entropy_coef" if has_bonus else "",
        value="0.0" if has_bonus else "",
    )


def check_entropy_collapse(run: RunLog) -> Finding | None:
    """Find a policy that repeats one answer, not a better one.

    Source: arXiv:2505.22617, verl #5953.
    """
    entropy, unique = run.metrics["policy/entropy"], run.metrics["completion/unique_frac"]
    limit = ENTROPY_LEFT * entropy.start_mean
    if entropy.recent_mean() >= limit or not measure_trend(unique).fell:
        return None
    if accuracy_rose(run.metrics):
        return None
    averages = entropy.moving_average()
    return Finding(
        rule="entropy_collapse",
        problem="The policy repeats one answer per prompt, and correct completions are not more "
        "frequent.",
        severity="warning",
        first_iteration=averages.onset(averages.values < limit),
        evidence=describe_changes(run.metrics, "policy/entropy", "completion/unique_frac"),
        samples=tuple(run.samples[-3:]),
        setting="model.objective.surrogate.clip_high",
        value="0.28",
    )


# --- texts ---


def check_loops(run: RunLog) -> Finding | None:
    """Find completions that repeat themselves. Source: LegalDelta #2, EchoInk #5."""
    loops = run.metrics["completion/loop_frac"]
    averages = loops.moving_average()
    if not len(averages) or averages.values[-1] < max(LOOPS, loops.start_mean + LOOPS):
        return None
    return Finding(
        rule="loops",
        problem=f"{averages.values[-1]:.0%} of the completions repeat themselves.",
        severity="critical" if averages.values[-1] >= OFTEN_LOOPS else "warning",
        first_iteration=averages.onset(averages.values >= LOOPS),
        evidence=describe_changes(run.metrics, "completion/loop_frac"),
        samples=tuple(run.samples[-3:]),
        setting="model.rewards",
    )


def check_length_growth(run: RunLog) -> Finding | None:
    """Find completions that become longer and not better.

    Source: Dr. GRPO, arXiv:2503.20783; VLM-R1 #280.
    """
    length = run.metrics["completion/len_mean"]
    limit = LENGTH_GROWTH * length.start_mean
    if length.recent_mean() < limit or accuracy_rose(run.metrics):
        return None
    averages = length.moving_average()
    return Finding(
        rule="length_growth",
        problem=f"Completions grew from {length.start_mean:.0f} to {length.recent_mean():.0f} "
        "tokens, and correct ones are not more frequent.",
        severity="warning",
        first_iteration=averages.onset(averages.values >= limit),
        evidence=describe_changes(run.metrics, "completion/len_mean", "reward/correct_frac"),
        samples=tuple(sorted(run.samples, key=lambda row: -(row.get("length") or 0))[:3]),
        setting="model.overlong_buffer_frac",
        value="0.2",
    )


def check_length_collapse(run: RunLog) -> Finding | None:
    """Find completions that become short and not better. Source: open-r1 #255."""
    length = run.metrics["completion/len_mean"]
    limit = LENGTH_SHRINKAGE * length.start_mean
    if length.recent_mean() > limit or accuracy_rose(run.metrics):
        return None
    averages = length.moving_average()
    return Finding(
        rule="length_collapse",
        problem=f"Completions shrank from {length.start_mean:.0f} to {length.recent_mean():.0f} "
        "tokens, and correct ones are not more frequent.",
        severity="warning",
        first_iteration=averages.onset(averages.values <= limit),
        evidence=describe_changes(run.metrics, "completion/len_mean", "reward/correct_frac"),
        samples=tuple(run.samples[-3:]),
        setting="model.rewards",
    )
