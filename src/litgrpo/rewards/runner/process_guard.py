"""Reward functions in processes of their own, which are ended when they hang and replaced."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from litgrpo.rewards.runner.calls import Call, Scores, is_marked
from litgrpo.rewards.runner.in_process import Gather, InProcessRunner, RewardRunner
from litgrpo.rewards.runner.processes import Crew
from litgrpo.rewards.runner.scheduling import Round

OURS = "litgrpo.rewards."
MOST_WORKERS = 4


class ProcessRunner(RewardRunner):
    """Runs the functions in worker processes, several at a time; the default.

    A function that hangs, also in C code, is ended after its time; one that crashes or floods the
    terminal loses only its own samples. What litgrpo brings itself runs in this process, which is
    quicker, and so does a function that cannot be sent to another process (with a warning).

    Args:
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; where that fails, the other half for the rows one by one.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        slow_s: questions that take longer are listed in `slowest`.
        workers: processes that may work at the same time; default: one per core, at most 4.
        cache_size: rewards of `pure` functions that are remembered.
    """

    def __init__(
        self,
        timeout_s: float = 60.0,
        max_failed_frac: float = 0.5,
        slow_s: float = 1.0,
        workers: int | None = None,
        cache_size: int = 100_000,
    ) -> None:
        """See the class."""
        super().__init__(timeout_s, max_failed_frac, slow_s)
        if workers is None:
            workers = min(MOST_WORKERS, os.cpu_count() or 1)
        if workers < 1 or cache_size < 0:
            raise ValueError(
                f"a guard needs workers >= 1 and cache_size >= 0, got {workers} and {cache_size}"
            )
        self.crew = Crew(workers)
        self.cache: OrderedDict[bytes, float] = OrderedDict()
        self.cache_size = cache_size
        self.round: Round | None = None  # what is being asked

    def run(self, calls: Sequence[Call]) -> list[Scores]:
        """See RewardRunner."""
        return self.begin(calls)()

    def begin(self, calls: Sequence[Call]) -> Gather:
        """Let the workers begin; what runs in this process does when it is gathered."""
        self._abandon()
        there = [n for n, call in enumerate(calls) if not is_trusted(call)]
        if there:
            there = self._sendable(calls, there)
        keys = {n: self._keys(calls[n]) for n in there if is_marked(calls[n].function, "pure")}
        known = {n: self._remembered(keys[n]) for n in keys}
        round_ = self.round = Round(self, self.crew, {n: calls[n] for n in there}, known)

        def gather() -> list[Scores]:
            try:
                here = [n for n in range(len(calls)) if n not in there]
                ran_here = InProcessRunner.run(self._in_process(), [calls[n] for n in here])
                round_.finish()
            finally:
                self._abandon()
            results = dict(zip(here, ran_here, strict=True)) | round_.results()
            for n, row_keys in keys.items():
                self._remember(row_keys, results[n])
            return [results[n] for n in range(len(calls))]

        try:
            round_.start()
        except BaseException:
            self._abandon()
            raise
        return gather

    def close(self) -> None:
        """End all processes; they start again when needed."""
        self._abandon()
        self.crew.close()

    def _abandon(self) -> None:
        """End what still runs of the newest questions: nothing, unless something went wrong."""
        if self.round is not None:
            self.round.abandon()
            self.round = None

    def _sendable(self, calls: Sequence[Call], there: list[int]) -> list[int]:
        """Those calls whose functions can be run in a worker; the user is told of the others."""
        troubles = self.crew.teach([calls[n] for n in there])
        for name, why in troubles.items():
            self.tell_once(
                name,
                "reward '%s' cannot be sent to another process (%s). It runs in this one, where a "
                "hang or a crash of it cannot be survived; a function that can be imported, with "
                "plain kwargs, can be sent.",
                *(name, why),
            )
        return [n for n in there if calls[n].name not in troubles]

    def _in_process(self) -> InProcessRunner:
        """A guard of the other kind with this one's settings and lists."""
        other = InProcessRunner(self.timeout_s, self.max_failed_frac, self.slow_s)
        other.slowest, other.told = self.slowest, self.told
        return other

    def _keys(self, call: Call) -> list[bytes]:
        """What identifies each row: the function's name and everything that it is given."""
        names = sorted(call.rows)
        columns = [call.rows[name] for name in names]
        constant = (call.name, names, call.settings, call.context)
        try:
            seed = pickle.dumps(constant)
            rows = [pickle.dumps(row) for row in zip(*columns, strict=True)]
        except Exception as error:  # whatever a foreign object raises when it is pickled
            self.tell_once(*(call.name, "rewards of '%s' are not remembered: %s", call.name, error))
            return []
        return [hashlib.blake2b(seed + row, digest_size=16).digest() for row in rows]

    def _remembered(self, keys: Sequence[bytes]) -> dict[int, float]:
        """{row: reward} of the rows that were judged before."""
        return {row: self.cache[key] for row, key in enumerate(keys) if key in self.cache}

    def _remember(self, keys: Sequence[bytes], scores: Scores) -> None:
        for row, key in enumerate(keys):
            if row not in scores.failures:
                self.cache[key] = scores.values[row]
                self.cache.move_to_end(key)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)


def is_trusted(call: Call) -> bool:
    """Whether a call runs code of this package only, and no judge that was handed to it.

    What holds the weights of a model (`in_process`) stays here too, wherever it comes from.
    """
    function, settings = call.function, list(call.settings.values())
    if is_marked(function, "in_process"):
        return True
    while isinstance(function, partial):
        settings += function.keywords.values()
        function = function.func
    ours = str(function.__module__).startswith(OURS) and not is_marked(function, "isolated")
    return ours and not any(_is_foreign(value) for value in settings)


def _is_foreign(value: Any) -> bool:
    """Whether a setting is, or holds, code from elsewhere."""
    if isinstance(value, dict | list | tuple):
        return any(_is_foreign(v) for v in (value.values() if isinstance(value, dict) else value))
    return callable(value) and not str(value.__module__).startswith(OURS)
