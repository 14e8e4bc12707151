"""Score probes: the completions of an audit, in one table of rewards."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from litgrpo.audit.cases import Case, Problem
from litgrpo.metrics import reward_stats
from litgrpo.rewards import Scorer, Scoring
from litgrpo.types import RewardTable, compare_within_groups

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")
Probes = Sequence[tuple[Problem, Sequence[Case]]]

TOKEN = re.compile(r"\w+|[^\w\s]")
PROBLEMS_AT_ONCE = 64
PATIENCE_S = 10.0
ROUNDING = 1e-6  # of a reward: float32 keeps seven digits
LOWEST = -1e300  # in place of NaN, so that a failed completion is never the best
REWARD = "reward/"  # before the names of the components in the table


def slack(reward: Any) -> Any:
    """Return the largest difference from this reward that rounding can explain."""
    return ROUNDING * (1.0 + abs(reward))


def evenly(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most this number of rows, evenly spread.

    Example:
        >>> evenly(range(10), 3)
        [0, 3, 6]
    """
    step = max(1, len(rows) // most) if most else 1
    return list(rows[::step][:most])


@contextmanager
def patient_scorer(
    scorer: Scorer, patience_s: float = PATIENCE_S, **settings: Any
) -> Iterator[Scorer]:
    """Copy a scorer; failures of its rewards are counted, neither raised nor logged."""
    log = logging.getLogger("litgrpo.rewards.runner")
    level = log.level
    # max_failed_frac=1: the audit counts failures, so none may stop it.
    scoring = Scoring(scorer.scoring.format, patience_s, max_failed_frac=1.0, **settings)
    log.setLevel(logging.ERROR)
    try:
        with closing(Scorer(scorer.components, scoring)) as patient:
            yield patient
    finally:
        log.setLevel(level)


def score_probes(
    scorer: Scorer, probes: Probes, deciding: Mapping[str, str], threshold: float
) -> tuple[DataFrame, DataFrame]:
    """Score all completions.

    Args:
        scorer: the rewards.
        probes: problems with their completions, the plain correct answer first.
        deciding: {task: the reward that decides if an answer is correct}, "" for all others.
        threshold: least value of this reward for a correct answer.

    Returns:
        A row per completion: kind, completion, total reward, its margin over the plain correct
        answer to the same problem, whether it beats or equals that, whether it is judged correct,
        and `reward/<name>` of each component; and a row of statistics per batch.
    """
    import pandas as pd

    frames, stats = [], []
    # Groups of a batch have the same size, and numbers have more variants than texts.
    for size in sorted({len(cases) for _, cases in probes}):
        same = [probe for probe in probes if len(probe[1]) == size]
        for start in range(0, len(same), PROBLEMS_AT_ONCE):
            batch = same[start : start + PROBLEMS_AT_ONCE]
            table = score_cases(scorer, batch)
            plain = table.total[:, :1]
            margin = table.total - plain
            columns: dict[str, Tensor] = {
                "total": table.total,
                "margin": margin,
                "beats": margin > slack(plain),
                "equals": margin.abs() <= slack(plain),
                "correct": table.find_correct(deciding, threshold) == 1,
                **{f"{REWARD}{name}": values for name, values in table.components.items()},
            }
            cases = [case for _, row in batch for case in row]
            texts = {
                "kind": [case.kind for case in cases],
                "completion": [case.completion for case in cases],
            }
            numbers = {name: values.flatten().numpy() for name, values in columns.items()}
            frames.append(pd.DataFrame(texts | numbers))
            stats.append({name: float(value) for name, value in reward_stats(table).items()})
    return pd.concat(frames, ignore_index=True), pd.DataFrame(stats)


def score_cases(scorer: Scorer, probes: Probes) -> RewardTable:
    """Return rewards [problems, cases]; the completions of a problem are one group."""
    flat = [case for _, cases in probes for case in cases]
    owners = [problem for problem, cases in probes for _ in cases]
    names = {name for problem, _ in probes for name in problem.columns}
    # Words and signs stand for tokens, so an audit needs no tokenizer.
    tokens = [TOKEN.findall(case.completion) for case in flat]
    ids = [[zlib.crc32(token.encode()) % 65536 for token in row] for row in tokens]
    columns: dict[str, list[Any]] = {
        **{name: [problem.columns.get(name) for problem in owners] for name in names},
        "answer": [case.answer for case in flat],
        "completion_ids": ids,
        "completion_lengths": [len(row) for row in ids],
        "truncated": [False] * len(flat),
    }
    if all(case.answer is None for case in flat):  # open text
        del columns["answer"]
    prompts = [problem.prompt for problem in owners]
    return scorer(prompts, [case.completion for case in flat], columns, len(probes[0][1]))


# --- probes against samples of the initial policy ---


def best_samples(samples: Tensor) -> list[int]:
    """Return which sample [B, k] of each prompt earns most; NaN if it failed."""
    best: list[int] = samples.nan_to_num(LOWEST).argmax(1).tolist()
    return best


def highest_samples(samples: Tensor) -> Tensor:
    """Return the reward [B] of the best of the samples [B, k]."""
    return samples.nan_to_num(LOWEST).max(1).values


def reach_best(totals: Tensor, samples: Tensor) -> Tensor:
    """[B] True for probes [B] that earn as much as the best sample [B, k], or more."""
    highest = highest_samples(samples)
    return totals >= highest - slack(highest)


def are_equal(samples: Tensor) -> Tensor:
    """[B] True if all samples [B, k] of a prompt earn the same: they have no advantage."""
    return (compare_within_groups(samples)[0].nan_to_num(0.0) == 0).all(1)


def compare_with_samples(totals: Tensor, samples: Tensor) -> dict[str, Any]:
    """Summarize the rewards of one kind of probe.

    Args:
        totals: [B] total rewards, one per prompt; NaN if the probe failed.
        samples: [B, k] total rewards of samples of the initial policy.

    Returns:
        Number of prompts, mean of the rewards, and on how many prompts they beat the best and the
        mean sample.
    """
    scored, paid = totals[~totals.isnan()], totals.nan_to_num(LOWEST)
    highest, mean = highest_samples(samples), samples.nanmean(1)
    return {
        "count": len(totals),
        "mean": float(scored.mean()) if len(scored) else 0.0,
        "beats_best": int((paid > highest + slack(highest)).sum()),
        "beats_mean": int((paid > mean + slack(mean)).sum()),
    }


def mean_and_best(samples: Tensor) -> tuple[float, float]:
    """Return the mean reward of samples [B, k], and the mean of the best of each prompt.

    Both are 0 if no sample has a reward.
    """
    if samples.isnan().all():
        return 0.0, 0.0
    best = highest_samples(samples)
    return float(samples.nanmean()), float(best[best > LOWEST].mean())


def describe_samples(samples: Tensor) -> str:
    """Return what samples [B, k] of the initial policy earn, as the end of a sentence."""
    if samples.isnan().all():
        return "have no reward"
    mean, best = mean_and_best(samples)
    return f"earn {mean:.3g} on average, the best of them {best:.3g}"


def describe_paid_for_nothing(names: Iterable[object], samples: Tensor) -> Iterator[str]:
    """Yield a fault that lists probes that do nothing and earn as much as the best sample."""
    _, best = mean_and_best(samples)
    if listed := ", ".join(map(repr, names)):
        yield (
            f"paid for nothing: {listed} earn as much as the best of {samples.shape[1]} samples of "
            f"the initial policy (these earn {best:.3g}) on more than half of the prompts"
        )


def describe_equal_samples(samples: Tensor) -> list[str]:
    """Return a remark if the rewards of samples [B, k] rank nothing."""
    if samples.isnan().all() or not are_equal(samples).all():
        return []
    mean, _ = mean_and_best(samples)
    return [
        f"no advantage: all {samples.shape[1]} samples of each prompt earn the same ({mean:.3g} on "
        "average), so nothing is learned; either the reward is constant, or the task is too hard "
        "or too easy for the initial policy"
    ]


def describe_failures(scorer: Scorer, what: str, name_text: str = "") -> list[str]:
    """Return a fault for each reason for which a reward failed.

    Args:
        scorer: has counted the failures.
        what: what they failed on.
        name_text: before the name of the reward.
    """
    return [
        f"failures: {name_text}{name!r} fails on {what} of the audit ({reason}: {count})"
        for name, reasons in scorer.failures.items()
        for reason, count in reasons.items()
    ]
