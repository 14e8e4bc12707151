"""Wrong types of arguments end in one sentence, in the constructor."""

import dataclasses
import inspect
import typing
from fractions import Fraction

import numpy as np
import pytest
import torch

import litgrpo
from litgrpo import (
    GRPO,
    SFT,
    Chat,
    Clipped,
    Criterion,
    Evaluation,
    LoRA,
    Objective,
    PairData,
    PromptData,
    Reward,
    Rubric,
    Sampling,
    StaticEngine,
    UpdateConfig,
    argument_types,
)
from litgrpo.argument_types import UnknownArgument, WrongType, argument_hints, find_class, matches
from litgrpo.cli.options import options_of
from litgrpo.learning.optim import DefaultAdamW
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
NOT_SETTINGS = {"OnPolicy", "PromptBatch", "PlainStepper", "WarmupCosine", "WarmupLinear"}


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
        ("group_size", "8", "group_size is '8' (str), expected int"),
        ("group_size", 8.0, "group_size is 8.0 (float), expected int"),
        ("group_size", True, "group_size is True (bool), expected int"),
        ("update", None, "expected UpdateConfig"),
        ("lora", 16, "expected LoRA or None: LoRA(...)"),
        ("optimizer", 1e-5, "expected a function"),
        ("optimizer", "adamw_8bit", "unknown class 'adamw_8bit'"),
        ("optimizer", {"lr": "1e-5"}, "optimizer['lr'] is '1e-5' (str), expected float or None"),
        ("optimizer", {"learning_rate": 1e-5}, "has no argument 'learning_rate': use lr=..."),
        ("sampling", {"temprature": 1.0}, "Sampling has no argument 'temprature': did you mean"),
        ("sampling", {"temperature": "1"}, "Sampling: temperature is '1' (str), expected float"),
        ("engine", "vllm", "unknown class 'vllm': use one of ColocatedEngine, "),
        ("engine", {"class_path": "ServerEngine"}, "missing a required argument: 'urls'"),
        (
            "scoring",
            {"timeout_s": "1"},
            "Scoring: timeout_s is '1' (str), expected float",
        ),
        ("objective", {"class_path": "litgrpo.Sampling"}, "expected Objective"),
        ("objective", {"advantages": {"scale": "grup"}}, "did you mean 'group'"),
        ("precision", {"dtype": "bf16"}, "Precision: dtype is 'bf16', expected 'float32' or"),
        ("scoring", {"format": 5}, "expected 'text' or 'chat'"),
        ("max_iterations", "all", "expected int or None"),
        ("evaluation", Evaluation, "expected Evaluation"),
    ],
)
def test_the_message_says_what_to_write(name, value, said):
    with pytest.raises(WrongType) as seen:
        GRPO(MODEL, REWARDS, **{name: value})
    assert said in str(seen.value)


def test_an_object_may_be_given_as_in_a_recipe():
    given = {
        "objective": {"kl_coef": 0.1, "surrogate": {"clip_low": 0.1}},
        "sampling": {"temperature": 0.7},
        "lora": {"rank": 4},
        "engine": {"class_path": "StaticEngine", "init_args": {"sync_every_tokens": 4}},
        "evaluation": {"num_samples": 8},
    }
    objects = {
        "objective": Objective(kl_coef=0.1, surrogate=Clipped(clip_low=0.1)),
        "sampling": Sampling(temperature=0.7),
        "lora": LoRA(rank=4),
        "engine": StaticEngine(sync_every_tokens=4),
        "evaluation": Evaluation(num_samples=8),
    }
    assert GRPO(MODEL, REWARDS, **given).hparams == GRPO(MODEL, REWARDS, **objects).hparams
    asked = {"kind": {"text": "Is it kind?", "weight": 2.0}}
    rubric = Rubric(asked, judge=lambda prompts, completions, criterion: [1.0])
    assert rubric.criteria == {"kind": Criterion("Is it kind?", 2.0)}
    chat = PromptData(["x"], chat={"system": "Be brief."}).prompt_format.chat
    assert chat == Chat(system="Be brief.")


