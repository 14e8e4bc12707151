"""Check rewards of tasks with reference answers: false negatives, and exploits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import one_of, require
from litgrpo.audit.cases import (
    CORRECT_KINDS,
    DECORATED,
    GIVEN_UP,
    HONEST,
    INCORRECT,
    MALFORMED,
    AnswerFormat,
    Case,
    Problem,
    correct_answers,
    make_exploits,
    nasty_texts,
    write_malformed_answer,
)
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import (
    REWARD,
    evenly,
    patient_scorer,
    score_cases,
    score_probes,
    slack,
)
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.reward import find_success_rewards

if TYPE_CHECKING:
    from pandas import DataFrame, Series

COSINE = "reward/cosine_"
DOMINANT, CONFLICT = 0.95, -0.5
NASTY_SIZE, SLOW_S = 20_000, 1.0
# Share of the reward for correctness. Other components, such as one for length, shift the means
# of thousands of completions a little; smaller differences of means are no incentive.
NEGLIGIBLE = 0.01
# A component judges answers if at least this share of the plain correct answers get its best value.
MOSTLY = 0.75
FORMAT_PROBLEMS = 8  # on which the format of the answers is recognized
OTHER_FORMATS = (
    "{reasoning}\n{answer}",
    "{reasoning}\n#### {answer}",
    "{reasoning}\n\\boxed{{answer}}",
    "{reasoning}\nThe answer is {answer}.",
    "{answer}",
)


def audit_rewards(
    scorer: Scorer,
    problems: Sequence[Problem],
    *,
    success: str | None = None,
    threshold: float = 1.0,
    answer_format: AnswerFormat | None = None,
    seed: int = 0,
) -> AuditReport:
    """Score correct answers in many formatting variants, and completions that try exploits.

    Args:
        scorer: the rewards.
        problems: questions with reference answers.
        success: the reward that decides if an answer is correct; default: the heaviest.
        threshold: least value of this reward for a correct answer.
        answer_format: format of a completion; default: the first of `usual_formats` in which the
            rewards judge a plain correct answer as correct.
        seed: random seed of the noise in the exploits.

    Returns:
        The report; `passed` is True if it has no fault.
    """
    if success is not None:
        one_of("success_reward", success, scorer.components)
    tasks = {name: reward.tasks for name, reward in scorer.components.items()}
    deciding = find_success_rewards(scorer.weights, tasks, success)
    require(len(problems) > 0, "there are no problems to audit with")
    with patient_scorer(scorer) as patient:
        completion_format = answer_format or recognize_format(
            patient, problems, deciding, threshold
        )
        probes = [(problem, make_cases(problem, completion_format, seed)) for problem in problems]
        scored, stats = score_probes(patient, probes, deciding, threshold)
    columns = problems[0].columns
    slowest = [measure_slowest(part, scorer, columns) for part in scorer.components.values()]
    rewards = summarize_rewards(scored, stats, scorer, deciding).assign(
        slowest_s=[seconds for seconds, _ in slowest],
        slowest_on=[kind for _, kind in slowest],
        failed=[patient.failures.get(name, {}) for name in scorer.components],
    )
    conflicts = stats.filter(like=COSINE).fillna(0.0).mean()
    kinds = summarize_kinds(scored)
    is_variant = kinds.index.isin(CORRECT_KINDS)
    variants = kinds[is_variant]
    must_be_correct = kinds[is_variant & ~kinds.index.isin(DECORATED)]
    exploits = kinds[~is_variant].sort_values("mean", ascending=False)
    success_rewards = list(dict.fromkeys(deciding.values()))
    decides = ", ".join(success_rewards)
    return AuditReport(
        title=f"{len(problems)} problems; {decides!r} decides if an answer is correct; completions "
        f"look like {completion_format.text!r}",
        numbers={
            "problems": len(problems),
            "success": decides,
            "answer_format": completion_format.text,
            "false_negatives": int((must_be_correct["count"] - must_be_correct["correct"]).sum()),
        },
        tables={
            "correct answer": variants[["count", "correct", "mean", "example"]],
            "everything else": exploits.drop(columns="example"),
            "reward": rewards,
        },
        faults=list(find_faults(kinds, rewards, success_rewards, threshold, answer_format)),
        remarks=list(find_remarks(kinds, rewards, conflicts)),
    )


# --- probes ---


def make_cases(problem: Problem, answer_format: AnswerFormat, seed: int) -> list[Case]:
    """Return every completion of a problem, the plain correct answer first."""
    exploits = make_exploits(problem, answer_format, random.Random(seed))
    return [*correct_answers(problem, answer_format), *exploits, write_malformed_answer(problem)]


def recognize_format(
    scorer: Scorer, problems: Sequence[Problem], deciding: Mapping[str, str], threshold: float
) -> AnswerFormat:
    """Return the usual format with the most correct answers that are judged correct.

    They are written plainly and with spaces around: a reward that reads the last line accepts the
    first in tags, too.
    """
    few = evenly(problems, FORMAT_PROBLEMS)
    formats = usual_formats(scorer)
    probes = [
        (
            problem,
            [
                Case(HONEST, candidate.fill(problem.reasoning, answer), problem.answer)
                for candidate in formats
                for answer in (problem.reference, f"\n   {problem.reference} \n")
            ],
        )
        for problem in few
    ]
    table = score_cases(scorer, probes)
    correct = table.find_correct(deciding, threshold).sum(0).view(-1, 2).sum(1).tolist()
    return formats[correct.index(max(correct))]


def usual_formats(scorer: Scorer) -> list[AnswerFormat]:
    """Return tags as the rewards' kwargs name them, the last line, `####`, a box, a sentence."""
    kwargs = {k: v for part in scorer.components.values() for k, v in part.kwargs.items()}
    reasoning = kwargs.get("reasoning_tag", "reasoning")
    answer = kwargs.get("answer_tag", "answer")
    tags = f"<{reasoning}>\n{{reasoning}}\n</{reasoning}>\n<{answer}>{{answer}}</{answer}>"
    return [AnswerFormat(text) for text in (tags, *OTHER_FORMATS)]


