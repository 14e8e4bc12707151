"""All rules on one run: causes first, what they explain under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from litgrpo.tools.doctor.finding import LEVELS, Diagnosis, Finding
from litgrpo.tools.doctor.rule import EXPLAINS, RULES, Rule
from litgrpo.tools.doctor.run_files import Run, read

LEAD = 5  # iterations that a symptom may show before its cause


def diagnose(run_folder: str | Path) -> list[Finding]:
    """What is wrong with a run; causes, the most severe and earliest first.

    Args:
        run_folder: of litgrpo; or TRL's `trainer_state.json`, a console log of verl, a csv.

    Raises:
        ValueError: there is nothing that can be read.

    Example:
        findings = diagnose("runs/quickstart")
        findings[0].what, findings[0].severity, findings[0].since, findings[0].evidence
    """
    return list(examine(read(run_folder)).findings)


def examine(run: Run) -> Diagnosis:
    """Findings, what is fine, and what could not be checked.

    Args:
        run: of any trainer.
    """
    found: list[Finding] = []
    fine, unchecked = dict[str, str](), dict[str, str]()
    for rule in RULES:
        missing = rule.missing(run.metrics, run.samples)
        finding = None if missing else rule.check(run.metrics, run.samples, run.config)
        if missing:
            unchecked[rule.name] = f"needs {', '.join(missing)}"
        elif finding is None:
            fine[rule.name] = rule.fine
        else:
            command = run.config.command(finding.key, finding.value)
            found.append(replace(finding, command=command))
    return Diagnosis(tuple(in_order(found)), fine, unchecked, run.metrics.iterations)


def in_order(found: Sequence[Finding]) -> list[Finding]:
    """Causes with what they explain under them; the most severe first, then the earliest.

    A finding is put under the first rule of the table that explains it and found something.
    """
    by_rule = {each.rule: each for each in found}
    cause_of: dict[str, str] = {}
    for rule in RULES:
        cause = by_rule.get(rule.name)
        for name in symptoms(rule, cause, by_rule):
            cause_of.setdefault(name, root(rule.name, cause_of))
    causes = [each for each in found if cause_of.get(each.rule, each.rule) == each.rule]
    whole = [
        replace(
            cause,
            symptoms=tuple(
                each
                for each in found
                if each is not cause and root(each.rule, cause_of) == cause.rule
            ),
        )
        for cause in causes
    ]
    return sorted(whole, key=lambda each: (-LEVELS.index(each.severity), each.since))


def symptoms(rule: Rule, cause: Finding | None, found: dict[str, Finding]) -> list[str]:
    """Findings that a rule explains, and that did not begin before its own."""
    known = [name for name in EXPLAINS.get(rule.name, ()) if name in found and cause is not None]
    return [name for name in known if cause and found[name].since >= cause.since - LEAD]


def root(rule: str, cause_of: dict[str, str]) -> str:
    """The cause at the end of the chain from this rule."""
    seen = {rule}
    while cause_of.get(rule, rule) not in seen:
        rule = cause_of[rule]
        seen.add(rule)
    return rule
