"""HTTP client of one vLLM server: requests, weight versions, and the errors of servers.

Source: vLLM 0.32, `vllm/entrypoints/rl/online` and `vllm/entrypoints/scale_out`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from http import HTTPStatus
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
    repr_of,
    send,
    wait_for,
)
from litgrpo.rollout.engines.served import (
    MAX_LOGPROB,
    MIN_LOGPROB,
    SampleRequest,
    SampleResult,
    check_result,
)
from litgrpo.text.visible import excerpt

# Version of weights that litgrpo set: iteration, number of the publish, run.
VERSION = re.compile(r"(\d{1,9})-(\d{1,9})-(\w+)", re.ASCII)
# Largest responses: of the routes for weights and settings, and for each generated token.
MAX_BYTES, MAX_BYTES_PER_TOKEN = 16 * MIB, 4096
GENERATE = "/inference/v1/generate"
# Routes of every vLLM server; the others need flags.
COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"
MISSING_ROUTE = (
    "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out; see "
    f"{find_page('docs/explanation/scale.md')}."
)


class ServerFailure(RuntimeError):
    """A server cannot do what a rollout needs, and a retry would not help."""

    exit_code = 2


class ServersUnavailable(ServerFailure):
    """No server responds; the run can resume once one is available again."""

    exit_code = 75  # EX_TEMPFAIL: schedulers may restart the run later


class NotFound(ServerFailure):
    """A server does not have what a request names."""


class ServerUnavailable(ConnectionError):
    """A server cannot be reached, or reports an internal error; a retry may help."""


class InternalError(ServerUnavailable):
    """A server reports an internal error (500)."""


class StaleWeights(Exception):
    """A server sampled with other weights than the published ones.

    Args:
        found: version that sampled.
    """

    def __init__(self, found: object) -> None:
        super().__init__(found)
        self.found = found


def normalize_url(url: str, allow_public: bool, option: str = "model.engine.urls") -> str:
    """Return an address without trailing slash.

    Host names are resolved at the first request, not here: a server may start later.

    Args:
        url: address of a server.
        allow_public: allow a public address.
        option: that has the address, for messages.

    Raises:
        ValueError: it is not a URL, or a public address.
    """
    parts = urlsplit(url)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"{option} has {excerpt(url)!r:.100}; expected an address such as http://127.0.0.1:8000.",
    )
    require(
        "@" not in parts.netloc and not parts.query,
        f"{option} has an address of {parts.hostname} with a user name, a password or a query; "
        "these are written to files and logs. Use a server in a private network without a "
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
        client = make_client(base_url=self.url, direct=True)
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
        is_json: bool = True,
    ) -> Any:
        """Send a request and return the JSON of its response.

        Args:
            method: HTTP method.
            path: route.
            body: sent as JSON.
            params: query.
            max_bytes: largest response.
            is_json: False for a route whose response is a text, which is not returned.

        Raises:
            ServerUnavailable: the server cannot be reached, closes the connection, takes longer
                than `timeout_s`, or reports an internal error (5xx).
            ServerFailure: the server rejects the request (4xx), redirects it, or the response is
                too large or not JSON.
        """
        try:
            reply = wait_for(self._send(method, path, max_bytes, body=body, params=params))
            if reply.is_server_error:
                internal = reply.status == HTTPStatus.INTERNAL_SERVER_ERROR
                failure = InternalError if internal else ServerUnavailable
                raise failure(f"{self.url}{path} ({reply.describe()})")
            if not reply.is_success:
                missing = reply.status in (404, 405) and path not in (COMPLETIONS, TOKENIZE)
                hint = f" {MISSING_ROUTE}" if missing else ""
                kind = NotFound if reply.status == HTTPStatus.NOT_FOUND else ServerFailure
                raise kind(f"{self.url}{path} rejected the request ({reply.describe()}).{hint}")
            return reply.json() if is_json and reply.content else {}
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

    def list_models(self) -> list[str]:
        """Return the names of the model and of its adapters.

        Raises:
            ServerFailure: the response is not a list of names.
        """
        found = self.read("GET", "/v1/models", "data", kind=list)
        try:
            return [read_field(each, "id", str) for each in found]
        except MalformedReply as error:
            raise ServerFailure(f"{self.url}/v1/models returned {error}.") from error

    def read_config(self, *names: str) -> str:
        """Return a text of the server's configuration; see `read`."""
        names = ("vllm_config", *names)
        return str(self.read("GET", "/server_info", *names, kind=str, config_format="json"))

    @cached_property
    def copies_head(self) -> bool:
        """True if it samples with a copy of the output head; see `weight_transfer.HEAD`."""
        if self.read_config("device_config", "device") != "cpu":
            return False
        found = self.post("/collective_rpc", {"method": "get_model_inspection"})
        return has_head(str(found))

    def check_logprobs(self, mode: str) -> None:
        """Raise if the server returns log-probabilities of another distribution than it samples.

        Args:
            mode: expected value of `--logprobs-mode`.

        Raises:
            ServerFailure: the server was started with another mode.
        """
        found = self.read_config("model_config", "logprobs_mode")
        if found != mode:
            raise ServerFailure(
                f"{self.url} runs with --logprobs-mode {excerpt(found)}; start it with "
                f"--logprobs-mode {mode}."
            )

    @contextmanager
    def updating_weights(self, version: str, *, in_flight: bool = False) -> Iterator[None]:
        """Pause the server while its weights are replaced, and set their version.

        The prefix cache holds keys and values of the old weights, so it is reset before the version
        changes.

        Args:
            version: of the new weights.
            in_flight: running requests continue after the update, and the server computes the keys
                and values of their tokens again; if not, they are finished first.

        Raises:
            ServerUnavailable: the server could not reset its cache.
        """
        self.post("/pause", mode="keep" if in_flight else "wait")
        try:
            yield
            options = {"reset_running_requests": "true"} if in_flight else {}
            if not self.read("POST", "/reset_prefix_cache", "success", kind=bool, **options):
                raise ServerUnavailable(f"{self.url} (it could not reset its prefix cache)")
            self.post("/update_weight_version", {"new_version": version})
        finally:
            self.post("/resume")

    def complete(
        self,
        request: SampleRequest,
        version: str,
        *,
        in_flight: bool = False,
        is_adapter: bool = False,
    ) -> SampleResult:
        """Generate the next turn of a row.

        Args:
            request: request for the turn.
            version: version of the weights that must sample it.
            in_flight: newer versions may sample it, too.
            is_adapter: the weights are an adapter with the name of the version.

        Raises:
            StaleWeights: other weights sampled.
            ServerUnavailable: the server aborted the request.
            ServerFailure: the response does not match the request.
        """
        body = {"token_ids": request.ids, "sampling_params": request.params}
        num_tokens = len(request.ids) + request.params["max_tokens"]
        max_bytes = MIB + MAX_BYTES_PER_TOKEN * num_tokens
        if is_adapter:
            body["model"] = version
        try:
            response = self.call("POST", GENERATE, body, max_bytes=max_bytes)
        except NotFound as error:
            if is_adapter:
                raise StaleWeights("another adapter") from error
            raise
        try:
            choice = read_choice(response)
            if choice["finish_reason"] not in ("stop", "length"):
                reason = excerpt(str(choice["finish_reason"]))
                raise ServerUnavailable(f"{self.url} (finish_reason {reason!r})")
            # A weight update during the request gives several versions.
            spans = read_versions(choice)
            if is_adapter:  # the server would have rejected another name
                spans = [(version, 0)]
            wrong = [
                found
                for found, _ in spans
                if found != version and not (in_flight and is_newer(found, version))
            ]
            if wrong:
                raise StaleWeights(excerpt(" and ".join(sorted(wrong))))
            result = read_result(response, choice, request)
            if in_flight:
                versions = token_versions(spans, len(result.ids))
                result = replace(result, versions=versions)
            check_result(request, result)
        except MalformedReply as error:
            raise ServerFailure(f"{self.url} returned {error}.") from error
        return result

    def tokenize(self, text: str) -> tuple[list[int], int]:
        """Return the token ids of a text without special tokens before it, and the longest row.

        Raises:
            ServerUnavailable, ServerFailure: see `call`.
        """
        found = self.post(TOKENIZE, {"prompt": text, "add_special_tokens": False})
        try:
            ids = read_field(found, "tokens", list)
            return ids, read_field(found, "max_model_len", int)
        except MalformedReply as error:
            raise ServerFailure(f"{self.url} returned {error}.") from error

    def prompt_logprobs(self, ids: list[int], start: int) -> list[float]:
        """Return the log-probabilities of the tokens of a row from `start` on.

        They are those of the whole softmax at temperature 1, for any `--logprobs-mode` of
        log-probabilities: samplers and filters do not apply to a prompt.

        Args:
            ids: tokens of the row.
            start: first token to return, at least 1: nothing predicts the first one.

        Raises:
            ServerUnavailable: see `call`.
            ServerFailure: see `call`; or the response does not match the request.
        """
        assert start > 0
        # A server generates at least one token; it is not used.
        body = {"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0}
        max_bytes = MIB + MAX_BYTES_PER_TOKEN * len(ids)
        response = self.call("POST", COMPLETIONS, body, max_bytes=max_bytes)
        try:
            entries = read_field(read_choice(response), "prompt_logprobs", list)
            if len(entries) != len(ids):
                raise MalformedReply(f"log-probabilities of {len(entries)} tokens, not {len(ids)}")
            pairs = zip(ids[start:], entries[start:], strict=True)
            return [read_prompt_logprob(entry, token) for token, entry in pairs]
        except MalformedReply as error:
            raise ServerFailure(f"{self.url} returned {error}.") from error


def has_head(inspection: str) -> bool:
    """Return True if vLLM's model has a module for the output head, also for a tied one.

    Args:
        inspection: vLLM's listing of the modules.

    Example:
        >>> has_head("LlamaForCausalLM()((lm_head): ParallelLMHead(num_embeddings=265))")
        True
    """
    return "(lm_head): ParallelLMHead" in inspection


def read_prompt_logprob(entry: Any, token: int) -> float:
    """Return the log-probability of a token of a prompt.

    Args:
        entry: {token id: its values}.
        token: id of the token.

    Raises:
        MalformedReply: it is missing, or no log-probability.
    """
    found = read_field(read_field(entry, str(token), dict), "logprob", float, int)
    if not MIN_LOGPROB <= found <= MAX_LOGPROB:
        raise MalformedReply(
            f"log-probability {repr_of(found)}; expected {MIN_LOGPROB:g} to 0 (--logprobs-mode "
            "raw_logprobs or processed_logprobs)"
        )
    return float(found)


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


def read_versions(choice: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Return the versions of the weights that sampled a choice, and their first tokens.

    Raises:
        MalformedReply: a field is missing or of another type.
    """
    spans = read_field(choice, "weight_versions", list, type(None)) or []
    versions = [str(read_field(span, "version", str, type(None))) for span in spans] or ["None"]
    begins = [read_field(span, "start", int, type(None)) for span in spans] or [0]
    return list(zip(versions, begins, strict=True))


def is_newer(found: str, version: str) -> bool:
    """Return True if the same run published a version after another one.

    Args:
        found: version of a server, "<iteration>-<number of the publish>-<run>" if litgrpo set it.
        version: version of this run.

    Example:
        >>> is_newer("7-8-5f0c9a1be2d4", "6-7-5f0c9a1be2d4")
        True
        >>> is_newer("default", "6-7-5f0c9a1be2d4")
        False
    """
    new, own = VERSION.fullmatch(found), VERSION.fullmatch(version)
    if new is None or own is None or new[3] != own[3]:
        return False
    return int(new[2]) > int(own[2]) and int(new[1]) >= int(own[1])


def token_versions(spans: list[tuple[str, int | None]], num_tokens: int) -> list[int]:
    """Return the iteration of the weights that sampled each token.

    Args:
        spans: versions and their first tokens.
        num_tokens: tokens of the turn.

    Raises:
        MalformedReply: spans do not begin with the first token, or are not in order.

    Example:
        >>> token_versions([("6-7-5f0c9a1be2d4", 0), ("7-8-5f0c9a1be2d4", 2)], num_tokens=3)
        [6, 6, 7]
    """
    begins = [-1 if start is None else start for _, start in spans]
    if begins[0] != 0 or begins != sorted(set(begins)) or begins[-1] >= num_tokens:
        raise MalformedReply(
            f"weight versions that begin at tokens {excerpt(str(begins))} of {num_tokens}"
        )
    ends = [*begins[1:], num_tokens]
    numbers = [int(version.split("-")[0]) for version, _ in spans]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return [number for number, size in zip(numbers, sizes, strict=True) for _ in range(size)]


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
