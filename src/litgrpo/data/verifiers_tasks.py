"""Tasks of the verifiers package (version 0.4, `verifiers.v1`) as rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import import_package, require, summarize_error
from litgrpo.data.sources import GeneratedSource
from litgrpo.types import TASK_DATA


@check_field_types
@dataclass(frozen=True)
class VerifiersTasks(GeneratedSource):
    """Tasks of a verifiers taskset as rows: `prompt`, and `task_data` with all data of the task.

    Args:
        taskset: the `[env.taskset]` table, such as `{id: my-taskset, split: train}`.
        select: the `[select]` table: `limit`, `skip`, `shuffle`, `seed`, `include`, `exclude`.

    Example::

        VerifiersTasks({"id": "my-taskset"}, select={"limit": 500})
    """

    taskset: dict[str, Any]
    select: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        identifier = self.taskset.get("id")
        require(
            isinstance(identifier, str) and bool(identifier),
            f"taskset is {self.taskset!r}; it must have the id of an installed taskset, such as "
            "{id: my-taskset}.",
        )

    @property
    def name(self) -> str:
        return f"VerifiersTasks({self.taskset['id']})"

    def rows(self) -> list[dict[str, Any]]:
        """Load the tasks.

        Raises:
            ValueError: there is no such taskset, a setting is wrong, or it has no end and `select`
                has no `limit`.
        """
        vf = import_package("verifiers.v1", "verifiers")
        try:
            kind = vf.taskset_config_type(self.taskset["id"])
            taskset = vf.load_taskset(kind.model_validate(self.taskset))
            tasks = taskset.select(vf.SelectConfig(**self.select))
        except Exception as error:  # a taskset's module may raise anything
            raise ValueError(f"{self.name}: {summarize_error(error)}") from error
        require(
            tasks.bounded, f"{self.name} has no end; give select: {{limit: 500}} or another limit."
        )
        return [_row(task.data) for task in tasks]


def _row(data: Any) -> dict[str, Any]:
    prompt = data.prompt_text or data.name or data.description or f"task {data.idx}"
    return {"prompt": prompt, TASK_DATA: data.model_dump_json(exclude_none=True)}
