"""The table of rules, and the diagnosis of a run: causes first, their symptoms below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from litgrpo.tools.doctor import rules_policy as policy
from litgrpo.tools.doctor import rules_reward as reward
from litgrpo.tools.doctor.finding import SEVERITIES, Diagnosis, Finding
from litgrpo.tools.doctor.run import RunLog, read_run

# Requirements that are not the name of one metric.
HELD_OUT, SAMPLES = "val/", "samples"
COMPONENTS, COSINES = "reward/<component>_std", "reward/cosine_<component>_<component>"


@dataclass(frozen=True)
class Rule:
    """A rule of the doctor.

    Args:
        name: its name in logs, and the section of docs/reference/doctor.md.
        check: returns a finding, or None.
        needs: metrics without which it cannot be checked; or `HELD_OUT`, `SAMPLES`, ...
        passed: sentence printed if it finds nothing.
        min_iterations: iterations before which it is not checked.

    Example:
        >>> from litgrpo.tools.doctor.run import RunMetrics
        >>> rule = Rule("loops", policy.check_loops, ("completion/loop_frac",), "No loops.", 2)
        >>> rule.missing(RunLog(RunMetrics()))
        ['completion/loop_frac']
    """

    name: str
    check: Callable[[RunLog], Finding | None]
    needs: tuple[str, ...]
    passed: str
    min_iterations: int = 20

    def missing(self, run: RunLog) -> list[str]:
        """Return the requirements that a run does not meet."""
        metrics = run.metrics
        available = {
            HELD_OUT: bool(metrics.held_out_accuracy()),
            SAMPLES: bool(run.samples),
            COMPONENTS: bool(metrics.reward_components()),
            COSINES: any("reward/cosine_" in name for name in metrics.series),
        }
        missing = [name for name in self.needs if not available.get(name, name in metrics)]
        if not missing and metrics.iterations < self.min_iterations:
            return [f"{self.min_iterations} iterations"]
        return missing


# Causes come first: a finding is shown below the first rule that explains it.
RULES = (
    Rule("not_finite", policy.check_finite, (), "All values were finite; no step was skipped.", 3),
    Rule(
        "sampler_mismatch",
        policy.check_sampler,
        ("policy/sampler_mismatch",),
        "Sampler and trainer log-probabilities agree.",
        3,
    ),
    Rule(
        "double_begin",
        reward.check_double_begin,
        ("prompt/begin_tokens",),
        "Prompts have at most one begin token.",
        3,
    ),
    Rule(
        "no_end_token",
        reward.check_no_end_token,
        ("completion/eos_frac", "completion/truncated_frac"),
        "Completions end with an end token.",
        10,
    ),
    Rule(
        "truncated",
        reward.check_truncation,
        ("completion/truncated_frac",),
        "Few completions reach the length limit.",
        10,
    ),
    Rule(
        "duplicate_completions",
        reward.check_duplicates,
        ("completion/unique_frac", "reward/zero_variance_groups_frac"),
        "Completions of a group differ.",
        10,
    ),
    Rule(
        "rewards_fail",
        reward.check_failed_rewards,
        ("reward/failed_frac",),
        "Completions have rewards.",
        10,
    ),
    Rule(
        "reward_contradicts",
        reward.check_contradictions,
        (SAMPLES,),
        "The sampled completions agree with their correctness reward.",
        3,
    ),
    Rule(
        "conflicting_rewards",
        reward.check_conflicting_rewards,
        (COSINES,),
        "No two rewards prefer opposite completions.",
    ),
    Rule(
        "too_hard",
        reward.check_too_hard,
        (
            "reward/all_incorrect_frac",
            "reward/zero_variance_groups_frac",
            "reward/correct_frac",
        ),
        "Most groups have a correct completion, or rewards that differ.",
        10,
    ),
    Rule(
        "too_easy",
        reward.check_too_easy,
        ("reward/all_correct_frac", "reward/zero_variance_groups_frac"),
        "Not all prompts were solved at the start; groups that become all correct are normal.",
        10,
    ),
    Rule(
        "no_signal",
        reward.check_no_signal,
        ("reward/zero_variance_groups_frac", "reward/mean"),
        "Rewards differ within groups.",
    ),
    Rule(
        "dominating_reward",
        reward.check_dominating_reward,
        ("reward/mean", "reward/correct_frac"),
        "No other reward outweighs correctness, or correct completions become more frequent.",
    ),
    Rule(
        "reward_hacking",
        reward.check_reward_hacking,
        ("reward/mean", "reward/correct_frac"),
        "Correct completions do not become rarer while the reward rises.",
    ),
    Rule(
        "format_only",
        reward.check_format_only,
        ("reward/mean", "reward/correct_frac"),
        "Format and answer improve together.",
    ),
    Rule(
        "constant_reward",
        reward.check_constant_rewards,
        (COMPONENTS,),
        "Every reward component distinguishes completions.",
    ),
    Rule(
        "clip_saturated",
        policy.check_clipping,
        ("policy/clip_low_frac", "policy/clip_high_frac"),
        "Few tokens are clipped; with one optimizer step per iteration none are.",
    ),
    Rule("collapsed", policy.check_collapse, ("reward/mean",), "The reward is near its best."),
    Rule(
        "kl_blowup",
        policy.check_kl,
        ("policy/kl",),
        "The KL to the reference rises slowly, as in any run that learns.",
    ),
    Rule(
        "entropy_explosion",
        policy.check_entropy_growth,
        ("policy/entropy", "reward/mean"),
        "The entropy does not rise.",
    ),
    Rule(
        "entropy_collapse",
        policy.check_entropy_collapse,
        ("policy/entropy", "completion/unique_frac", "reward/correct_frac"),
        "Falling entropy is normal while correct completions become more frequent.",
    ),
    Rule(
        "nothing_moves",
        policy.check_movement,
        ("optim/update_rel", "reward/mean"),
        "The weights change.",
    ),
    Rule(
        "loops",
        policy.check_loops,
        ("completion/loop_frac",),
        "Completions do not repeat themselves more than at the start.",
    ),
    Rule(
        "length_growth",
        policy.check_length_growth,
        ("completion/len_mean", "reward/mean"),
        "Completions are about as long as at the start, or longer and better.",
    ),
    Rule(
        "length_collapse",
        policy.check_length_collapse,
        ("completion/len_mean", "reward/mean"),
        "Completions are about as long as at the start, or shorter and better.",
    ),
    Rule(
        "overfitting",
        reward.check_overfitting,
        ("data/epoch", "reward/correct_frac", HELD_OUT),
        "Accuracy on held-out prompts is close to that on training prompts.",
    ),
)

_COMPONENT_RULES = ("conflicting_rewards", "dominating_reward", "format_only")
_NO_LEARNING = ("too_hard", "no_signal", "nothing_moves", "constant_reward")
_ENTROPY = ("entropy_explosion", "entropy_collapse")
_TEXTS = ("length_growth", "length_collapse", "loops", "truncated", "no_end_token")
# {rule: rules whose findings are its symptoms}
EXPLAINS: dict[str, tuple[str, ...]] = {
    "not_finite": ("collapsed", *_NO_LEARNING, *_ENTROPY, *_TEXTS, *_COMPONENT_RULES),
    "sampler_mismatch": ("collapsed", "clip_saturated", "reward_hacking", *_ENTROPY),
    "double_begin": ("too_hard", "no_signal"),
    "no_end_token": ("truncated", "length_growth", "loops", *_NO_LEARNING),
    "truncated": ("length_growth", *_NO_LEARNING),
    "duplicate_completions": ("too_easy", *_NO_LEARNING),
    "rewards_fail": _NO_LEARNING,
    "reward_contradicts": ("reward_hacking", "collapsed", *_COMPONENT_RULES),
    "conflicting_rewards": ("dominating_reward", *_NO_LEARNING),
    "too_hard": ("no_signal", "constant_reward", "nothing_moves"),
    "too_easy": ("no_signal", "constant_reward", "nothing_moves"),
    "no_signal": ("nothing_moves",),
    "dominating_reward": ("reward_hacking", "format_only", *_TEXTS, *_ENTROPY),
    "reward_hacking": ("format_only", "too_hard", *_TEXTS, *_ENTROPY),
    "clip_saturated": _ENTROPY,
    "collapsed": (
        *("kl_blowup", "clip_saturated"),
        *_NO_LEARNING,
        *_ENTROPY,
        *_TEXTS,
        *_COMPONENT_RULES,
    ),
    "entropy_explosion": _TEXTS,
    "loops": ("length_growth",),
}
MAX_LEAD = 5  # iterations by which a symptom may show before its cause


def diagnose(run_folder: str | Path) -> list[Finding]:
    """Find the problems of a run; causes, the most severe and earliest first.

    Args:
        run_folder: folder of a run; or TRL's `trainer_state.json`, a console log of verl, a csv.

    Raises:
        ValueError: there is no run to read.

    Example:
        findings = diagnose("runs/quickstart")
        findings[0].problem, findings[0].severity, findings[0].first_iteration
    """
    return list(examine(read_run(run_folder)).findings)


def examine(run: RunLog) -> Diagnosis:
    """Apply all rules to a run.

    Args:
        run: of any trainer.
    """
    findings: list[Finding] = []
    passed, not_checked = dict[str, str](), dict[str, str]()
    for rule in RULES:
        if missing := rule.missing(run):
            not_checked[rule.name] = f"needs {', '.join(missing)}"
        elif finding := rule.check(run):
            command = run.config.fix_command(finding.setting, finding.value)
            findings.append(replace(finding, command=command))
        else:
            passed[rule.name] = rule.passed
    causes = tuple(group_by_cause(findings))
    iterations, success_rule = run.metrics.iterations, run.config.success_rule
    return Diagnosis(causes, passed, not_checked, iterations, success_rule)


def group_by_cause(findings: Sequence[Finding]) -> list[Finding]:
    """Move symptoms below their causes; sort causes by severity, then by first iteration.

    A finding belongs to the first rule of `RULES` that explains it and found something, unless the
    symptom began more than `MAX_LEAD` iterations earlier.
    """
    by_rule = {finding.rule: finding for finding in findings}
    cause_of: dict[str, str] = {}
    for rule in RULES:
        cause = by_rule.get(rule.name)
        if cause is None:
            continue
        for name in EXPLAINS.get(rule.name, ()):
            symptom = by_rule.get(name)
            if symptom and symptom.first_iteration >= cause.first_iteration - MAX_LEAD:
                cause_of.setdefault(name, _first_cause(rule.name, cause_of))
    causes = [
        replace(
            cause,
            symptoms=tuple(
                symptom
                for symptom in findings
                if symptom is not cause and _first_cause(symptom.rule, cause_of) == cause.rule
            ),
        )
        for cause in findings
        if cause_of.get(cause.rule, cause.rule) == cause.rule
    ]
    return sorted(causes, key=lambda each: (-SEVERITIES.index(each.severity), each.first_iteration))


def _first_cause(rule: str, cause_of: dict[str, str]) -> str:
    """Follow the chain of causes to its end."""
    seen = {rule}
    while cause_of.get(rule, rule) not in seen:
        rule = cause_of[rule]
        seen.add(rule)
    return rule
