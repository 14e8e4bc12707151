"""How a worker answers for reward functions; see `processes.worker`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from litgrpo.rewards.runner.calls import (
    MalformedResult,
    Scores,
    answer,
    own_settings,
)
from litgrpo.rewards.runner.coroutines import awaited_answer
from litgrpo.rewards.runner.marks import Function
from litgrpo.workers.failures import portable
from litgrpo.workers.worker import Send

Answer = tuple[int, Scores, float]  # number of the question, scores, seconds that it took


class Question(NamedTuple):
    """Some rows of a call, as they travel to a worker; settings were sent before.

    Args:
        name: of the reward function.
        arguments: {parameter: value}.
        num_rows: how many.
        notes: which methods of `Notes` the function names.
    """

    name: str
    arguments: dict[str, Any]
    num_rows: int
    notes: tuple[str, ...] = ()


class Message(NamedTuple):
    """What a worker is sent.

    Args:
        questions: one, or coroutines that are awaited at the same time.
        together: they are coroutines.
        limit_s: seconds after which a coroutine is stopped.
    """

    questions: list[Question]
    together: bool
    limit_s: float


def answered(loaded: dict[str, Any], message: Message, send: Send) -> Answer | None:
    """Answer a message; coroutines are answered as they end."""
    if message.together:
        asyncio.run(_answer_together(loaded, message, send))
        return None
    (question,) = message.questions
    started = time.perf_counter()
    function, given = _asked(loaded, question)
    # No Ctrl-C reaches a worker: whatever is raised, it was the function.
    scores = answer(function, given, question.num_rows, question.notes, (BaseException,))
    return _packed(0, scores, started)


async def _answer_together(loaded: dict[str, Any], message: Message, send: Send) -> None:
    """Call all functions, and await them at the same time."""

    async def ask(number: int, question: Question) -> None:
        started = time.perf_counter()
        function, given = _asked(loaded, question)
        rows, notes = question.num_rows, question.notes
        scores = await awaited_answer(function, given, rows, notes, message.limit_s)
        send(_packed(number, scores, started))

    await asyncio.gather(*(ask(*numbered) for numbered in enumerate(message.questions)))


def _asked(loaded: dict[str, Any], question: Question) -> tuple[Function, dict[str, Any]]:
    function, settings = loaded[question.name]
    return function, question.arguments | own_settings(settings)


def _packed(number: int, scores: Scores, started: float) -> Answer:
    if scores.error is not None and not isinstance(scores.error, MalformedResult):
        scores.error = portable(scores.error)
    return number, scores, time.perf_counter() - started
