"""Calls of one agent: which calls continue each other, and the rows of tokens that result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litgrpo.agents.chat_api import ChatRequest
from litgrpo.data.messages import Messages


@dataclass(eq=False)
class AgentCall:
    """One reply of the policy, and what it followed."""

    context: list[int]  # tokens that the policy read
    added: Messages  # since the parent's reply, or all of them
    parent: AgentCall | None  # whose messages and reply the messages of this one begin with
    limit: int  # maximal tokens of the reply
    # Sampled tokens, see `Rollout`; set when the reply is sampled, as all fields below.
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)
    truncated: bool = False  # a token limit ended the reply
    has_end: bool = False  # the last token is one of the policy's end tokens
    text: str = ""  # of the reply, as the policy wrote it
    message: dict[str, Any] = field(default_factory=dict)  # the reply
    tools: list[str] = field(default_factory=list)  # names of those that it calls

    @property
    def all_ids(self) -> list[int]:
        """Context and reply."""
        return self.context + self.ids

    @property
    def root(self) -> AgentCall:
        """First call of its conversation."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call


class Continuation(NamedTuple):
    """The earlier call that a request continues, and the messages since its reply."""

    parent: AgentCall | None
    added: Messages


class CallTree:
    """Calls of one agent, as a forest.

    A request continues an earlier call if its messages begin with those of that call and exactly
    the message that was returned. Its tokens are then the recorded ones and the new messages: no
    reply is ever tokenized from text.
    """

    def __init__(self) -> None:
        self.calls: list[AgentCall] = []  # answered ones, in order
        self.by_history: dict[bytes, AgentCall] = {}
        self.by_message: dict[str, str] = {}  # text that the policy wrote for each message

    def find(self, request: ChatRequest) -> Continuation:
        """Find the longest earlier conversation that a request continues."""
        messages = request.messages
        continuation = Continuation(None, messages)
        for length, digest in enumerate(_history_digests(request), start=1):
            if length < len(messages) and digest in self.by_history:
                continuation = Continuation(self.by_history[digest], messages[length:])
        return continuation

    def written(self, message: dict[str, Any]) -> str | None:
        """Return the text that the policy wrote for a message; None for messages of others."""
        return self.by_message.get(_key(message))

    def add(self, request: ChatRequest, call: AgentCall) -> None:
        """Record an answered call."""
        self.calls.append(call)
        history = ChatRequest([*request.messages, call.message], tools=request.tools)
        *_, digest = _history_digests(history)
        earlier = self.by_history.get(digest)
        # Parallel calls may have gotten the same text in other tokens: which of the two a later
        # call continues must not depend on the order in which they were answered.
        if earlier is None or call.all_ids < earlier.all_ids:
            self.by_history[digest] = call
        self.by_message[_key(call.message)] = call.text

    def chains(self) -> list[list[AgentCall]]:
        """Return the calls as chains in which each call continues the one before.

        The first chain is the longest. If several calls continue one call, the one that most calls
        follow continues the chain; the others begin separate chains. The order depends on
        the tokens alone, not on the order of arrival.
        """
        children: dict[AgentCall | None, list[AgentCall]] = {None: []}
        for call in self.calls:
            children.setdefault(call.parent, []).append(call)
            children.setdefault(call, [])
        sizes: dict[AgentCall, int] = {}
        for call in reversed(self.calls):  # a call is recorded after its parent
            sizes[call] = 1 + sum(sizes[child] for child in children[call])

        def rank(call: AgentCall) -> tuple[int, list[int]]:
            return -sizes[call], call.all_ids

        chains = []
        starts = list(children[None])
        while starts:
            chain = [starts.pop()]
            while following := sorted(children[chain[-1]], key=rank):
                chain.append(following[0])
                starts += following[1:]
            chains.append(chain)
        return sorted(chains, key=lambda chain: (-len(chain), chain[-1].all_ids))


def _key(message: dict[str, Any]) -> str:
    return json.dumps(message, sort_keys=True)


def _history_digests(request: ChatRequest) -> Iterator[bytes]:
    """Yield a digest of the first 1, 2, ... messages, together with the tools."""
    digest = hashlib.sha256(json.dumps(request.tools, sort_keys=True).encode())
    for message in request.messages:
        digest.update(hashlib.sha256(_key(message).encode()).digest())
        yield digest.copy().digest()
