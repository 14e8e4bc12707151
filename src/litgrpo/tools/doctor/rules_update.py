"""Rules about the update: numbers that are not finite, a policy that breaks or does not move."""

from __future__ import annotations

import numpy as np

from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.metrics import EARLY, Metrics, Series
from litgrpo.tools.doctor.rules_reward import gained
from litgrpo.tools.doctor.rules_signal import Rows, first_of
from litgrpo.tools.doctor.trend import FIRST, both, lately, noise, start, trend

SKIPPED = 3  # steps
ROUNDING = 1e-3  # of a reward
DROP, SIGMAS = 0.4, 4.0  # of what was reached; of the noise
STILL, SLOW, PATIENCE = 1e-6, 3e-5, 30  # movement of the weights; iterations
ROWS = 8.0  # root of the completions that a first reward is at least the mean of
CLIPPED, CLIPPED_OFTEN = 0.2, 0.4
GAP, GAP_WIDE = 0.05, 0.15  # nats
GROWN, LARGE = 10.0, 0.5  # times a KL's own median; nats
MORE, LESS, NATS = 1.5, 0.1, 0.3  # times the entropy at the start; nats


def not_finite(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Steps were skipped, or numbers are not finite. Source: TRL #3714, verl #2505."""
    skipped = metrics["optim/skipped_steps"]
    watched = [metrics[name] for name in ("policy/loss", "optim/grad_norm", "reward/mean")]
    broken = [each.steps[~np.isfinite(each.values)] for each in watched]
    since = [*np.concatenate([*broken, skipped.known.steps])]
    if not since:
        return None
    count = int(skipped.known.values[-1]) if len(skipped.known) else len(since)
    return Finding(
        "not_finite",
        f"{count} optimizer steps were not taken: a number in them was not finite.",
        "critical" if count >= SKIPPED else "warning",
        int(min(since)),
        (f"optim/skipped_steps: {count}", "the completions behind it are in non_finite/"),
        (),
        "model.optimizer.lr",
        tenth(config),
    )


def tenth(config: Config) -> str:
    """A tenth of the learning rate; "" where it is not known."""
    lr = config.get("model.optimizer.lr")
    return f"{float(lr) / 10:g}" if isinstance(lr, int | float) else ""


def nothing_moves(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The weights hardly move. Source: open-r1 #474, X-R1 #66."""
    moved = metrics["optim/update_rel"]
    usual = float(np.median(moved.known.values))
    if len(moved.known) < PATIENCE or usual > SLOW or gained(metrics):
        return None
    # A pretrained model changes what it says by steps as small as this.
    entropy = metrics["policy/entropy"]
    if usual > STILL and len(entropy.known) > 1:
        certainty = trend(entropy)
        if certainty.rose or certainty.fell:
            return None
    lr = config.get("model.optimizer.lr")
    return Finding(
        "nothing_moves",
        "The weights hardly move, and nothing is learned.",
        "critical" if usual <= STILL else "warning",
        int(moved.steps[0]),
        (both("optim/update_rel", moved), both("reward/mean", metrics["reward/mean"])),
        (),
        "model.optimizer.lr",
        f"{float(lr) * (100 if usual <= STILL else 10):g}" if isinstance(lr, int | float) else "",
    )


def collapsed(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The reward fell far below its best, and stays there. Source: hello-agents #770."""
    reward = metrics["reward/mean"].known
    means = reward.means()
    if len(means) < EARLY:
        return None
    # A policy may break in its first step, so the first reward of all counts as reached, too.
    best = np.maximum.accumulate(np.maximum(means.values, reward.values[0]))
    lowest = float(np.min(metrics["reward/min"].known.values, initial=np.min(reward.values)))
    spread = metrics["reward/std"].first(1)
    error = SIGMAS * max(noise(reward) * np.sqrt(2 / EARLY), float(np.sum(spread)) / ROWS)
    least = np.maximum(error, ROUNDING * np.abs(best))
    fallen = best - means.values > np.maximum(least, DROP * (best - lowest))
    if not fallen[-1]:
        return None
    return Finding(
        "collapsed",
        f"The reward fell from {best[-1]:.3g} to {means.values[-1]:.3g} and stays there.",
        "critical",
        began(reward, float(best[-1]), float(means.values[-1])),
        (
            both("reward/mean", reward),
            *(
                both(name, metrics[name])
                for name in ("optim/update_rel", "policy/log_ratio", "policy/entropy")
                if name in metrics
            ),
        ),
        tuple(samples[-3:]),
        "model.optimizer.lr",
        tenth(config),
    )


def began(reward: Series, best: float, last: float) -> int:
    """First iteration of the fall: behind the last one that was nearer to the best."""
    above = np.flatnonzero(reward.values > best - (best - last) / 3)
    return int(reward.steps[min(above[-1] + 1, len(reward) - 1)] if len(above) else reward.steps[0])


def entropy_collapse(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The policy says one thing only, without being right. Source: arXiv:2505.22617, verl #5953."""
    entropy, unique = metrics["policy/entropy"], metrics["completion/unique_frac"]
    low = lately(entropy) < LESS * start(entropy)
    if not low or not trend(unique).fell or gained(metrics):
        return None
    means = entropy.means()
    return Finding(
        "entropy_collapse",
        "The policy says one thing only, and is not right more often.",
        "warning",
        first_of(means, means.values < LESS * start(entropy)),
        (both("policy/entropy", entropy), both("completion/unique_frac", unique)),
        tuple(samples[-3:]),
        "model.objective.surrogate.clip_high",
        "0.28",
    )


def entropy_explosion(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The policy becomes random. Source: arXiv:2511.05993, rllm #116."""
    entropy = metrics["policy/entropy"]
    bound = max(MORE * start(entropy), start(entropy) + NATS)
    means = entropy.means()
    if not len(means) or means.values[-1] < bound or gained(metrics):
        return None
    return Finding(
        "entropy_explosion",
        f"The entropy rose from {start(entropy):.3g} to {means.values[-1]:.3g} nats, and right "
        "answers did not.",
        "critical",
        first_of(means, means.values >= bound),
        (both("policy/entropy", entropy), both("reward/mean", metrics["reward/mean"])),
        tuple(samples[-3:]),
        "model.objective.entropy_coef" if config.number("model.objective.entropy_coef", 0) else "",
        "0.0" if config.number("model.objective.entropy_coef", 0) else "",
    )


def kl_blowup(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The KL to the reference jumps. Source: torchforge #664, open-r1 #257."""
    kl = metrics["policy/kl"].known
    if len(kl) < 2 * EARLY:
        return None
    usual = float(np.median(kl.values[FIRST : 2 * EARLY]))
    high = kl.values > max(LARGE, GROWN * usual)
    means = kl.means(FIRST)
    if lately(kl, FIRST) < LARGE or not high[-EARLY:].any():
        return None
    if gained(metrics):
        return None
    return Finding(
        "kl_blowup",
        f"The KL to the reference is {lately(kl, FIRST):.3g} nats per token, and rose faster than "
        "before.",
        "warning",
        int(kl.steps[np.argmax(high)]),
        (both("policy/kl", kl), f"largest mean of {FIRST}: {np.max(means.values):.3g}"),
        (),
        "model.optimizer.lr",
        tenth(config),
    )


def clip_saturated(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Most of the update is clipped. Source: verl PR #2775."""
    low, high = metrics["policy/clip_low_frac"].known, metrics["policy/clip_high_frac"].known
    if config.steps_per_iteration == 1 or len(low) != len(high) or len(low) < EARLY:
        return None
    share = Series(low.steps, low.values + high.values).means()
    allowed = 3 * CLIPPED if config.get("model.objective.ratio") == "sequence" else CLIPPED
    if share.values[-1] < allowed:
        return None
    return Finding(
        "clip_saturated",
        f"{share.values[-1]:.0%} of the tokens are clipped: most of the later steps teach nothing.",
        "critical" if share.values[-1] >= 2 * allowed else "warning",
        first_of(share, share.values >= allowed),
        (
            both("policy/clip_low_frac", low),
            both("policy/clip_high_frac", high),
            "optimizer steps of an iteration: "
            f"{config.get('model.update.epochs_per_rollout', '?')} x "
            f"{config.get('model.update.num_mini_batches', '?')}",
        ),
        (),
        "model.update.epochs_per_rollout",
        "1",
    )


def sampler_mismatch(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """What samples is not what learns. Source: TRL #5312, AReaL #1290, open-instruct #1473."""
    gap = metrics["policy/sampler_mismatch"].means(FIRST)
    if not len(gap) or np.median(gap.values[-EARLY:]) < GAP:
        return None
    level = float(np.median(gap.values[-EARLY:]))
    grows = level > 2 * float(gap.values[0])
    return Finding(
        "sampler_mismatch",
        f"Sampler and learner disagree by {level:.3g} nats per token"
        + (", and it grows: the sampler's weights are old." if grows else "."),
        "critical" if level >= GAP_WIDE else "warning",
        max(1, gap.since(gap.values >= GAP) - FIRST + 1),
        (both("policy/sampler_mismatch", metrics["policy/sampler_mismatch"]),),
        (),
        "model.check_invariants",
        "true",
    )
