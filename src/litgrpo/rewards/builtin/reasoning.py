"""How the reasoning hangs together: steps, connectives, calculations, relevance to the question.

These measure form and cannot tell sense from nonsense that looks like it. They are meant as a small
part behind a gate (`gate: correct`), where there is nothing to gain by writing for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import log, prod, sqrt
from operator import mul, truediv

from litgrpo.arguments import require
from litgrpo.rewards.calls import whole_batch
from litgrpo.text.answers import Completions, Message, reasonings, text_of

WORD = re.compile(r"[a-z]+|[0-9]+(?:[.,][0-9]+)*")
STEP_END = re.compile(r"\n+|(?<=[.!?;])\s+")
LIST_MARK = re.compile(r"^\s*(?:step\s*)?[0-9]{1,2}[.):]\s+|^\s*[-*]\s+", re.IGNORECASE)
NUMBER = r"-?\$?(?:[0-9]{1,12}(?:,[0-9]{3})*(?:\.[0-9]{1,9})?|\.[0-9]{1,9})%?"
SIGN = r" ?[-+*/x\u00d7\u00f7] ?"
# Not the end of a longer calculation ("60 students x 2/3 = 40"), and not the beginning of one.
CALCULATION = re.compile(
    rf"(?<![\w.*/+-])(?<![-+*/x=] )({NUMBER}(?:{SIGN}{NUMBER}){{1,8}}) ?= ?({NUMBER})"
    r"(?![\w%]|\.[0-9]| ?[-+*/x])"
)
OPERATOR = re.compile(r"(?<=[0-9%]) ?([-+*/x\u00d7\u00f7]) ?")

SUMS = {"+": 1, "-": -1}
PRODUCTS = {"*": mul, "x": mul, "\u00d7": mul, "/": truediv, "\u00f7": truediv}

CONNECTIVES = {
    *("so", "then", "thus", "hence", "therefore", "because", "since", "first", "second", "third"),
    *("next", "finally", "now", "means", "if", "but", "however", "also", "after", "before"),
    *("total", "altogether", "leaves", "gives", "which", "that"),
}
FREQUENT = {
    *("a", "an", "the", "of", "to", "in", "on", "at", "for", "and", "or", "is", "are", "was"),
    *("were", "be", "has", "have", "had", "he", "she", "it", "they", "his", "her", "their", "its"),
    *("with", "by", "from", "as", "this", "there", "do", "does", "did", "how", "many", "much"),
    *("what", "i", "you", "we", "your", "my", "our", "not", "than", "each", "per"),
} | CONNECTIVES

FULL_COSINE = 0.3  # of question and reasoning; honest reasoning brings words of its own
NEW_WORDS = 0.2  # share of words that the question does not have
STUFFED = 0.34  # share of connectives from which on a text is a list of them


def steps(
    prompts: Sequence[object],
    completions: Completions,
    *,
    low: int = 2,
    high: int = 12,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """1 for `low` to `high` different steps of reasoning, less for fewer or more.

    A step is a sentence or a line with two words or numbers at least. A step that was said before
    counts against the text as if it was one too many.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        low: fewest steps with full reward; below, the reward is their share of it.
        high: most steps with full reward; above, the reward falls to 0 at twice as many.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].
    """
    require(1 <= low <= high, f"steps needs 1 <= low <= high, got {low} and {high}")
    return [
        _steps_reward(_steps(text), low, high) for text in reasonings(completions, reasoning_tag)
    ]


def _steps_reward(found: Sequence[tuple[str, ...]], low: int, high: int) -> float:
    different = len(set(found))
    # n / low                       if n < low
    # 1                             if low <= n <= high
    # 2 - n / high, at least 0      above; then less the share of repeated steps
    full = min(1.0, different / low, max(0.0, 2.0 - different / high))
    return full * different / max(1, len(found))


def connectives(
    prompts: Sequence[object], completions: Completions, *, reasoning_tag: str = "reasoning"
) -> list[float]:
    """The share of steps after the first that are tied to what came before.

    A step is tied by a connective (so, then, because, ...) or by a number that an earlier step
    brought up. No connective counts more than three times, and a text of which a third is
    connectives earns nothing.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1]; 0 for fewer than two different steps.
    """
    texts = reasonings(completions, reasoning_tag)
    return [_tied(list(dict.fromkeys(_steps(text)))) for text in texts]


def _tied(found: Sequence[tuple[str, ...]]) -> float:
    words = [word for step in found for word in step]
    if len(found) < 2 or sum(word in CONNECTIVES for word in words) > STUFFED * len(words):  # noqa: PLR2004
        return 0.0
    used: Counter[str] = Counter()
    numbers = {word for word in found[0] if word[0].isdigit()}
    tied = 0
    for step in found[1:]:
        now = {word for word in step if word[0].isdigit()}
        usable = [word for word in step if word in CONNECTIVES and used[word] < 3]  # noqa: PLR2004
        used.update(usable[:1])
        tied += bool(usable or now & numbers)
        numbers |= now
    return tied / (len(found) - 1)


def arithmetic(
    prompts: Sequence[object], completions: Completions, *, reasoning_tag: str = "reasoning"
) -> list[float | None]:
    """The share of written calculations (`48 / 2 = 24`) that are right.

    Each counts once, and one without a number other than 0 and 1 not at all. A result that was
    rounded to the digits shown is right.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1]; 0 where nothing is calculated.
    """
    texts = reasonings(completions, reasoning_tag)
    # GSM8K's calculator marks, <<48/2=24>>, are calculations too.
    return [_right_share(text.replace("<<", " ").replace(">>", " ")) for text in texts]


def _right_share(text: str) -> float:
    found = dict.fromkeys((left, right) for left, right in CALCULATION.findall(text))
    telling = [pair for pair in found if not set(re.findall(r"[0-9]+", pair[0])) <= {"0", "1"}]
    return sum(_holds(*pair) for pair in telling) / max(1, len(telling))


def _holds(left: str, right: str) -> bool:
    """Whether a calculation without parentheses gives the stated result, as it is rounded."""
    try:
        exact = _calculated(left)
    except ZeroDivisionError:
        return False
    digits = len(right.rstrip("%").partition(".")[2])
    stated, rounding = _value(right), Fraction(1, 2 * 10**digits)
    return exact == stated or (digits > 0 and abs(exact - stated) <= rounding)


def _calculated(text: str) -> Fraction:
    """What sums of products give: products change the last term, sums begin a new one."""
    pieces = OPERATOR.split(text)
    terms = [_value(pieces[0])]
    for sign, number in zip(pieces[1::2], pieces[2::2], strict=True):
        if sign in PRODUCTS:
            terms[-1] = PRODUCTS[sign](terms[-1], _value(number))
        else:
            terms.append(SUMS[sign] * _value(number))
    return sum(terms, Fraction(0))


def _value(text: str) -> Fraction:
    number = Fraction(text.strip().replace("$", "").replace(",", "").rstrip("%"))
    return number / 100 if text.endswith("%") else number


@whole_batch
def relevance(
    prompts: Sequence[str | Sequence[Message]],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Whether the reasoning speaks of what the question asks, in words of its own too.

    The cosine of the TF-IDF vectors of question and reasoning, in full from 0.3 on. What all
    questions of the batch share, such as the wording of the task, weighs next to nothing. Reasoning
    of which less than a fifth is new, a copy or a list of the question's words, earns less, down to
    nothing.

    Args:
        prompts: N prompts, texts or lists of chat messages.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].
    """
    questions = [_words(text_of(prompt)) for prompt in prompts]
    documents = {tuple(question) for question in questions}
    frequency = Counter(word for document in documents for word in set(document))
    # A word of all D documents weighs log((1 + D) / D), an unknown one as much as a unique one.
    idf = {word: log((1 + len(documents)) / count) for word, count in frequency.items()}
    rare = log(1 + len(documents))
    return [
        _relevance(question, _words(text), idf, rare)
        for question, text in zip(questions, reasonings(completions, reasoning_tag), strict=True)
    ]


