"""Tests a set of rewards before money is spent on it: would it be fair, and could it be gamed?"""

from __future__ import annotations

import logging
import random
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from litgrpo.rewards.audit.cases import (
    HONEST,
    WRONG,
    Case,
    Form,
    Problem,
    hacks,
    nasty_texts,
    out_of_form,
    right_answers,
)
from litgrpo.rewards.audit.report import (
    NASTY_SIZE,
    SLOW_S,
    TOLERANCE,
    Line,
    Part,
    Report,
    added,
    faults,
    remarks,
)
from litgrpo.rewards.runner.in_process import log as guard_log
from litgrpo.rewards.runner.process_guard import ProcessRunner
from litgrpo.rewards.scorer import Reward, Scorer
from litgrpo.types import RewardTable

TOKEN = re.compile(r"\w+|[^\w\s]")
PROBLEMS_AT_ONCE = 64
PATIENCE_S = 10.0
MOSTLY = 0.75  # of the plain right answers have the best, where a part judges answers


def audit(
    composite: Scorer,
    problems: Sequence[Problem],
    *,
    success: str | None = None,
    threshold: float = 1.0,
    form: Form | None = None,
    seed: int = 0,
) -> Report:
    """Ask a set of rewards about right answers in many renderings, and about ways to cheat.

    Args:
        composite: the rewards.
        problems: questions with gold answers.
        success: the reward that says whether an answer is right; default: the first.
        threshold: from which it does.
        form: how a completion should look; default: the tags that the rewards' kwargs name.
        seed: of the noise in the attacks.

    Returns:
        The report; `passed` is the verdict.
    """
    success = next(iter(composite.parts)) if success is None else success
    if success not in composite.parts:
        known = ", ".join(composite.parts)
        raise ValueError(f"success is {success!r}; it must name a reward: {known}")
    if not problems:
        raise ValueError("there are no problems to audit with")
    form = form or form_of(composite)
    guard = ProcessRunner(timeout_s=PATIENCE_S, max_failed_frac=1.0)
    patient = Scorer(composite.parts, composite.reward_format, guard)
    found = _Findings(success, threshold)
    with _quiet(), closing(guard):
        for start in range(0, len(problems), PROBLEMS_AT_ONCE):
            chunk = problems[start : start + PROBLEMS_AT_ONCE]
            for same in _by_kinds([_cases(p, form, random.Random(seed)) for p in chunk], chunk):
                found.add(_judge(patient, *same), *same)
        parts = composite.parts.items()
        times = {name: slowest(part, composite.reward_format) for name, part in parts}
    return found.report(len(problems), patient.failures, times)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the guard would warn of is in the report."""
    level = guard_log.level
    guard_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        guard_log.setLevel(level)


def form_of(composite: Scorer) -> Form:
    """Tags as the rewards' kwargs name them."""
    kwargs = {k: v for part in composite.parts.values() for k, v in part.kwargs.items()}
    reasoning = kwargs.get("reasoning_tag", "reasoning")
    answer = kwargs.get("answer_tag", "answer")
    return Form(f"<{reasoning}>\n{{reasoning}}\n</{reasoning}>\n<{answer}>{{answer}}</{answer}>")


def slowest(part: Reward, reward_format: Any) -> tuple[float, str]:
    """The longest that a reward function needs for one long text, and the kind of text.

    Args:
        part: the reward.
        reward_format: as in Scorer.
    """
    alone = Reward(part.function, kwargs=part.kwargs)
    guard = ProcessRunner(timeout_s=2 * SLOW_S, max_failed_frac=1.0, workers=1)
    composite = Scorer({"part": alone}, reward_format, guard)
    worst = (0.0, "")
    problem = Problem("How much is 40 + 32?", "72")
    with closing(guard):
        _judge(composite, [[Case("", "", "72")]], [problem])  # starts the worker, warms up
        for kind, text in nasty_texts(NASTY_SIZE).items():
            start = time.perf_counter()
            _judge(composite, [[Case(kind, text, "72")]], [problem])
            worst = max(worst, (time.perf_counter() - start, kind))
            if worst[0] > SLOW_S:
                break
    return worst


def _cases(problem: Problem, form: Form, rng: random.Random) -> list[Case]:
    """The honest answer first."""
    return [*right_answers(problem, form), *hacks(problem, form, rng), out_of_form(problem)]


def _by_kinds(
    cases: list[list[Case]], problems: Sequence[Problem]
) -> Iterator[tuple[list[list[Case]], list[Problem]]]:
    """Problems with the same number of cases together (numbers have more renderings than texts)."""
    for size in sorted({len(row) for row in cases}):
        pairs = [(row, p) for row, p in zip(cases, problems, strict=True) if len(row) == size]
        yield [row for row, _ in pairs], [problem for _, problem in pairs]


