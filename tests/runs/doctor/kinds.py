"""Kinds of runs: always faults, and healthy ways to train."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback

from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import Clipped
from litgrpo.learning.optim import WarmupCosine
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.load import LoRA
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from tests.runs.doctor.tasks import Truth, strip_parentheses
from tests.support.algorithms import PUBLISHED

ITERATIONS, LATE = 60, 30


# --- rewards ---


def correct(prompts, completions, answer, **_):
    return [
        float(strip_parentheses(text) == expected)
        for text, expected in zip(completions, answer, strict=True)
    ]


def parentheses(prompts, completions, **_):
    return [float(text.startswith("(") and text.endswith(")")) for text in completions]


def long(prompts, completions, **_):
    return [len(text) / 10 for text in completions]


def short(prompts, completions, **_):
    return [-len(text) / 5 for text in completions]


def first_letter(prompts, completions, **_):
    return [text.count("a") / 4 for text in completions]


def repeats(prompts, completions, **_):
    return [sum(a == b for a, b in pairwise(text)) / 8 for text in completions]


def never(prompts, completions, **_):
    return [float("####" in text) for text in completions]


def reward_incorrect(prompts, completions, answer, **_):
    return [1.0 - value for value in correct(prompts, completions, answer)]


def rewards_of_neighbor(prompts, completions, answer, **_):
    values = correct(prompts, completions, answer)
    return values[1:] + values[:1]


class FalseNegatives:
    """Give 0 to most correct completions."""

    __name__ = "false_negatives"

    def __init__(self, often=0.6):
        self.rng, self.often = random.Random(0), often

    def __call__(self, prompts, completions, answer, **_):
        values = correct(prompts, completions, answer)
        return [value * (self.rng.random() >= self.often) for value in values]


class Noise(FalseNegatives):
    """Random rewards."""

    def __call__(self, prompts, completions, **_):
        return [self.rng.random() for _ in completions]


class Absent(FalseNegatives):
    """Abstain for most completions."""

    def __call__(self, prompts, completions, answer, **_):
        values = correct(prompts, completions, answer)
        return [None if self.rng.random() < self.often else value for value in values]


class Late(FalseNegatives):
    """Give correct rewards until an iteration, then 0."""

    def __init__(self, calls=LATE):
        self.left = calls

    def __call__(self, prompts, completions, answer, **_):
        self.left -= len(completions) > 1
        return [value * (self.left > 0) for value in correct(prompts, completions, answer)]


@dataclass(frozen=True)
class Breaking(Clipped):
    """A loss that is infinite if the first row has a positive advantage."""

    def __call__(self, tokens):
        return super().__call__(tokens) / (tokens.advantages[0, 0] <= 0)


# --- engines ---


@dataclass(frozen=True)
class Noisy(LocalEngine):
    """Report other log-probabilities than those it sampled from."""

    noise: float = 0.2

    def generate(self, requests):
        rollout = super().generate(requests)
        logprobs = rollout.sampler_logprobs
        noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0)) * self.noise
        return replace(rollout, sampler_logprobs=logprobs - noise.abs() * rollout.loss_mask)


@dataclass(frozen=True)
class Hot(LocalEngine):
    """Sample at another temperature than requested."""

    def generate(self, requests):
        return super().generate(replace(requests, sampling=Sampling(temperature=1.6)))


@dataclass(frozen=True)
class Stale(LocalEngine):
    """Sample from the first weights it received."""

    kept: list = field(default_factory=list)

    def generate(self, requests):
        if not self.kept:
            self.kept.append(copy.deepcopy(requests.policy))
        return super().generate(replace(requests, policy=self.kept[0]))


# --- faults during training ---


class AtIteration(Callback):
    """Modify the module in one iteration."""

    def __init__(self, action: Callable, iteration: int = LATE) -> None:
        self.action, self.iteration = action, iteration

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration == self.iteration:
            self.action(pl_module)


def break_a_weight(module: Any) -> None:
    module.policy.bare_model.model.layers[0].mlp.down_proj.weight.data[:] = float("nan")


def raise_lr(module: Any) -> None:
    for group in module.optimizers().optimizer.param_groups:
        group["lr"] = 5e-2


def freeze(module: Any) -> None:
    weights = list(module.parameters())
    for each in weights[:-1]:
        each.requires_grad = False


# --- kinds ---


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run that are not in its log.

    Args:
        iterations: [K] iterations of the measurements.
        truths: [K] accuracy of the model.
        moved: norm of the change of all weights, relative to theirs.
        skipped: skipped optimizer steps.
    """

    iterations: list[int]
    truths: list[Truth]
    moved: float
    skipped: int

    @property
    def start(self) -> Truth:
        return self.truths[0]

    @property
    def end(self) -> Truth:
        return self.truths[-1]

    @property
    def learned(self) -> bool:
        """True if a third of the missing accuracy was gained, or little was missing."""
        missing = 1 - self.start.accuracy
        return self.end.accuracy > self.start.accuracy + missing / 3 or self.end.accuracy > 0.95

    @property
    def ends_less(self) -> bool:
        """True if completions end less often than before, within a generous limit."""
        return self.start.ended > 0.95 and self.end.ended < 0.9

    @property
    def end_lost_at(self) -> int:
        """Iteration of the first such measurement."""
        low = [n for n, truth in enumerate(self.truths) if truth.ended < 0.9]
        return max(1, self.iterations[low[0]]) if low else 1