def measure_slowest(part: Reward, scorer: Scorer, columns: Mapping[str, Any]) -> tuple[float, str]:
    """Return the longest time of a reward function for one long text in s, and the kind of text.

    Args:
        part: the reward.
        scorer: it is one of its rewards.
        columns: other columns that the function may require, of any problem.
    """
    alone = Scorer({"part": Reward(part.function, kwargs=part.kwargs)}, scorer.scoring)
    problem, worst = Problem("How much is 40 + 32?", "72", columns), (0.0, "")
    with patient_scorer(alone, 2 * SLOW_S, num_workers=1) as patient:
        # The first call starts the worker: its imports are not timed.
        score_cases(patient, [(problem, [Case("", "", "72")])])
        for kind, text in nasty_texts(NASTY_SIZE).items():
            start = time.perf_counter()
            score_cases(patient, [(problem, [Case(kind, text, "72")])])
            worst = max(worst, (time.perf_counter() - start, kind))
            if worst[0] > SLOW_S:  # a fault already; each further text would take as long
                break
    return worst


# --- summaries of the table ---


def summarize_kinds(scored: DataFrame) -> DataFrame:
    """Return {kind: how many, how many judged correct, rewards, an example} as a table.

    The example is a misjudged completion if there is one, with the highest margin of these.
    """
    groups = scored.groupby("kind", sort=False)
    kinds = groups.agg(
        count=("total", "size"),
        correct=("correct", "sum"),
        mean=("total", "mean"),
        best_margin=("margin", "max"),
        beats=("beats", "sum"),
        equals=("equals", "sum"),
    )
    misjudged = scored["correct"] != scored["kind"].isin(CORRECT_KINDS)
    ordered = scored.assign(misjudged=misjudged).sort_values(["misjudged", "margin"])
    kinds["example"] = ordered.groupby("kind")["completion"].last()
    return kinds


