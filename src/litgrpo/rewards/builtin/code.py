"""Reward for code, which runs in a sandbox on tests that it cannot see."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import socket
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litgrpo.arguments import above, require
from litgrpo.rewards.calls import UnusableReward, add_check, isolated
from litgrpo.text.answers import Completions, list_answers, text_of
from litgrpo.workers import sandbox

# Possessive, and no backtick after the opening ones: linear time in any text.
FENCE = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py", "")
PAIRS = ({"call", "expected"}, {"stdin", "stdout"})
TEST_FORMATS = (
    "a test script, a list of assert lines, or a list of [call, expected], {call: ...,"
    " expected: ...} or {stdin: ..., stdout: ...}"
)
_FOLDER = Path(sandbox.__file__).parent

Tests = str | Sequence[Any] | None
Names = str | Sequence[str] | None


def check_tests(
    tests: Sequence[Tests],
    entry_point: Sequence[Names] | None = None,
    timeout_s: float = 4.0,
) -> None:
    """Read the tests of all rows before training; `audit` runs them."""
    require_sandbox()
    above("timeout_s", timeout_s, 0)
    _read_rows(tests, entry_point)


def require_sandbox() -> None:
    """Raise `UnusableReward`, with the fix, if programs cannot be sandboxed on this machine."""
    if not sandbox.available():
        raise UnusableReward(
            f"Could not run the tests: code of a model needs a sandbox:"
            f" {sandbox.unavailable_reason()}"
        )


@add_check(check_tests)
@isolated
def unit_tests(
    prompts: Sequence[object],
    completions: Completions,
    tests: Sequence[Tests],
    entry_point: Sequence[Names] | None = None,
    *,
    timeout_s: float = 4.0,
    memory_mib: int = 256,
    require_code_block: bool = False,
) -> list[float | None]:
    r"""Return the fraction of a row's tests that the completion's Python code passes.

    The code is the last fenced Python block of the completion, or the whole text if there is none.
    The code and the tests run in two separate sandboxes (bubblewrap). The code sees which of its
    functions is called with which plain data, or its input, and nothing else: neither the text of
    the tests, nor the expected values, nor the results. It returns plain data, which the other
    sandbox compares with Python's comparison. Each test uses a fresh process of the code.

    `audit` runs the tests against code that does nothing, and against the column
    `reference_solution`: the first must not pass all tests of a row, and the second must.

    Args:
        tests: N lists of tests, or N scripts. Items of a list are assert lines (or scripts, each
            one test); `[call, expected]` or `{call: "f(1)", expected: 2}`, where lists and tuples
            are equal; or `{stdin: "1 2", stdout: "3"}`, for code that is a program: lines are
            compared without the spaces at their ends, and 1.50 equals 1.5. In a script, each assert
            and each function `test_*` is one test. Rows without tests are not scored.
        entry_point: N names, or lists of names, that the code must define; needed if the tests use
            several of them. The first is the argument of scripts that define `check(candidate)`.
        timeout_s: seconds for all tests of a completion together, including the start-up; one test
            may take half of it.
        memory_mib: memory limit of the code.
        require_code_block: give code outside a fenced block 0.

    Returns:
        N rewards in [0, 1]; None without tests.

    Raises:
        UnusableReward: there is no sandbox, or the tests of a row cannot be read or run.

    Example:
        >>> completion = "```python\ndef double(x):\n    return 2 * x\n```"
        >>> tests = ["assert double(2) == 4", ["double(3)", 7]]
        >>> unit_tests(["?"], [completion], [tests])  # doctest: +SKIP
        [0.5]
    """
    require_sandbox()
    above("timeout_s", timeout_s, 0)
    limits = sandbox.SandboxLimits(seconds=timeout_s, memory_mib=memory_mib)
    rows = _read_rows(tests, entry_point)
    codes = [
        extract_code(text_of(completion), require_code_block=require_code_block)
        for completion in completions
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return list(threads.map(_pass_share, codes, rows, [limits] * len(codes)))


def extract_code(text: str, *, require_code_block: bool = False) -> str | None:
    """Return the Python code of a completion: its last fenced Python block, else all of it."""
    blocks = [code for name, code in FENCE.findall(text) if name.lower() in PYTHON]
    if blocks:
        return str(blocks[-1])
    return None if require_code_block else text


# --- reading the tests of a row ---


@dataclass(frozen=True)
class RowTests:
    """The tests of a row."""

    # JSON list of tests, each `{script}`, `{call, expected}` or `{stdin, stdout}`; "" without any
    tests: str = ""
    names: tuple[str, ...] = ()  # names that the code must define

    @property
    def listed(self) -> list[dict[str, Any]]:
        """The tests."""
        return list(json.loads(self.tests)) if self.tests else []


def _read_rows(tests: Sequence[Tests], entry_point: Sequence[Names] | None) -> list[RowTests]:
    return list(map(read_tests, tests, entry_point or [None] * len(tests)))


def read_tests(value: Tests, entry_point: Names = None) -> RowTests:
    """Return the tests of a row; none for None, NaN, and an empty text or list."""
    if value is None or not list_answers(value):
        return RowTests()
    declared = [entry_point] if isinstance(entry_point, str) else list(entry_point or [])
    if isinstance(value, str):
        tests = _split_script(value, declared[0] if declared else None)
    else:
        _require(isinstance(value, Sequence), f"got {value!r:.60}; give {TEST_FORMATS}")
        tests = [_read_test(test) for test in value]
    scripts = [test["script"] for test in tests if "script" in test]
    _require(
        len(scripts) < len(tests) or any(map(_can_fail, scripts)),
        f"{value!r:.60} has no assert, so any code would pass",
    )
    texts = [str(test.get("script", test.get("call"))) for test in tests if "stdin" not in test]
    names = _find_code_names(texts, declared) if texts else []
    return RowTests(json.dumps(tests, default=_not_json), tuple(names))


def _not_json(value: object) -> None:
    raise UnusableReward(f"tests: {value!r:.60} is not plain data")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnusableReward(f"tests: {message}")


def _read_test(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        _parse(test)
        return {"script": test}
    if isinstance(test, Sequence) and len(test) == 2:  # noqa: PLR2004 - a pair
        test = {"call": test[0], "expected": test[1]}
    is_test = isinstance(test, Mapping) and set(test) in PAIRS
    texts = [test.get(name, "") for name in ("call", "stdin", "stdout")] if is_test else [None]
    _require(all(isinstance(text, str) for text in texts), f"got {test!r:.60}; give {TEST_FORMATS}")
    if "call" in test:
        _parse(test["call"])
    return dict(test)


def _split_script(script: str, entry_point: str | None) -> list[dict[str, Any]]:
    """Make each assert and each function `test_*` a test, after the rest of the script."""
    body = _parse(script).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    test_functions = [function for function in functions if function.name.startswith("test_")]
    for function in test_functions:
        parameters = function.args
        _require(
            len(parameters.args) + len(parameters.posonlyargs) <= len(parameters.defaults),
            f"{function.name} takes arguments; fixtures and parametrize are not supported",
        )
    calls = [f"{function.name}()" for function in test_functions]
    if any(function.name == "check" for function in functions) and entry_point:
        calls.append(f"check({entry_point})")
    tests = []
    for number, node in enumerate(body):
        if isinstance(node, ast.Assert):
            before = [other for other in body[:number] if not isinstance(other, ast.Assert)]
            tests.append(ast.unparse(ast.Module([*before, node], [])))
    statements = [node for node in body if not isinstance(node, ast.Assert)]
    rest = ast.unparse(ast.Module(statements, []))
    tests += [f"{rest}\n{call}" for call in calls]
    definitions = (ast.FunctionDef, ast.ClassDef)
    # Asserts in loops and conditions are one test together.
    if any(_has_assert(node) for node in statements if not isinstance(node, definitions)):
        tests.append(rest)
    return [{"script": test} for test in tests or [script]]


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableReward(f"tests: {text!r:.60} is not Python: {error}") from error


def _can_fail(script: str) -> bool:
    return _has_assert(ast.parse(script))


def _has_assert(tree: ast.AST) -> bool:
    """Return True for an assert, a raise, or a call such as `self.assertEqual`."""
    nodes = list(ast.walk(tree))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    plain = any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
    return plain or any("assert" in call for call in calls)


def _find_code_names(texts: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return the names that the code must define: those of `entry_point`, else the undefined one.

    A name that the tests forgot to import must not be looked for in the code, which could define it
    so that every test passes.
    """
    undefined = sorted(set().union(*map(find_undefined, texts)))
    used = set().union(*map(_find_used, texts))
    names = set().union(*map(_find_used, declared))
    shown = f"{texts[0]!r:.60}"
    if not names:
        _require(
            bool(undefined),
            f"{shown} uses no name that the code could define; name it in the column entry_point",
        )
        _require(
            len(undefined) == 1,
            f"{shown} uses {', '.join(undefined)}, which the tests do not define: import helpers in"
            " the tests, and list the names that the code must define in the column entry_point",
        )
        return undefined
    unknown = [name for name in undefined if name not in names]
    _require(
        not unknown,
        f"{shown} uses {', '.join(unknown)}, which neither the tests nor the code must define:"
        " import it in the tests, or add it to the column entry_point"
        f" ({', '.join(sorted(names))})",
    )
    _require(bool(names & used), f"{shown} uses none of {', '.join(sorted(names))}")
    return sorted(names & used)


