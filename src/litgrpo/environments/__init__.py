"""Environments for multi-turn episodes: tools, games, and adapters for other libraries."""

from litgrpo.environments.adapters.gymnasium_env import TextEnv
from litgrpo.environments.adapters.openenv import OpenEnv
from litgrpo.environments.adapters.openreward import OpenReward
from litgrpo.environments.adapters.skyrl import SkyRL
from litgrpo.environments.adapters.textarena import TextArena
from litgrpo.environments.adapters.verifiers_env import Verifiers
from litgrpo.environments.agent import Agent
from litgrpo.environments.base import Environment, Message, StepResult
from litgrpo.environments.task_environments import TaskEnvironments
from litgrpo.environments.tool import EpisodeError
from litgrpo.environments.tool_calls import HermesFormat, PythonFormat, TagFormat
from litgrpo.environments.tools import Tools

__all__ = [
    "Agent",
    "Environment",
    "EpisodeError",
    "HermesFormat",
    "Message",
    "OpenEnv",
    "OpenReward",
    "PythonFormat",
    "SkyRL",
    "StepResult",
    "TagFormat",
    "TaskEnvironments",
    "TextArena",
    "TextEnv",
    "Tools",
    "Verifiers",
]
