"""Each rule on made-up numbers: what it finds, and what is normal."""

import numpy as np
import pytest

from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.diagnosis import RULES
from litgrpo.tools.doctor.metrics import of_rows
from litgrpo.tools.doctor.trend import trend

CHECKS = {rule.name: rule.check for rule in RULES}
LENGTH = 40


def up(first, last):
    return np.linspace(first, last, LENGTH)


def flat(value):
    return np.full(LENGTH, float(value))


def late(before, after):
    return np.concatenate([np.full(20, float(before)), np.full(20, float(after))])


FLAT = {"reward/mean": flat(0.4), "reward/correct_frac": flat(0.4)}
BETTER = {"reward/mean": up(0.3, 0.9), "reward/correct_frac": up(0.3, 0.9)}
PAID = {"reward/mean": up(0.3, 0.9), "reward/correct_frac": up(0.5, 0.1)}
ONCE = {"model": {"update": {"epochs_per_rollout": 1}}}
STEPS = {"model": {"update": {"epochs_per_rollout": 4}, "objective": {"ratio": "token"}}}
ALL_WRONG = {"reward/all_incorrect_frac": flat(0.9), "reward/zero_variance_groups_frac": flat(0.9)}
FORM = {
    "reward/format": late(0.3, 1),
    "reward/format_std": flat(0.1),
    "reward/right_std": flat(0.1),
}
FORM |= {"reward/right": flat(0.4)}
PARTS = {"model": {"rewards": {"right": {}, "format": {}}}}
# (rule, numbers, recipe)
FOUND = [
    ("not_finite", FLAT | {"optim/skipped_steps": up(0, 9)}, {}),
    ("not_finite", {"reward/mean": late(0.4, np.nan)}, {}),
    ("sampler_mismatch", {"policy/sampler_mismatch": flat(0.2)}, {}),
    ("double_begin", {"prompt/begin_tokens": flat(2)}, {}),
    ("no_end_token", {"completion/eos_frac": flat(0), "completion/truncated_frac": flat(1)}, {}),
    ("truncated", {"completion/truncated_frac": late(0, 0.5)}, {}),
    (
        "copies",
        {"completion/unique_frac": flat(0.13), "reward/zero_variance_groups_frac": flat(1)},
        {"model": {"sampling": {"temperature": 0.05}}},
    ),
    ("rewards_fail", {"reward/failed_frac": flat(0.3)}, {}),
    ("fighting_parts", FLAT | {"reward/cosine_a_b": flat(-1)}, {}),
    ("too_hard", FLAT | ALL_WRONG, {}),
    (
        "too_easy",
        {"reward/all_correct_frac": flat(0.9), "reward/zero_variance_groups_frac": flat(0.9)},
        {},
    ),
    ("no_signal", {"reward/zero_variance_groups_frac": flat(0.9), "reward/mean": flat(0.4)}, {}),
    ("dominating_part", FLAT | FORM | {"reward/format_share": flat(0.97)}, PARTS),
    ("hacked", PAID, {}),
    ("format_only", FLAT | FORM, PARTS),
    ("dead_part", FLAT | {"reward/x": flat(0), "reward/x_std": flat(0)}, {}),
    ("clip_saturated", {f"policy/clip_{side}_frac": flat(0.2) for side in ("low", "high")}, STEPS),
    ("collapsed", {"reward/mean": late(0.8, 0.1)}, {}),
    ("kl_blowup", FLAT | {"policy/kl": late(0.01, 3)}, {}),
    ("entropy_explosion", FLAT | {"policy/entropy": up(0.5, 3)}, {}),
    (
        "entropy_collapse",
        FLAT | {"policy/entropy": late(0.5, 0.01), "completion/unique_frac": up(0.9, 0.1)},
        {},
    ),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-9)}, {}),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-5)}, {}),
    ("loops", {"completion/loop_frac": late(0, 0.6)}, {}),
    ("length_growth", FLAT | {"completion/len_mean": up(10, 40)}, {}),
    ("length_collapse", FLAT | {"completion/len_mean": up(40, 10)}, {}),
    (
        "memorised",
        {"data/epoch": up(0, 9), "reward/correct_frac": up(0.3, 1), "val/avg@4": flat(0.3)}
        | {"val/avg@4_high": flat(0.35)},
        {},
    ),
]
# What users ask about and what is no fault; see docs/doctor.md.
NORMAL = [
    ("clip_saturated", {f"policy/clip_{side}_frac": flat(0) for side in ("low", "high")}, STEPS),
    ("clip_saturated", {f"policy/clip_{side}_frac": flat(0.3) for side in ("low", "high")}, ONCE),
    (
        "entropy_collapse",
        BETTER | {"policy/entropy": up(0.5, 0.01), "completion/unique_frac": up(0.9, 0.1)},
        {},
    ),
    ("kl_blowup", BETTER | {"policy/kl": up(0, 0.4)}, {}),
    (
        "too_easy",
        {"reward/all_correct_frac": up(0.1, 1), "reward/zero_variance_groups_frac": up(0.1, 1)},
        {},
    ),
    ("no_signal", {"reward/zero_variance_groups_frac": up(0.1, 1), "reward/mean": up(0.1, 1)}, {}),
    ("too_hard", FLAT | ALL_WRONG | {"reward/zero_variance_groups_frac": flat(0.1)}, {}),
    ("length_growth", BETTER | {"completion/len_mean": up(10, 40)}, {}),
    ("dead_part", FLAT | {"reward/x": flat(1), "reward/x_std": flat(0)}, {}),
    ("dominating_part", BETTER | FORM | {"reward/format_share": flat(0.97)}, {}),
    ("collapsed", {"reward/mean": np.where(np.arange(LENGTH) == 20, 0.1, 0.8)}, {}),
    ("collapsed", BETTER, {}),
    ("collapsed", {"reward/mean": np.where(np.arange(LENGTH) < 20, 0.6, 0.6 - 1e-8)}, {}),
    ("hacked", BETTER, {}),
    ("nothing_moves", BETTER | {"optim/update_rel": flat(1e-9)}, {}),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-5), "policy/entropy": up(0.1, 0.02)}, {}),
    (
        "copies",
        {"completion/unique_frac": flat(0.13), "reward/zero_variance_groups_frac": flat(1)},
        {},
    ),
    ("loops", {"completion/loop_frac": flat(0.3)}, {}),
]


