"""Check rewards of open-ended text: exploits must not earn more than samples of the model."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from litgrpo.arguments import require
from litgrpo.rewards import ProcessRunner, Scorer
from litgrpo.rewards.runner import RewardRunner
from litgrpo.tools.audit.cases import PRAISE, Case, Problem
from litgrpo.tools.audit.report import slack
from litgrpo.tools.audit.run import PATIENCE_S, judge, no_warnings

WORD = re.compile(r"[^\W\d_]{3,}")
OWN_WORDS, WORDS_AT_ONCE = "words of the reward", 30


@dataclass(frozen=True)
class Exploit:
    """The rewards of one kind of completion that says nothing."""

    kind: str
    count: int
    mean: float  # total reward
    beats: int  # prompts on which it earns more than the best sample of the initial policy
    above_mean: int  # prompts on which it earns more than the mean of the samples
    example: str  # the best paid


@dataclass(frozen=True)
class OpenReport:
    """What an audit of rewards without a correct answer found.

    Args:
        prompts: number of prompts.
        samples: completions of each by the initial policy.
        mean: mean total reward of these samples.
        best: mean over the prompts of the best sample's.
        exploits: kind by kind.
        failed: {reward: {reason: completions on which it failed}}.
    """

    prompts: int
    samples: int
    mean: float
    best: float
    exploits: list[Exploit]
    failed: dict[str, dict[str, int]]

    @property
    def faults(self) -> list[str]:
        """What makes the rewards unfit to train with, in sentences; equal is not better."""
        exploits = [
            f"exploit: '{exploit.kind}' earns {exploit.mean:.3g} on average and beats the best of "
            f"{self.samples} samples on {exploit.beats} of {exploit.count} prompts (these earn "
            f"{self.best:.3g}), such as {exploit.example[:60]!r}"
            for exploit in self.exploits
            if 2 * exploit.beats > exploit.count
        ]
        failures = [
            f"failures: {name!r} fails on completions of the audit ({reason}: {count})"
            for name, reasons in self.failed.items()
            for reason, count in reasons.items()
        ]
        return [*exploits, *failures]

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing, but may be meant."""
        return [
            f"'{exploit.kind}' earns more than the mean sample on {exploit.above_mean} of "
            f"{exploit.count} prompts: what begins to look like it will be learned"
            for exploit in self.exploits
            if 2 * exploit.above_mean > exploit.count >= 2 * exploit.beats
        ]

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        found = {"faults": self.faults, "remarks": self.remarks, "passed": self.passed}
        return asdict(self) | found


def audit_open_text(
    scorer: Scorer,
    problems: Sequence[Problem],
    samples: Sequence[Sequence[str]],
    seed: int = 0,
    runner: RewardRunner | None = None,
) -> OpenReport:
    """Ask rewards about texts that say nothing, and about samples of the initial policy.

    Args:
        scorer: the rewards.
        problems: B prompts, whose answers are not looked at.
        samples: k completions of each of them.
        seed: of what is shuffled.
        runner: runs the functions; None: worker processes, of which failures are counted.
    """
    require(len(problems) > 0, "there are no prompts to audit with")
    runner = runner or ProcessRunner(timeout_s=PATIENCE_S, max_failed_frac=1.0)
    patient = Scorer(scorer.parts, scorer.reward_format, runner)
    lexicon = own_words(scorer)
    with no_warnings(), closing(runner):
        real = judge(patient, [_cases(texts) for texts in samples], problems).total
        best = [texts[place] for texts, place in zip(samples, _best(real), strict=True)]
        rng = random.Random(seed)
        told = [
            make_exploits(problem.prompt, text, lexicon, rng)
            for problem, text in zip(problems, best, strict=True)
        ]
        paid = judge(patient, [_cases(texts.values()) for texts in told], problems).total
    return OpenReport(
        prompts=len(problems),
        samples=len(samples[0]),
        mean=float(real.nanmean()),
        best=float(real.nan_to_num(-1e300).max(1).values.mean()),
        exploits=[
            _trick(kind, paid[:, place], real, [texts[kind] for texts in told])
            for place, kind in enumerate(told[0])
        ],
        failed={name: dict(reasons) for name, reasons in patient.failures.items() if reasons},
    )


