"""Build a rollout from the calls of agents: one row per agent, one segment per chain of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from litgrpo.agents.call_tree import AgentCall, CallTree
from litgrpo.data.messages import Messages
from litgrpo.environments.agent import AgentResult
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.types import Episode, PromptBatch, Rollout, pad_left, pad_rows


class PlayedRow(Protocol):
    """State of an agent's row after its end."""

    tree: CallTree
    limit: str
    result: AgentResult
    failed: str
    seconds: float


Span = tuple[int, int]


@dataclass
class RowTokens:
    """Tokens of a row: its segments one after another, without the prompt of the group.

    `numbers` are those of the calls in their order, and `spans` the columns that a call reads and
    generates; it reads none that the prompt has. The other fields are of each token, see `Rollout`.
    """

    numbers: dict[AgentCall, int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)
    spans: dict[AgentCall, tuple[Span, Span]] = field(default_factory=dict)

    def add_chain(self, chain: Sequence[AgentCall], segment: int) -> None:
        """Append a chain of calls; segment 0 is without the context of its first call."""
        num_read = len(chain[0].context) if segment == 0 else 0
        for call in chain:
            read = call.context[num_read:]
            none = [0.0] * len(read)
            before = self._add(read, none, [[] for _ in read], turn=-1, segment=segment)
            self.versions += [-1] * len(read)
            sampled = self._add(
                call.ids,
                call.logprobs,
                call.candidates or [[] for _ in call.ids],
                turn=self.numbers[call],
                segment=segment,
            )
            self.versions += call.versions or [-1] * len(call.ids)
            self.spans[call] = before, sampled
            num_read = len(call.context) + len(call.ids)

    def _add(
        self,
        ids: list[int],
        logprobs: list[float],
        candidates: list[list[int]],
        *,
        turn: int,
        segment: int,
    ) -> Span:
        first = len(self.ids)
        self.ids += ids
        self.logprobs += logprobs
        self.candidates += candidates
        self.turns += [turn] * len(ids)
        self.segments += [segment] * len(ids)
        return first, len(self.ids)

    @property
    def messages(self) -> tuple[Messages, list[Span]]:
        """Messages in the order of the calls, and their columns."""
        messages: Messages = []
        spans: list[Span] = []
        for call in self.numbers:
            before, sampled = self.spans[call]
            if before[0] < before[1]:
                messages += call.added
                spans += [before] * len(call.added)
            messages.append({"role": "assistant", "content": call.text})
            spans.append(sampled)
        return messages, spans


