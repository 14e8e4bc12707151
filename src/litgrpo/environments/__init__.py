"""What answers the policy between its turns: tools, games, and environments of other libraries."""

from litgrpo.environments.calls import Hermes, Python, Tags
from litgrpo.environments.interface import Environment, Heard, Message
from litgrpo.environments.openenv import OpenEnv
from litgrpo.environments.skyrl import SkyRL
from litgrpo.environments.text import Text
from litgrpo.environments.textarena import TextArena
from litgrpo.environments.tools import Tools

__all__ = [
    "Environment",
    "Heard",
    "Hermes",
    "Message",
    "OpenEnv",
    "Python",
    "SkyRL",
    "Tags",
    "Text",
    "TextArena",
    "Tools",
]
