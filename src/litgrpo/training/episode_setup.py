"""Builds what plays episodes from a recipe's settings, and refuses settings that contradict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litgrpo.arguments import require
from litgrpo.data.rendering import prompt_style
from litgrpo.data.source_data import SourceData
from litgrpo.environments.base import Environment, EpisodePool, schemas_of
from litgrpo.environments.response_log import ResponseLog
from litgrpo.environments.workers import episode_pool
from litgrpo.instantiate import given_environment
from litgrpo.models.limits import check_length
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.episodes import Episodes, EpisodeSettings
from litgrpo.rollout.turn_format import InlineFormat, TurnFormat, chat_turn_format
from litgrpo.training.trainer_adapters import is_attached
from litgrpo.types import PromptBatch

REWARD = "environment"  # name of the reward that is the environment's own


def checked(
    environment: object | None,
    episode: EpisodeSettings,
    engine: RolloutEngine,
    rewards: Mapping[str, Any],
) -> object | None:
    """The environment; refuses settings of episodes that contradict each other.

    Args:
        environment: it, or what `given_environment` makes it of.
        episode: limits.
        engine: samples.
        rewards: {name: Reward}.

    Raises:
        ValueError: the environment is none, or the engine cannot play it; episodes are set or
            rewarded without one.
    """
    if environment is None:
        require(
            episode == EpisodeSettings(),
            "episode is set, but there is no environment. Name one: environment: {class_path: "
            "litgrpo.environments.Tools, ...}.",
        )
        check_own_reward(rewards)
        return None
    environment = given_environment(environment)
    require(
        isinstance(environment, Environment),
        f"environment is {environment!r:.80}, which lacks `reset(row, seed)` or `step(said)`; see "
        "docs/environments.md.",
    )
    require(
        engine.supports_episodes,
        f"{type(engine).__name__} samples without turns: it cannot put what an environment answers "
        "between the tokens that it samples. Give engine: {class_path: LocalEngine}.",
    )
    return environment


def episodes_of(
    module: Any, environment: object | None, settings: EpisodeSettings, policy: Policy
) -> Episodes | None:
    """What plays the episodes of a GRPO; None without an environment.

    Args:
        module: whose data open the prompts.
        environment: the pattern.
        settings: limits.
        policy: says what end tokens are, and has the tokenizer.
    """
    if environment is None:
        return None
    tools = [str(each.get("function", each)["name"]) for each in schemas_of(environment)]

    longest = [0]  # so far

    def opener(prompts: PromptBatch, row: int, added: Any) -> list[int]:
        ids = opened(prompts, row, added)
        if len(ids) > longest[0]:
            longest[0], limit = len(ids), module.settings.max_completion_length
            said = f"A prompt has {len(ids)} tokens with what the environment adds at its start"
            check_length(policy, len(ids), limit, "max_prompt_length", said)
        return ids

    def opened(prompts: PromptBatch, row: int, added: Any) -> list[int]:
        data = module.trainer.datamodule if is_attached(module) else None
        if isinstance(data, SourceData):
            return data.opened(prompts, row, added, settings.split_special_tokens)
        require(isinstance(added, str), "the environment begins with messages: use PromptData")
        style, split = prompt_style(None, False), settings.split_special_tokens
        return style.opened(prompts.prompts[row], {}, added, policy.tokenizer, split)

    turn_format = bridge_of(module, settings, policy, bool(tools))
    return Episodes(pool_of(module, settings), turn_format, settings, opener, tools)


def check_own_reward(rewards: Mapping[str, Any]) -> None:
    """Refuse an environment's own reward where there is none.

    Args:
        rewards: {name: Reward}.
    """
    own = rewards.get(REWARD)
    require(
        own is None or bool(own.function),
        f"rewards.{REWARD} without a function is the environment's own reward, but there is no"
        " environment.",
    )


def pool_of(module: Any, settings: EpisodeSettings) -> EpisodePool:
    """What plays many episodes side by side."""
    response_log = None
    if settings.record_responses and is_attached(module):
        folder = Path(module.trainer.default_root_dir)
        response_log = ResponseLog(folder / "tool_responses", folder / "checkpoints")
    return episode_pool(
        module.settings.environment,
        workers=settings.workers,
        timeout_s=settings.timeout_s,
        on_timeout=settings.on_timeout,
        max_observation_chars=settings.max_observation_chars,
        response_log=response_log,
    )


def bridge_of(module: Any, settings: EpisodeSettings, policy: Policy, tools: bool) -> TurnFormat:
    """What stands between two turns.

    Args:
        module: whose data know the chat format.
        settings: which of the two it is.
        policy: has the tokenizer.
        tools: tools will answer.

    Raises:
        ValueError: the chat template cannot say it, or there is none.
    """
    if settings.turn_format == "inline":
        return InlineFormat(policy.tokenizer, settings.split_special_tokens)
    data: Any = module.trainer.datamodule if is_attached(module) else None
    require(
        isinstance(data, SourceData) and data.shown is not None,
        "episode.turn_format is template, but there are no data whose chat format says it: use "
        "litgrpo.PromptData with chat: true, or set it to inline.",
    )
    style, tokenizer = data.shown
    ends = (*policy.eos_ids, *module.settings.sampling.stop_token_ids)
    role, split = settings.tool_role, settings.split_special_tokens
    return chat_turn_format(
        style, tokenizer, ends, tool_role=role, tools=tools, split_special_tokens=split
    )


def close_episodes(module: Any) -> None:
    """End the episodes of a GRPO, and the processes that played them."""
    rollouter = vars(module).get("rollouter")
    if rollouter is not None and rollouter.episodes is not None:
        rollouter.episodes.pool.close()
