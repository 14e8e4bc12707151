"""Rewards for the structure of the reasoning: steps, connectives, calculations, relevance.

These measure structure only and cannot distinguish sound reasoning from text that looks like it.
Use them with a small weight behind a gate (`gate: correct`), so that exploiting them gains nothing.
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
# Every part is bounded, so that a search takes at most a constant number of steps per character.
NUMBER = r"-?\$?(?:[0-9]{1,12}(?:,[0-9]{3}){0,4}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})%?"
SIGN = r" ?[-+*/x\u00d7\u00f7] ?"
# Matches neither the end of a longer calculation ("60 students x 2/3 = 40") nor its beginning.
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

FULL_COSINE = 0.3  # of question and reasoning; honest reasoning adds words
NEW_WORDS = 0.2  # fraction of words that the question does not have
STUFFED = 0.34  # a text with a larger fraction of connectives is a list of them
MAX_USES = 3  # of one connective


def steps(
    prompts: Sequence[object],
    completions: Completions,
    *,
    min_steps: int = 2,
    max_steps: int = 12,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Return 1 for `min_steps` to `max_steps` distinct steps of reasoning, less for fewer or more.

    A step is a sentence or a line with at least two words or numbers. Repeated steps reduce the
    reward in proportion.

    Args:
        min_steps: fewest steps with full reward; below, the reward is proportional.
        max_steps: most steps with full reward; above, the reward falls to 0 at twice as many.
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> text = "<reasoning>Three plus four is seven. Twice that is 14.</reasoning>"
        >>> steps(["?"] * 2, [text, "<reasoning>It is 14.</reasoning>"])
        [1.0, 0.5]
    """
    require(
        1 <= min_steps <= max_steps,
        f"steps needs 1 <= min_steps <= max_steps, got {min_steps} and {max_steps}",
    )
    # n / min                       if n < min
    # 1                             if min <= n <= max
    # 2 - n / max, at least 0       above; then times the fraction of steps that are not repeats
    rewards = []
    for text in reasonings(completions, reasoning_tag):
        all_steps = _split_steps(text)
        n = len(set(all_steps))
        full = min(1.0, n / min_steps, max(0.0, 2.0 - n / max_steps))
        rewards.append(full * n / max(1, len(all_steps)))
    return rewards


def connectives(
    prompts: Sequence[object], completions: Completions, *, reasoning_tag: str = "reasoning"
) -> list[float]:
    """Return the fraction of steps after the first that are connected to earlier ones.

    A step is connected by a connective (so, then, because, ...) or by a number of an earlier step.
    No connective counts more than three times. A text of which a third is connectives gets 0.

    Args:
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1]; 0 for fewer than two distinct steps.

    Example:
        >>> text = "<reasoning>3 + 4 is 7. So she has 7 apples. She likes them.</reasoning>"
        >>> connectives(["?"], [text])
        [0.5]
    """
    texts = reasonings(completions, reasoning_tag)
    return [_share_connected(list(dict.fromkeys(_split_steps(text)))) for text in texts]


def _share_connected(distinct: Sequence[tuple[str, ...]]) -> float:
    words = [word for step in distinct for word in step]
    if len(distinct) < 2 or sum(word in CONNECTIVES for word in words) > STUFFED * len(words):  # noqa: PLR2004
        return 0.0
    used: Counter[str] = Counter()
    numbers = {word for word in distinct[0] if word[0].isdigit()}
    connected = 0
    for step in distinct[1:]:
        now = {word for word in step if word[0].isdigit()}
        usable = [word for word in step if word in CONNECTIVES and used[word] < MAX_USES]
        used.update(usable[:1])
        connected += bool(usable or now & numbers)
        numbers |= now
    return connected / (len(distinct) - 1)


def arithmetic(
    prompts: Sequence[object], completions: Completions, *, reasoning_tag: str = "reasoning"
) -> list[float]:
    """Return the fraction of written calculations (`48 / 2 = 24`) that are correct.

    Each counts once, and those with no number except 0 and 1 do not count. A result that is
    rounded to the digits shown is correct.

    Args:
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1]; 0 without calculations.

    Example:
        >>> arithmetic(["?"], ["<reasoning>48 / 2 = 24, and 48 + 24 = 71.</reasoning>"])
        [0.5]
    """
    rewards = []
    for text in reasonings(completions, reasoning_tag):
        # GSM8K's calculator annotations, <<48/2=24>>, are calculations, too.
        plain = text.replace("<<", " ").replace(">>", " ")
        pairs = dict.fromkeys((left, right) for left, right in CALCULATION.findall(plain))
        # 1 * 1 = 1 would be a cheap exploit.
        counted = [pair for pair in pairs if not set(re.findall(r"[0-9]+", pair[0])) <= {"0", "1"}]
        rewards.append(sum(_is_correct(*pair) for pair in counted) / max(1, len(counted)))
    return rewards


