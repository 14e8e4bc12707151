"""Reward for problems of reasoning-gym, scored by its own functions.

Some of these functions evaluate the answer as Python. A grammar lets only formulas and literals
reach them, so nothing that the model wrote is executed. Time and memory are those of a worker.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from typing import Any

from litgrpo.arguments import at_least, at_most
from litgrpo.rewards.builtin.math import find_claims
from litgrpo.rewards.calls import UnusableReward, add_check, limit_rows
from litgrpo.text.answers import Completions, text_of
from litgrpo.workers.sandbox.wire import loads

# The tasks whose scorer evaluates the answer as Python, as found by running
# `python -m tests.oracle.reasoning_gym` with the version below.
TESTED_VERSION = "0.1.25"
# Their answers are formulas for `sympy.parse_expr`, which evaluates them.
ALGEBRA = (
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24"),
    "simple_integration",
)
# Their answers are texts. One that is not the reference answer is evaluated: it may be a list.
# An entry of `composite` that does not name its task may be any of them.
LITERALS = ("binary_matrix", "composite", "n_queens", "spiral_matrix", "string_insertion")
EVALUATED = (*ALGEBRA, *LITERALS)
MAX_ANSWER_CHARS = 2_000  # or the length of the whole entry, if that is longer
# Functions of which integrals are written; answers with any other call are rejected.
FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "erf", "Integral"),
)
CONSTANTS = ("pi",)  # names of several letters that are no functions; variables have one letter
MAX_EXPONENT = 1_000
CONTAINERS = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
ARITHMETIC = (
    *(ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
    *(ast.Name, ast.Load, ast.Call, ast.Tuple),  # a tuple: Integral(x, (x, 0, 1))
)
# Tasks with two possible answers, whose scorer gives credit for anything but the incorrect one.
WORDS = {"game_of_life_halting": ("true", "false")}


def check_version() -> None:
    """Check before training that the tasks of the installed version are known."""
    current = installed_version()
    if current != TESTED_VERSION:
        raise UnusableReward(
            f"reasoning-gym {TESTED_VERSION} is needed, but {current or 'none'} is installed: some"
            " of its tasks execute answers as Python, and they are known for this version only."
            f" `pip install reasoning-gym=={TESTED_VERSION}`"
        )


@cache
def installed_version() -> str | None:
    """Return the version of reasoning-gym; None if it is not installed."""
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        return None


def import_reasoning_gym() -> Any:
    """Return reasoning-gym, which takes a second to import."""
    import reasoning_gym as library  # type: ignore[import-not-found, unused-ignore]

    return library


@add_check(check_version)
@limit_rows(2.0, 1 << 30, import_reasoning_gym)
def reasoning_gym(
    prompts: Sequence[object],
    completions: Completions,
    metadata: Sequence[str],
    task: Sequence[str],
    *,
    require_tags: bool = True,
    answer_tag: str = "answer",
    min_score: float = 0.0,
) -> list[float | None]:
    """Return the score of the task's own function, for rows of `litgrpo.data.ReasoningGym`.

    Ten of the tasks evaluate what the model wrote. Their answers must be formulas or lists of
    numbers and texts: anything else, powers of powers, and more than 2,000 characters get 0
    without being evaluated. Each row is scored by a call of its own in a worker process; an answer
    that takes more than 2 s or 1 GiB gets 0. Needs `pip install reasoning-gym==0.1.25`.

    Args:
        metadata: N entries as text, written by the data source.
        task: N names of tasks.
        require_tags: as in `correctness`: the answer must be between tags. If false, the answer is
            what `correctness` would take, else the whole completion.
        answer_tag: name of the tag.
        min_score: lower scores count as 0, because some tasks give any answer a little
            (`countdown`: 0.05).

    Returns:
        N rewards in [0, 1]; 0 for an answer that the task's function cannot parse.

    Raises:
        UnusableReward: another version of the package is installed, or none.

    Example:
        >>> tasks = ["basic_arithmetic"]
        >>> reasoning_gym(["3 + 4?"], ["<answer>7</answer>"], [entry], tasks)  # doctest: +SKIP
        [1.0]

    Source: https://github.com/open-thought/reasoning-gym
    """
    at_least("min_score", min_score, 0)
    at_most("min_score", min_score, 1)
    check_version()
    scores = []
    for completion, entry, name in zip(completions, metadata, task, strict=True):
        answer = extract_one_answer(text_of(completion), require_tags=require_tags, tag=answer_tag)
        score = 0.0 if answer is None else score_answer(name, answer, entry)
        scores.append(score if score >= min_score else 0.0)
    return list(scores)


def extract_one_answer(text: str, *, require_tags: bool = True, tag: str = "answer") -> str | None:
    """Return the answer of a completion; None if it has none or several different ones."""
    claims = sorted(
        {claim.strip() for claim in find_claims(text, require_tags=require_tags, tag=tag)}
    )
    fallback = None if require_tags or claims else text.strip()
    return claims[0] if len(claims) == 1 else fallback


def score_answer(task: str, answer: str, entry: str) -> float:
    """Return the score of one answer; 0 without evaluating it if it is out of the grammar."""
    task = source_task(task, entry)
    if not passes_screen(task, answer, entry):
        return 0.0
    try:
        score = import_reasoning_gym().get_score_answer_fn(task)
        value = float(score(answer, loads(entry)))
    except Exception:  # a task's function may raise anything for a text that it cannot parse
        return 0.0
    return max(0.0, min(1.0, value)) if isfinite(value) else 0.0


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


def passes_screen(task: str, answer: str, entry: str) -> bool:
    """Return True if an answer may be passed to the task's function."""
    if task in WORDS and answer.lower() not in WORDS[task]:
        return False
    if task not in EVALUATED or answer == _reference(entry):
        return True
    if len(answer) > max(MAX_ANSWER_CHARS, len(entry)):
        return False
    try:
        # sympy splits comments and continued lines by its own rules.
        if task in ALGEBRA:
            return not set("#\\") & set(answer) and _is_algebra(_parse(answer))
        tree = _parse(answer)
        # Text that is not Python raises a SyntaxError before anything is evaluated.
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
    signs = {node.operand for node in nodes if isinstance(node, ast.UnaryOp)}
    plain = (ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, *CONTAINERS)
    return all(isinstance(node, plain) for node in nodes) and all(
        isinstance(node, ast.Constant) for node in signs
    )


def _is_algebra(tree: ast.AST | None) -> bool:
    """Return True for a formula of numbers, variables and known functions without huge powers."""
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    functions = {id(node.func) for node in calls}
    names = [node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in functions]
    powers = [
        node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    ]
    return (
        all(isinstance(node, (*ARITHMETIC, ast.Constant)) for node in nodes)
        and all(type(node) in (int, float) for node in constants)
        and all(isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS for node in calls)
        and all(len(name) == 1 or name in CONSTANTS for name in names)
        and not any(node.keywords for node in calls)
        and not any(_has_power(node.left) or _has_power(node.right) for node in powers)
        and all(_bound(node.right) < MAX_EXPONENT for node in powers)
    )


def _has_power(tree: ast.expr) -> bool:
    return any(isinstance(node, ast.Pow) for node in ast.walk(tree))


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
