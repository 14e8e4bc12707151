"""Each rule on made-up metrics: patterns that it finds, and patterns that are normal."""

import numpy as np
import pytest

from litgrpo.runs.config import RunConfig
from litgrpo.runs.doctor.diagnosis import RULES, examine
from litgrpo.runs.run import Run, table_of

CHECKS = {rule.name: rule.apply for rule in RULES}
LENGTH = 40


def up(first, last):
    return np.linspace(first, last, LENGTH)


def flat(value):
    return np.full(LENGTH, float(value))


def late(before, after):
    return np.concatenate([np.full(20, float(before)), np.full(20, float(after))])


FLAT = {"reward/mean": flat(0.4), "reward/correct_frac": flat(0.4)}
BETTER = {"reward/mean": up(0.3, 0.9), "reward/correct_frac": up(0.3, 0.9)}
HACKED = {"reward/mean": up(0.3, 0.9), "reward/correct_frac": up(0.5, 0.1)}
ALL_INCORRECT = {
    "reward/all_incorrect_frac": flat(0.9),
    "reward/zero_variance_groups_frac": flat(0.9),
}
FORMAT = {
    "reward/format": late(0.3, 1),
    "reward/format_std": flat(0.1),
    "reward/right_std": flat(0.1),
}
FORMAT |= {"reward/right": flat(0.4)}
TWO_REWARDS = {"model": {"rewards": {"right": {}, "format": {}}}}
# (rule, metrics, config)
FOUND = [
    ("not_finite", FLAT | {"optim/skipped_steps": up(0, 9)}, {}),
    ("not_finite", {"reward/mean": late(0.4, np.nan)}, {}),
    ("sampler_mismatch", {"policy/sampler_mismatch": flat(0.2)}, {}),
    ("double_begin", {"prompt/begin_tokens": flat(2)}, {}),
    ("no_end_token", {"completion/eos_frac": flat(0), "completion/truncated_frac": flat(1)}, {}),
    ("truncated", {"completion/truncated_frac": late(0, 0.5)}, {}),
    (
        "duplicate_completions",
        {"completion/unique_frac": flat(0.13), "reward/zero_variance_groups_frac": flat(1)},
        {"model": {"sampling": {"temperature": 0.05}}},
    ),
    ("rewards_fail", {"reward/failed_frac": flat(0.3)}, {}),
    ("conflicting_rewards", FLAT | {"reward/cosine_a_b": flat(-1)}, {}),
    ("too_hard", FLAT | ALL_INCORRECT, {}),
    (
        "too_easy",
        {"reward/all_correct_frac": flat(0.9), "reward/zero_variance_groups_frac": flat(0.9)},
        {},
    ),
    ("no_signal", {"reward/zero_variance_groups_frac": flat(0.9), "reward/mean": flat(0.4)}, {}),
    ("dominating_reward", FLAT | FORMAT | {"reward/format_share": flat(0.97)}, TWO_REWARDS),
    ("reward_hacking", HACKED, {}),
    ("format_only", FLAT | FORMAT, TWO_REWARDS),
    ("constant_reward", FLAT | {"reward/x": flat(0), "reward/x_std": flat(0)}, {}),
    ("collapsed", {"reward/mean": late(0.8, 0.1)}, {}),
    ("entropy_explosion", FLAT | {"policy/entropy": up(0.5, 3)}, {}),
    (
        "entropy_collapse",
        FLAT | {"policy/entropy": late(0.5, 0.01), "completion/unique_frac": up(0.9, 0.1)},
        {},
    ),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-9)}, {}),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-5)}, {}),
    # The accuracy happened to be higher, but bfloat16 rounded the steps away.
    (
        "nothing_moves",
        BETTER | {"optim/update_rel": flat(7e-9)},
        {"model": {"init_args": {"precision": {"dtype": "bfloat16"}}}},
    ),
    (
        "overfitting",
        {"data/epoch": up(0, 9), "reward/correct_frac": up(0.3, 1), "val/avg@4": flat(0.3)}
        | {"val/avg@4_high": flat(0.35)},
        {},
    ),
]
# Patterns that users ask about and that are normal; see docs/reference/tools.md.
NORMAL = [
    (
        "entropy_collapse",
        BETTER | {"policy/entropy": up(0.5, 0.01), "completion/unique_frac": up(0.9, 0.1)},
        {},
    ),
    (
        "too_easy",
        {"reward/all_correct_frac": up(0.1, 1), "reward/zero_variance_groups_frac": up(0.1, 1)},
        {},
    ),
    ("no_signal", {"reward/zero_variance_groups_frac": up(0.1, 1), "reward/mean": up(0.1, 1)}, {}),
    ("too_hard", FLAT | ALL_INCORRECT | {"reward/zero_variance_groups_frac": flat(0.1)}, {}),
    ("constant_reward", FLAT | {"reward/x": flat(1), "reward/x_std": flat(0)}, {}),
    ("dominating_reward", BETTER | FORMAT | {"reward/format_share": flat(0.97)}, {}),
    ("collapsed", {"reward/mean": np.where(np.arange(LENGTH) == 20, 0.1, 0.8)}, {}),
    ("collapsed", BETTER, {}),
    ("collapsed", {"reward/mean": np.where(np.arange(LENGTH) < 20, 0.6, 0.6 - 1e-8)}, {}),
    ("reward_hacking", BETTER, {}),
    ("nothing_moves", BETTER | {"optim/update_rel": flat(1e-9)}, {}),
    ("nothing_moves", FLAT | {"optim/update_rel": flat(1e-5), "policy/entropy": up(0.1, 0.02)}, {}),
    (
        "duplicate_completions",
        {"completion/unique_frac": flat(0.13), "reward/zero_variance_groups_frac": flat(1)},
        {},
    ),
]


