"""The diagnosis of a run: causes first, their symptoms below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from litgrpo.runs.doctor.finding import SEVERITIES, Diagnosis, Finding
from litgrpo.runs.doctor.rules import RULES
from litgrpo.runs.run import Run

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
    return list(examine(Run.read(run_folder)).findings)


def examine(run: Run) -> Diagnosis:
    """Apply all rules to a run, of any trainer."""
    findings: list[Finding] = []
    passed, not_checked = dict[str, str](), dict[str, str]()
    for rule in RULES:
        if missing := rule.missing(run):
            not_checked[rule.name] = f"needs {', '.join(missing)}"
        elif finding := rule.apply(run):
            findings.append(finding)
        else:
            passed[rule.name] = rule.passed
    causes = tuple(group_by_cause(findings))
    return Diagnosis(causes, passed, not_checked, run.iterations, run.config.success_rule)


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
        for name in rule.explains:
            symptom = by_rule.get(name)
            if symptom and symptom.first_iteration >= cause.first_iteration - MAX_LEAD:
                cause_of.setdefault(name, rule.name)

    def root(name: str) -> str:
        return root(cause_of[name]) if name in cause_of else name

    causes = [
        replace(
            cause,
            symptoms=tuple(
                finding
                for finding in findings
                if finding is not cause and root(finding.rule) == cause.rule
            ),
        )
        for cause in findings
        if cause.rule not in cause_of
    ]
    return sorted(
        causes, key=lambda cause: (-SEVERITIES.index(cause.severity), cause.first_iteration)
    )
