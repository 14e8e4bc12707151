"""Calls of coroutine functions, which wait for each other's servers; also used inside workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

from litgrpo.rewards.runner.calls import Call, Notes, Scores, failed
from litgrpo.rewards.runner.event_loop import gathered
from litgrpo.rewards.runner.marks import Function, is_marked


async def awaited_answer(
    function: Function, given: dict[str, Any], num_rows: int, notes: Iterable[str], limit_s: float
) -> Scores:
    """What `answer` gives, for a coroutine function, which is stopped after some seconds."""
    noted = Notes(num_rows)
    try:
        coming = function(**given, **noted.methods(notes))
        return noted.read(await asyncio.wait_for(coming, limit_s))
    except (Exception, SystemExit) as error:
        return failed(num_rows, error)


def scored_together(calls: Sequence[Call], limit_s: float) -> list[Scores]:
    """The scores of calls that are awaited at the same time, in this process."""
    return gathered([_score(call, limit_s) for call in calls])


async def _score(call: Call, limit_s: float) -> Scores:
    """Await the function for all rows; if that fails, for each row, all at the same time."""

    def attempt(rows: range) -> Any:
        given = call.arguments(slice(rows.start, rows.stop))
        return awaited_answer(call.function, given, len(rows), call.notes, limit_s)

    whole: Scores = await attempt(range(call.num_rows))
    if whole.error is None or is_marked(call.function, "whole_batch"):
        return whole
    scores = Scores([nan] * call.num_rows, error=whole.error)
    each = [attempt(range(row, row + 1)) for row in range(call.num_rows)]
    for row, one in enumerate(await asyncio.gather(*each)):
        scores.put([row], one)
    return scores
