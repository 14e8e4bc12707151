"""One vLLM server, by its HTTP routes: asked, given weights, named where it fails.

Source: vLLM 0.32, `vllm/entrypoints/rl/online` and `vllm/entrypoints/scale_out`.
"""

from __future__ import annotations

import ipaddress
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from litgrpo.arguments import require
from litgrpo.rollout.engines.served import Answer, Ask

GENERATE = "/inference/v1/generate"
START = (
    "Start it with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out, as "
    "docs/scale.md shows."
)


class ServerFailure(RuntimeError):
    """A server does not do what a rollout needs; names it, in one line."""


class ServersAway(ServerFailure):
    """No server answers; the same command may go on when one is there again."""


class Away(ConnectionError):
    """A server cannot be reached, or is not itself at the moment; it may come back."""


class Stale(Exception):
    """A server answered with other weights than those that it was given.

    Args:
        found: the version that it named.
    """

    def __init__(self, found: object) -> None:
        super().__init__(found)
        self.found = found


def checked_url(url: str, allow_public: bool) -> str:
    """The address without a slash at its end; names are looked up where they are used first.

    Raises:
        ValueError: it is none, or public.
    """
    parts = urlsplit(url)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"engine.urls has {url!r:.100}, which is no address such as http://127.0.0.1:8000",
    )
    try:
        public = not allow_public and ipaddress.ip_address(str(parts.hostname)).is_global
    except ValueError:  # a name
        public = False
    refuse_public(url, public)
    return url.rstrip("/")


def refuse_public(url: str, public: bool) -> None:
    """Refuse a server that anybody can reach.

    Raises:
        ValueError: it is public.
    """
    require(
        not public,
        f"engine.urls has {url}, a public address. The routes that take weights let anybody who "
        "reaches them run code: keep servers in a private network, or behind a tunnel, or set "
        "engine.allow_public: true.",
    )


class Server:
    """A vLLM server.

    Args:
        url: its address.
        timeout_s: seconds that an answer may take.
        allow_public: its address may be a public one.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, allow_public: bool = False) -> None:
        self.url, self.timeout_s, self.allow_public = url, timeout_s, allow_public

    @cached_property
    def client(self) -> httpx.Client:
        """Connections that stay open; no proxy stands between."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        client = httpx.Client(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)
        weakref.finalize(self, client.close)
        return client

    @cached_property
    def is_private(self) -> bool:
        """Whether its name stands for no public address.

        Raises:
            Away: nobody knows the name.
        """
        parts = urlsplit(self.url)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Away(f"{self.url} ({error})") from error
        return not any(ipaddress.ip_address(each[4][0]).is_global for each in found)

    def call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """What a route answers.

        Raises:
            Away: it cannot be reached, breaks off, or says that the fault is its own.
            ServerFailure: it refuses.
        """
        refuse_public(self.url, not (self.allow_public or self.is_private))
        try:
            response = self.client.request(method, path, json=body, params=params)
            if response.is_server_error:
                raise Away(f"{self.url}{path} (status {response.status_code}: {_said(response)})")
            if response.is_client_error:
                hint = f" {START}" * (response.status_code in (404, 405))
                raise ServerFailure(
                    f"{self.url}{path} refuses (status {response.status_code}): "
                    f"{_said(response)}.{hint}"
                )
            return response.json() if response.content else {}
        except httpx.TransportError as error:  # time-outs among them
            raise Away(f"{self.url} ({type(error).__name__}: {error})") from error
        except ValueError as error:
            raise ServerFailure(f"{self.url}{path} answers with no JSON: {error}") from error

    def post(self, path: str, body: Any = None, **params: str) -> Any:
        """What a route answers to this body; see `call`."""
        return self.call("POST", path, body, **params)

    @property
    def version(self) -> str:
        """Of its weights."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def check_logprobs(self, mode: str) -> None:
        """Refuse log-probabilities of another distribution than the one that was drawn from.

        Args:
            mode: that the server has to be started with.

        Raises:
            ServerFailure: it was started with another.
        """
        config = self.call("GET", "/server_info", config_format="json")["vllm_config"]
        found = config["model_config"]["logprobs_mode"]
        if found != mode:
            raise ServerFailure(f"{self.url} has --logprobs-mode {found}: start it with {mode}.")

    @contextmanager
    def exchanging(self, version: str) -> Iterator[None]:
        """Give it new weights within: it finishes what it samples, and forgets what it cached."""
        self.post("/pause", mode="wait")
        try:
            yield
            self.post("/reset_prefix_cache")
            self.post("/update_weight_version", {"new_version": version})
        finally:
            self.post("/resume")

    def complete(self, ask: Ask, version: str) -> Answer:
        """What it samples for a row.

        Args:
            ask: of the row.
            version: of the weights that have to sample.

        Raises:
            Stale: other weights sampled.
            Away: it broke off.
            ServerFailure: the answer is not one to this row.
        """
        body = {"token_ids": ask.ids, "sampling_params": ask.params}
        found = self.post(GENERATE, body)
        choice = found["choices"][0]
        ids, spans = choice["token_ids"] or [], choice["weight_versions"] or []
        if choice["finish_reason"] not in ("stop", "length"):
            raise Away(f"{self.url} (it ended a row by {choice['finish_reason']!r})")
        versions = {span["version"] for span in spans} or {None}
        if versions != {version}:
            raise Stale(" and ".join(map(str, sorted(versions, key=str))))
        entries = choice["logprobs"]["content"]
        same = found["usage"]["prompt_tokens"] == len(ask.ids)
        if not (same and ids and [each["token_id"] for each in entries] == ids):
            raise ServerFailure(f"{self.url} answers another prompt, or without log-probabilities.")
        if choice["finish_reason"] == "length" and len(ids) != ask.params["max_tokens"]:
            raise ServerFailure(
                f"{self.url} ends a row after {len(ask.ids) + len(ids)} tokens: start it with "
                f"--max-model-len {len(ask.ids) + ask.params['max_tokens']} or more."
            )
        return Answer(ids, [each["logprob"] for each in entries])


def _said(response: httpx.Response) -> str:
    """The reason in a refusal, short."""
    return " ".join(response.text.split())[:200]
