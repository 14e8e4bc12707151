"""Data: from any source to batches of prompts or pairs, in an order that resumes exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
# {module: its public names}, imported when they are first used, so that pure modules such as
# `data.messages` do not wait for torch.
_PUBLIC_BY_MODULE = {
    "modules": ("PairData", "PromptData"),
    "openreward_tasks": ("OpenRewardTasks",),
    "pairs": ("PairBatch",),
    "rendering": ("Chat",),
    "sources": ("EpisodePrompts", "GeneratedSource", "ReasoningGym", "Source"),
    "verifiers_tasks": ("VerifiersTasks",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"litgrpo.data.{_MODULE_OF[name]}"), name)
