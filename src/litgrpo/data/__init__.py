"""Data: from any source to batches of prompts or pairs, in an order that resumes exactly."""

from litgrpo.data.modules import PairData, PromptData
from litgrpo.data.openreward_tasks import OpenRewardTasks
from litgrpo.data.pairs import PairBatch
from litgrpo.data.rendering import Chat
from litgrpo.data.sources import EpisodePrompts, GeneratedSource, ReasoningGym, Source
from litgrpo.data.verifiers_tasks import VerifiersTasks

__all__ = [
    "Chat",
    "EpisodePrompts",
    "GeneratedSource",
    "OpenRewardTasks",
    "PairBatch",
    "PairData",
    "PromptData",
    "ReasoningGym",
    "Source",
    "VerifiersTasks",
]
