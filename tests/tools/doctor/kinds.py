"""What is provoked, and what is left well: faults, and healthy ways to train."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback

from litgrpo.algorithms.losses import Clipped, Objective, TokenMean
from litgrpo.models.loading import LoRA
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.training.optim import WarmupCosine
from litgrpo.training.update_config import UpdateConfig
from tests.support.algorithms import PUBLISHED
from tests.tools.doctor.tasks import Truth, bare

ITERATIONS, LATE = 60, 30
LR = 1e-3


# --- rewards ---


def correct(prompts, completions, answer, **_):
    return [float(bare(text) == right) for text, right in zip(completions, answer, strict=True)]


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


def wrong_is_right(prompts, completions, answer, **_):
    return [1.0 - value for value in correct(prompts, completions, answer)]


def of_the_neighbor(prompts, completions, answer, **_):
    values = correct(prompts, completions, answer)
    return values[1:] + values[:1]


class Unfair:
    """Says 0 for most right answers."""

    __name__ = "unfair"

    def __init__(self, often=0.6):
        self.rng, self.often = random.Random(0), often

    def __call__(self, prompts, completions, answer, **_):
        values = correct(prompts, completions, answer)
        return [value * (self.rng.random() >= self.often) for value in values]


class Noise(Unfair):
    """Dice."""

    def __call__(self, prompts, completions, **_):
        return [self.rng.random() for _ in completions]


class Absent(Unfair):
    """Has no reward for most completions."""

    def __call__(self, prompts, completions, answer, **_):
        values = correct(prompts, completions, answer)
        return [None if self.rng.random() < self.often else value for value in values]


class Late(Unfair):
    """Right until an iteration, then 0."""

    def __init__(self, calls=LATE):
        self.left = calls

    def __call__(self, prompts, completions, answer, **_):
        self.left -= len(completions) > 1
        return [value * (self.left > 0) for value in correct(prompts, completions, answer)]


@dataclass(frozen=True)
class Breaking(Clipped):
    """A loss that is no number where the first row is a good one."""

    def __call__(self, tokens):
        return super().__call__(tokens) / (tokens.advantages[0, 0] <= 0)


# --- engines ---


@dataclass(frozen=True)
class Noisy(LocalEngine):
    """Says other log-probabilities than it sampled from."""

    noise: float = 0.2

    def generate(self, requests):
        rollout = super().generate(requests)
        said = rollout.sampler_logprobs
        noise = torch.randn(said.shape, generator=torch.Generator().manual_seed(0)) * self.noise
        return replace(rollout, sampler_logprobs=said - noise.abs() * rollout.loss_mask)


@dataclass(frozen=True)
class Hot(LocalEngine):
    """Samples at another temperature than it was asked for."""

    def generate(self, requests):
        return super().generate(replace(requests, sampling=Sampling(temperature=1.6)))


@dataclass(frozen=True)
class Stale(LocalEngine):
    """Samples from the weights that it saw first."""

    kept: list = field(default_factory=list)

    def generate(self, requests):
        if not self.kept:
            self.kept.append(copy.deepcopy(requests.policy))
        return super().generate(replace(requests, policy=self.kept[0]))


# --- what happens on the way ---


class AtIteration(Callback):
    """Does something to the module in one iteration."""

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
class Hidden:
    """What is known of a run beside its log.

    Args:
        iterations: [K] at which the model was asked.
        truths: [K] what it could do.
        moved: length of the change of all weights over their own.
        skipped: optimizer steps that were not taken.
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
        """Whether at least a third of what was missing has been learned, or little was missing."""
        missing = 1 - self.start.accuracy
        return self.end.accuracy > self.start.accuracy + missing / 3 or self.end.accuracy > 0.95

    @property
    def ends_less(self) -> bool:
        """Whether completions end less often than before, with room to end."""
        return self.start.ended > 0.95 and self.end.ended < 0.9

    @property
    def end_lost_at(self) -> int:
        """Iteration of the first measurement at which they do."""
        low = [n for n, each in enumerate(self.truths) if each.ended < 0.9]
        return max(1, self.iterations[low[0]]) if low else 1

    @property
    def fell(self) -> bool:
        """Whether it can do less than before."""
        return self.end.accuracy < self.start.accuracy - 0.08


def stuck(hidden: Hidden) -> bool:
    return not hidden.learned


def fell(hidden: Hidden) -> bool:
    return hidden.fell


def planted(hidden: Hidden) -> bool:
    return True


def fell_from_best(hidden: Hidden) -> bool:
    return hidden.end.accuracy < max(t.accuracy for t in hidden.truths) - 0.15


