"""Check rewards of open-ended text: exploits must not earn more than samples of the model."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from litgrpo.arguments import require
from litgrpo.audit.cases import PRAISE, Case, Problem
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import (
    best_samples,
    compare_with_samples,
    describe_failures,
    mean_and_best,
    patient_scorer,
    score_cases,
)
from litgrpo.rewards import Scorer

if TYPE_CHECKING:
    from pandas import DataFrame

WORD = re.compile(r"[^\W\d_]{3,}")
LEXICON_WORDS, WORDS_AT_ONCE = "words of the reward", 30


def audit_open_text(
    scorer: Scorer, problems: Sequence[Problem], samples: Sequence[Sequence[str]], seed: int = 0
) -> AuditReport:
    """Score exploits, and compare their rewards with samples of the initial policy.

    Args:
        scorer: the rewards.
        problems: B prompts; their answers are ignored.
        samples: k completions of each of them.
        seed: random seed of the shuffled exploit.
    """
    import pandas as pd

    require(len(problems) > 0, "there are no prompts to audit with")
    lexicon, rng, num_samples = find_lexicon(scorer), random.Random(seed), len(samples[0])
    with patient_scorer(scorer) as patient:
        probes = [[Case("sample", text, None) for text in texts] for texts in samples]
        real = score_cases(patient, list(zip(problems, probes, strict=True))).total
        probes = [
            make_exploits(problem.prompt, texts[best], lexicon, rng)
            for problem, texts, best in zip(problems, samples, best_samples(real), strict=True)
        ]
        paid = score_cases(patient, list(zip(problems, probes, strict=True))).total
    rows = {}
    for column, case in enumerate(probes[0]):
        totals = paid[:, column]
        example = probes[int(totals.nan_to_num(-torch.inf).argmax())][column].completion
        rows[case.kind] = compare_with_samples(totals, real) | {"example": example}
    exploits = pd.DataFrame.from_dict(rows, orient="index").sort_values("mean", ascending=False)
    mean, best = mean_and_best(real)
    return AuditReport(
        title=f"{len(problems)} prompts without a column `answer` (another name: data.columns), so "
        f"correctness was not tested; {num_samples} samples of the initial policy earn {mean:.3g} "
        f"on average, the best of them {best:.3g}",
        numbers={"prompts": len(problems), "samples": num_samples, "mean": mean, "best": best},
        tables={"exploit": exploits},
        faults=[
            *find_faults(exploits, num_samples, best),
            *describe_failures(patient, "completions"),
        ],
        remarks=list(find_remarks(exploits)),
    )


def find_faults(exploits: DataFrame, num_samples: int, best: float) -> Iterator[str]:
    """Yield exploits that earn more than the best sample; to equal it is no fault."""
    for kind, row in exploits.iterrows():
        if 2 * row["beats_best"] > row["count"]:
            yield (
                f"exploit: '{kind}' earns {row['mean']:.3g} on average and beats the best of "
                f"{num_samples} samples on {row['beats_best']} of {row['count']} prompts (these "
                f"earn {best:.3g}), such as {row['example'][:60]!r}"
            )


def find_remarks(exploits: DataFrame) -> Iterator[str]:
    """Yield exploits that earn more than the mean sample, but not than the best."""
    for kind, row in exploits.iterrows():
        if 2 * row["beats_mean"] > row["count"] >= 2 * row["beats_best"]:
            yield (
                f"'{kind}' earns more than the mean sample on {row['beats_mean']} of "
                f"{row['count']} prompts: training reinforces completions that resemble it"
            )


def make_exploits(prompt: str, sample: str, lexicon: list[str], rng: random.Random) -> list[Case]:
    """Return completions without content of any use.

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
    texts = {
        "no completion": "",
        "prompt copied": prompt,
        "one sentence repeated": f"{sentence} " * 20,
        "words shuffled": " ".join(shuffled),
        "keywords of the prompt": " ".join(asked * 8),
        "keywords": PRAISE * 4,
        "no attempt": "I am sorry, but I cannot answer this question.",
    }
    if lexicon:
        texts[LEXICON_WORDS] = " ".join(lexicon[:WORDS_AT_ONCE])
        texts[f"{LEXICON_WORDS}, repeated"] = " ".join(lexicon[:1] * 30)
    return [Case(kind, text, None) for kind, text in texts.items()]


# --- words that a reward knows ---


def find_lexicon(scorer: Scorer) -> list[str]:
    """Return words in arguments, constants, closures and lexicons of the reward functions.

    Words with a score, as in sentiment lexicons, come first, the highest score first.
    """
    scores: dict[str, float] = {}
    for name, function in scorer.functions.items():
        for value in values_held_by(function, scorer.components[name].kwargs):
            for word, score in find_words(value).items():
                scores[word] = max(score, scores.get(word, score))
    return sorted(scores, key=lambda word: -scores[word])


def values_held_by(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values a function can read: arguments, attributes, closure, module globals."""
    plain = inspect.unwrap(function)
    values = [*kwargs.values(), *getattr(plain, "__dict__", {}).values()]
    code = plain if inspect.isroutine(plain) else type(plain).__call__
    if inspect.isfunction(code):
        values += [v for name, v in code.__globals__.items() if not name.startswith("__")]
        values += [cell.cell_contents for cell in code.__closure__ or ()]
        values += code.__defaults__ or ()
    return values


def find_words(value: Any) -> dict[str, float]:
    """Return {word: score} of a collection of words, or of an object with such collections."""
    collections = [value]
    if not (inspect.ismodule(value) or callable(value)):
        collections += getattr(value, "__dict__", {}).values()
    scores: dict[str, float] = {}
    for collection in collections:
        if isinstance(collection, Mapping):
            for word, score in collection.items():
                if _is_word(word):
                    scores[word] = float(score) if isinstance(score, int | float) else 0.0
        elif isinstance(collection, list | tuple | set | frozenset):
            scores |= dict.fromkeys(sorted(filter(_is_word, collection)), 0.0)
    return scores


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and WORD.fullmatch(value) is not None
