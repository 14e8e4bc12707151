"""Check rewards of open-ended text: exploits must not earn more than samples of the model."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.audit.cases import PRAISE, Case, Problem
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import (
    are_equal,
    best_samples,
    compare_with_samples,
    describe_equal_samples,
    describe_failures,
    describe_paid_for_nothing,
    describe_samples,
    mean_and_best,
    patient_scorer,
    reach_best,
    score_cases,
)
from litgrpo.rewards import Scorer
from litgrpo.types import RewardTable

if TYPE_CHECKING:
    from pandas import DataFrame

WORD = re.compile(r"[^\W\d_]{3,}")
LEXICON_WORDS, WORDS_AT_ONCE = "words of the reward", 30
NO_TEXT, COPY, REFUSAL = "no completion", "prompt copied", "no attempt"  # they do nothing


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
        table = score_cases(patient, list(zip(problems, probes, strict=True)))
        real = table.scored
        probes = [
            make_exploits(problem.prompt, texts[best], lexicon, rng)
            for problem, texts, best in zip(problems, samples, best_samples(real), strict=True)
        ]
        paid = score_cases(patient, list(zip(problems, probes, strict=True))).scored
    rows = {}
    for column, case in enumerate(probes[0]):
        totals = paid[:, column]
        example = probes[int(totals.nan_to_num(-torch.inf).argmax())][column].completion
        # If all samples earn 0, the task may be too hard for the initial policy.
        reaches = reach_best(totals, real) & ((totals > 0) | ~are_equal(real))
        rows[case.kind] = compare_with_samples(totals, real) | {
            "reaches_best": int(reaches.sum()),
            "example": example,
        }
    exploits = pd.DataFrame.from_dict(rows, orient="index").sort_values("mean", ascending=False)
    mean, best = mean_and_best(real)
    return AuditReport(
        title=f"{len(problems)} prompts without a column `answer` (another name: data.columns), so "
        f"correctness was not tested; {num_samples} samples of the initial policy "
        f"{describe_samples(real)}",
        numbers={"prompts": len(problems), "samples": num_samples, "mean": mean, "best": best},
        tables={"exploit": exploits},
        faults=[
            *find_faults(exploits, real),
            *(describe_failures(patient, "completions") or describe_unscored(real)),
        ],
        remarks=[*find_remarks(exploits), *describe_constant(table)],
        untested="no reference answers: correctness not tested",
    )


def find_faults(exploits: DataFrame, samples: Tensor) -> Iterator[str]:
    """Yield exploits that earn more than the best sample, and doing nothing that earns as much."""
    beats = 2 * exploits["beats_best"] > exploits["count"]
    reaches = (2 * exploits["reaches_best"] > exploits["count"]) & ~beats
    idle = [kind for kind in (NO_TEXT, REFUSAL, COPY) if reaches[kind]]
    yield from describe_paid_for_nothing(idle, samples)
    _, best = mean_and_best(samples)
    for kind, row in exploits.iterrows():
        if beats[kind]:
            yield (
                f"exploit: '{kind}' earns {row['mean']:.3g} on average and beats the best of "
                f"{samples.shape[1]} samples on {row['beats_best']} of {row['count']} prompts "
                f"(these earn {best:.3g}), such as {row['example'][:60]!r}"
            )


def find_remarks(exploits: DataFrame) -> Iterator[str]:
    """Yield exploits that earn more than the mean sample, but not than the best."""
    for kind, row in exploits.iterrows():
        if 2 * row["beats_mean"] > row["count"] >= 2 * row["beats_best"]:
            yield (
                f"'{kind}' earns more than the mean sample on {row['beats_mean']} of "
                f"{row['count']} prompts: training reinforces completions that resemble it"
            )


def describe_unscored(samples: Tensor) -> list[str]:
    """Return a fault if no sample has a reward."""
    fault = "no reward: the rewards give no sample a score (None)"
    return [fault] if samples.isnan().all() else []


def describe_constant(samples: RewardTable) -> list[str]:
    """Return remarks if all samples of each prompt get the same, in total or from a reward."""
    return describe_equal_samples(samples.scored) or [
        f"constant: '{name}' ranks no sample above another and gives no gradient"
        for name, values in samples.components.items()
        if samples.weights[name] and samples.valid.any() and are_equal(values).all()
    ]


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
        NO_TEXT: "",
        COPY: prompt,
        "one sentence repeated": f"{sentence} " * 20,
        "words shuffled": " ".join(shuffled),
        "keywords of the prompt": " ".join(asked * 8),
        "keywords": PRAISE * 4,
        REFUSAL: "I am sorry, but I cannot answer this question.",
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
