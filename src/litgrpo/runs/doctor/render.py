"""Render a diagnosis: a line for the log, text for the terminal, Markdown for loggers."""

from __future__ import annotations

from typing import Any

from litgrpo.arguments import find_page
from litgrpo.runs.doctor.finding import Diagnosis, Finding
from litgrpo.text.tables import plural

MAX_SAMPLE_CHARS = 160
NO_PROBLEMS = "No problems found."


def render_line(finding: Finding) -> str:
    """Render a finding as one line for the log."""
    start = f"doctor: {finding.severity} since iteration {finding.first_iteration}"
    line = f"{start}: {finding.problem}"
    if finding.setting and finding.value:
        line += f" Set {finding.setting} to {finding.value}."
    return f"{line} ({find_page(finding.doc)})"


def render_text(diagnosis: Diagnosis) -> str:
    """Render a diagnosis for the terminal."""
    blocks = [plural(diagnosis.iterations, "iteration")]
    if diagnosis.success_rule:
        blocks[0] += f"; correct: {diagnosis.success_rule} (model.evaluation.success_reward)"
    blocks += [_render_finding(finding) for finding in diagnosis.findings]
    if not diagnosis.findings:
        blocks.append(describe_no_problems(diagnosis))
    for title, rules in (("passed", diagnosis.passed), ("not checked", diagnosis.not_checked)):
        if rules:
            lines = [f"  {name}: {sentence}" for name, sentence in rules.items()]
            blocks.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(blocks)


def describe_no_problems(diagnosis: Diagnosis) -> str:
    """Write that nothing was found, and how many rules could be checked.

    Example:
        >>> describe_no_problems(Diagnosis((), {"collapsed": "Near."}, {"double_begin": "needs x"}))
        'No problems found by 1 of 2 rules; the other 1 could not be checked.'
    """
    checked, missing = len(diagnosis.passed), len(diagnosis.not_checked)
    if missing and not checked:
        return f"No result: none of the {missing} rules could be checked."
    if not missing:
        return NO_PROBLEMS
    if checked < missing:
        return (
            f"No problems found, but only {checked} of {checked + missing} rules could be checked: "
            "the others need more iterations, or metrics that are not logged."
        )
    return (
        f"No problems found by {checked} of {checked + missing} rules; the other {missing} could "
        "not be checked."
    )


def _render_finding(finding: Finding) -> str:
    lines = [
        f"{finding.severity.upper()} since iteration {finding.first_iteration}: {finding.problem}"
    ]
    lines += [f"  {sentence}" for sentence in finding.evidence]
    lines += [f"  sample: {_render_sample(row)}" for row in finding.samples[:1]]
    if finding.setting:
        change = f"set {finding.setting} to {finding.value}" if finding.value else finding.setting
        lines.append(f"  change: {change}")
    if finding.command:
        lines.append(f"  {finding.command}")
    lines += [f"  explains: {symptom.problem}" for symptom in finding.symptoms]
    lines.append(f"  see {find_page(finding.doc)}")
    return "\n".join(lines)


def _render_sample(row: dict[str, Any]) -> str:
    text = f"{row.get('prompt', '')!r} -> {row.get('completion', '')!r}"
    if len(text) > MAX_SAMPLE_CHARS:
        text = f"{text[:MAX_SAMPLE_CHARS]} ..."
    return f"{text} reward {row.get('reward')}"


def render_markdown(diagnosis: Diagnosis) -> str:
    """Render the findings as a Markdown list."""
    findings = "\n".join(f"- {render_line(finding)}" for finding in diagnosis.findings)
    return findings or describe_no_problems(diagnosis)
