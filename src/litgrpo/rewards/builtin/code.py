"""Rewards for code: it is run in a sandbox, on tests that it cannot see."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from litgrpo.arguments import above, require
from litgrpo.rewards.calls import isolated
from litgrpo.text.answers import Completions, text_of
from litgrpo.workers import sandbox

FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py", "")
PAIR = ("call", "expected")
FORMS = (
    "a test script, a list of assert lines, or a list of [call, expected] or"
    " {call: ..., expected: ...}"
)
_FOLDER = Path(sandbox.__file__).parent

Tests = str | Sequence[Any] | None


@isolated
def unit_tests(
    prompts: Sequence[object],
    completions: Completions,
    tests: Sequence[Tests],
    entry_point: Sequence[str | None] | None = None,
    *,
    timeout_s: float = 4.0,
    memory_mib: int = 256,
    require_fence: bool = False,
) -> list[float | None]:
    """Share of a row's tests that the completion's Python passes.

    The code and the tests run in two sandboxes (bubblewrap). The code learns which of its functions
    is called with which plain data, and nothing else: not the tests' text, not what they expect,
    not what became of them. What it answers is plain data again, compared by Python's own
    comparison where the code has no say. Each test is given to a fresh process of the code.

    Args:
        prompts: N prompts; not read.
        completions: N completions; the last fenced block that is Python is the code, without a
            fence the whole text.
        tests: N times the tests: a list whose items are assert lines (or scripts, each one test),
            or `[call, expected]`, or `{call: "f(1)", expected: 2}`, where lists and tuples are
            equal; or one script, whose asserts and functions `test_*` count one by one. Without
            tests a row is not judged.
        entry_point: N names of functions, for scripts that define `check(candidate)`.
        timeout_s: for all tests of a completion together, start included; one test may take half.
        memory_mib: of the code.
        require_fence: code without a fence earns nothing.

    Returns:
        N shares in [0, 1]; None without tests.

    Raises:
        ValueError: there is no sandbox here, or tests of another form.
    """
    above("timeout_s", timeout_s, 0)
    limits = sandbox.Limits(seconds=timeout_s, memory_mib=memory_mib)
    names = entry_point or [None] * len(completions)
    codes = [extract_code(text_of(each), require_fence=require_fence) for each in completions]
    listed = [read_tests(each, name) for each, name in zip(tests, names, strict=True)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return list(threads.map(_share, codes, listed, [limits] * len(codes)))


def extract_code(text: str, *, require_fence: bool = False) -> str | None:
    r"""The Python of a completion: its last fenced block of Python, else all of it.

    Example:
        >>> extract_code("So:\n```python\nx = 1\n```")
        'x = 1\n'
    """
    blocks = [code for name, code in FENCE.findall(text) if name.lower() in PYTHON]
    return blocks[-1] if blocks else None if require_fence else text


def read_tests(given: Tests, entry_point: str | None = None) -> list[dict[str, Any]]:
    """The tests of a row one by one, each `{script}` or `{call, expected}`; none for None.

    Raises:
        ValueError: they have another form, or cannot be parsed.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return _of_script(given, entry_point)
    require(isinstance(given, Sequence), f"tests are {given!r:.60}; give {FORMS}")
    return [_test(each) for each in given]


def _test(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        _parsed(given)
        return {"script": given}
    test = given if isinstance(given, Mapping) else {}
    if isinstance(given, Sequence):
        test = dict(zip(PAIR, given, strict=False))
    good = set(test) == set(PAIR) and isinstance(test["call"], str)
    require(good and len(given) == len(PAIR), f"a test is {given!r:.60}; give {FORMS}")
    _parsed(test["call"])
    return dict(test)


def _of_script(script: str, entry_point: str | None) -> list[dict[str, Any]]:
    """Each assert and each function `test_*` of a script, behind all that is no test of it."""
    body = _parsed(script).body
    named = [each for each in body if isinstance(each, ast.FunctionDef)]
    calls = [f"{each.name}()" for each in named if each.name.startswith("test_")]
    if any(each.name == "check" for each in named) and entry_point:
        calls.append(f"check({entry_point})")
    tests = []
    for number, each in enumerate(body):
        if isinstance(each, ast.Assert):
            before = [other for other in body[:number] if not isinstance(other, ast.Assert)]
            tests.append(ast.unparse(ast.Module([*before, each], [])))
    rest = ast.unparse(ast.Module([each for each in body if not isinstance(each, ast.Assert)], []))
    tests += [f"{rest}\n{call}" for call in calls]
    return [{"script": each} for each in tests or [script]]


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the test {text!r:.60} is no Python: {error}") from error


def _share(
    code: str | None, tests: Sequence[Mapping[str, Any]], limits: sandbox.Limits
) -> float | None:
    """The share of tests that code passes; None where there are none."""
    if not tests:
        return None
    if code is None or not _compiles(code):
        return 0.0
    ours, theirs = socket.socketpair()
    each_s = limits.seconds / 2
    with ours, theirs:
        shared: dict[str, Any] = {"channel": theirs.fileno(), "source": code, "seconds": each_s}
        examinee = _start("examinee", limits, shared, theirs)
        theirs.close()
        try:
            shared = {"channel": ours.fileno(), "tests": list(tests), "seconds": each_s}
            verdict = _start("referee", limits, shared, ours).wait().output
        finally:
            examinee.kill()
    # A referee that could not run would print why, and that is no mark.
    require(not verdict.strip("+-"), f"the tests could not be run: {verdict[-200:]}")
    return verdict.count("+") / len(tests)


def _start(
    part: str, limits: sandbox.Limits, names: dict[str, Any], end: socket.socket
) -> sandbox.Running:
    text = "".join((_FOLDER / f"{name}.py").read_text("utf-8") for name in ("wire", part))
    text = text.replace("from __future__ import annotations\n", "")
    return sandbox.start(text, limits, names=names, descriptors=[end.fileno()])


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
