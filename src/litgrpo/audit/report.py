"""Report of an audit: numbers, faults and remarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import Tensor

from litgrpo.audit.cases import GIVEN_UP, HONEST, INCORRECT, MALFORMED

DOMINANT, CONFLICT = 0.95, -0.5
NASTY_SIZE, SLOW_S = 20_000, 1.0
ROUNDING = 1e-6  # of a reward: float32 keeps seven digits
# Share of the reward for correctness. Other components, such as one for length, shift the means
# of thousands of completions a little; smaller differences of means are no incentive.
NEGLIGIBLE = 0.01

Finding = tuple[bool, str]  # whether it was found, in words
Number = TypeVar("Number", float, Tensor)


def slack(reward: Number) -> Number:
    """Return the largest difference from this reward that rounding can explain."""
    return ROUNDING * (1.0 + abs(reward))


@dataclass(frozen=True)
class KindResult:
    """Rewards of one kind of completion."""

    kind: str
    count: int
    correct: int  # how many were judged correct
    mean: float  # total reward
    best_margin: float  # highest total minus that of the plain correct answer to the same problem
    beats: int  # how many earned more than the plain correct answer
    equals: int  # how many earned as much, up to rounding
    example: str  # a misjudged one, if there is any


@dataclass(frozen=True)
class RewardResult:
    """Results of one reward function."""

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
    """Result of the audit of rewards for tasks with reference answers.

    Args:
        success: the reward that decides if an answer is correct.
        problems: number of problems.
        variants: correct answers, one result per formatting variant.
        attacks: exploits, one result per kind.
        parts: one result per reward function.
        conflicts: {pair of rewards: cosine of their advantages}.
        answer_format: template of the completions.
        format_was_given: False if it was chosen among the usual ones.
    """

    success: str
    problems: int
    variants: list[KindResult]
    attacks: list[KindResult]
    parts: list[RewardResult]
    conflicts: dict[str, float]
    answer_format: str = ""
    format_was_given: bool = False

    @property
    def faults(self) -> list[str]:
        """Problems that make the rewards unfit for training, one sentence each."""
        unseen = [line for line in self.variants if line.kind == HONEST and not line.correct]
        if unseen:  # comparisons with what correct answers earn would say nothing
            how = (
                f"with --answer_format {self.answer_format!r}; give the format that it reads"
                if self.format_was_given
                else "in tags, after ####, in \\boxed, or on the last line; if it reads another "
                "format, give that with --answer_format, such as 'Solution: {answer}'"
            )
            return [
                f"'{self.success}' judges no correct answer as correct, such as "
                f"{unseen[0].example!r}, {how}"
            ]
        exploits = [line for line in self.attacks if line.kind != MALFORMED]
        findings = [
            *(_variant_finding(line) for line in self.variants),
            *(finding for line in exploits for finding in _exploit_findings(line)),
            *self._format_findings(),
            *(finding for part in self.parts for finding in _reward_findings(part)),
        ]
        return list(_found(findings))

    @property
    def remarks(self) -> list[str]:
        """Findings that may be intended, one sentence each."""
        exploits = [line for line in self.attacks if line.kind != MALFORMED]
        best, least = max(exploits, key=_mean_of), min(self.attacks, key=_mean_of)
        several = len(self.parts) > 1
        findings = [
            (
                best.mean > least.mean + slack(best.mean),
                f"the best exploit is '{best.kind}': {best.mean:.3g} on average, a plain correct "
                f"answer earns {self._mean(HONEST):.3g}",
            ),
            *(finding for part in self.parts for finding in _reward_remarks(part, several)),
            *(
                (
                    cosine < CONFLICT,
                    f"conflict: {pair} have opposed advantages (cosine {cosine:.2f})",
                )
                for pair, cosine in self.conflicts.items()
            ),
        ]
        return list(_found(findings))

    @property
    def passed(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    @property
    def false_negatives(self) -> int:
        """Number of correct answers that were judged incorrect."""
        return sum(line.count - line.correct for line in self.variants)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self) | {
            "faults": self.faults,
            "remarks": self.remarks,
            "passed": self.passed,
            "false_negatives": self.false_negatives,
        }

    def _mean(self, kind: str) -> float:
        (mean,) = [line.mean for line in self.variants + self.attacks if line.kind == kind]
        return mean

    def _format_findings(self) -> list[Finding]:
        """Compare the reward of the format with that of correctness, and giving up with trying."""
        honest, wrong = self._mean(HONEST), self._mean(INCORRECT)
        untagged, given_up = self._mean(MALFORMED), self._mean(GIVEN_UP)
        # wrong - untagged = reward of the format - reward of correctness; the policy learns the
        # format alone if that exceeds what correctness adds to a formatted answer.
        correctness, format_gain = honest - wrong, wrong - untagged
        more = max(NEGLIGIBLE * correctness, slack(honest))
        return [
            (
                format_gain > correctness + more,
                "the format outweighs the answer: an incorrect answer in format earns "
                f"{wrong:.3g}, a correct, malformed one {untagged:.3g}; correctness adds only "
                f"{correctness:.3g}",
            ),
            (
                given_up > wrong + more,
                f"giving up pays: 'no idea' in format earns {given_up:.3g}, an incorrect attempt "
                f"{wrong:.3g}",
            ),
        ]


def _mean_of(line: KindResult) -> float:
    return line.mean


def _found(findings: Iterable[Finding]) -> Iterator[str]:
    return (words for found, words in findings if found)


def _variant_finding(line: KindResult) -> Finding:
    missed = line.count - line.correct
    return missed > 0, (
        f"false negatives: {missed} of {line.count} correct answers are judged incorrect in the "
        f"variant '{line.kind}', such as {line.example[-60:]!r}"
    )


def _exploit_findings(line: KindResult) -> list[Finding]:
    return [
        (
            line.correct > 0,
            f"false positives: {line.correct} of {line.count} completions '{line.kind}' are judged "
            f"correct, such as {line.example[-60:]!r}",
        ),
        (
            line.beats + line.equals > 0,
            f"exploit: {line.beats + line.equals} of {line.count} completions '{line.kind}' earn "
            f"as much as a plain correct answer, {line.beats} of them more (by up to "
            f"{line.best_margin:+.3g})",
        ),
    ]


def _reward_findings(part: RewardResult) -> list[Finding]:
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


def _reward_remarks(part: RewardResult, several: bool) -> list[Finding]:
    constant = part.high - part.low <= slack(part.high)
    return [
        (
            constant,
            f"constant: '{part.name}' gives {part.low:.3g} to every completion and no gradient",
        ),
        (
            several and not constant and part.share > DOMINANT,
            f"dominance: {part.share:.0%} of the advantage comes from '{part.name}'",
        ),
    ]
