"""Comparison of formulas by math-verify, in a process with limits of time and memory.

Algebra can run forever and take any memory. The library's own time limits use signals, which work
in the main thread only and do not interrupt C code.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from litgrpo.rewards.worker_pool import FunctionPool
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.process import Send

MEMORY_BYTES = 1 << 30  # of one comparison
MAX_SLOW = 8  # comparisons of a call that reach the time limit; then it is a quarter
UNESCAPED_DOLLAR = re.compile(r"(?<!\\)\$")
# A power of a power of numbers, an exponent of four digits, and factorials of large numbers: what
# sympy would try to write down.
TOWER = re.compile(
    r"[0-9)}]\^\{?[-+(]*[0-9.]+[)}]*\^|[)}]\^\{?[0-9]+\}?[)}]+\^|\^\{?[^{}^]{0,99}[0-9]{4}"
    r"|\^\{[^{}^]{0,99}[0-9]\^|[0-9]{4}[)}]{0,9}!|[)}]!"
)


def is_tower(latex: str) -> bool:
    """Return True for a number that is too large to be written down.

    Example:
        >>> is_tower("9^{9^9}"), is_tower("x^{2n} + 2^{10}")
        (True, False)
    """
    return TOWER.search(re.sub(r"\\left|\\right|\\,|\s", "", latex)) is not None


class Library:
    """Imports math-verify where it is unpickled: in the process that forks the workers."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Load the library instead of a copy of this object."""
        return load_library, ()


def load_library() -> Any:
    """Import math-verify and parse a formula, which builds its grammar."""
    import math_verify as library

    # It warns of disabled timeouts, once for every answer.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = library.parse("$x+1$", parsing_timeout=None)
    library.verify(formula, formula, timeout_seconds=None)
    return library


def compare_in_worker(
    loaded: dict[str, Any], message: tuple[str, str | None], send: Send
) -> bool | None:
    """Return True if a claim equals the reference; None if the reference cannot be parsed."""
    import resource  # not on Windows, where there are no workers

    (library,) = loaded["library"]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    reference, claim = message
    try:
        expected = _parse(library, reference)
        if not expected or claim is None:
            return None if not expected else True
        found = _parse(library, claim)
        return bool(found) and bool(library.verify(expected, found, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def _parse(library: Any, text: str) -> Any:
    """Return math-verify's parse of a text; empty if it finds nothing."""
    dollars = len(UNESCAPED_DOLLAR.findall(text))
    if dollars % 2:  # a price, no formula between dollars
        text = UNESCAPED_DOLLAR.sub(r"\\$", text)
    formula = text if (dollars and not dollars % 2) or "\\boxed" in text else f"${text}$"
    return library.parse(formula, parsing_timeout=None)


class SymbolicComparison:
    r"""Compares formulas one after the other; those that take too long are not equal.

    Args:
        timeout_s: seconds for one comparison.

    Example::

        comparison = SymbolicComparison(timeout_s=2.0)
        comparison.equal(r"\frac{x + 2}{2}", r"\frac{x}{2} + 1")  # True
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.num_slow = timeout_s, 0
        _pool.kill_busy()
        _pool.register({"library": (_library,)})

    def equal(self, reference: str, claim: str | None) -> bool | None:
        """Return True if they are equal; None if the reference cannot be parsed."""
        worker = _pool.take()
        if worker is None:
            failed = next(iter(_pool.failed.values()), None)
            raise RuntimeError(f"Could not start math-verify: {failed or _pool.troubles}")
        limit_s = self.timeout_s / (4 if self.num_slow >= MAX_SLOW else 1)
        worker.send((reference, claim), limit_s)
        while True:
            for _, answer, is_last in _pool.receive(wait=True):
                if isinstance(answer, WorkerError):
                    self.num_slow += 1
                    return False
                if is_last:
                    return None if answer is None else bool(answer)


_library = Library()
_pool = FunctionPool(1, "litgrpo.rewards.builtin.symbolic:compare_in_worker")
lock = threading.Lock()  # of the pool