@dataclass(frozen=True)
class Kind:
    """One way to train.

    Args:
        name: of it.
        expected: rules of which one must find something; none: a healthy way.
        truth: whether a run that was made so suffers from it; else it counts as healthy.
        since: iteration in which it begins; None: when the truth first shows.
        settings: of GRPO; a function makes what must be new in each run.
        teacher: of the model's imitation.
        words: letters of a word.
        data: settings of PromptData.
        batch: prompts.
        rows: prompts to train on; None: all.
        callbacks: makes those that it needs.
        doubled: prompts begin with two begin tokens.
    """

    name: str
    expected: tuple[str, ...] = ()
    truth: Callable[[Hidden], bool] = stuck
    since: int | None = 1
    settings: Callable[[], dict[str, Any]] = dict
    teacher: str = "careless"
    words: int = 3
    batch: int = 8
    rows: int | None = None
    callbacks: Callable[[], list[Callback]] = list
    doubled: bool = False
    lr: float = LR
    schedule: Any = None


def rewarded(**parts: tuple[Any, float]) -> Callable[[], dict[str, Any]]:
    """Settings with these parts, made anew for each run."""
    return lambda: {
        "rewards": {
            name: Reward(made() if isinstance(made, type) else made, weight)
            for name, (made, weight) in parts.items()
        }
    }


