"""Reward for problems of reasoning-gym, scored by its own functions: screened and sandboxed."""

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
from litgrpo.rewards.builtin.math import find_claims
from litgrpo.rewards.calls import isolated
from litgrpo.text.answers import Completions, text_of
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox.wire import loads

Isolation = Literal["auto", "always", "never"]

# The tasks whose scorer executes the answer as Python, as found by running
# `python -m tests.oracle.reasoning_gym` with the version below. With any other version, all tasks
# are treated as if they executed answers.
TESTED_VERSION = "0.1.25"
EXECUTED = (
    *("binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens"),
    *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix"),
    "string_insertion",
)
MAX_ANSWER_CHARS = 2_000  # or the length of the whole entry, if that is longer
# Functions of which integrals are written; answers with any other call are rejected.
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
# Tasks with two possible answers, whose scorer gives credit for anything but the incorrect one.
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
    min_score: float = 0.0,
    isolation: Isolation = "auto",
    timeout_s: float = 2.0,
) -> list[float | None]:
    """Return the score of the task's own function, for rows of `litgrpo.data.ReasoningGym`.

    Ten of the tasks execute what the model wrote. For these, answers that call a function, contain
    `__`, raise powers to powers or are longer than 2,000 characters get 0 without being run. The
    others are scored in a bubblewrap sandbox if it is installed, else in the worker process. Needs
    `pip install reasoning-gym`.

    Args:
        prompts: N prompts; not read.
        completions: N completions.
        metadata: N entries as text, written by the data source.
        task: N names of tasks.
        require_tags: as in `correctness`: the answer must be between tags. If false, the answer is
            what `correctness` would take, else the whole completion.
        answer_tag: name of the tag.
        min_score: lower scores count as 0, because some tasks give any answer a little
            (`countdown`: 0.05).
        isolation: for tasks that execute answers: `auto` uses bubblewrap if it is installed,
            `always` requires it, `never` scores in the worker process.
        timeout_s: seconds for one answer in bubblewrap; slower ones get 0.

    Returns:
        N rewards in [0, 1]; 0 for an answer that the task's function cannot parse.

    Raises:
        ValueError: `isolation` is `always`, and there is no sandbox.

    Example:
        >>> tasks = ["basic_arithmetic"]
        >>> reasoning_gym(["3 + 4?"], ["<answer>7</answer>"], [entry], tasks)  # doctest: +SKIP
        [1.0]

    Source: https://github.com/open-thought/reasoning-gym
    """
    above("timeout_s", timeout_s, 0)
    at_least("min_score", min_score, 0)
    at_most("min_score", min_score, 1)
    one_of("isolation", isolation, get_args(Isolation))
    scores = []
    for completion, entry, name in zip(completions, metadata, task, strict=True):
        answer = extract_one_answer(text_of(completion), require_tags=require_tags, tag=answer_tag)
        score = 0.0 if answer is None else score_answer(name, answer, entry, isolation, timeout_s)
        scores.append(score if score >= min_score else 0.0)
    return list(scores)


def extract_one_answer(text: str, *, require_tags: bool = True, tag: str = "answer") -> str | None:
    """Return the answer of a completion; None if it has none or several different ones."""
    claims = sorted(
        {each.strip() for each in find_claims(text, require_tags=require_tags, tag=tag)}
    )
    whole = None if require_tags or claims else text.strip()
    return claims[0] if len(claims) == 1 else whole


def score_answer(
    task: str, answer: str, entry: str, isolation: Isolation, timeout_s: float
) -> float:
    """Score one answer, screened and sandboxed if its task executes answers."""
    if not passes_screen(task, answer, entry):
        return 0.0
    sandboxed = isolation == "always" or (isolation == "auto" and sandbox.available())
    if sandboxed and is_executed(task):
        return _score_in_sandbox(task, answer, entry, timeout_s)
    from reasoning_gym import get_score_answer_fn  # type: ignore[import-not-found, unused-ignore]

    try:
        return float(get_score_answer_fn(task)(answer, loads(entry)))
    except Exception:  # a task's function may raise anything for a text that it cannot parse
        return 0.0


def is_executed(task: str) -> bool:
    """Return True if the task's function may execute answers."""
    return task in EXECUTED or installed_version() != TESTED_VERSION


@cache
def installed_version() -> str:
    """Return the version of reasoning-gym."""
    return version("reasoning-gym")


def passes_screen(task: str, answer: str, entry: str) -> bool:
    """Return True if an answer may be passed to the task's function.

    Example:
        >>> passes_screen("countdown", "(3 + 4) * 5", "{}")
        True
        >>> passes_screen("countdown", "exit()", "{}")
        False
    """
    if task in WORDS and answer.lower() not in WORDS[task]:
        return False
    if len(answer) > max(MAX_ANSWER_CHARS, len(entry)):
        return False
    if not is_executed(task):
        return True
    dangerous = ("__" in answer, CALL.search(answer), TOWER.search(answer))
    return not any(dangerous)


def _score_in_sandbox(task: str, answer: str, entry: str, timeout_s: float) -> float:
    """Score in this process's sandbox, which is started on first use and after a failure."""
    with _lock:
        if timeout_s not in _scorers:
            _scorers[timeout_s] = SandboxedScorer(timeout_s)
        try:
            found = _scorers[timeout_s].score(task, answer, entry)
        except (OSError, ValueError):
            _scorers.pop(timeout_s).close()
            return 0.0
    return float(found) if isinstance(found, float | int) else 0.0


class SandboxedScorer:
    """A sandbox that has imported reasoning-gym, which takes a second, and forks for each answer.

    Args:
        timeout_s: seconds for one answer.

    Raises:
        ValueError: there is no sandbox.
        ImportError: reasoning-gym cannot be imported in it.
    """

    def __init__(self, timeout_s: float) -> None:
        limits = sandbox.SandboxLimits(seconds=1e6, memory_mib=1024)
        text = "".join((_FOLDER / f"{name}.py").read_text("utf-8") for name in ("wire", "scorer"))
        text = text.replace("from __future__ import annotations\n", "")
        require(
            sandbox.available(),
            f"reasoning_gym: isolation is always, but {sandbox.unavailable_reason()}",
        )
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
            raise ImportError(f"Could not import reasoning-gym in the sandbox: {printed[-300:]}")
        self.end.settimeout(timeout_s + 5.0)

    def score(self, task: str, answer: str, entry: str) -> object:
        """Return the score, or a text that says why there is none.

        Raises:
            OSError: the sandbox does not respond.
            ValueError: its response is not JSON.
        """
        self.end.sendall(json.dumps([task, answer, entry]).encode() + b"\n")
        return json.loads(self.lines.readline(4096))

    def close(self) -> None:
        """Kill the sandbox."""
        self.running.kill()
        self.lines.close()
        self.end.close()


_lock = threading.Lock()
_scorers: dict[float, SandboxedScorer] = {}


def package_folders() -> list[str]:
    """Return the folders of installed packages, which the sandbox may read."""
    ends = ("site-packages", "dist-packages")
    return [each for each in sys.path if each.rstrip(os.sep).endswith(ends) and os.path.isdir(each)]
