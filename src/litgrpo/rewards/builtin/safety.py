"""Reward for safe text: a word list, and optionally a classifier."""

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

WORD_FILE = "unsafe_words.txt"
# Characters that replace letters; a text is checked both as it is and with the letters.
DISGUISES = str.maketrans("013457@$!|", "oieastasil")
WITHOUT_WIDTH = ("Cf", "Mn", "Me")  # format characters and marks, in Unicode's categories
WORD = re.compile(r"[a-z]+")
Phrases = dict[str, list[tuple[str, ...]]]


def safety(
    prompts: Sequence[object],
    completions: Completions,
    *,
    extra_words: Sequence[str] = (),
    word_file: str | None = None,
    classifier: str | Callable[[list[str]], Sequence[Any]] | None = None,
) -> list[float]:
    """Return 0 for a text with a listed word or phrase, else 1; times the classifier's safety.

    The built-in list has profanity, threats, self-harm, and sexual and criminal phrases, in
    English. Whole words are compared regardless of case, accents, invisible characters, digits in
    place of letters (`sh1t`), repeated letters (`shiiit`) and spaced letters (`s h i t`).

    Args:
        extra_words: further words and phrases; `x*` means everything that starts with x.
        word_file: a file of words, one per line, that replaces the built-in list.
        classifier: a function from N texts to N probabilities of being unsafe, or its import path.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> safety(["?"] * 2, ["Have a nice day.", "The b@nana is ripe."], extra_words=["banana"])
        [1.0, 0.0]
    """
    texts = [text_of(completion) for completion in completions]
    phrases, prefixes = _load_words(tuple(extra_words), word_file)
    clean = [float(not _has_listed_word(text, phrases, prefixes)) for text in texts]
    if classifier is None:
        return clean
    if isinstance(classifier, str):
        # reward.py imports torch, which a worker without a classifier need not load.
        from litgrpo.rewards.reward import resolve_function

        classifier = resolve_function("safety.classifier", classifier, {})
    risks = classifier(texts)
    require(
        len(risks) == len(texts),
        f"safety: classifier returned {len(risks)} probabilities for {len(texts)} texts",
    )
    return [
        ok * min(1.0, max(0.0, 1.0 - float(risk))) for ok, risk in zip(clean, risks, strict=True)
    ]


@lru_cache(maxsize=8)
def _load_words(words: tuple[str, ...], file: str | None) -> tuple[Phrases, frozenset[str]]:
    """Return {first word: all phrases that start with it}, and prefixes without their star."""
    source = resources.files("litgrpo.assets").joinpath(WORD_FILE) if file is None else Path(file)
    text = source.read_text(encoding="utf-8")
    lines = [line.strip().lower() for line in (*text.splitlines(), *words)]
    entries = [line for line in lines if WORD.search(line) and not line.startswith("#")]
    starred = {entry for entry in entries if entry.endswith("*") and " " not in entry}
    phrases: Phrases = {}
    for phrase in (tuple(WORD.findall(entry)) for entry in entries if entry not in starred):
        phrases.setdefault(phrase[0], []).append(phrase)
    return phrases, frozenset(entry.removesuffix("*") for entry in starred)


def _has_listed_word(text: str, phrases: Phrases, prefixes: frozenset[str]) -> bool:
    plain = unicodedata.normalize("NFKD", text).casefold()
    plain = "".join(c for c in plain if unicodedata.category(c) not in WITHOUT_WIDTH)
    readings = {plain, plain.translate(DISGUISES)}
    return any(_matches(WORD.findall(reading), phrases, prefixes) for reading in readings)


def _matches(words: Sequence[str], phrases: Phrases, prefixes: frozenset[str]) -> bool:
    words = _join_letters(words)
    short = [_collapse_repeats(word) for word in words]
    listed = any(
        sequence[start : start + len(phrase)] == phrase
        for sequence in {tuple(words), tuple(short)}
        for start, word in enumerate(sequence)
        for phrase in phrases.get(word, ())
    )
    lengths = {len(prefix) for prefix in prefixes}
    return listed or any(word[:n] in prefixes for word in {*words, *short} for n in lengths)


def _join_letters(words: Sequence[str]) -> list[str]:
    """Join three or more single letters in a row into one word: `s h i t`."""
    joined: list[str] = []
    for single, run in groupby(words, key=lambda word: len(word) == 1):
        letters = list(run)
        joined += ["".join(letters)] if single and len(letters) > 2 else letters  # noqa: PLR2004
    return joined


def _collapse_repeats(word: str) -> str:
    """Reduce a letter that is repeated three or more times to one: `shiiit`."""
    return re.sub(r"(.)\1{2,}", r"\1", word)
