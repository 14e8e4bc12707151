"""Data classes of a diagnosis: a finding of one rule, and all findings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Severity = Literal["warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True)
class Finding:
    """A problem of a run.

    Args:
        rule: name of the rule, also of the section of docs/reference/tools.md that explains it.
        problem: one sentence.
        severity: warning: the run learns less than it could; critical: it learns nothing, or the
            wrong thing.
        first_iteration: first iteration that shows the problem.
        evidence: sentences with the numbers that show it.
        samples: at most three rows of `samples/iteration-*.jsonl` that show it.
        setting: dotted config key to change; "" if no setting helps.
        value: suggested value of that setting; "" if there is no general one.
        command: shell command that starts the changed run.
        symptoms: findings that this one explains.

    Example:
        >>> finding = Finding(
        ...     rule="truncated",
        ...     problem="The length limit cuts off 31% of the completions.",
        ...     severity="critical",
        ...     first_iteration=12,
        ...     evidence=("completion/truncated_frac: 0.02 at the start, 0.31 recently",),
        ...     setting="model.max_completion_length",
        ...     value="128",
        ... )
        >>> finding.doc
        'docs/reference/tools.md#truncated'
    """

    rule: str
    problem: str
    severity: Severity
    first_iteration: int
    evidence: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    setting: str = ""
    value: str = ""
    command: str = ""
    symptoms: tuple[Finding, ...] = ()

    @property
    def doc(self) -> str:
        """Section of the documentation that explains the rule."""
        return f"docs/reference/tools.md#{self.rule}"

    def at_least(self, severity: Severity) -> bool:
        """Return whether the finding has this severity or a higher one."""
        return SEVERITIES.index(self.severity) >= SEVERITIES.index(severity)


@dataclass(frozen=True)
class Diagnosis:
    """Results of all rules on one run.

    Args:
        findings: causes, the most severe and earliest first; each holds its symptoms.
        passed: {rule: sentence} of rules that found no problem.
        not_checked: {rule: missing metrics}.
        iterations: finished iterations of the run.
        success_rule: when a completion is correct, in words; "" if it is not known.
    """

    findings: tuple[Finding, ...]
    passed: dict[str, str]
    not_checked: dict[str, str]
    iterations: int = 0
    success_rule: str = ""

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Causes, each followed by its symptoms."""
        return tuple(finding for cause in self.findings for finding in (cause, *cause.symptoms))
