"""Tasks of an OpenReward server (package openreward) as rows."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, import_package, require, summarize_error
from litgrpo.data.sources import GeneratedSource
from litgrpo.http import call_within
from litgrpo.types import TASK_DATA

KEY_VARIABLE = "OPENREWARD_API_KEY"
CALL_S = 300.0  # limit of a call of the package, which has none


@check_field_types
@dataclass(frozen=True)
class OpenRewardTasks(GeneratedSource):
    """Tasks of an OpenReward environment as rows: `prompt`, and `task_data` with the task.

    Each prompt is asked of a session of its task.

    Args:
        url: address of the environment's server, such as http://localhost:8080.
        environment: see `litgrpo.environments.OpenReward`; so is `variant`.
        split: of its tasks.
        limit: take only the first tasks.

    Example::

        OpenRewardTasks("http://localhost:8080", "sums", split="train", limit=500)
    """

    url: str
    environment: str
    split: str = "train"
    limit: int | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        at_least("limit of OpenRewardTasks", self.limit, 1)

    @property
    def name(self) -> str:
        return f"OpenRewardTasks({self.environment}, {self.split})"

    def rows(self) -> list[dict[str, Any]]:
        """Ask the server for the tasks and their prompts.

        Raises:
            ValueError: the server does not answer, or has no such environment or split.
        """
        api = import_package("openreward.api.environments.client", "openreward")
        with api.EnvironmentsAPI(self.url, os.environ.get(KEY_VARIABLE, "")) as client:
            try:
                get = partial(client.get, self.environment, variant=self.variant)
                server = call_within(CALL_S, get)
                list_tasks = partial(server.get_task_range, self.split, stop=self.limit)
                tasks = call_within(CALL_S, list_tasks)
                return [call_within(CALL_S, partial(_row, server, task)) for task in tasks]
            except Exception as error:  # aiohttp, openreward
                raise ValueError(f"{self.name}: {summarize_error(error)}") from error


def _row(server: Any, task: Any) -> dict[str, Any]:
    with server.session(task=task) as session:
        blocks = session.get_prompt()
    texts = [block.text for block in blocks if hasattr(block, "text")]
    require(len(texts) == len(blocks), "a prompt has an image; only texts can be trained on")
    return {"prompt": "\n".join(texts), TASK_DATA: json.dumps(asdict(task))}