def build_rollout(requests: RolloutRequest, rows: Sequence[PlayedRow]) -> Rollout:
    """Build the rollout of N agents.

    The prompt of a group is the context of the first call of its agents, that of most of them if
    they differ. A chain of calls that begins with it is segment 0 of its row; every other chain is
    a further segment with its own prompt.
    """
    size = requests.group_size
    chains = [_main_first(row.tree.chains()) for row in rows]
    groups = [chains[first : first + size] for first in range(0, len(rows), size)]
    openings = [_common_opening(group) for group in groups]
    built = []
    for number, row in enumerate(rows):
        tokens = RowTokens({call: n for n, call in enumerate(row.tree.calls)})
        row_chains = chains[number]
        is_shared = bool(row_chains) and row_chains[0][0].context == openings[number // size]
        for segment, chain in enumerate(row_chains, start=0 if is_shared else 1):
            tokens.add_chain(chain, segment)
        built.append(tokens)
    device, pad_id = requests.prompts.prompt_ids.device, requests.policy.pad_id
    ids = pad_rows([row.ids for row in built], pad_id, torch.long, device)
    lengths = torch.tensor([len(row.ids) for row in built], device=device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    versions = pad_rows([row.versions for row in built], -1, torch.int32, device)
    return Rollout(
        prompts=_with_openings(requests, openings),
        group_size=size,
        completion_ids=ids,
        completion_mask=mask,
        sampler_logprobs=pad_rows([row.logprobs for row in built], 0.0, torch.float32, device),
        truncated=torch.tensor(
            [bool(row.limit) or _last_is_cut(row.tree) for row in rows], device=device
        ),
        candidate_ids=_candidates(built, mask),
        turns=pad_rows([row.turns for row in built], -1, torch.int16, device),
        token_versions=versions if bool((versions >= 0).any()) else None,
        segments=pad_rows([row.segments for row in built], 0, torch.int16, device),
        episodes=[_episode(row, tokens) for row, tokens in zip(rows, built, strict=True)],
        completions=_texts(requests, rows),
    )


def _main_first(chains: list[list[AgentCall]]) -> list[list[AgentCall]]:
    """Put the first chain that begins a conversation in front."""
    main = [chain for chain in chains if chain[0].parent is None][:1]
    return main + [chain for chain in chains if chain not in main]


def _common_opening(group: Sequence[list[list[AgentCall]]]) -> list[int] | None:
    """Return the context of the first call of most agents of a group; None without any call."""
    counts = Counter(tuple(chains[0][0].context) for chains in group if chains)
    return list(counts.most_common(1)[0][0]) if counts else None


def _with_openings(requests: RolloutRequest, openings: Sequence[list[int] | None]) -> PromptBatch:
    """Return the prompts with those that agents began with; the data's for groups without calls."""
    prompts, tokenizer = requests.prompts, requests.policy.tokenizer
    pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
    ids = [row[mask].tolist() for row, mask in pairs]
    texts = list(prompts.prompts)
    for number, opening in enumerate(openings):
        if opening is not None and opening != ids[number]:
            ids[number], texts[number] = opening, str(tokenizer.decode(opening))
    padded = pad_left(ids, requests.policy.pad_id)
    device = prompts.prompt_ids.device
    moved: dict[str, Any] = {
        "prompt_ids": padded[0].to(device),
        "prompt_mask": padded[1].to(device),
    }
    return replace(prompts, prompts=texts, **moved)


def _last_is_cut(tree: CallTree) -> bool:
    return bool(tree.calls) and tree.calls[-1].truncated


def _candidates(built: Sequence[RowTokens], mask: Tensor) -> Tensor | None:
    """Return [N, C, S] tokens that could be sampled, padded with -1; None: every token."""
    of_tokens = [ids for row in built for ids in row.candidates]
    if not any(of_tokens):
        return None
    padded = pad_rows(of_tokens, -1, torch.int32, mask.device)
    candidates = padded.new_full((*mask.shape, padded.shape[1]), -1)
    candidates[mask] = padded
    return candidates


def _episode(row: PlayedRow, tokens: RowTokens) -> Episode:
    """Return the record of an agent, whose reward belongs to its last turn."""
    calls = Counter(name for call in row.tree.calls for name in call.tools)
    messages, spans = tokens.messages
    num_turns = max(1, len(tokens.numbers))
    rewards: list[float | None] = [None] * num_turns
    if row.result.reward is not None and not row.failed:
        rewards = [*[0.0] * (num_turns - 1), row.result.reward]
    return Episode(
        messages=messages,
        spans=spans,
        turn_rewards=rewards,
        turn_states=[None] * num_turns,
        turn_calls=[len(call.tools) for call in row.tree.calls],
        calls={name: (number, 0) for name, number in sorted(calls.items())},
        seconds=row.seconds,
        failed=row.failed,
        done=not (row.failed or row.limit),
    )


def _texts(requests: RolloutRequest, rows: Sequence[PlayedRow]) -> list[str]:
    """Return the answers of the agents; by default the text of the last reply."""
    sampling, stops = requests.sampling, requests.stops
    last_replies = [row.tree.calls[-1].ids if row.tree.calls else [] for row in rows]
    texts = requests.policy.completion_texts(last_replies, sampling.stop_token_ids)
    if stops is not None:
        texts = [stops.cut(text, sampling.include_stop_str_in_output) for text in texts]
    answers = [row.result.completion for row in rows]
    return [text if answer is None else answer for text, answer in zip(texts, answers, strict=True)]
