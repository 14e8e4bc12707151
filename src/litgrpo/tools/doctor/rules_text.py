"""Rules about the texts: longer, shorter, or in loops, without more right answers."""

from __future__ import annotations

from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.metrics import Metrics
from litgrpo.tools.doctor.rules_reward import gained, right
from litgrpo.tools.doctor.rules_signal import Rows, first_of
from litgrpo.tools.doctor.trend import both, lately, start

LONGER, SHORTER = 1.5, 0.6  # times the length at the start
LOOPS, LOOPS_OFTEN = 0.1, 0.5


def length_growth(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Completions become longer and no better. Source: Dr. GRPO, arXiv:2503.20783; VLM-R1 #280."""
    length = metrics["completion/len_mean"]
    if lately(length) < LONGER * start(length) or gained(metrics):
        return None
    means = length.means()
    return Finding(
        "length_growth",
        f"Completions grew from {start(length):.0f} to {lately(length):.0f} tokens, and right "
        "answers did not.",
        "warning",
        first_of(means, means.values >= LONGER * start(length)),
        (both("completion/len_mean", length), right(metrics)),
        tuple(sorted(samples, key=lambda row: -(row.get("length") or 0))[:3]),
        "model.soft_overlong",
        "0.2",
    )


def length_collapse(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Completions become short and no better. Source: open-r1 #255."""
    length = metrics["completion/len_mean"]
    if lately(length) > SHORTER * start(length) or gained(metrics):
        return None
    means = length.means()
    return Finding(
        "length_collapse",
        f"Completions shrank from {start(length):.0f} to {lately(length):.0f} tokens, and right "
        "answers did not rise.",
        "warning",
        first_of(means, means.values <= SHORTER * start(length)),
        (both("completion/len_mean", length), right(metrics)),
        tuple(samples[-3:]),
        "model.rewards",
        "",
    )


def loops(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Completions repeat themselves. Source: LegalDelta #2, EchoInk #5."""
    series = metrics["completion/loop_frac"]
    share = series.means()
    if not len(share) or share.values[-1] < max(LOOPS, start(series) + LOOPS):
        return None
    return Finding(
        "loops",
        f"{share.values[-1]:.0%} of the completions repeat themselves.",
        "critical" if share.values[-1] >= LOOPS_OFTEN else "warning",
        first_of(share, share.values >= LOOPS),
        (both("completion/loop_frac", series),),
        tuple(samples[-3:]),
        "model.rewards",
        "",
    )
