"""A reference of the KL term whose log-probabilities vLLM servers compute, such as a teacher."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from litgrpo.algorithms.divergences import Divergence, TopK
from litgrpo.argument_types import check_field_types
from litgrpo.arguments import above, at_least, require
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rollout.servers.client import ServerClient, ServerFailure
from litgrpo.rollout.servers.http_client import normalize_url
from litgrpo.rollout.servers.pool import Servers
from litgrpo.rollout.servers.vllm_client import VllmServer
from litgrpo.run_options import RunOptions
from litgrpo.types import TokenLogprobs, TokenRows, move_to_positions

SERVER_SCHEMES = ("http://", "https://")  # of `reference`, given as an address
PROBES = 512  # tokens of the vocabulary whose text both tokenizers encode at the start
LEAST_TAIL = 1e-6  # probability of all tokens that a server did not list: its numbers are rounded


@check_field_types
@dataclass(frozen=True)
class ReferenceServers:
    """vLLM servers of the reference model: a teacher that does not fit beside the policy.

    They return the log-probabilities of the sampled tokens, for the estimates of
    `objective.kl_estimator`, and of the most likely tokens, for `TopK`. `vllm serve MODEL` needs no
    further flags (`--max-logprobs K` for `TopK` with k above 20); weights stay as they are.

    Args:
        urls: addresses of servers of the same model, in a private network; prompts are distributed
            over them.
        timeout_s: seconds that a request may take, to the last byte of the response.
        wait_s: if no server responds, retry for this many seconds.
        max_concurrent_requests: maximal rows requested at the same time by this process; servers
            queue them.

    Example:
        >>> ReferenceServers(["http://10.0.0.4:8000/"]).urls
        ['http://10.0.0.4:8000']
    """

    urls: list[str]
    timeout_s: float = 600.0
    wait_s: float = 300.0
    max_concurrent_requests: int = 256

    def __post_init__(self) -> None:
        require(bool(self.urls), "model.reference.urls is empty; set the address of a vLLM server.")
        above("model.reference.timeout_s", self.timeout_s, 0)
        at_least("model.reference.wait_s", self.wait_s, 0)
        at_least("model.reference.max_concurrent_requests", self.max_concurrent_requests, 1)
        # A server that takes no weights runs no code of a client: public addresses are allowed.
        urls = [normalize_url(url, True, "model.reference.urls") for url in self.urls]
        object.__setattr__(self, "urls", urls)

    def connect(self, url: str) -> ServerClient:
        """Return the client of a server; a subclass may connect to another kind."""
        return VllmServer(url, self.timeout_s, allow_public=True)


class ServedReference(Reference):
    """Log-probabilities under the model of vLLM servers.

    Its `hidden_states` are what servers return of a distribution: the k most likely tokens and
    their log-probabilities, [M, C, 2k]. Its `head` spreads the rest evenly over all other tokens,
    which `TopK` counts as one outcome.

    Args:
        servers: where they are.
        policy: that is compared with it; the servers must have the same tokenizer.
        divergence: from the policy, of which servers support `TopK`; None: none.

    Raises:
        ValueError: the policy is an encoder-decoder.

    Example::

        reference = ServedReference(ReferenceServers(["http://10.0.0.4:8000"]), policy)
        reference.logprobs(rows).logprobs  # [M, C], temperature 1
    """

    def __init__(
        self, servers: ReferenceServers, policy: Policy, divergence: Divergence | None = None
    ) -> None:
        super().__init__()
        self.vocab_size = policy.vocab_size
        self.top_k = min(divergence.k, self.vocab_size) if isinstance(divergence, TopK) else 0
        require(
            not policy.bare_model.config.is_encoder_decoder,
            "model.reference is a vLLM server, which does not support encoder-decoder models. Load "
            "it from a folder or Hub id.",
        )
        self.settings, self.tokenizer = servers, policy.tokenizer
        clients = [servers.connect(url) for url in servers.urls]
        self.servers = Servers(clients, servers.wait_s, "model.reference")
        self.unchecked = {client.url for client in clients}

    @property
    def computes_elsewhere(self) -> bool:
        """True; see `Reference.computes_elsewhere`."""
        return True

    def check(self, max_tokens: int) -> None:
        """Check tokenizer and context length of a server that is available.

        The others are checked before their first request.

        Args:
            max_tokens: longest row that will be requested, prompt and completion.

        Raises:
            ServersUnavailable: no server responds.
            ServerFailure: a server cannot compute the rows of this run.
        """
        self.servers.ask(0, threading.Event(), lambda server: self._check(server, max_tokens))

    def _check(self, server: ServerClient, max_tokens: int = 0) -> None:
        text = probe_text(self.tokenizer)
        expected = self.tokenizer(text, add_special_tokens=False).input_ids
        ids, longest = server.tokenize(text)
        if ids != expected:
            raise ServerFailure(
                f"{server.url} has another tokenizer than the policy, so their log-probabilities "
                "cannot be compared. Set model.reference to servers of a model of the same family."
            )
        if longest < max_tokens + 1:  # a server generates at least one token
            raise ServerFailure(
                f"{server.url} takes rows of up to {longest} tokens, but the longest row of this "
                f"run has {max_tokens}. Start it with --max-model-len {max_tokens + 1} or more."
            )
        if self.top_k:
            try:
                server.prompt_logprobs(ids[:2], 1, self.top_k)
            except ServerFailure as error:
                raise ServerFailure(
                    f"{server.url} does not return the {self.top_k} most likely tokens of "
                    f"model.objective.kl_estimator ({error}). Start it with --max-logprobs "
                    f"{self.top_k}, or set a smaller k."
                ) from error
        self.unchecked.discard(server.url)

    @torch.no_grad()
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        """Request log-probabilities, one request per row; entropies are 0.

        Raises:
            ServersUnavailable: no server responded for `wait_s` seconds.
            ServerFailure: a server cannot compute a row.
        """
        assert temperature == 1, "servers return log-probabilities at temperature 1"
        assert rows.candidate_ids is None, "servers return log-probabilities over all tokens"
        if rows.segments is not None:
            split, places = rows.split_segments()
            return self.logprobs(split).to_positions(places, rows.completion_ids.shape)
        values = torch.zeros(rows.completion_ids.shape)
        for row, ids, entries in self._request(rows, top_k=0):
            logprobs = [entry[token] for token, entry in zip(ids, entries, strict=True)]
            values[row, : len(ids)] = torch.tensor(logprobs)
        masks = rows.on_host
        values = torch.where(masks.predicted & masks.completion_mask, values, 0.0)
        values = values.to(rows.completion_ids.device)
        return TokenLogprobs(values, torch.zeros_like(values))

    def _request(
        self, rows: TokenRows, top_k: int
    ) -> Iterator[tuple[int, list[int], list[dict[int, float]]]]:
        """Yield number, completion tokens, and {token: log-probability} at each, of each row."""
        masks = rows.on_host
        prompt_ids, completion_ids = rows.prompt_ids.cpu(), rows.completion_ids.cpu()
        completions = [
            ids[mask].tolist()
            for ids, mask in zip(completion_ids, masks.completion_mask, strict=True)
        ]

        def score(row: int, server: ServerClient) -> list[dict[int, float]]:
            if server.url in self.unchecked:
                self._check(server)
            prompt = prompt_ids[masks.prompt_of[row]][masks.prompt_mask[masks.prompt_of[row]]]
            return server.prompt_logprobs(prompt.tolist() + completions[row], len(prompt), top_k)

        num_threads = min(self.settings.max_concurrent_requests, len(rows))
        with self.servers.requests(num_threads) as submit:
            scores = {
                row: submit(int(masks.prompt_of[row]), partial(score, row))
                for row in range(len(rows))
                if completions[row]
            }
            for row, entries in scores.items():
                yield row, completions[row], entries.result()

    @torch.no_grad()
    def hidden_states(self, rows: TokenRows) -> Tensor:
        """Request [M, C, 2k]: the k most likely tokens, then their log-probabilities."""
        if rows.segments is not None:
            split, places = rows.split_segments()
            return move_to_positions(self.hidden_states(split), places, rows.completion_ids.shape)
        # Float32 holds token ids below 2^24 exactly.
        states = torch.zeros(*rows.completion_ids.shape, 2 * self.top_k)
        for row, ids, entries in self._request(rows, self.top_k):
            states[row, : len(ids)] = torch.tensor([self._most_likely(one) for one in entries])
        return states.to(rows.completion_ids.device)

    def _most_likely(self, logprobs: dict[int, float]) -> list[float]:
        """Return k token ids and their log-probabilities; padding of the vocabulary is left out."""
        tokens = [token for token in logprobs if token < self.vocab_size]
        tokens = sorted(tokens, key=logprobs.__getitem__, reverse=True)[: self.top_k]
        tokens += tokens[-1:] * (self.top_k - len(tokens))
        return [*map(float, tokens), *(logprobs[token] for token in tokens)]

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Compute [n, V] log-probabilities of [n, 2k] most likely tokens; see the class."""
        tokens, logprobs = hidden.chunk(2, dim=-1)
        listed = hidden.new_full((len(hidden), self.vocab_size), -torch.inf)
        listed = listed.scatter(-1, tokens.long(), logprobs)
        is_listed = listed.isfinite()
        tail = (1 - listed.exp().sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
        tail = tail / (~is_listed).sum(-1, keepdim=True)
        return torch.where(is_listed, listed, tail.log())


def probe_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text of tokens from all over the vocabulary, and its end token.

    Another tokenizer encodes it as other token ids.
    """
    special = set(tokenizer.get_added_vocab().values())
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    return str(tokenizer.decode(ids[:: max(1, len(ids) // PROBES)])) + str(tokenizer.eos_token)


def read_reference(
    reference: str | ReferenceServers | None, run: RunOptions
) -> str | ReferenceServers | None:
    """Return the reference of a run; the address of a server becomes `ReferenceServers`.

    Args:
        reference: folder, Hub id, address or servers; None: the initial policy.
        run: options that may need more of it than servers return.

    Raises:
        ValueError: servers cannot return what this run needs of the reference.
    """
    if isinstance(reference, str) and reference.startswith(SERVER_SCHEMES):
        reference = ReferenceServers([reference])
    if not isinstance(reference, ReferenceServers) or not run.objective.needs_reference:
        return reference
    problem = ""
    if not isinstance(run.objective.divergence, TopK | None):
        problem = (
            "model.objective.kl_estimator is a divergence over the vocabulary, but servers return "
            "log-probabilities of the sampled token and of the most likely ones: set it to k3 or "
            "to {class_path: TopK, k: 20}"
        )
    elif run.sampling.policy_temperature != 1:
        problem = (
            f"model.sampling.temperature is {run.sampling.temperature}, but servers return "
            "log-probabilities at temperature 1: set it to 1.0"
        )
    elif run.sampling.has_filters:
        problem = (
            f"model.sampling has top_k {run.sampling.top_k}, top_p {run.sampling.top_p} and min_p "
            f"{run.sampling.min_p}, but servers return log-probabilities over all tokens: set them "
            "to 0, 1.0 and 0.0"
        )
    elif {*run.engine.addresses} & {*reference.urls}:
        problem = (
            "model.engine.urls has the same server, whose weights become the policy's: start "
            "another one"
        )
    if problem:
        raise ValueError(
            f"model.reference is a vLLM server ({reference.urls[0]}). {problem}, or load the "
            "reference from a folder or Hub id."
        )
    return reference
