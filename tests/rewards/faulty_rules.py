"""Widespread rules for GSM8K with the faults that they are known for, rewritten for the audit.

Wanted is `<reasoning>..</reasoning><answer>..</answer>`. The rules add up to 9.5 for a correct one
in this form.
"""

import re

FORM = re.compile(
    r"^\s*<reasoning>.+?</reasoning>.*?<answer>(.+?)</answer>\s*$", re.MULTILINE | re.DOTALL
)
FIRST_NUMBER = re.compile(r"<answer>.*?([\d.]+)", re.MULTILINE | re.DOTALL)
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def gold_of(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def whole_form(prompts, completions):
    return [3.0 if FORM.search(text) else 0.0 for text in completions]


def some_form(prompts, completions):
    return [sum(0.5 if text.count(tag) == 1 else -0.5 for tag in TAGS) for text in completions]


def check_answer(prompts, completions, answer):
    return [
        _check(FORM.search(text), gold_of(gold))
        for text, gold in zip(completions, answer, strict=True)
    ]


def _check(found, gold):
    if found is None:
        return 0.0
    guess = found[1]
    if guess == gold:
        return 3.0
    if guess.strip() == gold:
        return 1.5
    try:
        ratio = float(guess) / float(gold)
    except (ValueError, ZeroDivisionError):
        return -0.5
    if 0.9 <= ratio <= 1.1:
        return 0.5
    return 0.25 if 0.8 <= ratio <= 1.2 else -1.0


def check_numbers(prompts, completions, answer):
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        found = FIRST_NUMBER.search(text)
        try:
            rewards.append(1.5 if found and float(found[1]) == float(gold_of(gold)) else 0.0)
        except ValueError:
            rewards.append(0.0)
    return rewards


def slow_form(prompts, completions):
    """A catastrophic regular expression."""
    return [float(bool(re.search(r"<answer>(\s*\w+\s*)*</answer>", text))) for text in completions]


def constant(prompts, completions):
    return [1.0] * len(completions)


def longer_is_better(prompts, completions):
    return [len(text) / 1000 for text in completions]


def substring(prompts, completions, answer):
    """The answer is right if it occurs anywhere."""
    return [
        float(gold_of(str(gold)) in text) for text, gold in zip(completions, answer, strict=True)
    ]


def crashes_on_empty(prompts, completions):
    return [float(text[0] == "<") for text in completions]
