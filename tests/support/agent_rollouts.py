"""Rollouts of the agents of `tests.support.agents`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from litgrpo.agents.episodes import AgentEpisodes
from litgrpo.data.rendering import Chat
from litgrpo.environments.agent import Agent
from litgrpo.models.loading.load import build_policy
from litgrpo.rollout.chat_format import ChatFormat
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings, RolloutKey
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.turn_format import InlineFormat, TemplateFormat
from litgrpo.types import Rollout
from tests.support.chat_templates import merging_tokenizer
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.turns_support import ending

GROUP, LENGTH = 2, 64
KEY = RolloutKey(0, "train", 0, 0)


def agent_episodes(agent=None, encoder=None, **settings):
    """Episodes of at most eight replies of eight tokens; the default agent is named by rows."""
    given = {"max_turns": 8, "max_turn_tokens": 8, "turn_format": "inline"} | settings
    agent = agent or Agent("tests.support.agents.play")
    encoder = encoder or InlineFormat(byte_tokenizer())
    return AgentEpisodes(agent, encoder, EpisodeSettings(**given))


def agent_prompts(*agents, texts=None):
    """One row for each agent."""
    prompts = prompt_batch(*(texts or [f"q{n}?" for n in range(len(agents))]))
    return replace(prompts, columns={"agent": list(agents)})


def play_agents(episodes, *agents, policy=None, sampling=None, length=LENGTH, key=KEY, engine=None):
    """A rollout with a group for each agent."""
    policy = policy or ending(tiny_policy("llama"))
    prompts = agent_prompts(*agents)
    uniforms = draw_uniforms(0, "train", 0, prompts.index, GROUP, length)
    request = RolloutRequest(policy, prompts, GROUP, uniforms, sampling or Sampling())
    return episodes.play(engine or LocalEngine(), request, key)


@dataclass(frozen=True)
class ScriptedEngine(RolloutEngine):
    """Replies with texts instead of sampling.

    Args:
        script: returns the reply to the text of a prompt; `<end>` is the end token.
        end_id: of the end token.
    """

    allows = frozenset({"episodes"})

    script: Callable[[str], str]
    end_id: int

    def generate(self, request):
        tokenizer, rows = request.policy.tokenizer, []
        for ids, mask in zip(request.prompts.prompt_ids, request.prompts.prompt_mask, strict=True):
            text = self.script(tokenizer.decode(ids[mask]))
            reply = tokenizer(text.replace("<end>", ""), add_special_tokens=False).input_ids
            rows += [reply + [self.end_id] * text.endswith("<end>")] * request.group_size
        width = max(map(len, rows))
        mask = torch.tensor([[n < len(row) for n in range(width)] for row in rows])
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return Rollout(
            request.prompts,
            request.group_size,
            ids,
            mask,
            torch.zeros(ids.shape),
            truncated=torch.zeros(len(rows), dtype=torch.bool),
        )


def chat_policy(template):
    """A random policy whose tokenizer has a chat template with the end token `<|im_end|>`."""
    tokenizer = merging_tokenizer(template)
    policy = build_policy(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer).eval()
    policy.eos_ids = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    return policy


def template_format(policy):
    """The turn format of a policy's template."""
    return TemplateFormat(ChatFormat(policy.tokenizer, Chat(), policy.eos_ids))
