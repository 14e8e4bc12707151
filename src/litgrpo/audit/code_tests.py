"""Run the tests of code rewards on code that does nothing, and on reference solutions.

Tests that judge all code the same rank nothing, and tests that a correct program fails punish it.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from litgrpo.audit.score import evenly
from litgrpo.rewards import Reward
from litgrpo.rewards.builtin.code import (
    RowTests,
    describe_broken,
    extract_code,
    read_tests,
    require_sandbox,
    run_tests,
    unit_tests,
)
from litgrpo.workers.sandbox import SandboxLimits

NUM_RUN = 64  # rows whose tests are run, evenly spread
REFERENCE = "reference_solution"


def find_test_faults(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a fault for each way in which tests do not separate correct code from other.

    Args:
        reward: `unit_tests` with its kwargs.
        rows: columns of the data.

    Raises:
        UnusableReward: there is no sandbox, or the tests of a row cannot be read.
    """
    require_sandbox()
    limits = {**(unit_tests.__kwdefaults__ or {}), **reward.kwargs}
    pairs = dict.fromkeys(
        (read_tests(row.get("tests"), row.get("entry_point")), row.get(REFERENCE)) for row in rows
    )
    judged = evenly([pair for pair in pairs if pair[0].tests], NUM_RUN)

    def faults_of(pair: tuple[RowTests, str | None]) -> list[tuple[str, str]]:
        return list(try_row(*pair, limits["timeout_s"], limits["memory_mib"]))

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        faults = [fault for of_row in threads.map(faults_of, judged) for fault in of_row]
    counts, examples = Counter(reason for reason, _ in faults), dict(reversed(faults))
    return [
        f"tests of {count} of {len(judged)} rows, such as {examples[reason]}: {reason}"
        for reason, count in counts.items()
    ]


def try_row(
    row: RowTests, reference: str | None, timeout_s: float, memory_mib: int
) -> Iterator[tuple[str, str]]:
    """Run the tests of a row on several programs; yield (fault, example).

    Args:
        row: its tests.
        reference: a completion that must pass them; None without one.
        timeout_s: seconds for all tests of a program together.
        memory_mib: memory limit of a program.
    """
    programs = {"empty code": ""}
    if row.names:
        stubs = [f"def {name}(*args, **kwargs): pass" for name in row.names]
        programs["functions that return nothing"] = "\n".join(stubs)
    if reference is not None:
        programs[REFERENCE] = extract_code(reference) or ""
    # Imports that the tests may not reach are tried as well.
    imports = [{"script": text} for test in row.listed for text in find_imports(test)]
    cases = [
        test | {"names": list(row.names), "source": number}
        for number in range(len(programs))
        for test in [*row.listed, *(imports if number == 0 else [])]
    ]
    limits = SandboxLimits(seconds=timeout_s * (1 + len(programs)), memory_mib=memory_mib)
    marks, broken = run_tests(list(programs.values()), cases, limits, timeout_s / 2)
    tests, count = f"{row.tests:.100}", len(row.listed)
    if broken:
        yield f"they {describe_broken(broken)}", tests
        return
    for number, name in enumerate(programs):
        positions = [n for n, case in enumerate(cases) if case["source"] == number][:count]
        passed = sum(marks[n : n + 1] == "+" for n in positions)
        if name == REFERENCE and passed < count:
            example = f"{tests} ({passed} of {count}; one test may take {timeout_s / 2:g} s)"
            yield f"the {REFERENCE} does not pass all of them", example
        if name != REFERENCE and passed == count:
            yield f"{name} would pass all of them", tests


def find_imports(test: Mapping[str, Any]) -> list[str]:
    """Return the import statements of a test, without those that `try` may skip."""
    waiting: list[ast.AST] = [ast.parse(test.get("script", ""))]
    statements = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append(ast.unparse(node))
        elif not isinstance(node, ast.Try):
            waiting += ast.iter_child_nodes(node)
    return list(dict.fromkeys(statements))
