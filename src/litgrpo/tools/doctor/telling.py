"""A diagnosis as text: lines for the log, a page for the terminal."""

from __future__ import annotations

import textwrap
from typing import Any

from litgrpo.tools.doctor.finding import Diagnosis, Finding

WIDTH, SHOWN = 100, 160  # characters of a line, of a sample


def line(finding: Finding) -> str:
    """One line for the log.

    Example:
        >>> print(line(Finding("loops", "12% repeat themselves.", "warning", 40)))
        doctor: warning since iteration 40: 12% repeat themselves. (docs/doctor.md#loops)
    """
    change = f" Change {finding.key} to {finding.value}." if finding.key and finding.value else ""
    since = f"doctor: {finding.severity} since iteration {finding.since}"
    return f"{since}: {finding.what}{change} ({finding.page})"


def page(diagnosis: Diagnosis) -> str:
    """Everything that was looked at."""
    found = "\n\n".join(card(each) for each in diagnosis.findings) or "Nothing is wrong."
    parts = [f"{diagnosis.iterations} iterations", found]
    for title, sentences in (("fine", diagnosis.fine), ("not checked", diagnosis.unchecked)):
        lines = [f"  {name}: {sentence}" for name, sentence in sentences.items()]
        parts += ["\n".join([f"{title}:", *lines])] * bool(lines)
    return "\n\n".join(parts)


def card(finding: Finding) -> str:
    """A finding with what shows it and what to change."""
    lines = [f"{finding.severity.upper()} since iteration {finding.since}: {finding.what}"]
    lines += [f"  {sentence}" for sentence in finding.evidence]
    lines += [f"  sample: {shown(row)}" for row in finding.samples[:1]]
    setting = f"  change: {finding.key}" + f" -> {finding.value}" * bool(finding.value)
    lines += [setting] * bool(finding.key)
    lines += [f"  {finding.command}"] * bool(finding.command)
    lines += [f"  explains: {each.what}" for each in finding.symptoms]
    return "\n".join([*lines, f"  {finding.page}"])


def shown(row: dict[str, Any]) -> str:
    """A sample in one line."""
    said = f"{row.get('prompt', '')!r} -> {row.get('completion', '')!r}"
    return f"{textwrap.shorten(said, SHOWN)} reward {row.get('reward')}"


def as_markdown(diagnosis: Diagnosis) -> str:
    """The findings for a logger that renders Markdown."""
    return "\n".join(f"- {line(each)}" for each in diagnosis.findings) or "Nothing is wrong."