def fixed(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: settings


HEAVY = UpdateConfig(epochs_per_rollout=8, num_mini_batches=4, max_grad_norm=None)
OFTEN = UpdateConfig(epochs_per_rollout=6)
COLLAPSE = ("collapsed", "diverged")
MISMATCH = ("sampler_mismatch",)
UNTRUE = ("reward_contradicts",)
CUT = ("truncated", "no_end_token")

FAULTS = (
    Kind("truncated", ("truncated",), lambda h: True, settings=fixed(max_completion_length=4)),
    Kind("truncated_hard", ("truncated",), planted, settings=fixed(max_completion_length=3)),
    Kind("too_hard", ("too_hard",), stuck, words=7, settings=fixed(max_completion_length=16)),
    Kind("too_easy", ("too_easy",), planted, teacher="perfect"),
    Kind("copies", ("copies",), stuck, settings=fixed(sampling=Sampling(temperature=0.05))),
    Kind(
        "paid_length",
        ("hacked",),
        fell,
        settings=rewarded(correct=(correct, 0.0), long=(long, 1.0)),
    ),
    Kind(
        "paid_letter",
        ("hacked",),
        fell,
        settings=rewarded(correct=(correct, 0.0), letter=(first_letter, 1.0)),
    ),
    Kind(
        "paid_length_more",
        ("hacked", "length_growth"),
        fell,
        settings=rewarded(correct=(correct, 0.2), long=(long, 2.0)),
    ),
    Kind(
        "paid_short",
        ("hacked", "length_collapse"),
        fell,
        settings=rewarded(correct=(correct, 0.2), short=(short, 2.0)),
    ),
    Kind(
        "loops",
        ("loops", "hacked"),
        fell,
        settings=lambda: (
            rewarded(correct=(correct, 0.1), repeats=(repeats, 2.0))()
            | {"max_completion_length": 24}
        ),
    ),
    Kind(
        "format_only",
        ("format_only", "dominating_part"),
        stuck,
        settings=rewarded(correct=(correct, 0.0), format=(parentheses, 1.0)),
    ),
    Kind("lr_high", COLLAPSE, fell_from_best, since=None, lr=3e-2),
    Kind("lr_very_high", COLLAPSE, fell_from_best, since=None, lr=2e-1),
    Kind(
        "lr_late", COLLAPSE, fell_from_best, since=LATE, callbacks=lambda: [AtIteration(raise_lr)]
    ),
    Kind("lr_low", ("nothing_moves",), stuck, lr=1e-8),
    Kind("frozen", ("nothing_moves",), stuck, lr=1e-5, callbacks=lambda: [AtIteration(freeze, 0)]),
    Kind(
        "lora_lr_low", ("nothing_moves",), stuck, lr=1e-6, settings=lambda: {"lora": LoRA(rank=4)}
    ),
    Kind(
        "entropy_up",
        ("entropy_explosion", *COLLAPSE),
        fell,
        since=None,
        settings=fixed(objective=Objective(loss_aggregation=TokenMean(), entropy_coef=1.0)),
    ),
    Kind(
        "kl_blowup",
        (*COLLAPSE, "kl_blowup"),
        fell_from_best,
        since=None,
        lr=2e-2,
        settings=fixed(objective=Objective(loss_aggregation=TokenMean(), kl_coef=1e-4)),
    ),
    Kind(
        "clip_saturated",
        ("clip_saturated", *COLLAPSE),
        lambda h: stuck(h) or fell_from_best(h),
        since=None,
        lr=2e-2,
        settings=fixed(update=HEAVY),
    ),
    Kind(
        "no_clip",
        COLLAPSE,
        fell_from_best,
        since=None,
        lr=2e-2,
        settings=fixed(
            update=OFTEN,
            objective=Objective(loss_aggregation=TokenMean(), surrogate=Clipped(0.9, 100.0)),
        ),
    ),
    Kind("noisy_sampler", MISMATCH, planted, settings=fixed(engine=Noisy())),
    Kind("hot_sampler", MISMATCH, planted, settings=fixed(engine=Hot())),
    Kind(
        "stale_sampler",
        MISMATCH,
        lambda h: h.moved > 1e-3,
        since=5,
        settings=lambda: {"engine": Stale()},
    ),
    Kind(
        "nan_loss",
        ("not_finite",),
        lambda h: h.skipped >= 3,
        settings=lambda: {
            "objective": Objective(loss_aggregation=TokenMean(), surrogate=Breaking())
        },
    ),
    Kind(
        "broken_weight",
        ("not_finite",),
        lambda h: h.skipped >= 3,
        since=LATE,
        callbacks=lambda: [AtIteration(break_a_weight)],
    ),
    Kind("no_end_token", ("no_end_token",), lambda h: h.end.ended < 0.05, teacher="endless"),
    Kind(
        "dead_part",
        ("dead_part",),
        planted,
        settings=rewarded(correct=(correct, 0.5), format=(never, 0.5)),
    ),
    Kind(
        "noise_part",
        ("dominating_part",),
        stuck,
        settings=rewarded(correct=(correct, 0.1), judge=(Noise, 30.0)),
    ),
    Kind(
        "fighting_parts",
        ("fighting_parts",),
        stuck,
        settings=rewarded(correct=(correct, 0.6), other=(wrong_is_right, 0.6)),
    ),
    Kind("sign_flipped", UNTRUE, fell, settings=rewarded(correct=(wrong_is_right, 1.0))),
    Kind("shifted_rewards", UNTRUE, stuck, settings=rewarded(correct=(of_the_neighbor, 1.0))),
    Kind("unfair", UNTRUE, planted, settings=rewarded(correct=(Unfair, 1.0))),
    Kind("absent", ("rewards_fail",), planted, settings=rewarded(correct=(Absent, 1.0))),
    Kind("late_zero", ("too_hard",), planted, since=LATE, settings=rewarded(correct=(Late, 1.0))),
    Kind("double_begin", ("double_begin",), planted, doubled=True),
    Kind("two_prompts", ("memorised", *COLLAPSE), stuck, rows=2, batch=2, lr=1e-2),
    Kind(
        "cut_and_dead",
        ("truncated", "dead_part"),
        planted,
        settings=lambda: (
            rewarded(correct=(correct, 0.5), format=(never, 0.5))() | {"max_completion_length": 4}
        ),
    ),
)

TWO_PARTS = rewarded(correct=(correct, 0.8), format=(parentheses, 0.2))


def with_objective(objective: Objective, **settings: Any) -> Callable[[], dict[str, Any]]:
    return fixed(objective=objective, **settings)


HEALTHY = (
    Kind("plain"),
    Kind("two_parts", settings=TWO_PARTS),
    *(
        Kind(name, settings=with_objective(PUBLISHED[name]))
        for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "rloo", "reinforce_pp", "sapo")
    ),
    Kind(
        "gspo_steps",
        settings=with_objective(PUBLISHED["gspo"], update=UpdateConfig(num_mini_batches=2)),
    ),
    Kind(
        "dr_grpo_steps",
        settings=with_objective(PUBLISHED["dr_grpo"], update=UpdateConfig(epochs_per_rollout=2)),
    ),
    Kind("lora", lr=1e-2, settings=lambda: {"lora": LoRA(rank=8)}),
    Kind("kl", settings=with_objective(Objective(kl_coef=0.05))),
    Kind("epochs_per_rollout", settings=fixed(update=UpdateConfig(epochs_per_rollout=2))),
    Kind("mini_batches", settings=fixed(update=UpdateConfig(num_mini_batches=4))),
    Kind("small_batch", batch=3),
    Kind("group_of_four", settings=fixed(group_size=4)),
    Kind("group_of_sixteen", settings=fixed(group_size=16), batch=4),
    Kind("warmup", schedule=lambda optimizer: WarmupCosine(optimizer, warmup=0.3)),
    Kind("slow", lr=5e-4),
    Kind("hard_start", teacher="weak"),
    Kind("warm", settings=fixed(sampling=Sampling(temperature=0.8))),
    Kind(
        "entropy_bonus",
        settings=with_objective(Objective(loss_aggregation=TokenMean(), entropy_coef=1e-3)),
    ),
    Kind("resampled", settings=fixed(dynamic_sampling_attempts=2)),
    Kind("long_limit", settings=fixed(max_completion_length=24)),
    Kind("hard_and_mixed", settings=TWO_PARTS, teacher="weak", batch=12),
    Kind("clipped_gradient", settings=fixed(update=UpdateConfig(max_grad_norm=0.05))),
)