@pytest.mark.parametrize("kind", [GRPO, SFT])
def test_the_learning_rate_is_an_argument_of_the_default_optimizer(kind):
    weight = torch.nn.Parameter(torch.zeros(2))
    arguments = (MODEL, REWARDS) if kind is GRPO else (MODEL,)
    optimizer = kind(*arguments, optimizer={"lr": 2e-5}).optimizer([weight])
    assert isinstance(optimizer, DefaultAdamW)
    assert optimizer.defaults["lr"] == 2e-5
    sgd = kind(*arguments, optimizer={"class_path": "SGD", "lr": 0.5}).optimizer([weight])
    assert isinstance(sgd, torch.optim.SGD)
    schedule = kind(*arguments, lr_scheduler={"class_path": "WarmupCosine", "warmup": 2.0})
    assert schedule.lr_scheduler(sgd).warmup == 2.0


# Arguments of TRL's GRPOTrainer, GRPOConfig and SFTConfig, and of verl.
@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (GRPO, "model", "use pretrained=..."),
        (GRPO, "reward_funcs", "use rewards=..."),
        (GRPO, "num_generations", "use group_size=..."),
        (GRPO, "learning_rate", "use optimizer={'lr': ...}"),
        (GRPO, "beta", "use objective={'kl_coef': ...}"),
        (GRPO, "epsilon_high", "use objective={'surrogate': {'clip_high': ...}}"),
        (GRPO, "temperature", "use sampling={'temperature': ...}"),
        (GRPO, "num_iterations", "use update={'epochs_per_rollout': ...}"),
        (GRPO, "peft_config", "use lora=..."),
        (GRPO, "train_dataset", "use PromptData(train=...)"),
        (GRPO, "per_device_train_batch_size", "use PromptData(batch_size=...)"),
        (GRPO, "num_train_epochs", "use Trainer(max_epochs=...)"),
        (GRPO, "bf16", "use Trainer(precision=...)"),
        (GRPO, "report_to", "use Trainer(logger=...)"),
        (GRPO, "output_dir", "it is --run_dir on the command line"),
        (GRPO, "save_steps", "it is --checkpoint.every_n_iterations in a recipe"),
        (GRPO, "groupsize", "did you mean 'group_size'?"),
        (SFT, "learning_rate", "use optimizer={'lr': ...}"),
        (SFT, "num_train_epochs", "use Trainer(max_epochs=...)"),
        (PromptData, "train_dataset", "use train=..."),
        (PromptData, "tokeniser", "did you mean 'tokenizer'?"),
        (PairData, "processing_class", "use tokenizer=..."),
        (Objective, "beta", "use kl_coef=..."),
        (Sampling, "max_new_tokens", "use GRPO(max_completion_length=...)"),
        (LoRA, "r", "use rank=..."),
        (LoRA, "lora_alpha", "use alpha=..."),
        (Reward, "wieght", "did you mean 'weight'?"),
    ],
)
def test_an_argument_of_another_library_or_a_misspelt_one_names_the_right_one(kind, name, said):
    with pytest.raises(UnknownArgument) as seen:
        kind(**(GIVEN.get(kind) or build_required(kind)), **{name: 1})
    assert str(seen.value).startswith(f"{kind.__name__} has no argument {name!r}: ")
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
        ({"right": {"function": "a.b", "normalize": "std"}}, "normalize is 'std', expected 'none'"),
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


def test_a_public_class_that_nothing_has_imported_yet_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text("class LateFraction(__import__('fractions').Fraction): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(argument_types, "PUBLIC", {"LateFraction": "late"})
    with pytest.raises(ValueError, match="did you mean 'LateFraction'"):
        find_class("LateFractoin", [Fraction])