def summarize_rewards(
    scored: DataFrame, stats: DataFrame, scorer: Scorer, deciding: Mapping[str, str]
) -> DataFrame:
    """Return {reward: weight, lowest, highest, share of the advantage, unfair variants} as a table.

    `unfair` is {variant: correct answers that got less than the best}, `scored` the number of
    completions that got a value.
    """
    import pandas as pd

    rows = {}
    for name, weight in scorer.weights.items():
        values = scored[f"{REWARD}{name}"]
        share = stats.get(f"reward/{name}_share", pd.Series([1.0])).fillna(1.0).mean()
        by_kind = {str(kind): rows for kind, rows in values.groupby(scored["kind"])}
        rows[name] = {
            "weight": weight,
            "lowest": values.min() if values.notna().any() else 0.0,
            "highest": values.max() if values.notna().any() else 0.0,
            "scored": int(values.count()),
            "share": share,
            "unfair": {} if name in deciding.values() else find_unfair(by_kind),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def find_unfair(values: Mapping[str, Series]) -> dict[str, int]:
    """Return {variant: number of correct answers below the best value}.

    Rewards that do not separate correct from incorrect answers, such as one for length, or that
    often give plain correct answers less than the best, get {}.
    """
    plain, wrong = values[HONEST].fillna(0.0), values[INCORRECT].fillna(0.0)
    full = plain.max() - slack(plain.max())
    judges = plain.mean() > wrong.mean() and (wrong >= full).mean() < MOSTLY
    if not judges or (plain >= full).mean() < MOSTLY:
        return {}
    counts = {kind: int((values[kind] < full).sum()) for kind in sorted(CORRECT_KINDS & {*values})}
    return {kind: count for kind, count in counts.items() if count}


# --- faults and remarks ---


def find_faults(
    kinds: DataFrame,
    rewards: DataFrame,
    success: Sequence[str],
    threshold: float,
    answer_format: AnswerFormat | None,
) -> Iterator[str]:
    """Yield what makes the rewards unfit for training.

    Args:
        kinds: of `summarize_kinds`.
        rewards: of `summarize_rewards`, with the slowest text and failures.
        success: the rewards that decide if an answer is correct.
        threshold: their least value for a correct answer.
        answer_format: as the user gave it.
    """
    names = ", ".join(success)
    # Comparisons with what correct answers earn say nothing if none or all are judged correct.
    if not kinds.loc[HONEST, "correct"]:
        yield from unjudged_faults(kinds, rewards, success, threshold, answer_format)
    elif kinds["correct"].equals(kinds["count"]):
        yield f"false positives: {names!r} judges every completion as correct, even an empty one"
    else:
        for kind, row in kinds.iterrows():
            if kind in CORRECT_KINDS:
                yield from variant_faults(str(kind), row)
            elif kind != MALFORMED:
                yield from exploit_faults(str(kind), row)
        yield from format_faults(kinds["mean"])
    for name, row in rewards.iterrows():
        yield from reward_faults(str(name), row)


def unjudged_faults(
    kinds: DataFrame,
    rewards: DataFrame,
    success: Sequence[str],
    threshold: float,
    answer_format: AnswerFormat | None,
) -> Iterator[str]:
    """Yield why no correct answer is judged as correct; arguments as in `find_faults`."""
    names, deciding = ", ".join(success), rewards.loc[list(success)]
    if any(sum(reasons.values()) >= kinds["count"].sum() for reasons in rewards["failed"]):
        return  # that a reward always fails is a fault of its own
    if not deciding["scored"].any():
        yield f"no reward: {names!r} gives no completion a score (None)"
        return
    lowest, highest = deciding["lowest"].min(), deciding["highest"].max()
    if lowest + slack(lowest) < highest < threshold:
        yield (
            f"{names!r} judges no completion as correct: the highest reward is {highest:.3g}, a "
            f"correct answer needs {threshold:g}; set --success_threshold, or --success_reward if "
            "another reward judges answers, or --answer_format if it reads another format than "
            f"{kinds.loc[HONEST, 'example']!r}"
        )
        return
    if answer_format is not None:
        how = f"with --answer_format {answer_format.text!r}; give the format that it reads"
    else:
        how = (
            "in tags, after ####, in \\boxed, or on the last line; if it reads another format, "
            "give that with --answer_format, such as 'Solution: {answer}'"
        )
    example = kinds.loc[HONEST, "example"]
    yield f"{names!r} judges no correct answer as correct, such as {example!r}, {how}"


def variant_faults(kind: str, row: Series) -> Iterator[str]:
    """Yield whether correct answers are judged incorrect in a variant."""
    missed = row["count"] - row["correct"]
    if missed and kind not in DECORATED:
        yield (
            f"false negatives: {missed} of {row['count']} correct answers are judged incorrect "
            f"in the variant '{kind}', such as {row['example'][-40:]!r}"
        )


def exploit_faults(kind: str, row: Series) -> Iterator[str]:
    """Yield whether an exploit is judged correct, or pays as much as a correct answer."""
    count, paid, findings = row["count"], row["beats"] + row["equals"], []
    if row["correct"]:
        findings.append(f"judged correct in {row['correct']} of {count} cases")
    if paid:
        more = f" ({row['beats']} more, by up to {row['best_margin']:.3g})" if row["beats"] else ""
        findings.append(f"paid as a correct answer in {paid} of {count}{more}")
    if findings:
        yield f"exploit: '{kind}' is {', '.join(findings)}, such as {row['example'][-40:]!r}"


def format_faults(mean: Mapping[str, float] | Series) -> Iterator[str]:
    """Compare the reward of the format with that of correctness, and giving up with trying."""
    honest, wrong, untagged, given_up = (
        mean[kind] for kind in (HONEST, INCORRECT, MALFORMED, GIVEN_UP)
    )
    # wrong - untagged = reward of the format - reward of correctness; the policy learns the
    # format alone if that exceeds what correctness adds to a formatted answer.
    correctness, format_gain = honest - wrong, wrong - untagged
    more = max(NEGLIGIBLE * correctness, slack(honest))
    if format_gain > correctness + more:
        yield (
            f"the format outweighs the answer: an incorrect answer in format earns {wrong:.3g}, a "
            f"correct, malformed one {untagged:.3g}; correctness adds only {correctness:.3g}"
        )
    if given_up > wrong + more:
        yield (
            f"giving up pays: 'no idea' in format earns {given_up:.3g}, an incorrect attempt "
            f"{wrong:.3g}"
        )


def reward_faults(name: str, row: Series) -> Iterator[str]:
    """Yield whether a reward is slow, unfair to correct answers, or fails."""
    if row["slowest_s"] > SLOW_S:
        yield (
            f"slow: '{name}' needs {row['slowest_s']:.1f} s or more for {NASTY_SIZE} characters of "
            f"the kind '{row['slowest_on']}'; look at its regular expressions"
        )
    unfair = row["unfair"]
    if HONEST in unfair:
        yield (
            f"false negatives: '{name}' gives {unfair[HONEST]} correct answers less than its best "
            "although they look as in the data set"
        )
    variants = [f"{kind} {n}" for kind, n in unfair.items() if kind not in {HONEST, *DECORATED}]
    if variants:
        yield (
            f"false negatives: '{name}' gives less than its best in the variants "
            f"{', '.join(variants)}"
        )
    if reasons := [f"{reason}: {count}" for reason, count in row["failed"].items()]:
        yield f"failures: '{name}' fails on completions of the audit ({', '.join(reasons)})"


def find_remarks(kinds: DataFrame, rewards: DataFrame, conflicts: Series) -> Iterator[str]:
    """Yield what may be intended.

    Args:
        kinds: of `summarize_kinds`.
        rewards: of `summarize_rewards`.
        conflicts: {reward/cosine_<pair of rewards>: cosine of their advantages}.
    """
    mean = kinds["mean"][~kinds.index.isin(CORRECT_KINDS)]
    best = mean.drop(MALFORMED).idxmax()
    if mean[best] > mean.min() + slack(mean[best]):
        yield (
            f"the best exploit is '{best}': {mean[best]:.3g} on average, a plain correct answer "
            f"earns {kinds['mean'][HONEST]:.3g}"
        )
    is_judged = kinds.loc[HONEST, "correct"] > 0  # if not, there is a fault that says why
    decorated = kinds[kinds.index.isin(DECORATED) & (kinds["correct"] < kinds["count"])]
    if is_judged and len(decorated):
        counts = [f"{kind} {row['count'] - row['correct']}" for kind, row in decorated.iterrows()]
        yield (
            "exact text: correct answers with other characters around them are judged incorrect "
            f"({', '.join(counts)} of {decorated['count'].max()})"
        )
    is_constant = rewards["highest"] - rewards["lowest"] <= slack(rewards["highest"])
    for name, row in rewards.iterrows():
        if not row["scored"]:
            if is_judged and not row["failed"]:
                yield f"no reward: '{name}' gives no completion a score (None)"
        elif is_constant[name]:
            yield (
                f"constant: '{name}' gives {row['lowest']:.3g} to every completion and no gradient"
            )
        elif (~is_constant).sum() > 1 and row["share"] > DOMINANT:
            yield f"dominance: {row['share']:.0%} of the advantage comes from '{name}'"
    for pair, cosine in conflicts.items():
        if cosine < CONFLICT:
            name = str(pair).removeprefix(COSINE)
            yield f"conflict: {name} have opposed advantages (cosine {cosine:.2f})"
