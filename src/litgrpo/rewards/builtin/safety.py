"""Whether a text is fit to be shown: a word list, and any classifier."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import Completions, text_of

OURS = "unsafe_words.txt"
# How letters are disguised; each is tried both as it is and undisguised.
DISGUISES = str.maketrans("013457@$!|", "oieastasil")
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
WORD = re.compile(r"[a-z]+")
Phrases = dict[str, list[tuple[str, ...]]]


def safety(
    prompts: Sequence[object],
    completions: Completions,
    *,
    words: Sequence[str] = (),
    word_file: str | None = None,
    classifier: str | Callable[[list[str]], Sequence[Any]] | None = None,
) -> list[float]:
    """0 for a text with a word or phrase of the list, else 1; times a classifier's verdict.

    The list of the package holds profanity, threats, self-harm, and sexual and criminal phrases, in
    English. Whole words are compared, without case, accents, invisible characters, letters spelled
    as digits (`sh1t`), drawn out (`shiiit`) or set apart (`s h i t`).

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        words: further words and phrases; `x*` means everything that begins with x.
        word_file: a file of words, one per line, instead of the package's.
        classifier: a function, or its import path, from N texts to N probabilities of being unsafe.

    Returns:
        N rewards in [0, 1].
    """
    texts = [text_of(completion) for completion in completions]
    phrases, beginnings = _word_list(tuple(words), word_file)
    clean = [float(not _found(text, phrases, beginnings)) for text in texts]
    if classifier is None:
        return clean
    risks = _classifier(classifier)(texts)
    given = f"the classifier gave {len(risks)} probabilities for {len(texts)} texts"
    require(len(risks) == len(texts), given)
    return [
        ok * min(1.0, max(0.0, 1.0 - float(risk))) for ok, risk in zip(clean, risks, strict=True)
    ]


def _classifier(given: str | Callable[[list[str]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    if not isinstance(given, str):
        return given
    from litgrpo.rewards.reward import resolved

    return resolved("safety.classifier", given, {})


@lru_cache(maxsize=8)
def _word_list(words: tuple[str, ...], file: str | None) -> tuple[Phrases, frozenset[str]]:
    """{first word: all phrases that begin with it}, and beginnings of words without their star."""
    source = resources.files("litgrpo.assets").joinpath(OURS) if file is None else Path(file)
    text = source.read_text(encoding="utf-8")
    lines = [line.strip().lower() for line in (*text.splitlines(), *words)]
    entries = [line for line in lines if WORD.search(line) and not line.startswith("#")]
    starred = {entry for entry in entries if entry.endswith("*") and " " not in entry}
    phrases: Phrases = {}
    for found in (tuple(WORD.findall(entry)) for entry in entries if entry not in starred):
        phrases.setdefault(found[0], []).append(found)
    return phrases, frozenset(entry.removesuffix("*") for entry in starred)


def _found(text: str, phrases: Phrases, beginnings: frozenset[str]) -> bool:
    plain = unicodedata.normalize("NFKD", INVISIBLE.sub("", text)).casefold()
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    readings = {plain, plain.translate(DISGUISES)}
    return any(_listed(WORD.findall(reading), phrases, beginnings) for reading in readings)


def _listed(words: Sequence[str], phrases: Phrases, beginnings: frozenset[str]) -> bool:
    words = _put_together(words)
    short = [_undrawn(word) for word in words]
    listed = any(
        sequence[start : start + len(phrase)] == phrase
        for sequence in {tuple(words), tuple(short)}
        for start, word in enumerate(sequence)
        for phrase in phrases.get(word, ())
    )
    lengths = {len(beginning) for beginning in beginnings}
    return listed or any(word[:n] in beginnings for word in {*words, *short} for n in lengths)


def _put_together(words: Sequence[str]) -> list[str]:
    """Three or more single letters in a row are one word: `s h i t`."""
    found: list[str] = []
    for single, run in groupby(words, key=lambda word: len(word) == 1):
        letters = list(run)
        found += ["".join(letters)] if single and len(letters) > 2 else letters  # noqa: PLR2004
    return found


def _undrawn(word: str) -> str:
    """A letter that is repeated three times or more, once: `shiiit`."""
    return re.sub(r"(.)\1{2,}", r"\1", word)
