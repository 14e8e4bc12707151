"""Reward for problems of reasoning-gym, scored by its own functions: screened and sandboxed."""

from __future__ import annotations

import ast
import json
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from litgrpo.arguments import above, at_least, at_most, one_of
from litgrpo.rewards.builtin.math import find_claims
from litgrpo.rewards.calls import UnusableReward, add_check, isolated
from litgrpo.text.answers import Completions, text_of
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox.wire import loads

log = logging.getLogger(__name__)

Isolation = Literal["bubblewrap", "none"]

# The tasks whose scorer executes the answer as Python, as found by running
# `python -m tests.oracle.reasoning_gym` with the version below. With any other version, all tasks
# are treated as if they executed answers.
TESTED_VERSION = "0.1.25"
# Their answers are formulas for `sympy.parse_expr`, which evaluates them.
ALGEBRA = (
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"),
    "simple_integration",
)
# Their answers are texts. One that is not the reference answer is evaluated: it may be a list.
# Any task may be in `composite`, so a data set with it needs the sandbox.
LITERALS = ("binary_matrix", "composite", "n_queens", "spiral_matrix", "string_insertion")
EXECUTED = (*ALGEBRA, *LITERALS)
MAX_ANSWER_CHARS = 2_000  # or the length of the whole entry, if that is longer
# Functions of which integrals are written; answers with any other call are rejected.
FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "erf", "Integral"),
)
MAX_EXPONENT = 1_000
CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
ARITHMETIC = (
    *(ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
    *(ast.Name, ast.Load, ast.Call, ast.Tuple),  # a tuple: Integral(x, (x, 0, 1))
)
# Tasks with two possible answers, whose scorer gives credit for anything but the incorrect one.
WORDS = {"game_of_life_halting": ("true", "false")}
START_S, SLACK_S = 60.0, 3.0  # for the import in the sandbox; beyond the time of an answer
MAX_REPLY_BYTES = 4096
_FOLDER = Path(sandbox.__file__).parent


def check_isolation(task: Sequence[str], isolation: Isolation = "bubblewrap") -> None:
    """Check before training that answers which are executed run in a sandbox.

    Raises:
        UnusableReward: there is no sandbox, and `isolation` is not `none`.
    """
    one_of("isolation", isolation, get_args(Isolation))
    executed = sorted({str(each) for each in task if is_executed(str(each))})
    if executed and isolation == "none":
        log.warning(
            "reasoning_gym: isolation is none: answers to %s are executed as Python without a"
            " sandbox, as your user. A screen rejects calls that it does not know.",
            ", ".join(executed),
        )
    elif executed:
        _require_sandbox(executed)


def _require_sandbox(tasks: Sequence[str]) -> None:
    if not sandbox.available():
        raise UnusableReward(
            f"Could not score the reasoning-gym tasks {', '.join(tasks)}: they execute answers as"
            f" Python, which needs a sandbox: {sandbox.unavailable_reason()}. `isolation: none`"
            " executes them without one."
        )


@add_check(check_isolation)
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
    isolation: Isolation = "bubblewrap",
    timeout_s: float = 2.0,
) -> list[float | None]:
    """Return the score of the task's own function, for rows of `litgrpo.data.ReasoningGym`.

    Ten of the tasks execute what the model wrote. Their answers must be formulas or lists of
    numbers and texts: anything else, powers of powers, and more than 2,000 characters get 0
    without being executed. The others are scored in a bubblewrap sandbox. Needs
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
        isolation: for tasks that execute answers: `bubblewrap`, or `none` to execute them in the
            worker process as your user, which is not safe.
        timeout_s: seconds for one answer in bubblewrap; slower ones get 0.

    Returns:
        N rewards in [0, 1]; 0 for an answer that the task's function cannot parse.

    Raises:
        UnusableReward: a task executes answers, and there is no sandbox.

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
    task = source_task(task, entry)
    executed = is_executed(task)
    if executed and isolation == "bubblewrap":
        _require_sandbox([task])
    if not passes_screen(task, answer, entry):
        return 0.0
    if executed and isolation == "bubblewrap":
        return _score_in_sandbox(task, answer, entry, timeout_s)
    from reasoning_gym import get_score_answer_fn  # type: ignore[import-not-found, unused-ignore]

    try:
        return float(get_score_answer_fn(task)(answer, loads(entry)))
    except Exception:  # a task's function may raise anything for a text that it cannot parse
        return 0.0


def source_task(task: str, entry: str) -> str:
    """Return the task of an entry; an entry of `composite` names the task it was taken from.

    The package constructs `composite` only with the list of its tasks, which entries do not have.

    Example:
        >>> from litgrpo.workers.sandbox.wire import dumps
        >>> source_task("composite", dumps({"metadata": {"source_dataset": "n_queens"}}))
        'n_queens'
    """
    if task != "composite":
        return task
    try:
        return str(loads(entry)["metadata"]["source_dataset"])
    except (ValueError, KeyError, TypeError):
        return task


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
    if not is_executed(task) or answer == _reference(entry):
        return True
    if len(answer) > max(MAX_ANSWER_CHARS, len(entry)):
        return False
    try:
        # sympy splits comments and continued lines by its own rules.
        if task in ALGEBRA:
            return not set("#\\") & set(answer) and _is_algebra(_parse(answer))
        tree = _parse(answer)
        # Python does not execute text that is not Python; sympy inserts calls, but for "!" only.
        return _is_literal(tree) if tree is not None else not set("(!") & set(answer)
    except (ValueError, RecursionError, MemoryError):
        return False


def _parse(text: str) -> ast.AST | None:
    """Return the syntax tree of an expression, or of statements; None if the text is neither."""
    for mode in ("eval", "exec"):
        try:
            tree = ast.parse(text.strip(), mode=mode)
        except SyntaxError:
            continue
        return tree.body if isinstance(tree, ast.Expression) else tree
    return None


def _reference(entry: str) -> str | None:
    try:
        reference = loads(entry)["answer"]
    except (ValueError, KeyError):
        return None
    return reference.strip() if isinstance(reference, str) else None


def _is_literal(tree: ast.AST) -> bool:
    """Return True for numbers, texts, and lists, tuples, sets and dicts of them."""
    nodes = list(ast.walk(tree))
    signs = {each.operand for each in nodes if isinstance(each, ast.UnaryOp)}
    plain = (ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, *CONTAINERS)
    return all(isinstance(each, plain) for each in nodes) and all(
        isinstance(each, ast.Constant) for each in signs
    )


def _is_algebra(tree: ast.AST | None) -> bool:
    """Return True for a formula of numbers, names and known functions without huge powers."""
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    constants = [each.value for each in nodes if isinstance(each, ast.Constant)]
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    powers = [
        each for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Pow)
    ]
    return (
        all(isinstance(each, (*ARITHMETIC, ast.Constant)) for each in nodes)
        and all(type(each) in (int, float) for each in constants)
        and all(isinstance(each.func, ast.Name) and each.func.id in FUNCTIONS for each in calls)
        and not any(each.keywords for each in calls)
        and not any(_has_power(each.left) or _has_power(each.right) for each in powers)
        and all(_bound(each.right) < MAX_EXPONENT for each in powers)
    )


def _has_power(tree: ast.expr) -> bool:
    return any(isinstance(each, ast.Pow) for each in ast.walk(tree))


def _bound(tree: ast.expr) -> float:  # noqa: PLR0911 (one for each kind of node)
    """Return an upper bound of the absolute value of an exponent; a name counts 1."""
    match tree:
        case ast.Constant(value=int(value) | float(value)):
            return float(min(abs(value), MAX_EXPONENT))
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _bound(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _bound(left) + _bound(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bound(left) * _bound(right)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int(value))) if value:
            return _bound(left)
        case _:
            return float(MAX_EXPONENT)


def _score_in_sandbox(task: str, answer: str, entry: str, timeout_s: float) -> float:
    """Score in this process's sandbox, which is started on first use and after a failure."""
    with _lock:
        if timeout_s in _scorers and not _scorers[timeout_s].is_idle():
            _scorers.pop(timeout_s).close()
        if timeout_s not in _scorers:
            _scorers[timeout_s] = SandboxedScorer(timeout_s)
        try:
            found = _scorers[timeout_s].score(task, answer, entry)
        except (OSError, ValueError):
            _scorers.pop(timeout_s).close()
            return 0.0
    return max(0.0, min(1.0, found)) if found is not None and isfinite(found) else 0.0


