"""Environments of the verifiers package (version 0.4, `verifiers.v1`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import import_package, require
from litgrpo.environments.adapters.external import construct
from litgrpo.environments.agent import Agent
from litgrpo.types import TASK_DATA

KEY_VARIABLE = "OPENAI_API_KEY"  # `Agent.run` sets it for each row


@check_field_types
@dataclass(eq=False)
class Verifiers(Agent):
    """Plays tasks of a verifiers environment: its harness is the agent, its score the reward.

    The rows come from `VerifiersTasks`. The environment's program calls the policy through the API
    of `Agent`, so the same tokens are trained on. Everything that is not about the policy is
    verifiers': harness, runtime, tool servers, judges. The environment must have one agent.

    Args:
        env: the `[env]` table of a verifiers configuration, such as `{taskset: {id: my-taskset},
            agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`. verifiers' default
            runtime is a cloud service.

    Example::

        Verifiers(env={"taskset": {"id": "my-taskset"}, "agent": {"runtime": {"type": "docker"}}})
    """

    env: dict[str, Any] = field(kw_only=True)
    function: Callable | str | None = field(init=False, default=None)
    command: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        # The environment is loaded once to check its settings.
        taskset = self.env.get("taskset")
        require(
            isinstance(taskset, dict) and isinstance(taskset.get("id"), str),
            f"env is {self.env!r}; it must have the id of an installed taskset, such as "
            "{taskset: {id: my-taskset}}.",
        )
        self.env_json = json.dumps(self.env)
        load_environment(self.env_json)
        self.function = functools.partial(play, self.env_json)
        super().__post_init__()


async def play(env_json: str, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Play a task and return its reward and the agent's last reply."""
    require(
        TASK_DATA in row, f"the data have no column {TASK_DATA!r}; `train` must be VerifiersTasks."
    )
    vf = import_package("verifiers.v1", "verifiers")
    environment = load_environment(env_json)
    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate_json(row[TASK_DATA])
    task = kind(data, environment.config.taskset.task)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
    async with environment.serving():
        episode = await environment.run_episode(
            task, vf.ModelContext(model="policy", client=client)
        )
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
        raise RuntimeError(" ".join(why.split())[:300])
    require(
        len(episode.traces) == 1,
        f"the environment ran {len(episode.traces)} agents; Verifiers trains one.",
    )
    (trace,) = episode.traces
    return {"reward": trace.reward, "completion": trace.last_reply}


@functools.cache
def load_environment(env_json: str) -> Any:
    """Load an environment from its settings, once per process."""
    vf = import_package("verifiers.v1", "verifiers")
    env = json.loads(env_json)

    def load() -> Any:
        kind = vf.env_config_type(env["taskset"]["id"], env.get("id", ""))
        return vf.load_environment(kind.model_validate(env))

    return construct(f"env {env_json}", load)
