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
from litgrpo.audit.cases import PRAISE, Case, Problem
from litgrpo.audit.report import slack
from litgrpo.audit.run import PATIENCE_S, no_warnings, score_cases
from litgrpo.rewards import ProcessRunner, Scorer
from litgrpo.rewards.runner import RewardRunner

WORD = re.compile(r"[^\W\d_]{3,}")
LEXICON_WORDS, WORDS_AT_ONCE = "words of the reward", 30


@dataclass(frozen=True)
class Exploit:
    """The rewards of one kind of completion that gives empty turns."""

    kind: str
    count: int
    mean: float  # total reward
    beats: int  # prompts with more reward than the best sample of the initial policy
    above_mean: int  # prompts with more reward than the mean of the samples
    example: str  # the one with the highest reward


@dataclass(frozen=True)
class OpenReport:
    """Result of the audit of rewards for open-ended text.

    Args:
        prompts: number of prompts.
        samples: completions of each by the initial policy.
        mean: mean total reward of these samples.
        best: mean over prompts of the best sample's reward.
        exploits: one result per kind of exploit.
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
        """Problems that make the rewards unfit for training, one sentence each.

        An exploit that only equals the best sample is not a fault.
        """
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
        """Findings that may be intended, one sentence each."""
        return [
            f"'{exploit.kind}' earns more than the mean sample on {exploit.above_mean} of "
            f"{exploit.count} prompts: training reinforces completions that resemble it"
            for exploit in self.exploits
            if 2 * exploit.above_mean > exploit.count >= 2 * exploit.beats
        ]

    @property
    def passed(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        found = {"faults": self.faults, "remarks": self.remarks, "passed": self.passed}
        return asdict(self) | found


def audit_open_text(
    scorer: Scorer,
    problems: Sequence[Problem],
    samples: Sequence[Sequence[str]],
    seed: int = 0,
    runner: RewardRunner | None = None,
) -> OpenReport:
    """Score exploits, and compare their rewards with samples of the initial policy.

    Args:
        scorer: the rewards.
        problems: B prompts; their answers are ignored.
        samples: k completions of each of them.
        seed: random seed of the shuffled exploit.
        runner: runs the functions; None: worker processes that count failures.
    """
    require(len(problems) > 0, "there are no prompts to audit with")
    runner = runner or ProcessRunner(timeout_s=PATIENCE_S, max_failed_frac=1.0)
    patient = Scorer(scorer.components, scorer.reward_format, runner)
    lexicon = find_lexicon(scorer)
    with no_warnings(), closing(runner):
        real = score_cases(patient, [_cases(texts) for texts in samples], problems).total
        best = [texts[place] for texts, place in zip(samples, _best(real), strict=True)]
        rng = random.Random(seed)
        exploits = [
            make_exploits(problem.prompt, text, lexicon, rng)
            for problem, text in zip(problems, best, strict=True)
        ]
        paid = score_cases(patient, [_cases(texts.values()) for texts in exploits], problems).total
    return OpenReport(
        prompts=len(problems),
        samples=len(samples[0]),
        mean=float(real.nanmean()),
        best=float(real.nan_to_num(-1e300).max(1).values.mean()),
        exploits=[
            _exploit_result(kind, paid[:, place], real, [texts[kind] for texts in exploits])
            for place, kind in enumerate(exploits[0])
        ],
        failed={name: dict(reasons) for name, reasons in patient.failures.items() if reasons},
    )


def _cases(texts: Iterable[str]) -> list[Case]:
    return [Case("", text, None) for text in texts]


def _best(real: Tensor) -> list[int]:
    return real.nan_to_num(-1e300).argmax(1).tolist()


def _exploit_result(kind: str, paid: Tensor, real: Tensor, texts: list[str]) -> Exploit:
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
    """Return {kind: text}: completions without content of any use.

    Args:
        prompt: the prompt.
        sample: a completion of the initial policy.
        lexicon: words found in the reward functions; may be empty.
        rng: shuffles the words of the sample.
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
        "no attempt": "I am sorry, but I cannot answer this question.",
    }
    known = list(lexicon)[:WORDS_AT_ONCE]
    own = {LEXICON_WORDS: " ".join(known), f"{LEXICON_WORDS}, repeated": " ".join(known[:1] * 30)}
    return found | (own if known else {})


def find_lexicon(scorer: Scorer) -> list[str]:
    """Return words in arguments, constants, closures and lexicons of the reward functions.

    Words with a score, as in sentiment lexicons, come first, the highest score first.
    """
    found: dict[str, float] = {}
    for name, function in scorer.functions.items():
        for value in _values_held_by(function, scorer.components[name].kwargs):
            for word, worth in _find_words(value).items():
                found[word] = max(worth, found.get(word, worth))
    return sorted(found, key=lambda word: -found[word])


def _values_held_by(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values a function can read: arguments, attributes, closure, module globals."""
    plain = inspect.unwrap(function)
    held = [*kwargs.values(), *_attributes(plain)]
    code = plain if inspect.isroutine(plain) else type(plain).__call__
    if not inspect.isfunction(code):
        return held
    named = [value for name, value in code.__globals__.items() if not name.startswith("__")]
    cells = [cell.cell_contents for cell in code.__closure__ or ()]
    return [*held, *named, *cells, *(code.__defaults__ or ())]


def _attributes(value: Any) -> list[Any]:
    """Return the attribute values of an object; [] if it has no `__dict__`."""
    try:
        return list(vars(value).values())
    except TypeError:  # a number, a text, a list
        return []


def _find_words(value: Any) -> dict[str, float]:
    """Return {word: score} of a collection of words, or of an object with such collections."""
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
