"""What is counted and told of calls that failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from litgrpo.rewards.runner.calls import Call, Scores
from litgrpo.workers.failures import cause_of

log = logging.getLogger(__name__)


class RewardFailure(RuntimeError):
    """So many rewards of one function failed that going on would train on noise.

    The message is one line; the cause has the traceback.
    """


def count(counts: Counter[str], call: Call, scores: Scores, max_failed_frac: float) -> None:
    """Count the failures of a call; show the first, and stop the run if there are too many.

    Args:
        counts: {reason: rows of this function so far}, added to.
        call: the call.
        scores: what came of it, with at least one failure.
        max_failed_frac: share of the rows that may fail.

    Raises:
        RewardFailure: more failed.
    """
    before, first = counts.total(), min(scores.failures)
    counts.update(scores.failures.values())
    summary = f"reward '{call.name}': {len(scores.failures)} of {call.num_rows} completions failed"
    if len(scores.failures) > max_failed_frac * call.num_rows:
        raise RewardFailure(_why_stopped(call, scores, summary)) from scores.error
    if not before:
        given = (f"{name} {values[first]!r:.200}" for name, values in call.rows.items())
        log.warning(
            "%s and are left out (%s); the first is %s, which got %s",
            *(summary, _listed(counts), _row(call, first), ", ".join(given)),
            exc_info=scores.error,
        )
    elif counts.total().bit_length() > before.bit_length():  # each time that the total doubles
        log.warning("%s; so far %d (%s)", summary, counts.total(), _listed(counts))


def _why_stopped(call: Call, scores: Scores, summary: str) -> str:
    """One line: the reasons, the first row, the first cause, and what to do."""
    reasons, first = _listed(Counter(scores.failures.values())), _row(call, min(scores.failures))
    cause = "" if scores.error is None else f"; the first cause: {cause_of(scores.error)}"
    return (
        f"{summary} ({reasons}), first {first}{cause}. Mend the function,"
        " or let more fail by reward_runner.max_failed_frac; --debug shows its traceback."
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())


def _row(call: Call, row: int) -> str:
    """Which row it is, and where it comes from if that is known."""
    return f"row {row} ({call.places[row]})" if call.places else f"row {row}"