def _cases(texts: Iterable[str]) -> list[Case]:
    return [Case("", text, None) for text in texts]


def _best(real: Tensor) -> list[int]:
    return real.nan_to_num(-1e300).argmax(1).tolist()


def _trick(kind: str, paid: Tensor, real: Tensor, texts: list[str]) -> Exploit:
    paid = paid.nan_to_num(-1e300)
    highest, mean = real.nan_to_num(-1e300).max(1).values, real.nanmean(1)
    return Exploit(
        kind=kind,
        count=len(paid),
        mean=float(paid.mean()),
        beats=int((paid > highest + slack(highest)).sum()),
        above_mean=int((paid > mean + slack(mean)).sum()),
        example=texts[int(paid.argmax())],
    )


def make_exploits(
    prompt: str, sample: str, lexicon: Sequence[str], rng: random.Random
) -> dict[str, str]:
    """{kind: text}: completions that say nothing of their own.

    Args:
        prompt: what was asked.
        sample: a real completion.
        lexicon: words that the rewards know; may be empty.
        rng: for what is shuffled.
    """
    words = sample.split()
    shuffled = rng.sample(words, len(words))
    sentence = re.split(r"(?<=[.!?])\s", sample.strip())[0]
    asked = WORD.findall(prompt) or prompt.split()
    found = {
        "no completion": "",
        "prompt copied": prompt,
        "one sentence repeated": f"{sentence} " * 20,
        "words shuffled": " ".join(shuffled),
        "keywords of the prompt": " ".join(asked * 8),
        "keywords": PRAISE * 4,
        "refusal": "I am sorry, but I cannot answer this question.",
    }
    known = list(lexicon)[:WORDS_AT_ONCE]
    own = {OWN_WORDS: " ".join(known), f"{OWN_WORDS}, repeated": " ".join(known[:1] * 30)}
    return found | (own if known else {})


def own_words(scorer: Scorer) -> list[str]:
    """Words that the reward functions hold: in arguments, constants, closures and lexicons.

    Of words with numbers, as lexicons of sentiment have them, those with the highest come first.
    """
    found: dict[str, float] = {}
    for name, function in scorer.functions.items():
        for value in _held(function, scorer.parts[name].kwargs):
            for word, worth in _words_in(value).items():
                found[word] = max(worth, found.get(word, worth))
    return sorted(found, key=lambda word: -found[word])


def _held(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a function can look words up in: arguments, attributes, closure, its file's names."""
    plain = inspect.unwrap(function)
    held = [*kwargs.values(), *_attributes(plain)]
    code = plain if inspect.isroutine(plain) else type(plain).__call__
    if not inspect.isfunction(code):
        return held
    named = [value for name, value in code.__globals__.items() if not name.startswith("__")]
    cells = [cell.cell_contents for cell in code.__closure__ or ()]
    return [*held, *named, *cells, *(code.__defaults__ or ())]


def _attributes(value: Any) -> list[Any]:
    """What an object of a class of its own holds."""
    try:
        return list(vars(value).values())
    except TypeError:  # a number, a text, a list
        return []


def _words_in(value: Any) -> dict[str, float]:
    """{word: what it is worth} of a collection of words, or of an object with such collections."""
    inner = [] if inspect.ismodule(value) or callable(value) else _attributes(value)
    found: dict[str, float] = {}
    for each in [value, *inner]:
        if isinstance(each, Mapping):
            found |= {word: _worth(worth) for word, worth in each.items() if _is_word(word)}
        elif isinstance(each, list | tuple | set | frozenset):
            found |= dict.fromkeys(sorted(filter(_is_word, each)), 0.0)
    return found


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and WORD.fullmatch(value) is not None


def _worth(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
