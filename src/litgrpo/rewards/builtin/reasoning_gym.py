"""Answers to problems of reasoning-gym, scored by its own functions: screened, and out of reach."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from litgrpo.arguments import above, at_least, at_most, one_of, require
from litgrpo.rewards.builtin.math import committed_claims
from litgrpo.rewards.calls import isolated
from litgrpo.text.answers import Completions, text_of
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox.wire import loads

Isolation = Literal["auto", "always", "never"]

# The tasks whose scorer executes the answer as Python, found by trying:
# `python -m tests.oracle.reasoning_gym` with the version named here. Of any other version every
# task is held to be one.
TRIED = "0.1.25"
EXECUTED = (
    *("binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens"),
    *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix"),
    "string_insertion",
)
LONGEST = 2_000  # characters of an answer; as long as the whole entry, where that is longer
# Functions that an integral is written with; any other call is refused.
FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "erf", "Integral"),
)
CALL = re.compile(
    rf"(?<!\w)(?!(?:{'|'.join(FUNCTIONS)})\s*\()(?=\d*[^\W\d])\w++\s*\(" + r"""|[\])'"}]\s*\("""
)
# a**b**c, a**(b**c), a**(b(c)), (a**b)**c, a**1000
TOWER = re.compile(
    r"\*\*\s*[-+]?[\w.]+\s*\*\*|\*\*\s*[-+]?\([^()]*(?:\*\*|\()"
    r"|\([^()]*\*\*[^()]*\)\s*\*\*|\*\*\s*[-+(]*\s*\d{4,}"
)
# Whose answer is one of two words, and whose scorer pays for anything but the wrong one.
WORDS = {"game_of_life_halting": ("true", "false")}
_FOLDER = Path(sandbox.__file__).parent


@isolated
def reasoning_gym(
    prompts: Sequence[object],
    completions: Completions,
    metadata: Sequence[str],
    task: Sequence[str],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
    threshold: float = 0.0,
    isolation: Isolation = "auto",
    timeout_s: float = 2.0,
) -> list[float | None]:
    """The score of an answer by the task's own function, for rows of `litgrpo.data.ReasoningGym`.

    Ten of the tasks execute what the model wrote. So answers that call something, name what begins
    with `__`, raise powers to powers or are longer than 2,000 characters earn 0 unseen there, and
    what is left is scored in bubblewrap, where that is installed, else in the worker process
    alone. Needs `pip install reasoning-gym`.

    Args:
        prompts: N prompts; not read.
        completions: N completions.
        metadata: N entries as text, as the source wrote them.
        task: N names of tasks.
        require_tags: as in `correctness`: the answer must stand between tags. Without, the answer
            is what `correctness` would take, and the whole completion where there is none.
        answer_tag: name of the tag.
        threshold: scores below earn 0: some tasks pay a little for anything, `countdown` 0.05.
        isolation: of tasks that execute answers: `auto` takes bubblewrap where it is, `always`
            refuses to go without, `never` scores in the worker process.
        timeout_s: for one answer in bubblewrap; what takes longer earns 0.

    Returns:
        N scores in [0, 1]; 0 for an answer that the task's function cannot read.

    Source: https://github.com/open-thought/reasoning-gym
    """
    above("timeout_s", timeout_s, 0)
    at_least("threshold", threshold, 0)
    at_most("threshold", threshold, 1)
    one_of("isolation", isolation, get_args(Isolation))
    scores = []
    for completion, entry, name in zip(completions, metadata, task, strict=True):
        answer = the_answer(text_of(completion), require_tags=require_tags, tag=answer_tag)
        score = 0.0 if answer is None else score_of(name, answer, entry, isolation, timeout_s)
        scores.append(score if score >= threshold else 0.0)
    return list(scores)


def the_answer(text: str, *, require_tags: bool = True, tag: str = "answer") -> str | None:
    """The one answer of a completion; None where there is none or there are several."""
    claims = sorted(
        {each.strip() for each in committed_claims(text, require_tags=require_tags, tag=tag)}
    )
    whole = None if require_tags or claims else text.strip()
    return claims[0] if len(claims) == 1 else whole


