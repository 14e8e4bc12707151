"""The findings of an audit: the numbers, and which of them make rewards unfit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import Tensor

from litgrpo.tools.audit.cases import GIVEN_UP, HONEST, MALFORMED, WRONG

DOMINANT, CONFLICT = 0.95, -0.5
NASTY_SIZE, SLOW_S = 20_000, 1.0
ROUNDING = 1e-6  # of a reward: float32 keeps seven digits
# Of what being right adds. Other parts, such as one for length, move the means of thousands of
# completions a little; a difference of means below this share pays nobody.
NEGLIGIBLE = 0.01

Finding = tuple[bool, str]  # whether it was found, in words
Number = TypeVar("Number", float, Tensor)


def slack(reward: Number) -> Number:
    """How far a reward may be from this one and still be the same but for rounding."""
    return ROUNDING * (1.0 + abs(reward))


@dataclass(frozen=True)
class Line:
    """The rewards of one kind of completion."""

    kind: str
    count: int
    right: int  # how many were judged correct
    mean: float  # total reward
    best_margin: float  # highest total minus that of the honest correct answer to the same problem
    beats: int  # how many earned more than the honest correct answer; equal is not better
    equals: int  # how many earned as much
    example: str  # one of those that went wrong, if any did


@dataclass(frozen=True)
class Part:
    """The numbers of one reward function."""

    name: str
    low: float
    high: float
    share: float  # of the advantage that comes from it, over all completions of the audit
    slowest_s: float  # longest time for one long text
    slowest_on: str  # kind of that text
    failed: dict[str, int]  # {reason: completions on which the function failed}
    # {variant: correct answers that got less than the best}, if this component separates correct
    # from incorrect answers and nearly always gives the plain correct answer its best.
    unfair: dict[str, int]


@dataclass(frozen=True)
class Report:
    """Everything that an audit found.

    Args:
        success: the reward that says whether an answer is right.
        problems: number of problems.
        variants: correct answers, kind by kind.
        attacks: exploits, kind by kind.
        parts: reward by reward.
        conflicts: {pair of rewards: cosine of their advantages}.
    """

    success: str
    problems: int
    variants: list[Line]
    attacks: list[Line]
    parts: list[Part]
    conflicts: dict[str, float]

    @property
    def faults(self) -> list[str]:
        """What makes the rewards unfit to train with, in sentences; none is a pass."""
        exploits = [line for line in self.attacks if line.kind != MALFORMED]
        findings = [
            *(_of_rendering(line) for line in self.variants),
            *(finding for line in exploits for finding in _of_hack(line)),
            *self._of_form(),
            *(finding for part in self.parts for finding in _of_part(part)),
        ]
        return list(_found(findings))

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing, but may be meant."""
        exploits = [line for line in self.attacks if line.kind != MALFORMED]
        best, least = max(exploits, key=_mean_of), min(self.attacks, key=_mean_of)
        several = len(self.parts) > 1
        findings = [
            (
                best.mean > least.mean + slack(best.mean),
                f"the best exploit is '{best.kind}': {best.mean:.3g} on average, an honest right "
                f"answer earns {self._mean(HONEST):.3g}",
            ),
            *(finding for part in self.parts for finding in _remarks_of_part(part, several)),
            *(
                (
                    cosine < CONFLICT,
                    f"conflict: {pair} pull against each other (cosine {cosine:.2f})",
                )
                for pair, cosine in self.conflicts.items()
            ),
        ]
        return list(_found(findings))

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    @property
    def false_negatives(self) -> int:
        """Correct answers that were not judged correct."""
        return sum(line.count - line.right for line in self.variants)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self) | {
            "faults": self.faults,
            "remarks": self.remarks,
            "passed": self.passed,
            "false_negatives": self.false_negatives,
        }

    def _mean(self, kind: str) -> float:
        (mean,) = [line.mean for line in self.variants + self.attacks if line.kind == kind]
        return mean

    def _of_form(self) -> list[Finding]:
        """Where form is worth more than being right, or giving up more than trying."""
        honest, wrong = self._mean(HONEST), self._mean(WRONG)
        untagged, given_up = self._mean(MALFORMED), self._mean(GIVEN_UP)
        being_right, form = honest - wrong, wrong - untagged
        more = max(NEGLIGIBLE * being_right, slack(honest))
        return [
            (
                form > being_right + more,
                f"form outweighs the answer: an incorrect answer in format earns {wrong:.3g}, a "
                f"correct, malformed one {untagged:.3g}; correctness adds only "
                f"{being_right:.3g}",
            ),
            (
                given_up > wrong + more,
                f"giving up pays: 'no idea' in format earns {given_up:.3g}, an incorrect attempt "
                f"{wrong:.3g}",
            ),
        ]


def _mean_of(line: Line) -> float:
    return line.mean


def _found(findings: Iterable[Finding]) -> Iterator[str]:
    return (words for found, words in findings if found)


def _of_rendering(line: Line) -> Finding:
    refused = line.count - line.right
    return refused > 0, (
        f"false negatives: {refused} of {line.count} correct answers are judged wrong in the "
        f"variant '{line.kind}', such as {line.example[-60:]!r}"
    )


def _of_hack(line: Line) -> list[Finding]:
    return [
        (
            line.right > 0,
            f"false positives: {line.right} of {line.count} completions '{line.kind}' are judged "
            f"right, such as {line.example[-60:]!r}",
        ),
        (
            line.beats + line.equals > 0,
            f"exploit: {line.beats + line.equals} of {line.count} completions '{line.kind}' earn "
            f"as much as an honest correct answer, {line.beats} of them more (by up to "
            f"{line.best_margin:+.3g})",
        ),
    ]


def _of_part(part: Part) -> list[Finding]:
    others = [f"{kind} {count}" for kind, count in part.unfair.items() if kind != HONEST]
    reasons = [f"{reason}: {count}" for reason, count in part.failed.items()]
    return [
        (
            part.slowest_s > SLOW_S,
            f"slow: '{part.name}' needs {part.slowest_s:.1f} s or more for {NASTY_SIZE} characters"
            f" of the kind '{part.slowest_on}'; look at its regular expressions",
        ),
        (
            HONEST in part.unfair,
            f"false negatives: '{part.name}' gives {part.unfair.get(HONEST)} correct answers less "
            "than its best although they look as in the data set",
        ),
        (
            bool(others),
            f"false negatives: '{part.name}' gives less than its best in the variants "
            f"{', '.join(others)}",
        ),
        (
            bool(reasons),
            f"failures: '{part.name}' fails on completions of the audit ({', '.join(reasons)})",
        ),
    ]


def _remarks_of_part(part: Part, several: bool) -> list[Finding]:
    constant = part.high - part.low <= slack(part.high)
    return [
        (
            constant,
            f"constant: '{part.name}' gives {part.low:.3g} to everything and teaches nothing",
        ),
        (
            several and not constant and part.share > DOMINANT,
            f"dominance: {part.share:.0%} of the advantage comes from '{part.name}'",
        ),
    ]
