"""Distillation on completions of the data, in a part of the iterations (GKD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import did_you_mean
from litgrpo.data.tokenization import encode_pieces, tokenize
from litgrpo.learning.learner import Learner
from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import PURPOSES
from litgrpo.types import PromptBatch, Rollout


@check_field_types
@dataclass(frozen=True)
class DataCompletions:
    """Completions of the data, which some iterations train on in place of sampled ones.

    Each iteration is on-policy with probability `on_policy_frac`; the others learn from the teacher
    at the tokens of the data. The choice depends on seed and iteration alone. Source: GKD,
    arXiv:2306.13649, algorithm 1.

    Args:
        column: column of the training prompts with the completions, texts.
        on_policy_frac: probability that an iteration samples its completions (GKD: lambda; TRL:
            lmbda); 0: all iterations train on the data.

    Example:
        >>> given = DataCompletions(column="solution", on_policy_frac=0.5)
        >>> [given.is_on_policy(seed=0, iteration=n) for n in range(4)]
        [False, True, True, False]
    """

    column: str
    on_policy_frac: float = 0.5

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.on_policy_frac < 1:
            raise ValueError(
                f"model.data_completions.on_policy_frac is {self.on_policy_frac}; it must be from "
                "0 to below 1. If every iteration is to sample, leave out model.data_completions."
            )

    def is_on_policy(self, seed: int, iteration: int) -> bool:
        """Return True if an iteration samples; equal on all ranks, and after a resume.

        Args:
            seed: of the run.
            iteration: number of finished iterations.
        """
        # The key differs from those of `draw_uniforms` and of `episode_seed`.
        key = np.array([seed, 2 * len(PURPOSES)], dtype=np.uint64)
        counter = np.array([0, 0, iteration, 0], dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key, counter=counter)).random()
        return bool(drawn < self.on_policy_frac)

    def check_columns(self, columns: dict[str, list[Any]]) -> None:
        """Check that every prompt has a completion.

        Args:
            columns: {name: one value per prompt} of the data.

        Raises:
            ValueError: there is no such column, or a value is not a text.
        """
        if self.column not in columns:
            raise ValueError(
                f"model.data_completions.column is {self.column!r}, but the training data have no "
                f"such column{did_you_mean(self.column, columns)}; they have "
                f"{', '.join(sorted(columns))}."
            )
        for number, value in enumerate(columns[self.column]):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f"model.data_completions.column is {self.column!r}, whose value {number} is "
                    f"{value!r:.60}; expected the text of a completion."
                )

    def read_rollout(
        self, prompts: PromptBatch, learner: Learner, end_id: int, iteration: int
    ) -> Rollout:
        """Return the completions of the data as a rollout of one completion per prompt.

        Log-probabilities are those of the policy before the update, as if it had sampled them. A
        completion that is longer than the limit is cut and counts as truncated.

        Args:
            prompts: B prompts.
            learner: has the policy and the limit on the tokens of a completion.
            end_id: token that ends a completion.
            iteration: number of finished iterations.

        Raises:
            ValueError: a completion is missing.
        """
        self.check_columns(prompts.columns)
        policy, limit = learner.policy, learner.max_completion_length
        rows = encode_completions(prompts.prompts, prompts.columns[self.column], policy, end_id)
        cut = [ids[:limit] for ids in rows]
        shape, device = (len(cut), max(map(len, cut))), prompts.prompt_ids.device
        ids = torch.full(shape, policy.pad_id)
        for row, tokens in enumerate(cut):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in cut])
        mask = (torch.arange(shape[1]) < lengths[:, None]).to(device)
        rollout = Rollout(
            prompts=prompts,
            group_size=1,
            completion_ids=ids.to(device),
            completion_mask=mask,
            sampler_logprobs=torch.zeros(shape, device=device),
            truncated=torch.tensor([len(tokens) > limit for tokens in rows], device=device),
            completions=policy.completion_texts(cut, [end_id]),
            policy_version=iteration,
        )
        return learner.add_policy_logprobs(rollout)


def encode_completions(
    prompts: Sequence[str], completions: Sequence[str], policy: Policy, end_id: int
) -> list[list[int]]:
    """Return the token ids of completions, each with one end token.

    They begin after the tokens of the prompt, as in generation: no token spans the boundary.

    Args:
        prompts: B rendered prompts.
        completions: B texts.
        policy: has the tokenizer.
        end_id: token that ends a completion.
    """
    tokenizer = policy.tokenizer
    if policy.bare_model.config.is_encoder_decoder:  # the decoder does not see the prompt
        rows = tokenize(tokenizer, list(completions), add_special_tokens=False)
    else:
        pairs = [list(pair) for pair in zip(prompts, completions, strict=True)]
        rows = [ids for _, ids in encode_pieces(pairs, tokenizer)]
    return [ids if ids[-1:] == [end_id] else [*ids, end_id] for ids in rows]
