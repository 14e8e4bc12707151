"""Build what plays the multi-turn episodes of a GRPO run, and check its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from litgrpo.agents.episodes import AgentEpisodes
from litgrpo.arguments import find_page
from litgrpo.data.modules import SourceData
from litgrpo.data.rendering import build_prompt_format
from litgrpo.environments.agent import Agent
from litgrpo.environments.base import Environment, EpisodePool, schemas_of
from litgrpo.environments.tools import Tools
from litgrpo.environments.workers import episode_pool
from litgrpo.instantiate import instantiate_environment
from litgrpo.learning.steppers import is_attached
from litgrpo.models.limits import check_length
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.episodes import EpisodeRunner, Episodes, EpisodeSettings
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.turn_format import InlineFormat, TurnFormat, build_template_format
from litgrpo.types import PromptBatch


class EpisodeModule(Protocol):
    """The parts of GRPO that episodes need."""

    trainer: Any
    environment: Any
    max_completion_length: int
    sampling: Sampling


OWN_REWARD = "environment"  # name of the reward that the environment itself returns


def check_environment(
    environment: object | None,
    episode: EpisodeSettings,
    engine: RolloutEngine,
    rewards: Mapping[str, Any],
) -> object | None:
    """Return the environment, after checking it against the settings of episodes.

    Args:
        environment: an object, a description of one, or a list of functions for `Tools`.
        episode: limits of an episode.
        engine: generates.
        rewards: {name: Reward}.

    Raises:
        ValueError: the object is not an environment, the engine cannot generate episodes, or
            episodes are configured or rewarded without an environment.
    """
    if environment is None:
        if episode != EpisodeSettings():
            raise ValueError(
                "episode is set, but environment is not. Set environment: {class_path: "
                "litgrpo.environments.Tools, ...}."
            )
        check_own_reward(rewards)
        return None
    if isinstance(environment, list | tuple):
        environment = Tools(environment)
    environment = instantiate_environment(environment)
    if isinstance(environment, Agent):
        check_agent_settings(episode)
    elif not isinstance(environment, Environment):
        raise ValueError(
            f"environment is {environment!r:.80}, which has no `reset(row, seed)` or "
            f"`step(action)`; see {find_page('docs/reference/environments.md')}."
        )
    if "episodes" not in engine.allows:
        raise ValueError(
            f"{type(engine).__name__} does not support episodes: it cannot insert observations "
            "between generated tokens. Set engine: {class_path: LocalEngine}."
        )
    return environment


# Settings of observations that do not apply to the requests of an agent.
NOT_FOR_AGENTS = (
    *("max_observation_tokens", "max_observation_chars", "close_truncated_turns"),
    "on_timeout",
)


def check_agent_settings(episode: EpisodeSettings) -> None:
    """Check that only settings are given that have an effect on an agent.

    Raises:
        ValueError: another one is set.
    """
    defaults = EpisodeSettings()
    changed = [n for n in NOT_FOR_AGENTS if getattr(episode, n) != getattr(defaults, n)]
    if changed:
        raise ValueError(
            f"model.episode.{changed[0]} has no effect with litgrpo.environments.Agent: its "
            "requests are not cut, and its time limit always ends it. Leave it out."
        )
    if episode.num_workers == 0:
        raise ValueError(
            "model.episode.num_workers is 0; litgrpo.environments.Agent needs worker processes, "
            "because an agent waits while the policy generates. Set 1 or more, or leave it out."
        )


def check_own_reward(rewards: Mapping[str, Any]) -> None:
    """Check that the environment's own reward is not configured without an environment.

    Raises:
        ValueError: it is.
    """
    reward = rewards.get(OWN_REWARD)
    if reward is not None and not reward.function:
        raise ValueError(
            f"model.rewards.{OWN_REWARD} without a function is the environment's own reward, but "
            "model.environment is not set."
        )


def build_episodes(
    module: EpisodeModule, environment: Any, settings: EpisodeSettings, policy: Policy
) -> EpisodeRunner | None:
    """Build the player of episodes; None without an environment.

    Args:
        module: its data render prompts and observations.
        environment: is copied for each episode.
        settings: limits and format.
        policy: has the tokenizer and the end tokens.
    """
    if environment is None:
        return None
    if isinstance(environment, Agent):
        turn_format = _build_turn_format(module, settings, policy, has_tools=False)
        if policy.bare_model.config.is_encoder_decoder:
            raise ValueError(
                "litgrpo.environments.Agent needs a decoder-only model: an encoder reads only the "
                "first messages of a conversation."
            )
        return AgentEpisodes(environment, turn_format, settings)
    tools = [str(schema.get("function", schema)["name"]) for schema in schemas_of(environment)]
    pool = build_episode_pool(module, settings)
    turn_format = _build_turn_format(module, settings, policy, has_tools=bool(tools))
    return Episodes(pool, turn_format, settings, PromptOpener(module, settings, policy), tools)


def build_episode_pool(module: EpisodeModule, settings: EpisodeSettings) -> EpisodePool:
    """Build what runs many episodes concurrently."""
    return episode_pool(
        module.environment,
        num_workers=settings.num_workers,
        timeout_s=settings.timeout_s,
        on_timeout=settings.on_timeout,
        max_observation_chars=settings.max_observation_chars,
    )


class PromptOpener:
    """Tokenizes a prompt with what the environment adds to it at the start of an episode.

    Args:
        module: its data have the chat format.
        settings: of episodes.
        policy: has the tokenizer and the number of positions.
    """

    def __init__(self, module: EpisodeModule, settings: EpisodeSettings, policy: Policy) -> None:
        self.module, self.settings, self.policy = module, settings, policy
        self.longest = 0  # prompt so far; each new maximum is checked against the positions

    def __call__(self, prompts: PromptBatch, row: int, added: Any) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ValueError: the model has too few positions for prompt and completion.
        """
        ids = self._tokenize(prompts, row, added)
        if len(ids) > self.longest:
            self.longest = len(ids)
            what = f"A prompt has {len(ids)} tokens with what the environment adds at its start"
            completion = self.module.max_completion_length
            check_length(self.policy, len(ids), completion, "max_prompt_length", what)
        return ids

    def _tokenize(self, prompts: PromptBatch, row: int, added: Any) -> list[int]:
        split_special = self.settings.split_special_tokens
        data = _data_of(self.module)
        if data is not None:
            return data.encode_opening(prompts, row, added, split_special)
        if not isinstance(added, str):
            raise ValueError("The environment begins with messages: use litgrpo.PromptData.")
        encoder = bool(self.policy.bare_model.config.is_encoder_decoder)
        style = replace(build_prompt_format(None, False), encoder_decoder=encoder)
        return style.encode_opening(
            prompts.prompts[row], {}, added, self.policy.tokenizer, split_special
        )


def _data_of(module: EpisodeModule) -> SourceData | None:
    data = module.trainer.datamodule if is_attached(module) else None
    return data if isinstance(data, SourceData) else None


def _build_turn_format(
    module: EpisodeModule, settings: EpisodeSettings, policy: Policy, *, has_tools: bool
) -> TurnFormat:
    """Build the tokenizer of observations between turns.

    Raises:
        ValueError: the chat template cannot render observations, or the data have none.
    """
    if settings.turn_format == "inline":
        return InlineFormat(policy.tokenizer, settings.split_special_tokens)
    data = _data_of(module)
    if data is None or data.final_format is None:
        raise ValueError(
            "model.episode.turn_format is template, but the data have no chat format: use "
            "litgrpo.PromptData with chat: true, or set it to inline."
        )
    style, tokenizer = data.final_format
    return build_template_format(
        style,
        tokenizer,
        (*policy.eos_ids, *module.sampling.stop_token_ids),
        tool_role=settings.tool_role,
        tools=has_tools,
        split_special_tokens=settings.split_special_tokens,
    )