def score_of(task: str, answer: str, entry: str, isolation: Isolation, timeout_s: float) -> float:
    """The score of one answer, screened and isolated as its task needs it."""
    if not passes_screen(task, answer, entry):
        return 0.0
    boxed = isolation == "always" or (isolation == "auto" and sandbox.available())
    if boxed and is_executed(task):
        return _scored_in_sandbox(task, answer, entry, timeout_s)
    from reasoning_gym import get_score_answer_fn  # type: ignore[import-not-found, unused-ignore]

    try:
        return float(get_score_answer_fn(task)(answer, loads(entry)))
    except Exception:  # whatever a task's function raises at a text that it cannot read
        return 0.0


def is_executed(task: str) -> bool:
    """Whether the task's function may execute answers."""
    return task in EXECUTED or installed_version() != TRIED


@cache
def installed_version() -> str:
    """Of reasoning-gym."""
    return version("reasoning-gym")


def passes_screen(task: str, answer: str, entry: str) -> bool:
    """Whether an answer is what a task's function may be given.

    Example:
        >>> passes_screen("countdown", "(3 + 4) * 5", "{}")
        True
        >>> passes_screen("countdown", "exit()", "{}")
        False
    """
    if task in WORDS and answer.lower() not in WORDS[task]:
        return False
    if len(answer) > max(LONGEST, len(entry)):
        return False
    if not is_executed(task):
        return True
    dangerous = ("__" in answer, CALL.search(answer), TOWER.search(answer))
    return not any(dangerous)


def _scored_in_sandbox(task: str, answer: str, entry: str, timeout_s: float) -> float:
    """The score by the sandbox of this process, which is started once and again when it broke."""
    with _lock:
        bench = _benches.get(timeout_s) or Bench(timeout_s)
        _benches[timeout_s] = bench
        try:
            found = bench.score(task, answer, entry)
        except (OSError, ValueError):
            _benches.pop(timeout_s).close()
            return 0.0
    return float(found) if isinstance(found, float | int) else 0.0


class Bench:
    """A sandbox with reasoning-gym in it, whose import takes a second; a process for each answer.

    Args:
        timeout_s: for one answer.
    """

    def __init__(self, timeout_s: float) -> None:
        limits = sandbox.Limits(seconds=1e6, memory_mib=1024)
        text = "".join((_FOLDER / f"{name}.py").read_text("utf-8") for name in ("wire", "scorer"))
        text = text.replace("from __future__ import annotations\n", "")
        require(sandbox.available(), f"isolation: always needs a sandbox, and {sandbox.why_not()}")
        self.end, theirs = socket.socketpair()
        with theirs:
            names = {"channel": theirs.fileno(), "seconds": timeout_s}
            self.running = sandbox.start(
                text,
                limits,
                names=names,
                descriptors=[theirs.fileno()],
                packages=package_folders(),
            )
        self.end.settimeout(60.0)
        self.lines = self.end.makefile("r")
        if self.lines.readline() != '"ready"\n':
            printed = self.running.wait().output
            self.close()
            raise ImportError(f"reasoning-gym cannot be used in the sandbox: {printed[-300:]}")
        self.end.settimeout(timeout_s + 5.0)

    def score(self, task: str, answer: str, entry: str) -> object:
        """The score, or why there is none.

        Raises:
            OSError: the sandbox does not answer.
            ValueError: what it answers is no JSON.
        """
        self.end.sendall(json.dumps([task, answer, entry]).encode() + b"\n")
        return json.loads(self.lines.readline(4096))

    def close(self) -> None:
        """End it."""
        self.running.kill()
        self.lines.close()
        self.end.close()


_lock = threading.Lock()
_benches: dict[float, Bench] = {}


def package_folders() -> list[str]:
    """Where installed packages are, which the sandbox may read."""
    ends = ("site-packages", "dist-packages")
    return [each for each in sys.path if each.rstrip(os.sep).endswith(ends) and os.path.isdir(each)]
