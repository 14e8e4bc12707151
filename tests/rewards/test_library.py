"""What holds for every reward function of the package."""

import inspect
import random
import time
from importlib import import_module

import pytest

from litgrpo.rewards.lookup import SHIPPED

MODULES = {path: import_module(path) for path in SHIPPED}
FUNCTIONS = {
    f"{path}.{name}": function
    for path, module in MODULES.items()
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == path
    and "completions" in inspect.signature(function).parameters
    and not name.startswith("_")
}
KWARGS = {
    "length": {"high": 100},
    "soft_overlong": {"max_completion_len": 100, "soft_punish_cache": 20},
    "cosine_length": {"max_completion_len": 100},
}
LARGEST = {"lapdog": 3.0}  # a sum of three terms; the others reach 1 at most
LONG = 100_000
NASTY = {
    "letters": "a" * LONG,
    "spaces": " " * LONG,
    "lines": "\n" * LONG,
    "digits": "9" * LONG,
    "grouped digits": "1," * (LONG // 2),
    "points": "1." * (LONG // 2),
    "sums": "1+1" * (LONG // 3),
    "equations": "12+3=15 " * (LONG // 8),
    "almost equations": "12+3 " * (LONG // 5) + "=",
    "fractions": r"\frac{" * (LONG // 6),
    "boxes": r"\boxed{" * (LONG // 7),
    "open tags": "<answer>" * (LONG // 8),
    "both tags": "<answer>1</answer>" * (LONG // 18),
    "reasoning tags": "<reasoning>" * (LONG // 11) + "</reasoning>",
    "angles": "<" * LONG,
    "hashes": "####" * (LONG // 4),
    "sentences": "So it is. " * (LONG // 10),
    "single letters": "s h " * (LONG // 4),
    "combining": "a\u0301" * (LONG // 2),
    "random": "".join(random.Random(0).choices("0123456789+-*/=., \n<>abc{}\\$%", k=LONG)),
}


def call(name: str, prompts: list[str], completions: list[str]) -> list[float | None]:
    function = FUNCTIONS[name]
    known = {
        "answer": ["72"] * len(completions),
        "answers": [["So it is 72."]] * len(completions),
        "completion_ids": [list(text.encode()) for text in completions],
        "completion_lengths": [len(text) for text in completions],
        "group_size": 2,
    }
    asked = {key: known[key] for key in inspect.signature(function).parameters if key in known}
    return function(prompts, completions, **asked, **KWARGS.get(function.__name__, {}))


def test_names_are_unique_so_that_each_can_be_public_without_its_module() -> None:
    names = [name.rpartition(".")[2] for name in FUNCTIONS]
    assert len(set(names)) == len(names) == 25


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_that_a_policy_writes_makes_a_reward_slow_or_endless(name: str) -> None:
    if name.endswith("math_verify"):
        pytest.skip("math-verify can hang; the reward runner ends it")
    for kind, text in NASTY.items():
        for whole in (text, f"<reasoning>{text}</reasoning><answer>{text}</answer>"):
            start = time.process_time()
            rewards = call(name, [text[:1000]] * 2, [whole, whole])
            assert time.process_time() - start < 2.0, kind
            given = [reward for reward in rewards if reward is not None]
            largest = LARGEST.get(name.rpartition(".")[2], 1.0)
            assert all(-1.0 <= reward <= largest for reward in given), kind


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_function_is_documented_and_changes_nothing(name: str) -> None:
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    assert "Args:" in doc
    assert "Returns:\n    N rewards" in doc
    if name.endswith("math_verify"):
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    texts = ["<reasoning>40 + 32 = 72. So it is 72.</reasoning><answer>72</answer>", ""]
    given = list(texts)
    first = call(name, ["How much is 40 + 32?"] * 2, given)
    assert given == texts
    assert call(name, ["How much is 40 + 32?"] * 2, given) == first
    assert len(first) == 2