def _is_correct(left: str, right: str) -> bool:
    """Return True if a calculation without parentheses gives the stated result, as rounded."""
    try:
        exact = _calculate(left)
    except ZeroDivisionError:
        return False
    digits = len(right.rstrip("%").partition(".")[2])
    stated, rounding = _parse_value(right), Fraction(1, 2 * 10**digits)
    return exact == stated or (digits > 0 and abs(exact - stated) <= rounding)


def _calculate(text: str) -> Fraction:
    """Evaluate sums of products: products change the last term, sums start a new one."""
    pieces = OPERATOR.split(text)
    terms = [_parse_value(pieces[0])]
    for sign, number in zip(pieces[1::2], pieces[2::2], strict=True):
        if sign in PRODUCTS:
            terms[-1] = PRODUCTS[sign](terms[-1], _parse_value(number))
        else:
            terms.append(SUMS[sign] * _parse_value(number))
    return sum(terms, Fraction(0))


def _parse_value(text: str) -> Fraction:
    number = Fraction(text.strip().replace("$", "").replace(",", "").rstrip("%"))
    return number / 100 if text.endswith("%") else number


@whole_batch
def relevance(
    prompts: Sequence[str | Sequence[Message]],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Score how much the reasoning is about the question, with words that are not copied from it.

    The cosine of the TF-IDF vectors of question and reasoning, with full reward from 0.3 on. Words
    that all questions of the batch share, such as the instructions, have almost no weight. If less
    than a fifth of the reasoning's words are new (a copy of the question), the reward is reduced in
    proportion.

    Args:
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> text = "<reasoning>The {} are 3 + 4 = 7 together.</reasoning>"
        >>> prompts = ["How many apples has she?", "How many pens has he?"]
        >>> about = relevance(prompts, [text.format("apples"), text.format("apples")])
        >>> about[0] > about[1] == 0.0
        True
    """
    questions = [_words(text_of(prompt)) for prompt in prompts]
    documents = {tuple(question) for question in questions}
    frequency = Counter(word for document in documents for word in set(document))
    # idf = log((1 + D) / number of documents with the word); an unknown word counts as unique.
    idf = {word: log((1 + len(documents)) / count) for word, count in frequency.items()}
    rare = log(1 + len(documents))
    return [
        _relevance(question, _words(text), idf, rare)
        for question, text in zip(questions, reasonings(completions, reasoning_tag), strict=True)
    ]


def _relevance(
    question: Sequence[str], reasoning: Sequence[str], idf: dict[str, float], rare: float
) -> float:
    asked, answered = _tf_idf(question, idf, rare), _tf_idf(reasoning, idf, rare)
    norms = sqrt(sum(x * x for x in asked.values()) * sum(x * x for x in answered.values()))
    if not norms:
        return 0.0
    cosine = sum(weight * answered.get(word, 0.0) for word, weight in asked.items()) / norms
    new = sum(word not in asked for word in answered) / len(answered)
    return min(1.0, cosine / FULL_COSINE) * min(1.0, new / NEW_WORDS)


def _tf_idf(words: Sequence[str], idf: dict[str, float], rare: float) -> dict[str, float]:
    counts = Counter(word for word in words if word not in FREQUENT)
    return {word: (1 + log(count)) * idf.get(word, rare) for word, count in counts.items()}


@whole_batch
def coherence(
    prompts: Sequence[str | Sequence[Message]],
    completions: Completions,
    *,
    reasoning_tag: str = "reasoning",
) -> list[float]:
    """Return the product of `steps`, `connectives` and `relevance`.

    The reasoning must be in connected steps and about the question, all at once.

    Args:
        reasoning_tag: name of the tag around the reasoning.

    Returns:
        N rewards in [0, 1].

    Example:
        >>> text = "<reasoning>3 apples plus 4 is 7. So she has 7 apples.</reasoning>"
        >>> coherence(["How many apples has she?"], [text])
        [1.0]
    """
    parts = (
        steps(prompts, completions, reasoning_tag=reasoning_tag),
        connectives(prompts, completions, reasoning_tag=reasoning_tag),
        relevance(prompts, completions, reasoning_tag=reasoning_tag),
    )
    return [prod(row) for row in zip(*parts, strict=True)]


def _split_steps(reasoning: str) -> list[tuple[str, ...]]:
    """Return the words of each step that has at least two words."""
    lines = (LIST_MARK.sub("", line) for line in STEP_END.split(reasoning))
    return [words for line in lines if len(words := tuple(_words(line))) > 1]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
