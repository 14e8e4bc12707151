"""Problems of the package reasoning-gym as a source."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from litgrpo.arguments import above, at_least, did_you_mean, require
from litgrpo.data.mixing import quotas
from litgrpo.data.sources import GeneratedSource
from litgrpo.workers.sandbox.wire import dumps

INSTALL = "needs `pip install reasoning-gym` (or `pip install litgrpo[reasoning_gym]`)"


@dataclass(frozen=True)
class ReasoningGym(GeneratedSource):
    """Problems of reasoning-gym, made when they are read: the same ones for the same arguments.

    Rows have `prompt`, `answer` (None where a task has no single one), `task`, and `metadata`, the
    whole entry as text, by which `litgrpo.rewards.reasoning_gym` scores.

    Args:
        tasks: {name: weight}: shares of the rows, such as `{countdown: 2, leg_counting: 1}`.
        size: rows of all tasks together.
        seed: of the problems. In nearly all tasks problem n is made from `seed + n`: for other
            problems take a seed further away than `size`.
        configs: {name: {setting: value}} of the tasks, such as `{countdown: {max_numbers: 4}}`.
    """

    tasks: dict[str, float]
    size: int = 500
    seed: int = 0
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what can give no rows."""
        require(bool(self.tasks), "tasks of ReasoningGym are {}; give `{countdown: 1}` or others")
        at_least("size of ReasoningGym", self.size, len(self.tasks))
        for name, weight in self.tasks.items():
            above(f"weight of task {name!r}", weight, 0)
        for name in self.configs:
            hint = f"; the tasks are {', '.join(self.tasks)}"
            require(name in self.tasks, f"configs of ReasoningGym name {name!r}{hint}")

    @property
    def name(self) -> str:
        """For messages."""
        return f"ReasoningGym(seed {self.seed})"

    def rows(self) -> list[dict[str, Any]]:
        """The rows: tasks spread evenly, each in its own order.

        Raises:
            ValueError: the package is absent, or it has no such task or setting.
        """
        library = imported()
        known = sorted(library.factory.DATASETS)
        for name in self.tasks:
            hint = did_you_mean(name, known)
            require(name in known, f"reasoning-gym has no task {name!r}{hint}; it has {len(known)}")
        placed = []
        counts = quotas(self.size, list(self.tasks.values()))
        for number, (name, count) in enumerate(zip(self.tasks, counts, strict=True)):
            rows = self._of(library, name, count)
            placed += [((n + 0.5) / count, number, row) for n, row in enumerate(rows)]
        return [row for _, _, row in sorted(placed, key=lambda one: one[:2])]

    def _of(self, library: ModuleType, name: str, count: int) -> list[dict[str, Any]]:
        """The rows of a task; what it draws from the global generator leaves no trace."""
        state = random.getstate()
        try:
            given = {"seed": self.seed, "size": max(count, 1), **self.configs.get(name, {})}
            try:
                entries = library.create_dataset(name, **given)
                return [row_of(name, entries[n]) for n in range(count)]
            except (TypeError, ValueError, AssertionError) as error:
                raise ValueError(f"reasoning-gym, task {name!r}: {error}") from error
        finally:
            random.setstate(state)


def row_of(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A row of an entry of reasoning-gym."""
    answer = entry["answer"]
    return {
        "prompt": str(entry["question"]),
        "answer": None if answer is None else str(answer),
        "task": name,
        "metadata": dumps(entry),
    }


def imported() -> ModuleType:
    """The package, which takes a second to import.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"litgrpo.data.ReasoningGym {INSTALL}: {error}") from error
    import reasoning_gym.factory

    return reasoning_gym
