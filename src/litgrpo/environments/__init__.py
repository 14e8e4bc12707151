"""What answers the policy between its turns: tools, games, and environments of other libraries."""

from litgrpo.environments.calls import Hermes, Python, Tags
from litgrpo.environments.interface import Environment, Heard, Message
from litgrpo.environments.tools import Tools

__all__ = ["Environment", "Heard", "Hermes", "Message", "Python", "Tags", "Tools"]
