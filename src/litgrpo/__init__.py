"""GRPO for language models as a LightningModule.

The names below are the public API. They are imported when they are first used, so that `import
litgrpo`, and worker processes of reward functions, do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from litgrpo.algorithms.advantages import Normalized
    from litgrpo.algorithms.correction import ImportanceCorrection
    from litgrpo.algorithms.objective import Objective
    from litgrpo.algorithms.surrogates import Clipped
    from litgrpo.callbacks.adaptive import EntropyTarget, KLTarget, ReferenceSync
    from litgrpo.callbacks.progress import Progress
    from litgrpo.callbacks.rollouts import SaveRollouts
    from litgrpo.data.modules import PairData, PromptData
    from litgrpo.data.rendering import Chat
    from litgrpo.data.sources import Source
    from litgrpo.environments.tools import Tools
    from litgrpo.evaluation.evaluator import Evaluation
    from litgrpo.evaluation.metrics import DialogueScores
    from litgrpo.learning.optim import WarmupCosine, WarmupLinear
    from litgrpo.learning.steppers import PlainStepper
    from litgrpo.learning.update_config import UpdateConfig
    from litgrpo.models.adapters import LoRA
    from litgrpo.models.loading.export import export
    from litgrpo.models.loading.load import Precision
    from litgrpo.models.loading.scratch import Scratch
    from litgrpo.modules.grpo import GRPO
    from litgrpo.modules.sft import SFT
    from litgrpo.rewards.llm_judge import LLMJudge
    from litgrpo.rewards.reward import Reward
    from litgrpo.rewards.reward_model import RewardModel
    from litgrpo.rewards.rubric import Criterion, Rubric
    from litgrpo.rollout.engines.local import LocalEngine
    from litgrpo.rollout.engines.static import StaticEngine
    from litgrpo.rollout.episodes import EpisodeSettings
    from litgrpo.rollout.sampling import Sampling
    from litgrpo.rollout.servers.vllm import ColocatedEngine, ServerEngine
    from litgrpo.rollout.sources.ahead import Ahead, InFlight
    from litgrpo.rollout.sources.base import OnPolicy
    from litgrpo.rollout.sources.data_completions import DataCompletions
    from litgrpo.rollout.sources.stored import StoredRollouts
    from litgrpo.runs.summary import Summary
    from litgrpo.types import PromptBatch

__version__ = "0.2.0"
# {module: its public names}
_PUBLIC_BY_MODULE = {
    "algorithms.advantages": ("Normalized",),
    "algorithms.correction": ("ImportanceCorrection",),
    "algorithms.objective": ("Objective",),
    "algorithms.surrogates": ("Clipped",),
    "callbacks.adaptive": ("EntropyTarget", "KLTarget", "ReferenceSync"),
    "callbacks.progress": ("Progress",),
    "callbacks.rollouts": ("SaveRollouts",),
    "data.modules": ("PairData", "PromptData"),
    "data.rendering": ("Chat",),
    "data.sources": ("Source",),
    "environments.tools": ("Tools",),
    "evaluation.evaluator": ("Evaluation",),
    "evaluation.metrics": ("DialogueScores",),
    "learning.optim": ("WarmupCosine", "WarmupLinear"),
    "learning.steppers": ("PlainStepper",),
    "learning.update_config": ("UpdateConfig",),
    "models.adapters": ("LoRA",),
    "models.loading.export": ("export",),
    "models.loading.load": ("Precision",),
    "models.loading.scratch": ("Scratch",),
    "modules.grpo": ("GRPO",),
    "modules.sft": ("SFT",),
    "rewards.llm_judge": ("LLMJudge",),
    "rewards.reward": ("Reward",),
    "rewards.reward_model": ("RewardModel",),
    "rewards.rubric": ("Criterion", "Rubric"),
    "rollout.engines.local": ("LocalEngine",),
    "rollout.engines.static": ("StaticEngine",),
    "rollout.episodes": ("EpisodeSettings",),
    "rollout.sampling": ("Sampling",),
    "rollout.sources.ahead": ("Ahead", "InFlight"),
    "rollout.sources.base": ("OnPolicy",),
    "rollout.sources.data_completions": ("DataCompletions",),
    "rollout.sources.stored": ("StoredRollouts",),
    "rollout.servers.vllm": ("ColocatedEngine", "ServerEngine"),
    "runs.summary": ("Summary",),
    "types": ("PromptBatch",),
}
PUBLIC = {
    name: f"litgrpo.{module}" for module, names in _PUBLIC_BY_MODULE.items() for name in names
}
__all__ = [
    "GRPO",
    "SFT",
    "Ahead",
    "Chat",
    "Clipped",
    "ColocatedEngine",
    "Criterion",
    "DataCompletions",
    "DialogueScores",
    "EntropyTarget",
    "EpisodeSettings",
    "Evaluation",
    "ImportanceCorrection",
    "InFlight",
    "KLTarget",
    "LLMJudge",
    "LoRA",
    "LocalEngine",
    "Normalized",
    "Objective",
    "OnPolicy",
    "PairData",
    "PlainStepper",
    "Precision",
    "Progress",
    "PromptBatch",
    "PromptData",
    "ReferenceSync",
    "Reward",
    "RewardModel",
    "Rubric",
    "Sampling",
    "SaveRollouts",
    "Scratch",
    "ServerEngine",
    "Source",
    "StaticEngine",
    "StoredRollouts",
    "Summary",
    "Tools",
    "UpdateConfig",
    "WarmupCosine",
    "WarmupLinear",
    "export",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)
