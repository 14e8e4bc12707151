"""From any source to batches of prompts or pairs that resume where they stopped."""

from litgrpo.data.pairs import PairBatch
from litgrpo.data.rendering import Chat
from litgrpo.data.sources import Source

__all__ = ["Chat", "PairBatch", "Source"]
