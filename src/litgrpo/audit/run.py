"""Check a set of rewards before training for false negatives and exploits."""

from __future__ import annotations

import logging
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from litgrpo.arguments import one_of, require
from litgrpo.audit.cases import (
    CORRECT_KINDS,
    HONEST,
    INCORRECT,
    AnswerFormat,
    Case,
    Problem,
    correct_answers,
    make_exploits,
    nasty_texts,
    write_malformed_answer,
)
from litgrpo.audit.report import NASTY_SIZE, SLOW_S, KindResult, Report, RewardResult, slack
from litgrpo.rewards import ProcessRunner, Reward, Scorer
from litgrpo.rewards.reward import find_success_rewards
from litgrpo.types import RewardTable

TOKEN = re.compile(r"\w+|[^\w\s]")
COSINE = "reward/cosine_"
PROBLEMS_AT_ONCE = 64
FORMAT_PROBLEMS = 8  # on which the format of the answers is recognized
OTHER_FORMATS = (
    "{reasoning}\n{answer}",
    "{reasoning}\n#### {answer}",
    "{reasoning}\n\\boxed{{answer}}",
    "{reasoning}\nThe answer is {answer}.",
    "{answer}",
)
PATIENCE_S = 10.0
# A component judges answers if at least this share of the plain correct answers get its best value.
MOSTLY = 0.75


def audit_rewards(
    scorer: Scorer,
    problems: Sequence[Problem],
    *,
    success: str | None = None,
    threshold: float = 1.0,
    answer_format: AnswerFormat | None = None,
    seed: int = 0,
) -> Report:
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
    tasks = {name: each.tasks for name, each in scorer.components.items()}
    deciding = find_success_rewards(scorer.weights, tasks, success)
    require(len(problems) > 0, "there are no problems to audit with")
    # max_failed_frac=1: the audit counts failures, so none may stop it.
    runner = ProcessRunner(timeout_s=PATIENCE_S, max_failed_frac=1.0)
    patient = Scorer(scorer.components, scorer.reward_format, runner)
    with no_warnings(), closing(runner):
        chosen = answer_format or _recognize_format(patient, problems, deciding, threshold)
        answers = _ScoredCases(
            deciding, threshold, partial(_cases, answer_format=chosen, seed=seed)
        )
        for start in range(0, len(problems), PROBLEMS_AT_ONCE):
            answers.add(patient, problems[start : start + PROBLEMS_AT_ONCE])
        known = problems[0].columns
        times = {
            name: measure_slowest(part, scorer.reward_format, known)
            for name, part in scorer.components.items()
        }
    failed = patient.failures
    lines = [answers.line(kind) for kind in answers.kinds()]
    return Report(
        success=", ".join(dict.fromkeys(deciding.values())),
        problems=len(problems),
        variants=[line for line in lines if line.kind in CORRECT_KINDS],
        attacks=[line for line in lines if line.kind not in CORRECT_KINDS],
        parts=[answers.part(name, failed.get(name, {}), *time) for name, time in times.items()],
        conflicts=answers.conflicts(),
        answer_format=chosen.text,
        format_was_given=answer_format is not None,
    )


