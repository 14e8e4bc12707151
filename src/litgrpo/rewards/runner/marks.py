"""Marks of reward functions: how the runner may call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

MARKS = ("whole_batch", "pure", "isolated", "in_process")

Function = Callable[..., Any]


def whole_batch(function: Function) -> Function:
    """Mark a function that compares completions: it always gets all of them at once."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


def pure(function: Function) -> Function:
    """Mark a function whose reward of a row depends on that row only, and is always the same.

    It is then called row by row, in several processes, and never twice for the same row.
    """
    function.pure = True  # type: ignore[attr-defined]
    return function


def isolated(function: Function) -> Function:
    """Mark a function of this package that may hang: it runs in a worker like a user's."""
    function.isolated = True  # type: ignore[attr-defined]
    return function


def is_marked(function: Any, mark: str) -> bool:
    """Whether a function, or what a partial of it holds, has a mark."""
    assert mark in MARKS
    while isinstance(function, partial):
        function = function.func
    return mark in dir(function) and bool(getattr(function, mark))
