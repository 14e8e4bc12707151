"""Rollouts whose rows are agents: collect their calls, sample the replies, build the rollout."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from litgrpo.agents.call_tree import AgentCall, CallTree
from litgrpo.agents.chat_api import (
    SAMPLING_PARAMETERS,
    ApiError,
    ChatReply,
    ChatRequest,
    Choice,
)
from litgrpo.agents.conversations import (
    build_conversation_format,
    parse_reply,
    with_tool_names,
)
from litgrpo.agents.pool import AgentPool
from litgrpo.agents.proxy import AgentProxy, PendingCall
from litgrpo.agents.rows import build_rollout
from litgrpo.environments.agent import Agent, AgentRequest, AgentResult
from litgrpo.environments.base import EpisodeFailures, EpisodeStart, FailedEpisode
from litgrpo.models.limits import find_context_length
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.episodes import EpisodeRunner, EpisodeSettings, RolloutKey
from litgrpo.rollout.sampling import draw_call_uniforms
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.rollout.turn_format import TurnFormat
from litgrpo.types import PromptBatch, Rollout, Stats, pad_left

log = logging.getLogger(__name__)

POLL_S = 0.005  # between looks for agents that ended
# Calls are sampled together once every agent waits for one, or no call arrived for this long.
QUIET_S = 0.25
LINGER_S = 0.003  # for further parallel calls once every agent waits
MAX_STOP_SETS = 64  # stop strings of requests that are kept


@dataclass(eq=False)
class AgentRow:
    """State of the agent of one row."""

    start: EpisodeStart  # row, seed and key
    tree: CallTree = field(default_factory=CallTree)  # answered calls
    num_calls: int = 0  # replies that were asked for, answered or not
    # {context: how many replies to it were asked for}
    contexts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    limit: str = ""  # why a call was rejected: a limit of the episode; "" if none was
    pending: int = 0  # number of calls that wait
    result: AgentResult = field(default_factory=AgentResult)
    failed: str = ""  # why the agent failed
    over: bool = False  # it has ended
    seconds: float = 0.0  # in which it did not wait for a reply


@dataclass(eq=False)
class AdmittedCall:
    """A request whose replies are to be sampled."""

    pending: PendingCall
    row: AgentRow
    calls: list[AgentCall]  # one for each reply
    uniforms: list[torch.Tensor]  # random numbers [limit] of each reply


CallAndNumbers = tuple[AgentCall, torch.Tensor]


def split_by_width(
    calls: Sequence[CallAndNumbers], positions: float
) -> Iterator[list[CallAndNumbers]]:
    """Yield calls in requests of which every row has positions for the widest reply.

    Engines decode rows of a request side by side, also after a row has ended. A model with an
    embedding per position would fail beyond the last one; most models have infinitely many.
    """
    waiting = list(calls)
    while waiting:
        width = max(call.limit for call, _ in waiting)
        fits = [len(call.context) + width <= positions for call, _ in waiting]
        yield [pair for pair, fit in zip(waiting, fits, strict=True) if fit]
        waiting = [pair for pair, fit in zip(waiting, fits, strict=True) if not fit]


@dataclass(eq=False)
class AgentEpisodes(EpisodeRunner):
    """Plays a rollout's rows as episodes of an agent.

    Calls of all agents are sampled together, in rounds: one engine request with a prompt for each
    call. A reply's random numbers are a function of the row and of the tokens that it follows, so
    results do not depend on the order in which calls arrive.

    Args:
        agent: runs on each row.
        turn_format: encodes messages between two replies.
        settings: limits.
    """

    agent: Agent
    turn_format: TurnFormat
    settings: EpisodeSettings
    tools: Sequence[str] = ()
    waited: float = field(default=0.0, init=False)
    _proxy: AgentProxy | None = field(default=None, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _stops: dict[tuple[str, ...], StopStrings] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # Processes and server start with the first rollout.
        settings = self.settings
        self.pool = AgentPool(
            self.agent, timeout_s=settings.timeout_s, num_workers=settings.num_workers
        )
        self.failures = EpisodeFailures()

    def play(
        self, engine: RolloutEngine, requests: RolloutRequest, rollout_key: RolloutKey
    ) -> Rollout:
        return AgentRollout(self, engine, requests, rollout_key).play()

    @property
    def proxy(self) -> AgentProxy:
        """The server, started when needed."""
        if self._proxy is None:
            self._proxy = AgentProxy()
        return self._proxy

    def close(self) -> None:
        self.pool.close()
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None

    def stats(self, rollout: Rollout) -> Stats:
        """Return metrics of episodes, with the mean number of segments."""
        assert rollout.segments is not None
        number = torch.where(rollout.completion_mask, rollout.segments, -1)
        counts = torch.tensor([len(row[row >= 0].unique()) for row in number.cpu()])
        return super().stats(rollout) | {"env/segments": counts.float().mean()}

    def warn_of_ignored(self, request: ChatRequest, sampling: Any) -> None:
        """Warn once of each sampling parameter that agents give and that has no effect."""
        options = {name: getattr(sampling, name, None) for name in SAMPLING_PARAMETERS}
        ignored = {
            name: value
            for name, value in request.ignored.items()
            if value != options[name] and name not in self._warned
        }
        self._warned.update(ignored)
        if ignored:
            listed = ", ".join(f"{name}: {json.dumps(ignored[name]):.40}" for name in ignored)
            log.warning(
                "the agent asks for %s, which is ignored: replies are sampled with model.sampling, "
                "the distribution that is trained",
                listed,
            )

    def stop_strings(self, stop: tuple[str, ...], requests: RolloutRequest) -> StopStrings:
        """Return the search for the stop strings of a request."""
        if stop not in self._stops:
            if len(self._stops) >= MAX_STOP_SETS:
                self._stops.clear()
            policy = requests.policy
            self._stops[stop] = StopStrings(stop, policy.tokenizer, policy.vocab_size)
        return self._stops[stop]


def agent_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row that an agent gets: its `prompt` is not rendered by the chat template."""
    messages = row.get("conversation")
    return row | {"prompt": messages[-1]["content"]} if messages else row


