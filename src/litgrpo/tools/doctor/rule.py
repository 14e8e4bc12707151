"""The table of rules: which numbers each needs, and which findings it explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from litgrpo.tools.doctor import rules_reward as reward
from litgrpo.tools.doctor import rules_signal as signal
from litgrpo.tools.doctor import rules_text as text
from litgrpo.tools.doctor import rules_update as update
from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.metrics import Metrics

HELD_OUT, SAMPLES = "val/", "samples"  # any held-out accuracy; any samples
PARTS, COSINE = "reward/<part>_std", "reward/cosine_"
COSINES = f"{COSINE}<part>_<part>"
AT_ONCE, AFTER_A_WHILE = 3, 20  # iterations
Check = Callable[[Metrics, Sequence[dict[str, Any]], Config], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        check: the function; its name is the rule's.
        needs: numbers without which it cannot be checked; or `HELD_OUT`, `SAMPLES`.
        fine: what is said where it finds nothing.
        patience: iterations before which nothing can be said.
    """

    check: Check
    needs: tuple[str, ...]
    fine: str
    patience: int = AFTER_A_WHILE

    @property
    def name(self) -> str:
        """Of the rule, and of the section of docs/doctor.md."""
        return self.check.__name__

    def missing(self, metrics: Metrics, samples: Sequence[dict[str, Any]]) -> list[str]:
        """What it needs and was not logged."""
        known = {HELD_OUT: bool(metrics.success()), SAMPLES: bool(samples)}
        known |= {PARTS: bool(metrics.parts()), COSINES: any(COSINE in n for n in metrics.series)}
        lacks = [name for name in self.needs if not known.get(name, name in metrics)]
        return lacks or [f"{self.patience} iterations"] * (metrics.iterations < self.patience)


REWARD, RIGHT = "reward/mean", "reward/correct_frac"
EQUAL, UNIQUE = "reward/zero_variance_groups_frac", "completion/unique_frac"
CUT, ENDS = "completion/truncated_frac", "completion/eos_frac"
# Causes first: a finding is put under the first one that explains it.
RULES = (
    Rule(
        update.not_finite,
        (),
        "Every number was finite; every step was taken.",
        AT_ONCE,
    ),
    Rule(
        update.sampler_mismatch,
        ("policy/sampler_mismatch",),
        "What samples is what learns.",
        AT_ONCE,
    ),
    Rule(signal.double_begin, ("prompt/begin_tokens",), "Prompts begin once.", AT_ONCE),
    Rule(signal.no_end_token, (ENDS, CUT), "Completions have an end token.", 10),
    Rule(signal.truncated, (CUT,), "Completions end by themselves.", 10),
    Rule(signal.copies, (UNIQUE, EQUAL), "Completions of a group differ.", 10),
    Rule(reward.rewards_fail, ("reward/failed_frac",), "Every completion has a reward.", 10),
    Rule(
        reward.reward_contradicts,
        (SAMPLES,),
        "The samples agree with the reward for right answers.",
        AT_ONCE,
    ),
    Rule(reward.fighting_parts, (COSINES,), "No two rewards pull against each other."),
    Rule(
        signal.too_hard,
        ("reward/all_incorrect_frac", EQUAL, RIGHT),
        "Most groups have a right completion, or rewards that differ.",
        10,
    ),
    Rule(
        signal.too_easy,
        ("reward/all_correct_frac", EQUAL),
        "There was something to learn; groups that become all right later are normal.",
        10,
    ),
    Rule(signal.no_signal, (EQUAL, REWARD), "Rewards differ within groups."),
    Rule(
        reward.dominating_part,
        (REWARD, RIGHT),
        "No part rules over the one that counts, or right answers rise with it.",
    ),
    Rule(reward.hacked, (REWARD, RIGHT), "Right answers do not fall while the reward rises."),
    Rule(reward.format_only, (REWARD, RIGHT), "Form and answer are learned together."),
    Rule(reward.dead_part, (PARTS,), "Every part of the reward tells completions apart."),
    Rule(
        update.clip_saturated,
        ("policy/clip_low_frac", "policy/clip_high_frac"),
        "Few tokens are clipped; with one step per iteration none ever is.",
    ),
    Rule(update.collapsed, (REWARD,), "The reward is near its best."),
    Rule(
        update.kl_blowup,
        ("policy/kl",),
        "The KL to the reference rises slowly, as it does in a run that learns.",
    ),
    Rule(update.entropy_explosion, ("policy/entropy", REWARD), "The entropy does not rise."),
    Rule(
        update.entropy_collapse,
        ("policy/entropy", UNIQUE, RIGHT),
        "An entropy that falls while right answers rise is normal.",
    ),
    Rule(update.nothing_moves, ("optim/update_rel", REWARD), "The weights move."),
    Rule(
        text.loops,
        ("completion/loop_frac",),
        "Completions do not repeat themselves more than at the start.",
    ),
    Rule(
        text.length_growth,
        ("completion/len_mean", REWARD),
        "Completions are about as long as they were, or longer and better.",
    ),
    Rule(
        text.length_collapse,
        ("completion/len_mean", REWARD),
        "Completions did not shrink, or shrank and became better.",
    ),
    Rule(
        signal.memorised,
        ("data/epoch", RIGHT, HELD_OUT),
        "Held-out prompts are answered about as well as training prompts.",
    ),
)

PART_RULES = ("fighting_parts", "dominating_part", "format_only")
NO_LEARNING = ("too_hard", "no_signal", "nothing_moves", "dead_part")
ENTROPIES = ("entropy_explosion", "entropy_collapse")
TEXTS = ("length_growth", "length_collapse", "loops", "truncated", "no_end_token")
# {rule: rules whose findings are symptoms of its own}
EXPLAINS: dict[str, tuple[str, ...]] = {
    "not_finite": ("collapsed", *NO_LEARNING, *ENTROPIES, *TEXTS, *PART_RULES),
    "sampler_mismatch": ("collapsed", "clip_saturated", "hacked", *ENTROPIES),
    "double_begin": ("too_hard", "no_signal"),
    "no_end_token": ("truncated", "length_growth", "loops", *NO_LEARNING),
    "truncated": ("length_growth", *NO_LEARNING),
    "copies": ("too_easy", *NO_LEARNING),
    "rewards_fail": NO_LEARNING,
    "reward_contradicts": ("hacked", "collapsed", *PART_RULES),
    "fighting_parts": ("dominating_part", *NO_LEARNING),
    "too_hard": ("no_signal", "dead_part", "nothing_moves"),
    "too_easy": ("no_signal", "dead_part", "nothing_moves"),
    "no_signal": ("nothing_moves",),
    "dominating_part": ("hacked", "format_only", *TEXTS, *ENTROPIES),
    "hacked": ("format_only", "too_hard", *TEXTS, *ENTROPIES),
    "clip_saturated": ENTROPIES,
    "collapsed": ("kl_blowup", "clip_saturated", *NO_LEARNING, *ENTROPIES, *TEXTS, *PART_RULES),
    "entropy_explosion": TEXTS,
    "loops": ("length_growth",),
}
