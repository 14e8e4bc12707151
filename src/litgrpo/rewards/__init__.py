r"""Reward functions, and what runs, weights and combines them.

Every built-in reward function can be named by `litgrpo.rewards.<name>`, such as
`litgrpo.rewards.correctness`. It returns N rewards; None abstains. Arguments that several of them
take, with values for N completions:

- `prompts`: N prompts, texts or lists of chat messages.
- `completions`: N completions, texts or lists of chat messages.
- `answer`: N reference answers: a number, its text, or a worked solution that ends in `#### 72` or
  `\boxed{72}`; or a list of these, any of which is correct. Rows without one (None, NaN, an empty
  text or list) are not scored.
- `answers`: N reference replies, or lists of them, of which the most similar counts.
- `prompt_texts`: N rendered prompts, if `prompts` are messages.
- `completion_ids`: N lists of token ids.
- `completion_lengths`: N lengths in tokens.
- `truncated`: N flags; True if the length limit cut the completion off.
- `group_size`: G, completions of a prompt; row r is in group r // G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litgrpo.arguments import import_by_path
from litgrpo.rewards.builtin.code import unit_tests
from litgrpo.rewards.builtin.dialogue import bleu, f1, lapdog, rouge_l
from litgrpo.rewards.builtin.diversity import distinct, group_diversity, repetition
from litgrpo.rewards.builtin.format import json_fields, reasoning_answer, think_format
from litgrpo.rewards.builtin.length import cosine_length, length, soft_overlong
from litgrpo.rewards.builtin.math import closeness, correctness, exact, gsm8k, math_verify
from litgrpo.rewards.builtin.quality import cheerful, explanation_quality, quality
from litgrpo.rewards.builtin.reasoning import (
    arithmetic,
    coherence,
    connectives,
    relevance,
    steps,
)
from litgrpo.rewards.builtin.reasoning_gym import reasoning_gym
from litgrpo.rewards.builtin.safety import safety
from litgrpo.rewards.calls import pure, whole_batch
from litgrpo.rewards.runner import RewardFailure
from litgrpo.rewards.scoring import Scoring

if TYPE_CHECKING:
    from litgrpo.rewards.llm_judge import LLMJudge
    from litgrpo.rewards.reward import Reward
    from litgrpo.rewards.reward_model import Judge, RewardModel
    from litgrpo.rewards.rubric import Criterion, Rubric
    from litgrpo.rewards.scorer import PendingRewards, Scorer

# {name: module} of the names whose modules import torch, which takes a second. They are imported
# on first use, because a worker process imports this package for a user's reward function that
# uses `pure` or `correctness`, and should start in a tenth of a second.
NEED_TORCH = {
    "Criterion": "rubric",
    "Judge": "reward_model",
    "LLMJudge": "llm_judge",
    "PendingRewards": "scorer",
    "Reward": "reward",
    "RewardModel": "reward_model",
    "Rubric": "rubric",
    "Scorer": "scorer",
}

__all__ = [
    "Criterion",
    "Judge",
    "LLMJudge",
    "PendingRewards",
    "Reward",
    "RewardFailure",
    "RewardModel",
    "Rubric",
    "Scorer",
    "Scoring",
    "arithmetic",
    "bleu",
    "cheerful",
    "closeness",
    "coherence",
    "connectives",
    "correctness",
    "cosine_length",
    "distinct",
    "exact",
    "explanation_quality",
    "f1",
    "group_diversity",
    "gsm8k",
    "json_fields",
    "lapdog",
    "length",
    "math_verify",
    "pure",
    "quality",
    "reasoning_answer",
    "reasoning_gym",
    "relevance",
    "repetition",
    "rouge_l",
    "safety",
    "soft_overlong",
    "steps",
    "think_format",
    "unit_tests",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    """Import a name that needs torch."""
    if name not in NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_by_path(f"litgrpo.rewards.{NEED_TORCH[name]}.{name}")
