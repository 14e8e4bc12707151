"""What a rule is, and how one is named with the numbers that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from litgrpo.doctor.config import Config
from litgrpo.doctor.finding import Finding
from litgrpo.doctor.metrics import Metrics

Check = Callable[[Metrics, Sequence[dict[str, Any]], Config], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        check: the function; its name is the rule's.
        needs: numbers without which it cannot be checked.
        fine: what is said where it finds nothing.
        explains: rules whose findings are symptoms of this one's.
    """

    check: Check
    needs: tuple[str, ...]
    fine: str
    explains: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the rule, and of the section of docs/doctor.md."""
        return self.check.__name__

    def missing(self, metrics: Metrics) -> list[str]:
        """What it needs and was not logged."""
        return [name for name in self.needs if name not in metrics]
