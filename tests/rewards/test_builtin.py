"""Properties of every built-in reward function."""

import gc
import inspect
import pkgutil
import random
import re
import time
from importlib import import_module

import pytest
from docstring_parser import parse

from litgrpo import rewards
from litgrpo.rewards import builtin
from litgrpo.rewards.reward import builtin_rewards

# They start processes, and have separate tests.
SANDBOXED = {"unit_tests", "reasoning_gym"}
FUNCTIONS = {name: getattr(rewards, name) for name in builtin_rewards() if name not in SANDBOXED}
KWARGS = {
    "length": {"max_tokens": 100},
    "soft_overlong": {"max_completion_length": 100, "soft_punish_cache": 20},
    "cosine_length": {"max_completion_length": 100},
}
# Arguments that the package explains for all of them.
SHARED = re.findall(r"^- `(\w+)`: ", inspect.getdoc(rewards) or "", re.MULTILINE)
LARGEST = {"lapdog": 3.0}  # a sum of three terms; the others reach at most 1
SHORT, LONG = 500, 8_000  # characters
GROWTH = 75  # times as slow where the text is 16 times as long; the square would be 256
NASTY = {
    "letters": "a",
    "spaces": " ",
    "lines": "\n",
    "digits": "9",
    "grouped digits": "1,",
    "thousands": "000,",
    "thousands with spaces": "000 ",
    "thousands with points": "000.",
    "powers of ten": "1 x 10^1 ",
    "superscripts": "1\u00b2",
    "comparisons": "1<",
    "tags": "<b>1</b>",
    "arrows": "-->",
    "signs": "- + ",
    "percents": "1%",
    "prices": "$1",
    "fences": "```\n",
    "points": "1.",
    "sums": "1+1",
    "equations": "12+3=15 ",
    "almost equations": "12+3 ",
    "fractions": r"\frac{",
    "boxes": r"\boxed{",
    "open tags": "<answer>",
    "both tags": "<answer>1</answer>",
    "reasoning tags": "<reasoning>",
    "angles": "<",
    "hashes": "####",
    "sentences": "So it is. ",
    "nested objects": '{"a":',
    "single letters": "s h ",
    "combining": "a\u0301",
    "random": "",
}
ENDS = {"almost equations": "=", "reasoning tags": "</reasoning>"}
ANSWERS = {"json_fields": '{"answer": 72}'}
SIGNS = "0123456789+-*/=., \n<>abc{}\\$%"


def nasty(kind: str, length: int) -> str:
    """Many times the same, or any signs, and an end that promises more than there is."""
    piece = NASTY[kind] or "".join(random.Random(0).choices(SIGNS, k=length))
    return piece * (length // len(piece)) + ENDS.get(kind, "")


def call(name: str, prompts: list[str], completions: list[str]) -> list[float | None]:
    function = FUNCTIONS[name]
    known = {
        "answer": [ANSWERS.get(function.__name__, "72")] * len(completions),
        "answers": [["So it is 72."]] * len(completions),
        "completion_ids": [list(text.encode()) for text in completions],
        "completion_lengths": [len(text) for text in completions],
        "group_size": 2,
        "truncated": [False] * len(completions),
    }
    asked = {key: known[key] for key in inspect.signature(function).parameters if key in known}
    return function(prompts, completions, **asked, **KWARGS.get(function.__name__, {}))


def test_every_reward_function_of_a_builtin_module_is_public() -> None:
    found = set()
    for module in pkgutil.iter_modules(builtin.__path__, f"{builtin.__name__}."):
        members = inspect.getmembers(import_module(module.name), inspect.isfunction)
        found |= {
            name
            for name, function in members
            if function.__module__ == module.name
            and list(inspect.signature(function).parameters)[:2] == ["prompts", "completions"]
        }
    assert found == set(builtin_rewards())
    assert len(found) == 29


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_that_a_policy_writes_makes_a_reward_slow_or_endless(name: str) -> None:
    if name.endswith("math_verify"):
        pytest.skip("math-verify can hang; the reward runner ends it")
    if name.endswith("cheerful"):
        pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    for kind in NASTY:
        for form in ("{}", "<reasoning>{0}</reasoning><answer>{0}</answer>"):
            short, long = (form.format(nasty(kind, length)) for length in (SHORT, LONG))
            # What is too quick to be measured is 0.2 ms.
            at_once = max(2e-4, min(measure(name, short)[0] for _ in range(2)))
            for _ in range(3):  # one is enough, unless the machine was disturbed
                seconds, scores = measure(name, long)
                if seconds < GROWTH * at_once:
                    break
            assert seconds < GROWTH * at_once, kind
            largest = LARGEST.get(name.rpartition(".")[2], 1.0)
            assert all(score is None or -1.0 <= score <= largest for score in scores), kind


def measure(name: str, text: str) -> tuple[float, list[float | None]]:
    """Score two equal texts that consist mostly of the prompt; seconds of this process alone.

    The garbage of earlier tests does not count.
    """
    gc.disable()
    try:
        start = time.process_time()
        scores = call(name, [text[:1000]] * 2, [text, text])
        return time.process_time() - start, scores
    finally:
        gc.enable()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_function_is_documented_and_changes_nothing(name: str) -> None:
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    own = [parameter.arg_name for parameter in parse(doc).params]
    assert {*inspect.signature(FUNCTIONS[name]).parameters} <= {*SHARED, *own}
    assert "Returns:\n    N rewards" in doc
    if name.endswith("math_verify"):
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    if name.endswith("cheerful"):
        pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed")
    texts = ["<reasoning>40 + 32 = 72. So it is 72.</reasoning><answer>72</answer>", ""]
    given = list(texts)
    first = call(name, ["How much is 40 + 32?"] * 2, given)
    assert given == texts
    assert call(name, ["How much is 40 + 32?"] * 2, given) == first
    assert len(first) == 2