def check(rule, columns, config):
    rows = [
        {"step": n + 1} | {name: float(values[n]) for name, values in columns.items()}
        for n in range(LENGTH)
    ]
    return CHECKS[rule](Run(metrics=table_of(rows), config=RunConfig(config)))


@pytest.mark.parametrize(("rule", "columns", "config"), FOUND, ids=[each[0] for each in FOUND])
def test_a_problem_is_found(rule, columns, config):
    finding = check(rule, columns, config)
    assert finding is not None
    assert finding.rule == rule
    assert finding.problem.endswith(".")
    assert finding.evidence
    assert 1 <= finding.first_iteration <= LENGTH


@pytest.mark.parametrize(("rule", "columns", "config"), NORMAL, ids=[each[0] for each in NORMAL])
def test_a_normal_pattern_is_not_found(rule, columns, config):
    assert check(rule, columns, config) is None


@pytest.mark.parametrize("value", [[1, {"a": "b"}], 10**4299 * 9, {"a": ["b"]}, "x", 0])
def test_a_setting_of_another_kind_ends_no_rule(value):
    model = dict.fromkeys(("group_size", "max_completion_length", "rewards"), value)
    model |= {"sampling": {"temperature": value}, "optimizer": {"lr": value}}
    model |= {"objective": {"entropy_coef": value}, "precision": {"dtype": value}}
    for config in ({"model": model}, {"model": model | {"rewards": {"right": {"weight": value}}}}):
        for rule, columns, _ in FOUND:
            check(rule, columns, config)


def test_every_rule_is_covered():
    from_samples = {"reward_contradicts"}
    assert {rule for rule, *_ in FOUND} | from_samples == CHECKS.keys()


def test_the_first_iteration_is_near_the_change():
    columns = {"completion/truncated_frac": late(0, 0.5)}
    assert abs(check("truncated", columns, {}).first_iteration - 21) <= 3


def test_a_reward_collapse_is_dated_to_its_iteration():
    assert check("collapsed", {"reward/mean": late(0.8, 0.1)}, {}).first_iteration == 21


def sample(completion, reward, prompt="2+2", answer="4"):
    return {
        "iteration": 5,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"right": reward},
        "columns": {"answer": answer},
    }


def check_samples(rows):
    config = RunConfig({"model": {"rewards": {"right": {}}}})
    return CHECKS["reward_contradicts"](Run(samples=rows, config=config))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([sample("4", 0.0)] * 4, "equals the reference answer"),
        ([sample("five", 1.0)] * 4, "without the reference answer"),
        ([sample("x", 0.0), sample("x", 0.5)] * 2, "different rewards"),
    ],
)
def test_samples_that_contradict_their_reward_are_found(rows, reason):
    finding = check_samples(rows)
    assert reason in finding.evidence[0]
    assert finding.samples
    assert finding.first_iteration == 5


def test_samples_that_agree_with_their_reward_are_not_found():
    rows = [sample("is 4", 1.0), sample("5", 0.0), sample("44 or 4, no tags", 0.0)]
    rows.append(sample("4 it is", 0.5))
    rows.append(sample('{"age": 7, "name": "Bo"}', 1.0, answer='{"name": "Bo", "age": 7}'))
    assert check_samples(rows * 5) is None


def log_of(columns):
    """A run whose metrics are only logged where they are known."""
    rows = [{"step": n + 1} | {k: v for k, v in row.items() if v is not None} for n, row in columns]
    return Run(metrics=table_of(rows))


def test_what_no_completion_was_scored_for_is_neither_zero_nor_a_problem():
    """Only the missing rewards are found: not `no_signal`, `too_hard`, `collapsed`, ..."""
    unscored = {"reward/failed_frac": 1.0, "reward/unscored_groups_frac": 1.0}
    others = {"policy/entropy": 1.0, "completion/len_mean": 9.0, "optim/update_rel": 1e-9}
    found = examine(log_of(enumerate([unscored | others] * LENGTH)))
    assert [each.rule for each in found.all_findings] == ["rewards_fail"]
    assert found.not_checked["no_signal"] == "needs reward/zero_variance_groups_frac, reward/mean"
    assert {"too_hard", "collapsed", "reward_hacking", "nothing_moves"} <= found.not_checked.keys()


def test_iterations_without_scored_completions_change_no_finding():
    scored = {
        "reward/mean": 0.5,
        "reward/failed_frac": 0.0,
        "reward/zero_variance_groups_frac": 0.9,
    }
    scored |= {"reward/all_incorrect_frac": 0.9, "reward/correct_frac": 0.1}
    scored |= {"reward/a": 0.5, "reward/a_std": 0.0, "reward/a_share": 1.0}
    every = examine(log_of(enumerate([scored] * LENGTH)))
    gaps = [scored if n % 2 else {"completion/len_mean": 9.0} for n in range(2 * LENGTH)]
    some = examine(log_of(enumerate(gaps)))
    rules = {each.rule for each in every.all_findings}
    assert rules == {each.rule for each in some.all_findings}
    assert "too_hard" in rules


def test_a_share_that_is_seldom_known_dominates_nothing():
    columns = {"reward/mean": 0.5, "reward/correct_frac": 0.5, "reward/b": 1.0, "reward/b_std": 0.1}
    columns |= {"reward/a": 0.5, "reward/a_std": 0.1}
    once = [columns | ({"reward/b_share": 1.0} if n == 3 else {}) for n in range(LENGTH)]
    assert CHECKS["dominating_reward"](log_of(enumerate(once))) is None
    often = [columns | {"reward/b_share": 1.0}] * LENGTH
    assert CHECKS["dominating_reward"](log_of(enumerate(often))) is not None
