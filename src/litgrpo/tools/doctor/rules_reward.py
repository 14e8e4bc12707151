"""Rules about rewards: what they judge wrongly, what they pay for, which part rules."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.metrics import EARLY, Metrics, Series
from litgrpo.tools.doctor.rules_signal import Rows, first_of
from litgrpo.tools.doctor.trend import both, lately, trend

LONG = 20  # iterations that a part must be without a spread
FULL = 0.95
FAILED, FAILED_OFTEN = 0.05, 0.2
RULES_ALL, AGAINST = 0.9, -0.5
CONTRADICTED, FEW = 0.1, 3  # share and number of samples
LESS = 0.08  # right completions, as a share of all
LITTLE = 0.1  # of what was missing


def rewards_fail(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Completions have no reward. Source: TRL #3714."""
    share = metrics["reward/failed_frac"].means()
    if not len(share) or share.values[-1] < FAILED:
        return None
    return Finding(
        "rewards_fail",
        f"{share.values[-1]:.0%} of the completions have no reward.",
        "critical" if share.values[-1] >= FAILED_OFTEN else "warning",
        first_of(share, share.values >= FAILED),
        (both("reward/failed_frac", metrics["reward/failed_frac"]),),
        tuple([row for row in samples if None in row.get("rewards", {}).values()][-3:]),
        "model.rewards",
        "",
    )


