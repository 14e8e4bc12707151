"""Reward for code, which runs in a sandbox on tests that it cannot see."""

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
TEST_FORMATS = (
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
    require_code_block: bool = False,
) -> list[float | None]:
    r"""Return the fraction of a row's tests that the completion's Python code passes.

    The code and the tests run in two separate sandboxes (bubblewrap). The code sees which of its
    functions is called with which plain data, and nothing else: neither the text of the tests, nor
    the expected values, nor the results. It returns plain data, which the other sandbox compares
    with Python's comparison. Each test uses a fresh process of the code.

    Args:
        prompts: N prompts; not read.
        completions: N completions, texts or lists of chat messages. The code is the last fenced
            Python block, or the whole text if there is none.
        tests: N lists of tests, or N scripts. Items of a list are assert lines (or scripts, each
            one test), `[call, expected]` or `{call: "f(1)", expected: 2}`, where lists and tuples
            are equal. In a script, each assert and each function `test_*` is one test. Rows
            without tests are not scored.
        entry_point: N names of functions, for scripts that define `check(candidate)`.
        timeout_s: seconds for all tests of a completion together, including the start-up; one test
            may take half of it.
        memory_mib: memory limit of the code.
        require_code_block: give code outside a fenced block 0.

    Returns:
        N rewards in [0, 1]; None without tests.

    Raises:
        ValueError: there is no sandbox, or the tests have another format.

    Example:
        >>> completion = "```python\ndef double(x):\n    return 2 * x\n```"
        >>> tests = ["assert double(2) == 4", ["double(3)", 7]]
        >>> unit_tests(["?"], [completion], [tests])  # doctest: +SKIP
        [0.5]
    """
    above("timeout_s", timeout_s, 0)
    limits = sandbox.SandboxLimits(seconds=timeout_s, memory_mib=memory_mib)
    names = entry_point or [None] * len(completions)
    codes = [
        extract_code(text_of(each), require_code_block=require_code_block) for each in completions
    ]
    listed = [read_tests(each, name) for each, name in zip(tests, names, strict=True)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return list(threads.map(_pass_share, codes, listed, [limits] * len(codes)))


def extract_code(text: str, *, require_code_block: bool = False) -> str | None:
    r"""Return the Python code of a completion: its last fenced Python block, else all of it.

    Example:
        >>> extract_code("So:\n```python\nx = 1\n```")
        'x = 1\n'
    """
    blocks = [code for name, code in FENCE.findall(text) if name.lower() in PYTHON]
    if blocks:
        return str(blocks[-1])
    return None if require_code_block else text


def read_tests(given: Tests, entry_point: str | None = None) -> list[dict[str, Any]]:
    """Return the tests of a row, each `{script}` or `{call, expected}`; none for None.

    Raises:
        ValueError: the tests have another format, or cannot be parsed.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return _split_script(given, entry_point)
    require(isinstance(given, Sequence), f"tests: got {given!r:.60}; give {TEST_FORMATS}")
    return [_read_test(each) for each in given]


def _read_test(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        _parse(given)
        return {"script": given}
    test = given if isinstance(given, Mapping) else {}
    if isinstance(given, Sequence):
        test = dict(zip(PAIR, given, strict=False))
    good = set(test) == set(PAIR) and isinstance(test["call"], str)
    require(good and len(given) == len(PAIR), f"tests: got {given!r:.60}; give {TEST_FORMATS}")
    _parse(test["call"])
    return dict(test)


def _split_script(script: str, entry_point: str | None) -> list[dict[str, Any]]:
    """Make each assert and each function `test_*` a test, after the rest of the script."""
    body = _parse(script).body
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


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests: {text!r:.60} is not Python: {error}") from error


def _pass_share(
    code: str | None, tests: Sequence[Mapping[str, Any]], limits: sandbox.SandboxLimits
) -> float | None:
    """Return the fraction of tests that code passes; None without tests."""
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
    # A referee that could not run prints the reason instead of marks.
    require(not verdict.strip("+-"), f"Could not run the tests: {verdict[-200:]}")
    return verdict.count("+") / len(tests)


def _start(
    part: str, limits: sandbox.SandboxLimits, names: dict[str, Any], end: socket.socket
) -> sandbox.RunningSandbox:
    text = "".join((_FOLDER / f"{name}.py").read_text("utf-8") for name in ("wire", part))
    text = text.replace("from __future__ import annotations\n", "")
    return sandbox.start(text, limits, names=names, descriptors=[end.fileno()])


def _compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