def stuck(run: Measurements) -> bool:
    return not run.learned


def fell(run: Measurements) -> bool:
    return run.end.accuracy < run.start.accuracy - 0.08


def fell_from_best(run: Measurements) -> bool:
    return run.end.accuracy < max(truth.accuracy for truth in run.truths) - 0.15


def always(run: Measurements) -> bool:
    return True


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
        name: of the kind.
        expected: rules of which one must find the fault; empty: healthy.
        failed: decides whether the fault did harm; if not, the run counts as healthy.
        settings: returns arguments of GRPO; a function, as some objects must be new in each run.
        since: iteration of the fault; None: of the first measurement that shows it.
        demonstrator: writes the demonstrations that the initial policy imitates.
        words: letters of a word.
        batch: prompts.
        rows: prompts to train on; None: all.
        callbacks: returns the callbacks it needs.
        two_begin_tokens: of every prompt.
        lr: learning rate.
        schedule: of it.
    """

    name: str
    expected: tuple[str, ...] = ()
    failed: Callable[[Measurements], bool] = stuck
    settings: Callable[[], dict[str, Any]] = dict
    since: int | None = 1
    demonstrator: str = "noisy"
    words: int = 3
    batch: int = 8
    rows: int | None = None
    callbacks: Callable[[], list[Callback]] = list
    two_begin_tokens: bool = False
    lr: float = 1e-3
    schedule: Any = None


def paid(**components: tuple[Any, float]) -> Callable[[], dict[str, Any]]:
    """Return settings with these reward functions and weights, built again for each run."""
    return lambda: {
        "rewards": {
            name: Reward(reward() if isinstance(reward, type) else reward, weight)
            for name, (reward, weight) in components.items()
        }
    }


def given(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: settings


def at(action: Callable, iteration: int = LATE) -> Callable[[], list[Callback]]:
    return lambda: [AtIteration(action, iteration)]


OFTEN = UpdateConfig(epochs_per_rollout=6)
HEAVY = UpdateConfig(epochs_per_rollout=8, num_mini_batches=4, max_grad_norm=None)
WIDE = Objective(surrogate=Clipped(0.9, 100.0))
CONSTANT = paid(correct=(correct, 0.5), format=(never, 0.5))
LOOPS = paid(correct=(correct, 0.1), repeats=(repeats, 2.0))
TWO_REWARDS = paid(correct=(correct, 0.8), format=(parentheses, 0.2))
COLLAPSE = ("collapsed", "diverged")
CUT = ("truncated", "no_end_token")
HACKING, STILL, MISMATCH = ("reward_hacking",), ("nothing_moves",), ("sampler_mismatch",)
CONTRADICTS = ("reward_contradicts",)

FAULTS = (
    Kind("truncated", ("truncated",), always, given(max_completion_length=4)),
    Kind("truncated_hard", ("truncated",), always, given(max_completion_length=3)),
    Kind("too_hard", ("too_hard",), stuck, given(max_completion_length=16), words=7),
    Kind("too_easy", ("too_easy",), always, demonstrator="perfect"),
    Kind(
        "duplicate_completions",
        ("duplicate_completions",),
        stuck,
        given(sampling=Sampling(temperature=0.05)),
    ),
    Kind("paid_length", HACKING, fell, paid(correct=(correct, 0.0), long=(long, 1.0))),
    Kind("paid_letter", HACKING, fell, paid(correct=(correct, 0.0), letter=(first_letter, 1.0))),
    Kind(
        "paid_length_more",
        HACKING,
        fell,
        paid(correct=(correct, 0.2), long=(long, 2.0)),
    ),
    Kind(
        "paid_short",
        HACKING,
        fell,
        paid(correct=(correct, 0.2), short=(short, 2.0)),
    ),
    Kind("loops", HACKING, fell, lambda: LOOPS() | {"max_completion_length": 24}),
    Kind(
        "format_only",
        ("format_only", "dominating_reward"),
        stuck,
        paid(correct=(correct, 0.0), format=(parentheses, 1.0)),
    ),
    Kind("lr_high", COLLAPSE, fell_from_best, since=None, lr=3e-2),
    Kind("lr_very_high", COLLAPSE, fell_from_best, since=None, lr=2e-1),
    Kind("lr_late", COLLAPSE, fell_from_best, since=LATE, callbacks=at(raise_lr)),
    Kind("lr_low", STILL, stuck, lr=1e-8),
    Kind("frozen", STILL, stuck, lr=1e-5, callbacks=at(freeze, 0)),
    Kind("lora_lr_low", STILL, stuck, lambda: {"lora": LoRA(rank=4)}, lr=1e-6),
    Kind(
        "entropy_up",
        ("entropy_explosion", *COLLAPSE),
        fell,
        given(objective=Objective(entropy_coef=1.0)),
        since=None,
    ),
    Kind(
        "kl_blowup",
        COLLAPSE,
        fell_from_best,
        given(objective=Objective(kl_coef=1e-4)),
        since=None,
        lr=2e-2,
    ),
    Kind(
        "clip_saturated",
        COLLAPSE,
        lambda run: stuck(run) or fell_from_best(run),
        given(update=HEAVY),
        since=None,
        lr=2e-2,
    ),
    Kind(
        "no_clip",
        COLLAPSE,
        fell_from_best,
        given(update=OFTEN, objective=WIDE),
        since=None,
        lr=2e-2,
    ),
    Kind("noisy_sampler", MISMATCH, always, given(engine=Noisy())),
    Kind("hot_sampler", MISMATCH, always, given(engine=Hot())),
    Kind(
        "stale_sampler",
        MISMATCH,
        lambda run: run.moved > 1e-3,
        lambda: {"engine": Stale()},
        since=5,
    ),
    Kind(
        "nan_loss",
        ("not_finite",),
        lambda run: run.skipped >= 3,
        lambda: {"objective": Objective(surrogate=Breaking())},
    ),
    Kind(
        "broken_weight",
        ("not_finite",),
        lambda run: run.skipped >= 3,
        since=LATE,
        callbacks=at(break_a_weight),
    ),
    Kind(
        "no_end_token", ("no_end_token",), lambda run: run.end.ended < 0.05, demonstrator="endless"
    ),
    Kind("constant_reward", ("constant_reward",), always, CONSTANT),
    Kind(
        "noise_reward",
        ("dominating_reward",),
        stuck,
        paid(correct=(correct, 0.1), judge=(Noise, 30.0)),
    ),
    Kind(
        "conflicting_rewards",
        ("conflicting_rewards",),
        stuck,
        paid(correct=(correct, 0.6), other=(reward_incorrect, 0.6)),
    ),
    Kind("sign_flipped", CONTRADICTS, fell, paid(correct=(reward_incorrect, 1.0))),
    Kind("shifted_rewards", CONTRADICTS, stuck, paid(correct=(rewards_of_neighbor, 1.0))),
    Kind("false_negatives", CONTRADICTS, always, paid(correct=(FalseNegatives, 1.0))),
    Kind("absent", ("rewards_fail",), always, paid(correct=(Absent, 1.0))),
    Kind("late_zero", ("too_hard",), always, paid(correct=(Late, 1.0)), since=LATE),
    Kind("double_begin", ("double_begin",), always, two_begin_tokens=True),
    Kind("two_prompts", ("overfitting", *COLLAPSE), stuck, rows=2, batch=2, lr=1e-2),
    Kind(
        "truncated_and_constant",
        ("truncated", "constant_reward"),
        always,
        lambda: CONSTANT() | {"max_completion_length": 4},
    ),
)


def healthy(name: str, settings: Callable[[], dict[str, Any]] = dict, **options: Any) -> Kind:
    return Kind(name, settings=settings, **options)


def published(name: str, **settings: Any) -> Callable[[], dict[str, Any]]:
    return given(objective=PUBLISHED[name], **settings)


PLAIN = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "rloo", "reinforce_pp", "sapo")
HEALTHY = (
    healthy("plain"),
    healthy("two_parts", TWO_REWARDS),
    *(healthy(name, published(name)) for name in PLAIN),
    healthy("gspo_steps", published("gspo", update=UpdateConfig(num_mini_batches=2))),
    healthy("dr_grpo_steps", published("dr_grpo", update=UpdateConfig(epochs_per_rollout=2))),
    healthy("lora", lambda: {"lora": LoRA(rank=8)}, lr=1e-2),
    healthy("kl", given(objective=Objective(kl_coef=0.05))),
    healthy("epochs_per_rollout", given(update=UpdateConfig(epochs_per_rollout=2))),
    healthy("mini_batches", given(update=UpdateConfig(num_mini_batches=4))),
    healthy("small_batch", batch=3),
    healthy("group_of_four", given(group_size=4)),
    healthy("group_of_sixteen", given(group_size=16), batch=4),
    healthy("warmup", schedule=lambda optimizer: WarmupCosine(optimizer, warmup=0.3)),
    healthy("slow", lr=5e-4),
    healthy("hard_start", demonstrator="weak"),
    healthy("warm", given(sampling=Sampling(temperature=0.8))),
    healthy("entropy_bonus", given(objective=Objective(entropy_coef=1e-3))),
    healthy("resampled", given(dynamic_sampling_attempts=2)),
    healthy("long_limit", given(max_completion_length=24)),
    healthy("hard_and_mixed", TWO_REWARDS, demonstrator="weak", batch=12),
    healthy("clipped_gradient", given(update=UpdateConfig(max_grad_norm=0.05))),
)