def _relevance(
    question: Sequence[str], reasoning: Sequence[str], idf: dict[str, float], rare: float
) -> float:
    asked, said = _weighted(question, idf, rare), _weighted(reasoning, idf, rare)
    norms = sqrt(sum(x * x for x in asked.values()) * sum(x * x for x in said.values()))
    if not norms:
        return 0.0
    cosine = sum(weight * said.get(word, 0.0) for word, weight in asked.items()) / norms
    new = sum(word not in asked for word in said) / len(said)
    return min(1.0, cosine / FULL_COSINE) * min(1.0, new / NEW_WORDS)


def _weighted(words: Sequence[str], idf: dict[str, float], rare: float) -> dict[str, float]:
    counts = Counter(word for word in words if word not in FREQUENT)
    return {word: (1 + log(count)) * idf.get(word, rare) for word, count in counts.items()}


@whole_batch
def coherence(
    prompts: Sequence[str | Sequence[Message]],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Reasoning in steps that are tied together and about the question, all three at once.

    The product of `steps`, `connectives` and `relevance`: none makes up for another.

    Args:
        prompts: N prompts, texts or lists of chat messages.
        completions: N completions, texts or lists of chat messages.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].
    """
    parts = (
        steps(prompts, completions, reasoning_tag=reasoning_tag),
        connectives(prompts, completions, reasoning_tag=reasoning_tag),
        relevance(prompts, completions, reasoning_tag=reasoning_tag),
    )
    return [prod(row) for row in zip(*parts, strict=True)]


def _steps(reasoning: str) -> list[tuple[str, ...]]:
    """The words of every step; of two words at least."""
    lines = (LIST_MARK.sub("", line) for line in STEP_END.split(reasoning))
    return [words for line in lines if len(words := tuple(_words(line))) > 1]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
