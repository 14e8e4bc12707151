"""Prompts and pairs, from any source to batches that resume where they stopped."""

from litgrpo.data.pairs import PairBatch, PairData
from litgrpo.data.prompts import PromptData
from litgrpo.data.rendering import Chat
from litgrpo.data.sources import Source

__all__ = ["Chat", "PairBatch", "PairData", "PromptData", "Source"]