def _judge(
    composite: Scorer, cases: Sequence[Sequence[Case]], problems: Sequence[Problem]
) -> RewardTable:
    """[problems, cases] rewards; a problem's completions are one group."""
    flat = [case for row in cases for case in row]
    owners = [problem for row, problem in zip(cases, problems, strict=True) for _ in row]
    names = {name for problem in problems for name in problem.columns}
    ids = [_token_ids(case.completion) for case in flat]
    columns: dict[str, list[Any]] = {
        name: [dict(problem.columns).get(name) for problem in owners] for name in names
    }
    columns |= {
        "answer": [case.answer for case in flat],
        "completion_ids": ids,
        "completion_lengths": [len(tokens) for tokens in ids],
        "truncated": [False] * len(flat),
    }
    prompts = [problem.prompt for problem in owners]
    return composite(prompts, [case.completion for case in flat], columns, len(cases[0]))


def _token_ids(text: str) -> list[int]:
    """Words and signs as numbers: an audit needs no tokenizer, and lengths are about right."""
    return [_token_id(token) for token in TOKEN.findall(text)]


@lru_cache(maxsize=100_000)
def _token_id(token: str) -> int:
    return zlib.crc32(token.encode()) % 65536


class _Findings:
    """Numbers by kind of completion, gathered batch by batch."""

    def __init__(self, success: str, threshold: float) -> None:
        self.success, self.threshold = success, threshold
        self.lines: dict[str, Line] = {}
        self.worst: dict[str, tuple[bool, float]] = {}
        self.rights: set[str] = set()
        self.tables: list[RewardTable] = []
        self.values: dict[str, dict[str, list[Tensor]]] = {}

    def add(self, table: RewardTable, cases: list[list[Case]], problems: Sequence[Problem]) -> None:
        self.tables.append(table)
        right = ((table.parts[self.success] >= self.threshold) & table.valid).tolist()
        total = table.total.tolist()
        self.rights |= {case.kind for case in right_answers(problems[0], Form())}
        for place, case in enumerate(cases[0]):
            for name, part in table.parts.items():
                columns = self.values.setdefault(name, {}).setdefault(case.kind, [])
                columns.append(part[:, place])
        for row, group in enumerate(cases):
            for place, case in enumerate(group):
                line = Line(
                    kind=case.kind,
                    count=1,
                    right=int(right[row][place]),
                    mean=total[row][place],
                    best_margin=total[row][place] - total[row][0],
                    beats=int(total[row][place] - total[row][0] >= -TOLERANCE),
                    example=case.completion,
                )
                self._enter(line)

    def _enter(self, one: Line) -> None:
        """Add it to the line of its kind, whose example is one that went wrong, the worst."""
        kind = one.kind
        if kind not in self.lines:
            self.lines[kind] = one
        else:
            self.lines[kind] = added(self.lines[kind], one)
        badness = (bool(one.right) is not (kind in self.rights), one.best_margin)
        if badness >= self.worst.get(kind, badness):
            self.worst[kind] = badness
            self.lines[kind] = replace(self.lines[kind], example=one.example)

    def report(
        self,
        problems: int,
        failed: Mapping[str, Mapping[str, int]],
        times: Mapping[str, tuple[float, str]],
    ) -> Report:
        lines = self.lines
        renderings = [line for kind, line in lines.items() if kind in self.rights]
        attacks = [line for kind, line in lines.items() if kind not in self.rights]
        parts = [self._part(name, failed.get(name, {}), times[name]) for name in times]
        report = Report(self.success, problems, renderings, attacks, parts)
        report.faults.extend(faults(report, lines))
        report.remarks.extend(remarks(report, lines, self._conflicts()))
        return report

    def _part(self, name: str, failed: Mapping[str, int], slow: tuple[float, str]) -> Part:
        kinds = {kind: torch.cat(columns) for kind, columns in self.values[name].items()}
        values = torch.cat(list(kinds.values()))
        values = values[~values.isnan()]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
        share = self._mean(f"reward/{name}_share", 1.0)
        unfair = {} if name == self.success else self._unfair(kinds)
        return Part(name, low, high, share, *slow, dict(failed), unfair)

    def _unfair(self, kinds: Mapping[str, Tensor]) -> dict[str, int]:
        plain, wrong = kinds[HONEST].nan_to_num(0.0), kinds[WRONG].nan_to_num(0.0)
        best = plain.max()
        judges = plain.mean() > wrong.mean() and (wrong >= best).double().mean() < MOSTLY
        if not judges or (plain >= best).double().mean() < MOSTLY:
            return {}
        counts = {kind: int((kinds[kind] < best).sum()) for kind in self.rights}
        return {kind: count for kind, count in sorted(counts.items()) if count}

    def _mean(self, key: str, alone: float) -> float:
        """The mean of a statistic over the batches; `alone` where there is only one reward."""
        stats = [float(table.stats().get(key, torch.tensor(alone))) for table in self.tables]
        return sum(stats) / len(stats)

    def _conflicts(self) -> dict[str, float]:
        names = [name for name in self.tables[0].stats() if name.startswith("reward/cosine_")]
        return {name.removeprefix("reward/cosine_"): self._mean(name, 0.0) for name in names}
