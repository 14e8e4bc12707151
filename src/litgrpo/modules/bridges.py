"""What stands between the turns of a run: the chat template of its data, or texts as they are."""

from __future__ import annotations

from typing import Any

from litgrpo.data.rendering import PromptStyle, prompt_style
from litgrpo.environments.interface import schemas_of, shown_schemas_of
from litgrpo.models.policy import Policy
from litgrpo.modules.source_data import SourceData
from litgrpo.modules.trainer import is_attached
from litgrpo.rollout.bridge import Bridge, Inline
from litgrpo.rollout.bridge_proof import template_bridge
from litgrpo.rollout.episode_settings import EpisodeSettings


def bridge_of(
    module: Any, environment: object, settings: EpisodeSettings, policy: Policy
) -> Bridge:
    """What stands between two turns; a chat template is measured.

    Args:
        module: whose data show the prompts, and whose sampling may name more end tokens.
        environment: the pattern.
        settings: of episodes.
        policy: says what end tokens are, and has the tokenizer.

    Raises:
        ValueError: what the environment says cannot be written between turns.
    """
    if settings.between == "inline":
        return Inline(policy.tokenizer)
    ends = (*policy.eos_ids, *module.settings.sampling.stop_token_ids)
    return template_bridge(
        style_of(module, environment, policy),
        policy.tokenizer,
        ends,
        tool_role=settings.tool_role,
        tools=bool(schemas_of(environment)),
    )


def style_of(module: Any, environment: object, policy: Policy) -> PromptStyle:
    """How prompts are rendered: as the data say; in the chat format where no data are known."""
    data = module.trainer.datamodule if is_attached(module) else None
    if isinstance(data, SourceData) and data.shown is not None:
        return data.shown[0]
    return prompt_style(None, True).showing(shown_schemas_of(environment), policy.tokenizer)
