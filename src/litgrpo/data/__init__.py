"""From any source to batches of prompts or pairs that resume where they stopped."""

from litgrpo.data.episodes import EpisodePrompts
from litgrpo.data.pairs import PairBatch
from litgrpo.data.reasoning_gym import ReasoningGym
from litgrpo.data.rendering import Chat
from litgrpo.data.sources import Source

__all__ = ["Chat", "EpisodePrompts", "PairBatch", "ReasoningGym", "Source"]