class SandboxedScorer:
    """A sandbox that has imported reasoning-gym, which takes a second, and forks for each answer.

    Args:
        timeout_s: seconds for one answer.

    Raises:
        UnusableReward: there is no sandbox, or reasoning-gym cannot be imported in it.
    """

    def __init__(self, timeout_s: float) -> None:
        limits = sandbox.SandboxLimits(seconds=1e6, memory_mib=1024)
        text = "".join((_FOLDER / f"{name}.py").read_text("utf-8") for name in ("wire", "scorer"))
        text = text.replace("from __future__ import annotations\n", "")
        self.timeout_s, self.reusable = timeout_s, True
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
        try:
            ready = self._read_line(time.monotonic() + START_S) == b'"ready"\n'
        except OSError:
            ready = False
        if not ready:
            self.running.process.kill()
            printed = self.running.wait().output
            self.close()
            raise UnusableReward(f"Could not import reasoning-gym in the sandbox: {printed[-300:]}")

    def is_idle(self) -> bool:
        """Return True if the next reply can only be that of the next request."""
        return self.reusable and not select.select([self.end], [], [], 0)[0]

    def score(self, task: str, answer: str, entry: str) -> float | None:
        """Return the score; None if the task's function raised, ran too long or exited.

        Raises:
            OSError: the sandbox does not reply.
            ValueError: its reply is not the one to this request.
        """
        number = secrets.token_hex(8)  # an answer cannot know that of a later request
        request = json.dumps([number, task, answer, entry]).encode() + b"\n"
        self.end.settimeout(self.timeout_s + SLACK_S)
        self.end.sendall(request)
        reply = json.loads(self._read_line(time.monotonic() + self.timeout_s + SLACK_S))
        if not isinstance(reply, dict) or reply.get("number") != number:
            raise ValueError("a reply to another request")
        self.reusable = reply.get("reusable") is True
        score = reply.get("score")
        return float(score) if isinstance(score, float | int) else None

    def _read_line(self, until: float) -> bytes:
        """Read one line and nothing behind it."""
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_REPLY_BYTES:
            self.end.settimeout(max(0.001, until - time.monotonic()))
            if not (byte := self.end.recv(1)):
                raise ConnectionResetError("the sandbox has exited")
            line += byte
        return line

    def close(self) -> None:
        """Kill the sandbox."""
        self.running.kill()
        self.end.close()


_lock = threading.Lock()
_scorers: dict[float, SandboxedScorer] = {}


def package_folders() -> list[str]:
    """Return the folders of installed packages, which the sandbox may read."""
    ends = ("site-packages", "dist-packages")
    return [each for each in sys.path if each.rstrip(os.sep).endswith(ends) and os.path.isdir(each)]