def finding(rule, numbers, recipe):
    columns = {name: list(values) for name, values in numbers.items()}
    rows = [
        {"step": n + 1} | {name: values[n] for name, values in columns.items()}
        for n in range(LENGTH)
    ]
    return CHECKS[rule](of_rows(rows), [], Config(recipe))


@pytest.mark.parametrize(("rule", "numbers", "recipe"), FOUND, ids=[each[0] for each in FOUND])
def test_it_is_found(rule, numbers, recipe):
    found = finding(rule, numbers, recipe)
    assert found is not None
    assert found.rule == rule
    assert found.what.endswith(".")
    assert found.evidence
    assert 1 <= found.since <= LENGTH


@pytest.mark.parametrize(("rule", "numbers", "recipe"), NORMAL, ids=[each[0] for each in NORMAL])
def test_what_is_normal_is_not_found(rule, numbers, recipe):
    assert finding(rule, numbers, recipe) is None


def test_every_rule_is_tried():
    of_samples = {"reward_contradicts"}
    assert {rule for rule, *_ in FOUND} | of_samples == CHECKS.keys()


@pytest.mark.parametrize(("rule", "series"), [("truncated", (0, 0.5)), ("loops", (0, 0.6))])
def test_since_is_near_the_iteration_in_which_it_began(rule, series):
    name = {"truncated": "completion/truncated_frac", "loops": "completion/loop_frac"}[rule]
    assert abs(finding(rule, {name: late(*series)}, {}).since - 21) <= 3


def test_the_fall_of_a_reward_is_dated_to_its_iteration():
    assert finding("collapsed", {"reward/mean": late(0.8, 0.1)}, {}).since == 21


def row(completion, right, prompt="2+2", answer="4"):
    return {
        "iteration": 5,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"right": right},
        "columns": {"answer": answer},
    }


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row("4", 0.0)] * 4, "a completion that is the answer was judged wrong"),
        ([row("five", 1.0)] * 4, "a completion without the answer was judged right"),
        ([row("x", 0.0), row("x", 0.5)] * 2, "equal completions of a prompt"),
    ],
)
def test_samples_that_contradict_their_reward_are_found(rows, reason):
    recipe = Config({"model": {"rewards": {"right": {}}}})
    found = CHECKS["reward_contradicts"](of_rows([]), rows, recipe)
    assert found.evidence[0].startswith(reason)
    assert found.samples
    assert found.since == 5


def test_samples_that_agree_with_their_reward_are_no_finding():
    recipe = Config({"model": {"rewards": {"right": {}}}})
    rows = [row("is 4", 1.0), row("5", 0.0), row("44 or 4, no tags", 0.0), row("4 it is", 0.5)]
    rows.append(row('{"age": 7, "name": "Bo"}', 1.0, answer='{"name": "Bo", "age": 7}'))
    assert CHECKS["reward_contradicts"](of_rows([]), rows * 5, recipe) is None


def test_a_trend_is_measured_by_the_noise_around_it():
    rng = np.random.default_rng(0)
    noisy = of_rows([{"step": n, "x": x} for n, x in enumerate(rng.normal(0, 1, 200))])["x"]
    rising = of_rows([{"step": n, "x": x} for n, x in enumerate(up(0, 1))])["x"]
    assert not trend(noisy).rose
    assert not trend(noisy).fell
    assert trend(rising).rose
