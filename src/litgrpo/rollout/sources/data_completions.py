"""Distillation on completions of the data, in a part of the iterations (GKD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import did_you_mean, require
from litgrpo.data.modules import SourceData
from litgrpo.data.prompts import PromptSet
from litgrpo.data.tokenization import encode_pieces, tokenize
from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import PURPOSES
from litgrpo.rollout.sources.base import RolloutSource
from litgrpo.run_options import RunOptions
from litgrpo.types import FROM_DATA, PromptBatch, Rollout, Stats, pad_rows


@check_field_types
@dataclass
class DataCompletions(RolloutSource):
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
    provenance = FROM_DATA
    fixed_shapes = False

    def __post_init__(self) -> None:
        if not 0 <= self.on_policy_frac < 1:
            raise ValueError(
                f"model.source.on_policy_frac is {self.on_policy_frac}; it must be from "
                "0 to below 1. If every iteration is to sample, leave out model.source."
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
                f"model.source.column is {self.column!r}, but the training data have no "
                f"such column{did_you_mean(self.column, columns)}; they have "
                f"{', '.join(sorted(columns))}."
            )
        for number, value in enumerate(columns[self.column]):
            if not isinstance(value, str) or not value.strip():
                raise ValueError(
                    f"model.source.column is {self.column!r}, whose value {number} is "
                    f"{value!r:.60}; expected the text of a completion."
                )

    def check(self, run: RunOptions) -> None:
        """Check that a run can train on completions that the policy did not sample.

        Raises:
            ValueError: rewards or estimates need sampled completions, or another option does.
        """
        objective, sampling = run.objective, run.sampling
        needed = {
            "model.objective.reward_coef to 0, because there is nothing to compare data with": (
                objective.reward_coef != 0
            ),
            "model.objective.kl_estimator to reverse_kl, forward_kl or jsd, because estimates need "
            "tokens that the policy sampled": objective.divergence is None,
            "model.group_size to 1, because the data have one completion per prompt": (
                run.group_size != 1
            ),
            "model.sampling.top_k, top_p and min_p to 0, 1.0 and 0.0, because tokens of the data "
            "need not be candidates": sampling.has_filters,
            "model.objective.kl_in_reward to null": objective.kl_in_reward is not None,
            "model.objective.positive_nll to null": objective.positive_nll is not None,
            "model.objective.advantages to Normalized": objective.advantages.needs_greedy,
            "model.environment to null": run.environment is not None,
            "model.dynamic_sampling_attempts to 0": run.dynamic_sampling_attempts != 0,
        }
        for remedy, unmet in needed.items():
            require(
                not unmet, f"model.source is DataCompletions: set {remedy}, or leave out the source"
            )

    def setup(self, module: Any) -> None:
        """Check that the training data have the completions.

        Raises:
            ValueError: a completion is missing, or a curriculum needs the success of the policy.
        """
        data = module.trainer.datamodule
        if not isinstance(data, SourceData):
            return
        rows = data.sets["train"]
        if isinstance(rows, PromptSet):
            self.check_columns(rows.columns)
        require(
            getattr(data, "curriculum", None) is None,
            "model.source is DataCompletions, but data.curriculum follows the success of sampled "
            "completions. Leave out one of the two.",
        )

    def take(self, prompts: PromptBatch, iteration: int) -> Rollout:
        """Sample, or return the completions of the data as a rollout of one per prompt.

        Log-probabilities of data are those of the policy before the update, as if it had sampled
        them. A completion that is longer than the limit is cut and counts as truncated.

        Raises:
            ValueError: a completion is missing.
        """
        rollouter = self.parts.rollouter
        if self.is_on_policy(rollouter.seed, iteration):
            return rollouter.generate(prompts, "train", iteration)
        self.check_columns(prompts.columns)
        policy, limit = rollouter.policy, rollouter.max_completion_length
        with rollouter.clock.phase("time/logprobs_s"):
            completions, end_id = prompts.columns[self.column], self.parts.find_end_token()
            rows = encode_completions(prompts.prompts, completions, policy, end_id)
            cut, device = [ids[:limit] for ids in rows], prompts.prompt_ids.device
            ids = pad_rows(cut, policy.pad_id, torch.long, device)
            lengths = torch.tensor([len(tokens) for tokens in cut], device=device)
            rollout = Rollout(
                prompts=prompts,
                group_size=1,
                completion_ids=ids,
                completion_mask=torch.arange(ids.shape[1], device=device) < lengths[:, None],
                sampler_logprobs=torch.zeros(ids.shape, device=device),
                truncated=torch.tensor([len(tokens) > limit for tokens in rows], device=device),
                completions=policy.completion_texts(cut, [end_id]),
                policy_version=iteration,
                provenance=self.provenance,
            )
            return self.parts.add_policy_logprobs(rollout)

    def stats(self, rollout: Rollout, iteration: int) -> Stats:
        """Return whether the completions were sampled."""
        return {"data/on_policy": torch.tensor(float(rollout.provenance != self.provenance))}


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
        rows = tokenize(tokenizer, list(completions))
    else:
        pairs = [list(pair) for pair in zip(prompts, completions, strict=True)]
        rows = [ids for _, ids in encode_pieces(pairs, tokenizer)]
    return [ids if ids[-1:] == [end_id] else [*ids, end_id] for ids in rows]
