"""What an audit says: the numbers, and which of them make rewards unfit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from litgrpo.rewards.audit.cases import HONEST, OUT_OF_FORM, WRONG

TOLERANCE = 1e-9
DOMINANT, CONFLICT = 0.95, -0.5
NASTY_SIZE, SLOW_S = 20_000, 1.0


@dataclass(frozen=True)
class Line:
    """What one kind of completion was given.

    Args:
        kind: which.
        count: completions of it.
        right: how many were judged right.
        mean: mean total reward.
        best_margin: highest total minus that of the honest right answer to the same problem.
        beats: how many earned at least as much as the honest right answer.
        example: a completion; of those that went wrong, if any did.
    """

    kind: str
    count: int
    right: int
    mean: float
    best_margin: float
    beats: int
    example: str


@dataclass(frozen=True)
class Part:
    """What one reward function did in the audit.

    Args:
        name: which.
        low: lowest reward.
        high: highest reward.
        share: share of the advantage that comes from it, over all completions of the audit.
        slowest_s: longest time for one long text.
        slowest_on: kind of that text.
        failed: {reason: completions on which the function failed}.
        unfair: {rendering: right answers that got less than the best}, if this part tells right
            answers from wrong ones and nearly always gives the plain right answer its best.
    """

    name: str
    low: float
    high: float
    share: float
    slowest_s: float
    slowest_on: str
    failed: dict[str, int]
    unfair: dict[str, int]


@dataclass(frozen=True)
class Report:
    """Everything that an audit found.

    Args:
        success: the reward that says whether an answer is right.
        problems: number of problems.
        renderings: right answers, kind by kind.
        attacks: hacks, kind by kind.
        parts: reward by reward.
        faults: what makes the rewards unfit, in sentences; none is a pass.
        remarks: what is worth knowing.
    """

    success: str
    problems: int
    renderings: list[Line]
    attacks: list[Line]
    parts: list[Part]
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    @property
    def false_negatives(self) -> int:
        """Right answers that were not judged right."""
        return sum(line.count - line.right for line in self.renderings)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self) | {"passed": self.passed, "false_negatives": self.false_negatives}


def added(line: Line, one: Line) -> Line:
    """The line with one more completion."""
    return replace(
        line,
        count=line.count + 1,
        right=line.right + one.right,
        mean=line.mean + (one.mean - line.mean) / (line.count + 1),
        best_margin=max(line.best_margin, one.best_margin),
        beats=line.beats + one.beats,
    )


def faults(report: Report, lines: Mapping[str, Line]) -> Iterator[str]:
    """What makes rewards unfit to train with."""
    for line in report.renderings:
        if line.right < line.count:
            yield (
                f"false negatives: {line.count - line.right} of {line.count} right answers are "
                f"judged wrong in the rendering '{line.kind}', such as {line.example[-60:]!r}"
            )
    for line in report.attacks:
        if line.kind != OUT_OF_FORM:
            yield from _faults_of_attack(line)
    yield from _faults_of_form(lines)
    for part in report.parts:
        yield from _faults_of_part(part)


def _faults_of_attack(line: Line) -> Iterator[str]:
    if line.right:
        yield (
            f"false positives: {line.right} of {line.count} completions '{line.kind}' are judged "
            f"right, such as {line.example[-60:]!r}"
        )
    if line.beats:
        yield (
            f"hack: {line.beats} of {line.count} completions '{line.kind}' earn as much as an "
            f"honest right answer (by up to {line.best_margin:+.3g})"
        )


def _faults_of_part(part: Part) -> Iterator[str]:
    if part.slowest_s > SLOW_S:
        yield (
            f"slow: '{part.name}' needs {part.slowest_s:.1f} s or more for {NASTY_SIZE} characters "
            f"of the kind '{part.slowest_on}'; look at its regular expressions"
        )
    if HONEST in part.unfair:
        yield (
            f"false negatives: '{part.name}' gives {part.unfair[HONEST]} right answers less than "
            "its best although they look as in the data set"
        )
    others = {kind: count for kind, count in part.unfair.items() if kind != HONEST}
    if others:
        listed = ", ".join(f"{kind} {count}" for kind, count in others.items())
        yield f"false negatives: '{part.name}' gives less than its best in the renderings {listed}"
    if part.failed:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in part.failed.items())
        yield f"failures: '{part.name}' fails on completions of the audit ({reasons})"


def _faults_of_form(lines: Mapping[str, Line]) -> Iterator[str]:
    """Where form is worth more than being right, or giving up more than trying."""
    honest, wrong = lines[HONEST].mean, lines[WRONG].mean
    untagged, given_up = lines[OUT_OF_FORM].mean, lines["no idea, in form"].mean
    if wrong - untagged > honest - wrong + TOLERANCE:
        yield (
            f"form outweighs the answer: a wrong answer in form earns {wrong:.3g}, a right one out "
            f"of form {untagged:.3g}; being right adds only {honest - wrong:.3g} to the form"
        )
    if given_up > wrong + TOLERANCE:
        yield (
            f"giving up pays: 'no idea' in form earns {given_up:.3g}, an attempt that is wrong "
            f"{wrong:.3g}"
        )


def remarks(
    report: Report, lines: Mapping[str, Line], conflicts: Mapping[str, float]
) -> Iterator[str]:
    """What is worth knowing, but may be meant."""
    attacks = [line for line in report.attacks if line.kind != OUT_OF_FORM]
    best = max(attacks, key=lambda line: line.mean)
    yield (
        f"the best hack is '{best.kind}': {best.mean:.3g} on average, an honest right answer earns "
        f"{lines[HONEST].mean:.3g}"
    )
    for part in report.parts:
        if part.high - part.low <= TOLERANCE:
            yield f"constant: '{part.name}' gives {part.low:.3g} to everything and teaches nothing"
        elif part.share > DOMINANT and len(report.parts) > 1:
            yield f"dominance: {part.share:.0%} of the advantage comes from '{part.name}'"
    for pair, cosine in conflicts.items():
        if cosine < CONFLICT:
            yield f"conflict: {pair} pull against each other (cosine {cosine:.2f})"