def reward_contradicts(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The samples contradict the reward for right answers. Source: arXiv:2505.22203; NeMo-RL #3635.

    A completion that is the answer and was judged wrong, one without the answer that was judged
    right, or equal completions of a prompt that were judged differently.
    """
    name = success_part(metrics, config)
    rows = [row for row in samples if "messages" not in row and judged(row, name) is not None]
    against = contradictions(rows, name)
    if len(against) < max(FEW, CONTRADICTED * len(rows)):
        return None
    return Finding(
        "reward_contradicts",
        f"The reward {name!r} contradicts {len(against)} of {len(rows)} samples.",
        "critical",
        int(min(row.get("iteration", 1) for row in against)),
        tuple(sorted({reason for _, reason in reasons(rows, name)})),
        tuple(against[:3]),
        f"model.rewards.{name}.function",
        "",
    )


def reasons(rows: Rows, name: str) -> list[tuple[dict[str, Any], str]]:
    """Rows that contradict a reward, and why."""
    found = []
    verdicts = defaultdict(set)
    for row in rows:
        verdicts[row.get("prompt"), row.get("completion")].add(judged(row, name))
    for row in rows:
        answer = str(row.get("columns", {}).get("answer") or "")
        said, value = str(row.get("completion", "")), judged(row, name)
        if len(verdicts[row.get("prompt"), row.get("completion")]) > 1:
            found.append((row, "equal completions of a prompt were judged differently"))
        elif answer and value == 0 and letters(said) == letters(answer):
            found.append((row, "a completion that is the answer was judged wrong"))
        elif value == 1 and any(letters(word) not in letters(said) for word in answer.split()):
            found.append((row, "a completion without the answer was judged right"))
    return found


def contradictions(rows: Rows, name: str) -> list[dict[str, Any]]:
    """Rows that contradict a reward."""
    return [row for row, _ in reasons(rows, name)]


def letters(text: str) -> str:
    """Letters and digits of a text."""
    return re.sub(r"\W+", "", text.casefold())


def judged(row: dict[str, Any], name: str) -> float | None:
    """What a part gave to a sample."""
    value = row.get("rewards", {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def dead_part(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """A part gives every completion the same, and not the most. Source: open-r1 #235."""
    for part in metrics.parts():
        spread, mean = metrics[f"reward/{part}_std"], metrics[f"reward/{part}"]
        weight = config.number(f"model.rewards.{part}.weight", 1.0)
        constant = len(spread.known) >= LONG and not np.any(spread.last(LONG))
        if constant and weight and lately(mean) < FULL:
            return Finding(
                "dead_part",
                f"The reward {part!r} gives every completion {lately(mean):.3g}.",
                "warning",
                first_zero(spread),
                (f"reward/{part}_std: 0 in the last {LONG} iterations",),
                tuple(samples[-3:]),
                f"model.rewards.{part}.function",
                "",
            )
    return None


def first_zero(spread: Series) -> int:
    """Iteration since which a spread is 0."""
    last = np.flatnonzero(spread.known.values)
    return int(spread.known.steps[last[-1] + 1 if len(last) else 0])


def dominating_part(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """One part decides what is learned, and it is not the one that counts. Source: GDPO."""
    success = success_part(metrics, config)
    for part in metrics.parts():
        share = metrics[f"reward/{part}_share"]
        if part == success or not len(share.known) or np.mean(share.first(LONG)) < RULES_ALL:
            continue
        if gained(metrics):
            continue
        weight = config.number(f"model.rewards.{part}.weight", 1.0)
        return Finding(
            "dominating_part",
            f"The reward {part!r} alone decides what is learned; {success!r} does not count.",
            "warning",
            int(share.steps[0]),
            (both(f"reward/{part}_share", share), right(metrics)),
            tuple(samples[-3:]),
            f"model.rewards.{part}.weight",
            f"{weight / 10:g}",
        )
    return None


def fighting_parts(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """Two parts pull against each other. Source: GDPO, arXiv:2601.05242."""
    for name in sorted(metrics.series):
        cosine = metrics[name]
        if not name.startswith("reward/cosine_") or len(cosine.known) < EARLY:
            continue
        if lately(cosine, LONG) < AGAINST and not gained(metrics):
            return Finding(
                "fighting_parts",
                f"Two rewards pull against each other ({name.removeprefix('reward/cosine_')}).",
                "warning",
                int(cosine.steps[0]),
                (both(name, cosine),),
                tuple(samples[-3:]),
                "model.rewards",
                "",
            )
    return None


def format_only(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The form is learned and the answer is not. Source: open-r1 #255, TRL #3903."""
    success = success_part(metrics, config)
    for part in metrics.parts():
        mean = metrics[f"reward/{part}"]
        learned = trend(mean).rose and lately(mean) >= FULL
        if part != success and learned and not gained(metrics):
            return Finding(
                "format_only",
                f"The reward {part!r} is full, and right answers are no more frequent.",
                "warning",
                first_of(mean.means(), mean.means().values >= FULL),
                (both(f"reward/{part}", mean), right(metrics)),
                tuple(samples[-3:]),
                f"model.rewards.{part}.weight",
                "0.1",
            )
    return None


def hacked(metrics: Metrics, samples: Rows, config: Config) -> Finding | None:
    """The reward rises and right answers become fewer. Source: open-r1 #407, arXiv:2606.04923."""
    reward, answers = trend(metrics["reward/mean"]), trend(metrics["reward/correct_frac"])
    fewer = answers.fell and answers.change < -LESS
    if not reward.rose or not (fewer or held_out_fell(metrics)):
        return None
    falls = metrics["reward/correct_frac"].means()
    weight = config.get("model.rewards", {})
    paid = [name for name in metrics.parts() if trend(metrics[f"reward/{name}"]).rose]
    paid = [name for name in paid if name != success_part(metrics, config)] or list(weight)
    below = falls.values < answers.first - LESS
    return Finding(
        "hacked",
        f"The reward rose from {reward.first:.3g} to {reward.last:.3g} while right answers became "
        "fewer.",
        "critical",
        first_of(falls, below) if below.any() else int(metrics["reward/mean"].steps[-1]),
        (both("reward/mean", metrics["reward/mean"]), right(metrics)),
        tuple(sorted(samples, key=lambda row: -(row.get("reward") or 0))[:3]),
        f"model.rewards.{paid[0]}.weight" if paid else "model.rewards",
        "0.1" if paid else "",
    )


def held_out_fell(metrics: Metrics) -> bool:
    """Whether the intervals of the first and the last held-out accuracy do not overlap."""
    name = metrics.success()
    lows, highs = metrics[f"{name}_low"].known.values, metrics[f"{name}_high"].known.values
    return min(len(lows), len(highs)) > 1 and bool(highs[-1] < lows[0])


def gained(metrics: Metrics) -> bool:
    """Whether right answers became more frequent by more than noise, and by more than a little."""
    answers = metrics["reward/correct_frac"]
    if len(answers.known) <= 1:
        return trend(metrics["reward/mean"]).rose
    change = trend(answers)
    return change.last > FULL or (change.rose and change.change > LITTLE * (1 - change.first))


def right(metrics: Metrics) -> str:
    """A sentence about right answers."""
    return both("reward/correct_frac", metrics["reward/correct_frac"])


def success_part(metrics: Metrics, config: Config) -> str:
    """Name of the reward that counts: as the recipe says, else its first, else the first known."""
    named = config.get("model.evaluation.success")
    parts = [*config.get("model.rewards", {}), *metrics.parts(), ""]
    return str(named or parts[0])
