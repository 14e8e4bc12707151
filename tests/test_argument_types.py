"""Wrong types of arguments end in one sentence, in the constructor."""

import dataclasses
import inspect
import typing
from fractions import Fraction

import numpy as np
import pytest

import litgrpo
from litgrpo import (
    GRPO,
    SFT,
    Evaluation,
    LoRA,
    Objective,
    PairData,
    PromptData,
    Reward,
    Sampling,
    UpdateConfig,
)
from litgrpo.argument_types import WrongType, argument_hints, matches
from litgrpo.cli.options import options_of
from litgrpo.rewards.reward import name_rewards

MODEL, REWARDS = "builtin:tiny-gemma2", ["litgrpo.rewards.correctness"]
# Arguments of which the constructor takes more than it declares, with its own errors.
OWN_CHECKS = {
    GRPO: ("pretrained", "rewards"),
    SFT: ("pretrained",),
    PromptData: ("train", "val", "test", "predict"),
    PairData: ("train", "val", "test"),
}
GIVEN = {GRPO: {"pretrained": MODEL, "rewards": REWARDS}}
CLASSES = [each for name in litgrpo.__all__ if inspect.isclass(each := getattr(litgrpo, name))]
# Data classes of a training step, and schedules, which get an optimizer.
NOT_SETTINGS = {"PromptBatch", "PlainStepper", "WarmupCosine", "WarmupLinear"}


class Odd:
    """A value of no type that is expected anywhere."""


def arguments(kind):
    hints = argument_hints(kind)
    for name in inspect.signature(kind).parameters:
        hint = hints.get(name, typing.Any)
        if name not in OWN_CHECKS.get(kind, ()) and not matches(Odd(), hint):
            yield name


def example(hint):
    """Return a value of a type."""
    values = ("x", 1, [], {}, len, None)
    return next(value for value in values if matches(value, hint))


def build_required(kind):
    hints = argument_hints(kind)
    parameters = inspect.signature(kind).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty]
    return {name: example(hints[name]) for name in needed if name in hints}


CASES = [
    (kind, name)
    for kind in CLASSES
    if kind.__name__ not in NOT_SETTINGS
    for name in arguments(kind)
]


@pytest.mark.parametrize(
    ("kind", "name"), CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES]
)
def test_a_wrong_type_is_named_in_the_constructor(kind, name):
    given = GIVEN.get(kind) or build_required(kind)
    with pytest.raises(WrongType, match=rf"^{kind.__name__}: {name} is .*Odd.*, expected ") as seen:
        kind(**given | {name: Odd()})
    assert "\n" not in str(seen.value)


def test_every_public_class_with_settings_is_checked():
    assert len(CASES) > 150
    checked = {kind for kind, _ in CASES}
    assert {each for each in CLASSES if dataclasses.is_dataclass(each)} - checked <= {
        each for each in CLASSES if each.__name__ in NOT_SETTINGS
    }


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("objective", {"kl_coef": 0.1}, "expected Objective: Objective(kl_coef=0.1)"),
        ("sampling", {"temperature": 0.7}, "expected Sampling: Sampling(temperature=0.7)"),
        ("group_size", "8", "group_size is '8' (str), expected int"),
        ("group_size", 8.0, "group_size is 8.0 (float), expected int"),
        ("group_size", True, "group_size is True (bool), expected int"),
        ("update", None, "expected UpdateConfig"),
        ("lora", {"rank": 4}, "expected LoRA or None: LoRA(rank=4)"),
        ("optimizer", "AdamW", "expected a function"),
        ("reward_format", 5, "expected 'text' or 'chat'"),
        ("max_iterations", "all", "expected int or None"),
        ("evaluation", Evaluation, "expected Evaluation"),
    ],
)
def test_the_message_says_what_to_write(name, value, said):
    with pytest.raises(WrongType) as seen:
        GRPO(MODEL, REWARDS, **{name: value})
    assert said in str(seen.value)


def test_a_config_of_peft_is_named():
    peft = pytest.importorskip("peft")
    with pytest.raises(WrongType, match=r"lora is LoraConfig.* expected LoRA or None: LoRA"):
        GRPO(MODEL, REWARDS, lora=peft.LoraConfig())


def test_natural_values_of_other_types_pass():
    assert Sampling(temperature=1, top_k=np.int64(4)).top_k == 4
    assert Evaluation(num_samples=4, pass_at_k=(1, 4)).greedy
    assert Objective(kl_coef=np.float32(0.5)).needs_reference
    assert UpdateConfig(micro_batch_tokens="auto").num_steps == 1
    assert LoRA(target_modules=("q_proj",)).rank
    assert GRPO(MODEL, REWARDS, group_size=np.int64(4)).group_size == 4


def test_rewards_are_taken_in_every_natural_form():
    path = "litgrpo.rewards.correctness"
    weighted = {"function": path, "weight": 0.5}
    for given in (path, [path], {"correctness": path}, Reward(path), [Reward(path)]):
        assert list(name_rewards(given)) == ["correctness"]
    assert list(name_rewards([path, "litgrpo.rewards.length"])) == ["correctness", "length"]
    assert name_rewards({"right": weighted})["right"].weight == 0.5
    assert name_rewards([weighted])["correctness"].weight == 0.5


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({"right": 5}, "reward 'right' is 5 (int), expected a function, an import path or"),
        ([len, None], "rewards[1] is None (NoneType), expected a function"),
        ({"right": {"fuction": "a.b"}}, "did you mean 'function'"),
        ({"right": {"function": "a.b", "weight": "1"}}, "weight is '1' (str), expected float"),
        (5, "rewards is 5"),
        ({"right": Fraction}, "is the class fractions.Fraction, expected a function or an object"),
        ({"right": "fractions.Fraction"}, "function: {class_path: fractions.Fraction}"),
    ],
)
def test_rewards_of_a_wrong_type_are_named(rewards, said):
    with pytest.raises((ValueError, TypeError)) as seen:
        GRPO(MODEL, rewards)
    assert said in str(seen.value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_types_of_all_options_are_known(kind):
    # An annotation that stays text was looked up in another module than its class's.
    assert [key for key, each in options_of(kind).items() if isinstance(each.hint, str)] == []