def _recognize_format(
    scorer: Scorer, problems: Sequence[Problem], deciding: Mapping[str, str], threshold: float
) -> AnswerFormat:
    """Return the usual format with the most correct answers that are judged correct.

    They are written plainly and with spaces around: a reward that reads the last line accepts the
    first in tags, too.
    """
    few = problems[:: max(1, len(problems) // FORMAT_PROBLEMS)][:FORMAT_PROBLEMS]
    formats = usual_formats(scorer)
    cases = [
        [
            Case(HONEST, each.fill(problem.reasoning, shown), problem.answer)
            for each in formats
            for shown in (problem.reference, f"\n   {problem.reference} \n")
        ]
        for problem in few
    ]
    table = score_cases(scorer, cases, few)
    correct = table.find_correct(deciding, threshold).sum(0).view(-1, 2).sum(1).tolist()
    return formats[correct.index(max(correct))]


def _cases(problem: Problem, answer_format: AnswerFormat, seed: int) -> list[Case]:
    """Return every completion of a problem, the plain correct answer first."""
    cheats = make_exploits(problem, answer_format, random.Random(seed))
    return [*correct_answers(problem, answer_format), *cheats, write_malformed_answer(problem)]


@contextmanager
def no_warnings() -> Iterator[None]:
    """Silence the runner's warnings about failures, which the report contains."""
    log = logging.getLogger("litgrpo.rewards.runner")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def usual_formats(scorer: Scorer) -> list[AnswerFormat]:
    """Return tags as the rewards' kwargs name them, the last line, `####`, a box, a sentence."""
    kwargs = {k: v for part in scorer.components.values() for k, v in part.kwargs.items()}
    reasoning = kwargs.get("reasoning_tag", "reasoning")
    answer = kwargs.get("answer_tag", "answer")
    tags = f"<{reasoning}>\n{{reasoning}}\n</{reasoning}>\n<{answer}>{{answer}}</{answer}>"
    return [AnswerFormat(text) for text in (tags, *OTHER_FORMATS)]


def measure_slowest(
    part: Reward, reward_format: Any, columns: Mapping[str, Any] | None = None
) -> tuple[float, str]:
    """Return the longest time of a reward function for one long text in s, and the kind of text.

    Args:
        part: the reward.
        reward_format: as in Scorer.
        columns: other columns that the function may require, of any problem.
    """
    runner = ProcessRunner(timeout_s=2 * SLOW_S, max_failed_frac=1.0, num_workers=1)
    scorer = Scorer({"part": Reward(part.function, kwargs=part.kwargs)}, reward_format, runner)
    problem = Problem("How much is 40 + 32?", "72", columns or {})
    worst = (0.0, "")
    with closing(runner):
        score_cases(
            scorer, [[Case("", "", "72")]], [problem]
        )  # starts the worker: its imports are not timed
        for kind, text in nasty_texts(NASTY_SIZE).items():
            start = time.perf_counter()
            score_cases(scorer, [[Case(kind, text, "72")]], [problem])
            worst = max(worst, (time.perf_counter() - start, kind))
            if worst[0] > SLOW_S:  # a fault already; each further text would take as long
                break
    return worst


def score_cases(
    scorer: Scorer, cases: Sequence[Sequence[Case]], problems: Sequence[Problem]
) -> RewardTable:
    """Return rewards [problems, cases]; the completions of a problem are one group."""
    flat = [case for row in cases for case in row]
    owners = [problem for row, problem in zip(cases, problems, strict=True) for _ in row]
    names = {name for problem in problems for name in problem.columns}
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
    return scorer(prompts, [case.completion for case in flat], columns, len(cases[0]))


@dataclass(frozen=True)
class _Batch:
    """Rewards of some problems with the same kinds of completions."""

    kinds: list[str]
    problems: list[Problem]
    table: RewardTable  # [problems, kinds]; the first kind is the plain correct answer
    stats: dict[str, Tensor]


class _ScoredCases:
    """Rewards of all completions.

    Args:
        deciding: {task: the reward that decides if an answer is correct}, "" for all others.
        threshold: least value of this reward for a correct answer.
        cases: returns every completion of a problem.
    """

    def __init__(
        self, deciding: Mapping[str, str], threshold: float, cases: Callable[[Problem], list[Case]]
    ) -> None:
        self.deciding, self.threshold, self.cases = deciding, threshold, cases
        self.batches: list[_Batch] = []

    def add(self, scorer: Scorer, problems: Sequence[Problem]) -> None:
        """Score all completions of some problems.

        Numbers have more variants than texts, but all groups of a batch have the same size.
        Problems are therefore batched by their number of completions.
        """
        pairs = [(self.cases(problem), problem) for problem in problems]
        for size in sorted({len(cases) for cases, _ in pairs}):
            rows = [cases for cases, _ in pairs if len(cases) == size]
            same = [problem for cases, problem in pairs if len(cases) == size]
            kinds = [case.kind for case in rows[0]]
            table = score_cases(scorer, rows, same)
            self.batches.append(_Batch(kinds, same, table, table.stats()))

    def column(self, kind: str, of: Callable[[RewardTable], Tensor]) -> Tensor:
        """Return one column of the tables [problems], for all problems with this kind."""
        having = [batch for batch in self.batches if kind in batch.kinds]
        return torch.cat([of(batch.table)[:, batch.kinds.index(kind)] for batch in having])

    def kinds(self) -> list[str]:
        """Return all kinds of completions, in order."""
        return list(dict.fromkeys(kind for batch in self.batches for kind in batch.kinds))

    def line(self, kind: str) -> KindResult:
        """Summarize one kind of completion."""
        total = self.column(kind, lambda table: table.total)
        margin = self.column(kind, lambda table: table.total - table.total[:, :1])
        correct = self.column(kind, self._is_correct)
        # The example is a misjudged completion if there is one, with the highest margin of these.
        mistaken = correct != (kind in CORRECT_KINDS)
        worst = max(zip(mistaken.tolist(), margin.tolist(), range(len(total)), strict=True))[2]
        problems = [p for batch in self.batches if kind in batch.kinds for p in batch.problems]
        examples = {case.kind: case.completion for case in self.cases(problems[worst])}
        return KindResult(
            kind=kind,
            count=len(total),
            correct=int(correct.sum()),
            mean=float(total.mean()),
            best_margin=float(margin.max()),
            beats=int((margin > slack(total - margin)).sum()),
            equals=int((margin.abs() <= slack(total - margin)).sum()),
            example=examples[kind],
        )

    def _is_correct(self, table: RewardTable) -> Tensor:
        return table.find_correct(self.deciding, self.threshold) == 1

    def part(
        self, name: str, failed: dict[str, int], slowest_s: float, slowest_on: str
    ) -> RewardResult:
        """Summarize one reward."""
        kinds = {
            kind: self.column(kind, lambda table: table.components[name]) for kind in self.kinds()
        }
        values = torch.cat(list(kinds.values()))
        known = values[~values.isnan()].tolist() or [0.0]
        return RewardResult(
            name=name,
            low=min(known),
            high=max(known),
            share=self._mean(f"reward/{name}_share", 1.0),
            slowest_s=slowest_s,
            slowest_on=slowest_on,
            failed=failed,
            unfair={} if name in self.deciding.values() else _unfair(kinds),
        )

    def conflicts(self) -> dict[str, float]:
        """Return {pair of rewards: mean cosine of their advantages}."""
        names = [name for name in self.batches[0].stats if name.startswith(COSINE)]
        return {name.removeprefix(COSINE): self._mean(name, 0.0) for name in names}

    def _mean(self, name: str, default: float) -> float:
        """Return the mean of a statistic over the batches; `default` for batches without it."""
        values = [float(batch.stats.get(name, default)) for batch in self.batches]
        return sum(values) / len(values)


def _unfair(kinds: dict[str, Tensor]) -> dict[str, int]:
    """Return {variant: number of correct answers below the best value}.

    Rewards that do not judge answers, such as one for length, get {}.
    """
    plain, wrong = kinds[HONEST].nan_to_num(0.0), kinds[INCORRECT].nan_to_num(0.0)
    full = plain.max() - slack(plain.max())
    judges = plain.mean() > wrong.mean() and (wrong >= full).double().mean() < MOSTLY
    if not judges or (plain >= full).double().mean() < MOSTLY:
        return {}
    counts = {
        kind: int((kinds[kind] < full).sum()) for kind in sorted(CORRECT_KINDS & kinds.keys())
    }
    return {kind: count for kind, count in counts.items() if count}