class AgentRollout:
    """One rollout of agents; arguments as of `EpisodeRunner.play`."""

    def __init__(
        self,
        episodes: AgentEpisodes,
        engine: RolloutEngine,
        requests: RolloutRequest,
        rollout_key: RolloutKey,
    ) -> None:
        self.episodes, self.engine, self.requests = episodes, engine, requests
        self.key, self.policy = rollout_key, requests.policy
        self.pool, self.proxy = episodes.pool, episodes.proxy
        self.settings, self.agent = episodes.settings, episodes.agent
        self.max_length = requests.uniforms.shape[1]
        closing = self.policy.eos_ids[0]
        self.format = build_conversation_format(episodes.turn_format, self.agent.calls, closing)
        context = find_context_length(self.policy.bare_model)
        self.positions = context.positions if context is not None and context.hard else math.inf
        self.rows = [AgentRow(start) for start in episodes.starts(requests, rollout_key)]
        self.admitted: list[AdmittedCall] = []

    def play(self) -> Rollout:
        """Run all agents to their end."""
        self.proxy.reset()
        self.episodes.failures.reset([row.start for row in self.rows])
        requests = []
        for number, row in enumerate(self.rows):
            key = self.proxy.open(number)
            columns = agent_row(row.start.row)
            requests.append(AgentRequest(columns, row.start.seed, self.proxy.base_url, key))
        self.pool.start(requests)
        while self._wait_for_calls():
            self._answer()
        for number, row in enumerate(self.rows):
            row.seconds = self.pool.seconds[number]
        return build_rollout(self.requests, self.rows)

    # --- calls ---

    def _wait_for_calls(self) -> bool:
        """Wait until calls are to be answered; return False if all agents have ended."""
        with self.episodes.waiting():
            return self._collect()

    def _collect(self) -> bool:
        last_arrival = time.monotonic()
        while True:
            for pending in self._take(POLL_S):
                last_arrival = time.monotonic()
                self._admit(pending)
            arrived = self._take(0.0)  # while these were tokenized: their agents are not late
            for number, result in self.pool.receive().items():
                self._finish(number, result)
            for pending in arrived:
                last_arrival = time.monotonic()
                self._admit(pending)
            if self.pool.is_done:
                return False
            idle = all(self.rows[number].pending for number in self.pool.running)
            if idle and self.admitted:
                for pending in self._take(LINGER_S):
                    self._admit(pending)
                return True
            if self.admitted and time.monotonic() - last_arrival > QUIET_S:
                return True

    def _take(self, timeout_s: float) -> list[PendingCall]:
        """Return new calls, whose agents wait from now on."""
        calls = self.proxy.take(timeout_s)
        for call in calls:
            self.pool.pause_limit(call.row, call.arrived)
        return calls

    def _admit(self, pending: PendingCall) -> None:
        """Encode a request, or reject it."""
        row = self.rows[pending.row]
        if row.over:
            return
        try:
            admitted = self._encode(pending, row)
        except ApiError as error:
            if not row.pending:
                self.pool.resume_limit(pending.row)
            pending.answer(error)
            return
        self.admitted.append(admitted)
        row.pending += 1

    def _encode(self, pending: PendingCall, row: AgentRow) -> AdmittedCall:
        """Return the calls of a request.

        Raises:
            ApiError: a limit is reached, or the messages cannot be encoded.
        """
        request, settings = pending.request, self.settings
        if row.num_calls + request.num_choices > settings.max_turns:
            row.limit = f"an episode has at most {settings.max_turns} replies (max_turns)"
            raise ApiError(400, row.limit, "max_turns")
        self.episodes.warn_of_ignored(request, self.requests.sampling)
        parent, added = row.tree.find(request)
        context = self._continue(request, parent, added)
        if context is None:
            parent, added = None, request.messages
            messages = with_tool_names(request.messages)
            context = self.format.encode_opening(messages, request.tools, row.tree.written)
        if parent is None and len(context) > self.agent.max_prompt_tokens:
            row.limit = (
                f"the messages have {len(context)} tokens, more than max_prompt_tokens "
                f"{self.agent.max_prompt_tokens} of the agent"
            )
            raise ApiError(400, row.limit, "context_length_exceeded")
        begin = len(context if parent is None else parent.root.context)
        left = min(self.max_length - (len(context) - begin), self.positions - len(context))
        if left < 1:
            row.limit = (
                f"the conversation has {len(context)} tokens; model.max_completion_length is "
                f"{self.max_length} after the first {begin}"
            )
            raise ApiError(400, row.limit, "context_length_exceeded")
        limit = int(min(left, settings.max_turn_tokens, request.max_tokens or math.inf))
        calls, uniforms = [], []
        for _ in range(request.num_choices):
            calls.append(AgentCall(context, added, parent, limit))
            uniforms.append(
                draw_call_uniforms(
                    self.key, row.start.key, context, row.contexts[tuple(context)], limit
                )
            )
            row.contexts[tuple(context)] += 1
        row.num_calls += request.num_choices
        return AdmittedCall(pending, row, calls, uniforms)

    def _continue(
        self, request: ChatRequest, parent: AgentCall | None, added: Any
    ) -> list[int] | None:
        """Return the recorded tokens of an earlier call and the new messages."""
        if parent is None:
            return None
        # Names of tools are in the calls of the whole conversation.
        new_messages = with_tool_names(request.messages)[len(request.messages) - len(added) :]
        following = self.format.encode_following(
            new_messages, request.tools, turn_has_end=parent.has_end, truncated=parent.truncated
        )
        return None if following is None else parent.all_ids + following

    def _answer(self) -> None:
        """Sample the replies of all admitted calls."""
        admitted, self.admitted = self.admitted, []
        # Neither the rows of the engine nor the recorded order depend on the order of arrival.
        admitted.sort(key=lambda request: (request.row.start.key, request.calls[0].context))
        admitted = [request for request in admitted if not request.row.over]
        calls = [
            (call, numbers)
            for request in admitted
            for call, numbers in zip(request.calls, request.uniforms, strict=True)
        ]
        for calls_at_once in split_by_width(calls, self.positions):
            self._sample(calls_at_once)
        for request in admitted:
            self._reply(request)

    def _sample(self, drawn: list[CallAndNumbers]) -> None:
        """Sample replies in one request of the engine; equal contexts share their cache."""
        drawn = sorted(drawn, key=lambda pair: pair[0].context)
        counts = Counter(tuple(call.context) for call, _ in drawn)
        size = min(counts.values())
        group = size if all(count == size for count in counts.values()) else 1
        contexts = [call.context for call, _ in drawn[::group]]
        limits = [call.limit for call, _ in drawn]
        uniforms = torch.zeros(len(drawn), max(limits), dtype=torch.float64)
        for number, (_, numbers) in enumerate(drawn):
            uniforms[number, : len(numbers)] = numbers
        ids, mask = pad_left(contexts, self.policy.pad_id)
        device = self.requests.prompts.prompt_ids.device
        numbers = torch.arange(len(contexts), device=device)
        prompts = PromptBatch(ids.to(device), mask.to(device), [""] * len(contexts), {}, numbers)
        request = replace(
            self.requests,
            prompts=prompts,
            group_size=group,
            uniforms=uniforms,
            listener=None,
            row_limits=limits,
        )
        rollout = self.engine.generate(request)
        if request.stops is not None:
            rollout = request.stops.cut_tokens(rollout, self.policy.pad_id, static_shapes=False)
        logprobs, candidates = rollout.sampler_logprobs.tolist(), rollout.candidate_ids
        versions = rollout.token_versions
        for number, row in enumerate(rollout.token_lists()):
            call = drawn[number][0]
            call.ids = row[: call.limit]
            call.logprobs = logprobs[number][: len(call.ids)]
            if versions is not None:
                call.versions = versions[number, : len(call.ids)].tolist()
            if candidates is not None:
                call.candidates = candidates[number, : len(call.ids)].tolist()

    def _reply(self, admitted: AdmittedCall) -> None:
        """Record the replies of a request, and return them to the agent."""
        request, row = admitted.pending.request, admitted.row
        choices = [self._finish_call(call, request, row) for call in admitted.calls]
        row.pending -= 1
        if not row.pending:
            self.pool.restart_limit(admitted.pending.row)
        context = len(admitted.calls[0].context)
        if not admitted.pending.reply.done():
            admitted.pending.answer(ChatReply(request, choices, context))

    def _finish_call(self, call: AgentCall, request: ChatRequest, row: AgentRow) -> Choice:
        """Decode a sampled reply, cut it at stop strings, and record it."""
        tokenizer, stops = self.policy.tokenizer, self.requests.stops
        stopped = stops is not None and stops.completes(call.ids)
        if request.stop:
            search = self.episodes.stop_strings(request.stop, self.requests)
            length = search.length(call.ids)
            if length <= len(call.ids):
                call.ids, call.logprobs = call.ids[:length], call.logprobs[:length]
                call.candidates, stopped = call.candidates[:length], True
                call.versions = call.versions[:length]
        ends = call.ids[-1] in self.requests.end_ids
        call.has_end = call.ids[-1] in self.policy.eos_ids
        call.truncated = not (ends or stopped)
        call.text = str(tokenizer.decode(call.ids[: len(call.ids) - ends]))
        if stops is not None:
            call.text = stops.cut(call.text, include=True)
        text = call.text
        if request.stop:
            text = self.episodes.stop_strings(request.stop, self.requests).cut(text, False)
        name = f"{call.all_ids} {row.contexts[tuple(call.context)]}"
        tools = request.tools if request.parse_tools else []
        parsed = parse_reply(text, tools, self.agent.calls, name)
        reason = "length" if call.truncated else "tool_calls" if parsed.calls else "stop"
        call.tools = parsed.calls
        call.message = parsed.message | {"content": parsed.message["content"] or ""}
        row.tree.add(request, call)
        tokens = [str(tokenizer.decode([token])) for token in call.ids] if request.logprobs else []
        return Choice(parsed.message, reason, len(call.ids), tokens, call.logprobs)

    def _finish(self, number: int, result: AgentResult | FailedEpisode) -> None:
        """Record the end of an agent."""
        row = self.rows[number]
        row.over = True
        self.proxy.end(number)
        if isinstance(result, AgentResult):
            row.result = result
            return
        # An agent that stops because a limit of the episode was reached is cut off, not broken.
        if row.limit and not result.reason.startswith("timed out"):
            return
        row.failed = result.reason
        self.episodes.failures.count({number: result})