def find_undefined(script: str) -> set[str]:
    """Return the names that a script uses and neither defines nor imports.

    Python's own names are defined, and so is a module of the standard library in `math.sqrt`.
    """
    used, defined = _find_used(script), _find_defined(script)
    tree = _parse(script)
    bases = [id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bare = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases
    }
    modules = {name for name in used if name in sys.stdlib_module_names and name not in bare}
    python_names = {name for name in used if name in vars(builtins) or name.startswith("__")}
    return used - defined - modules - python_names


def _find_used(script: str) -> set[str]:
    symbols = _global_symbols(script)
    return {symbol.get_name() for symbol in symbols if symbol.is_referenced()}


def _find_defined(script: str) -> set[str]:
    symbols = _global_symbols(script)
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _global_symbols(script: str) -> Iterator[symtable.Symbol]:
    try:
        table = symtable.symtable(script, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnusableReward(f"tests: {script!r:.60} is not Python: {error}") from error
    waiting = [table]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        symbols = scope.get_symbols()
        yield from (symbol for symbol in symbols if scope is table or symbol.is_global())


# --- running them ---


def _pass_share(code: str | None, row: RowTests, limits: sandbox.SandboxLimits) -> float | None:
    """Return the fraction of tests that code passes; None without tests."""
    tests = row.listed
    if not tests:
        return None
    if code is None or not _compiles(code):
        return 0.0
    cases = [test | {"names": list(row.names), "source": 0} for test in tests]
    marks, broken = run_tests([code], cases, limits, limits.seconds / 2)
    _require(not broken, f"the tests {row.tests!r:.100} {describe_broken(broken)}")
    return marks.count("+") / len(tests)


def describe_broken(reasons: Sequence[str]) -> str:
    """Say why tests cannot run, whatever the code is."""
    return (
        f"cannot run with any code: {reasons[:1]}. They have Python's standard library only, and"
        " must not exit (as unittest.main does)"
    )


def run_tests(
    sources: Sequence[str],
    tests: Sequence[Mapping[str, Any]],
    limits: sandbox.SandboxLimits,
    each_s: float,
) -> tuple[str, list[str]]:
    """Return + or - for each test of one of the sources, and why tests are broken."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shared = {"channel": theirs.fileno(), "sources": list(sources), "seconds": each_s}
        code_side = _start("code_side", limits, shared, theirs)
        theirs.close()
        try:
            shared = {"channel": ours.fileno(), "tests": list(tests), "seconds": each_s}
            verdict = _start("test_side", limits, shared, ours).wait().output
        finally:
            code_side.kill()
    marks, *broken = verdict.split("\n")
    # A sandbox that could not start prints the reason instead of marks.
    require(not marks.strip("+-"), f"Could not run the tests: {verdict[-200:]}")
    return marks, broken


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
