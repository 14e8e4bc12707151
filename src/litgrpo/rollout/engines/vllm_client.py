"""HTTP client of one vLLM server: requests, weight versions, and the errors of servers.

Source: vLLM 0.32, `vllm/entrypoints/rl/online` and `vllm/entrypoints/scale_out`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from litgrpo.arguments import find_page, require
from litgrpo.http_client import (
    MIB,
    ConnectionLost,
    MalformedReply,
    Reply,
    TLSFailed,
    close_client,
    make_client,
    read_field,
    send,
    wait_for,
)
from litgrpo.rollout.engines.served import SampleRequest, SampleResult, check_result
from litgrpo.text.visible import excerpt

# Largest responses: of the routes for weights and settings, and for each generated token.
MAX_BYTES, MAX_BYTES_PER_TOKEN = 16 * MIB, 4096
GENERATE = "/inference/v1/generate"
MISSING_ROUTE = (
    "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out; see "
    f"{find_page('docs/scale.md')}."
)


class ServerFailure(RuntimeError):
    """A server cannot do what a rollout needs, and a retry would not help."""

    exit_code = 2


class ServersUnavailable(ServerFailure):
    """No server responds; the run can resume once one is available again."""

    exit_code = 75  # EX_TEMPFAIL: schedulers may restart the run later


class ServerUnavailable(ConnectionError):
    """A server cannot be reached, or reports an internal error; a retry may help."""


class StaleWeights(Exception):
    """A server sampled with other weights than the published ones.

    Args:
        found: version that sampled.
    """

    def __init__(self, found: object) -> None:
        super().__init__(found)
        self.found = found


def normalize_url(url: str, allow_public: bool) -> str:
    """Return an address without trailing slash.

    Host names are resolved at the first request, not here: a server may start later.

    Raises:
        ValueError: it is not a URL, or a public address.
    """
    parts = urlsplit(url)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"model.engine.urls has {excerpt(url)!r:.100}; expected an address such as "
        "http://127.0.0.1:8000.",
    )
    require(
        "@" not in parts.netloc and not parts.query,
        f"model.engine.urls has an address of {parts.hostname} with a user name, a password or a "
        "query; these are written to files and logs. Use a server in a private network without a "
        "password.",
    )
    try:
        is_public = ipaddress.ip_address(str(parts.hostname)).is_global
    except ValueError:  # a host name
        is_public = False
    if is_public and not allow_public:
        raise public_url_error(url)
    return url.rstrip("/")


def public_url_error(url: str) -> ValueError:
    """Return the error for a server that anyone can reach."""
    return ValueError(
        f"model.engine.urls has {url}, a public address. Anyone who reaches the routes that update "
        "weights can run code on the server: use a private network or a tunnel, or set "
        "model.engine.allow_public: true."
    )


class Server:
    """Client of a vLLM server.

    Args:
        url: address of the server.
        timeout_s: seconds that a request may take, to the last byte of the response.
        allow_public: allow a public address.

    Example::

        server = Server("http://10.0.0.2:8000")
        server.version  # of its weights, such as "12-5f0c9a1be2d4"
    """

    def __init__(self, url: str, timeout_s: float = 600.0, allow_public: bool = False) -> None:
        self.url, self.timeout_s, self.allow_public = url, timeout_s, allow_public
        self.known_public: bool | None = None  # not resolved yet

    @cached_property
    def client(self) -> httpx.AsyncClient:
        """HTTP client with persistent connections and without a proxy."""
        client = make_client(base_url=self.url, trust_env=False)
        weakref.finalize(self, close_client, client)
        return client

    async def _is_public(self) -> bool:
        """Return True if its host name resolves to a public address.

        Raises:
            ConnectionLost: the host name cannot be resolved in time.
        """
        parts, loop = urlsplit(self.url), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await loop.getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
        except (OSError, ValueError) as error:  # includes timeouts and malformed names
            raise ConnectionLost(str(error)) from error
        return any(ipaddress.ip_address(each[4][0]).is_global for each in found)

    async def _send(self, method: str, path: str, max_bytes: int, **options: Any) -> Reply:
        if not self.allow_public and self.known_public is None:
            self.known_public = await self._is_public()
        if self.known_public and not self.allow_public:
            raise public_url_error(self.url)
        return await send(
            self.client, method, path, timeout_s=self.timeout_s, max_bytes=max_bytes, **options
        )

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: dict[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Any:
        """Send a request and return the JSON of its response.

        Args:
            method: HTTP method.
            path: route.
            body: sent as JSON.
            params: query.
            max_bytes: largest response.

        Raises:
            ServerUnavailable: the server cannot be reached, closes the connection, takes longer
                than `timeout_s`, or reports an internal error (5xx).
            ServerFailure: the server rejects the request (4xx), redirects it, or the response is
                too large or not JSON.
        """
        try:
            reply = wait_for(self._send(method, path, max_bytes, body=body, params=params))
            if reply.is_server_error:
                raise ServerUnavailable(f"{self.url}{path} ({reply.describe()})")
            if not reply.is_success:
                hint = f" {MISSING_ROUTE}" if reply.status in (404, 405) else ""
                raise ServerFailure(
                    f"{self.url}{path} rejected the request ({reply.describe()}).{hint}"
                )
            return reply.json() if reply.content else {}
        except TLSFailed as error:
            raise ServerFailure(f"{self.url} cannot be reached: {error}") from error
        except ConnectionLost as error:
            raise ServerUnavailable(f"{self.url} ({error})") from error
        except MalformedReply as error:
            raise ServerFailure(
                f"{self.url}{path} returned an invalid response: {error}"
            ) from error

    def read(self, method: str, path: str, *names: str, kind: type, **params: str) -> Any:
        """Send a request and return a field of its response.

        Args:
            method: HTTP method.
            path: route.
            names: of the objects around the field, and of the field.
            kind: type of the field.
            params: query.

        Raises:
            ServerUnavailable, ServerFailure: see `call`; the field is missing or of another type.
        """
        found = self.call(method, path, params=params)
        try:
            for name in names[:-1]:
                found = read_field(found, name, dict)
            return read_field(found, names[-1], kind)
        except MalformedReply as error:
            raise ServerFailure(
                f"{self.url}{path} returned an invalid response: {error}"
            ) from error

    def post(self, path: str, body: Any = None, **params: str) -> Any:
        """Send a POST request; see `call`."""
        return self.call("POST", path, body, params)

    @property
    def version(self) -> str:
        """Version of its weights."""
        return str(self.read("GET", "/weight_info", "weight_version", kind=str))

    def check_logprobs(self, mode: str) -> None:
        """Raise if the server returns log-probabilities of another distribution than it samples.

        Args:
            mode: expected value of `--logprobs-mode`.

        Raises:
            ServerFailure: the server was started with another mode.
        """
        names = ("vllm_config", "model_config", "logprobs_mode")
        found = self.read("GET", "/server_info", *names, kind=str, config_format="json")
        if found != mode:
            raise ServerFailure(
                f"{self.url} runs with --logprobs-mode {excerpt(found)}; start it with "
                f"--logprobs-mode {mode}."
            )

    @contextmanager
    def updating_weights(self, version: str) -> Iterator[None]:
        """Pause the server while its weights are replaced, and set their version.

        Running requests are finished first. The prefix cache holds keys and values of the old
        weights, so it is reset before the version changes.
        """
        self.post("/pause", mode="wait")
        try:
            yield
            self.post("/reset_prefix_cache")
            self.post("/update_weight_version", {"new_version": version})
        finally:
            self.post("/resume")

    def complete(self, request: SampleRequest, version: str) -> SampleResult:
        """Generate the next turn of a row.

        Args:
            request: request for the turn.
            version: version of the weights that must sample it.

        Raises:
            StaleWeights: other weights sampled.
            ServerUnavailable: the server aborted the request.
            ServerFailure: the response does not match the request.
        """
        body = {"token_ids": request.ids, "sampling_params": request.params}
        num_tokens = len(request.ids) + request.params["max_tokens"]
        max_bytes = MIB + MAX_BYTES_PER_TOKEN * num_tokens
        response = self.call("POST", GENERATE, body, max_bytes=max_bytes)
        try:
            choice = read_choice(response)
            if choice["finish_reason"] not in ("stop", "length"):
                reason = excerpt(str(choice["finish_reason"]))
                raise ServerUnavailable(f"{self.url} (finish_reason {reason!r})")
            # A weight update during the request would give several versions.
            versions = read_versions(choice)
            if versions != {version}:
                raise StaleWeights(excerpt(" and ".join(sorted(versions))))
            result = read_result(response, choice, request)
            check_result(request, result)
        except MalformedReply as error:
            raise ServerFailure(f"{self.url} returned {error}.") from error
        return result


def read_choice(response: Any) -> dict[str, Any]:
    """Return the only choice of a response, with its finish reason.

    Raises:
        MalformedReply: it has none or several, or no finish reason.
    """
    choices = read_field(response, "choices", list)
    if len(choices) != 1:
        raise MalformedReply(f"{len(choices)} choices; expected 1")
    read_field(choices[0], "finish_reason", str, type(None))
    return dict(choices[0])


def read_versions(choice: dict[str, Any]) -> set[str]:
    """Return the versions of the weights that sampled a choice; {"None"} if it names none."""
    spans = read_field(choice, "weight_versions", list, type(None)) or []
    return {str(read_field(span, "version", str, type(None))) for span in spans} or {"None"}


def read_result(response: Any, choice: dict[str, Any], request: SampleRequest) -> SampleResult:
    """Return tokens and log-probabilities of a response.

    Raises:
        MalformedReply: a field is missing or of another type, or the parts contradict each other.
    """
    ids = read_field(choice, "token_ids", list)
    entries = read_field(read_field(choice, "logprobs", dict), "content", list)
    named = [read_field(entry, "token_id", int) for entry in entries]
    logprobs = [read_field(entry, "logprob", float, int) for entry in entries]
    prompt_tokens = read_field(read_field(response, "usage", dict), "prompt_tokens", int)
    if prompt_tokens != len(request.ids) or named != ids:
        raise MalformedReply(
            f"tokens for another prompt ({prompt_tokens} tokens instead of {len(request.ids)}), or "
            "log-probabilities of other tokens"
        )
    return SampleResult(ids, logprobs, choice["finish_reason"])
