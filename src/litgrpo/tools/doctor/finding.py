"""A finding: what is wrong with a run, since when, what shows it, and which key to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
LEVELS: tuple[Severity, ...] = ("info", "warning", "critical")


@dataclass(frozen=True)
class Finding:
    """Something that a run suffers from.

    Args:
        rule: name of the rule that found it; the section of docs/doctor.md that explains it.
        what: one sentence.
        severity: info: worth knowing; warning: the run teaches less than it could; critical: what
            it teaches is wrong, or nothing.
        since: first iteration in which it shows.
        evidence: the numbers that show it, a sentence each.
        samples: rows of `samples/iteration-*.jsonl` that show it, at most three.
        key: key of the recipe to change, such as `model.max_completion_length`; "" where none
            helps.
        value: what to set it to.
        command: starts the changed run.
        symptoms: findings that this one explains.
    """

    rule: str
    what: str
    severity: Severity
    since: int
    evidence: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    key: str = ""
    value: str = ""
    command: str = ""
    symptoms: tuple[Finding, ...] = ()

    @property
    def page(self) -> str:
        """Where it is explained.

        Example:
            >>> Finding("no_end_token", "It does not end.", "critical", 1).page
            'docs/doctor.md#no_end_token'
        """
        return f"docs/doctor.md#{self.rule}"

    def at_least(self, level: Severity) -> bool:
        """Whether it is as severe as this level, or more."""
        return LEVELS.index(self.severity) >= LEVELS.index(level)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at.

    Args:
        findings: causes, the most severe and earliest first; what they explain is in them.
        fine: {rule: sentence} of what was checked and is well, or normal.
        unchecked: {rule: which numbers are missing}.
        iterations: how many the run has finished.
    """

    findings: tuple[Finding, ...]
    fine: dict[str, str]
    unchecked: dict[str, str]
    iterations: int = 0

    @property
    def every(self) -> tuple[Finding, ...]:
        """Causes and what they explain, all together."""
        return tuple(found for cause in self.findings for found in (cause, *cause.symptoms))
