"""What answers the policy between its turns: tools, games, and environments of other libraries."""

from litgrpo.environments.interface import Environment, Heard, Message

__all__ = ["Environment", "Heard", "Message"]
