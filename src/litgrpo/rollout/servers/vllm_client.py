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
from functools import cache, cached_property
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import AliasPath, BaseModel, Field, create_model

from litgrpo.arguments import find_page, require
from litgrpo.event_loops import wait_for
from litgrpo.http import (
    LOOP,
    MIB,
    REQUEST_ERRORS,
    LimitedClient,
    MalformedReply,
    Model,
    close_client,
    describe_error,
    describe_response,
    is_tls_mistake,
    make_direct_transport,
    read_reply,
    repr_of,
)
from litgrpo.rollout.servers.served import (
    MAX_LOGPROB,
    MIN_LOGPROB,
    SampleRequest,
    SampleResult,
    check_result,
)
from litgrpo.text.visible import excerpt

Value = TypeVar("Value")
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


class ServedModel(BaseModel):
    """The model of a server, or one of its adapters."""

    id: str


class Tokens(BaseModel):
    """Response of `TOKENIZE`."""

    tokens: list[int]
    max_model_len: int


class Logprob(BaseModel):
    """Log-probability of a token of a prompt."""

    logprob: float


class TokenLogprob(Logprob):
    """Log-probability of a generated token."""

    token_id: int


class WeightSpan(BaseModel):
    """Version of the weights that sampled tokens from `start` on."""

    version: str | None
    start: int | None


class Generated(BaseModel):
    """Response of `GENERATE`; an aborted request may have no tokens."""

    choices: list[Any] = Field(min_length=1, max_length=1)
    finish_reason: str | None = Field(validation_alias=AliasPath("choices", 0, "finish_reason"))
    token_ids: list[int] | None = Field(None, validation_alias=AliasPath("choices", 0, "token_ids"))
    logprobs: list[TokenLogprob] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "logprobs", "content")
    )
    weight_versions: list[WeightSpan] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "weight_versions")
    )
    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


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
    def client(self) -> LimitedClient:
        """HTTP client with persistent connections and without a proxy."""
        client = LimitedClient(
            MAX_BYTES,
            self.timeout_s,
            base_url=self.url,
            trust_env=False,
            transport=make_direct_transport(),
        )
        weakref.finalize(self, close_client, client)
        return client

    async def _is_public(self) -> bool:
        """Return True if its host name resolves to a public address.

        Raises:
            OSError: the host name cannot be resolved in time.
        """
        parts, loop = urlsplit(self.url), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await loop.getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
        except ValueError as error:  # a malformed name
            raise OSError(str(error)) from error
        return any(ipaddress.ip_address(each[4][0]).is_global for each in found)

    async def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        if not self.allow_public and self.known_public is None:
            self.known_public = await self._is_public()
        if self.known_public and not self.allow_public:
            raise public_url_error(self.url)
        return await self.client.request(method, path, **options)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: dict[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> httpx2.Response:
        """Send a request and return its response.

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
                too large or compressed.
        """
        options = {"json": body, "params": params, "extensions": {"max_bytes": max_bytes}}
        try:
            response = wait_for(self._send(method, path, **options), LOOP)
        except httpx2.DecodingError as error:
            raise self._invalid(path, error) from error
        except REQUEST_ERRORS as error:
            if is_tls_mistake(error):
                problem = f"{self.url} cannot be reached: {describe_error(error)}"
                raise ServerFailure(problem) from error
            raise ServerUnavailable(f"{self.url} ({describe_error(error)})") from error
        if response.is_server_error:
            internal = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
            failure = InternalError if internal else ServerUnavailable
            raise failure(f"{self.url}{path} ({describe_response(response)})")
        if not response.is_success:
            missing = response.status_code in (404, 405) and path not in (COMPLETIONS, TOKENIZE)
            hint = f" {MISSING_ROUTE}" if missing else ""
            kind = NotFound if response.status_code == HTTPStatus.NOT_FOUND else ServerFailure
            raise kind(
                f"{self.url}{path} rejected the request ({describe_response(response)}).{hint}"
            )
        return response

    def _invalid(self, path: str, problem: object) -> ServerFailure:
        return ServerFailure(f"{self.url}{path} returned an invalid response: {problem}")

    def read(
        self,
        model: type[Model],
        method: str,
        path: str,
        body: Any = None,
        params: dict[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> Model:
        """Send a request and return its response as a model.

        Raises:
            ServerUnavailable, ServerFailure: see `call`; the response is not JSON of this type.
        """
        response = self.call(method, path, body, params, max_bytes)
        try:
            return read_reply(response.content, model)
        except MalformedReply as error:
            raise self._invalid(path, error) from error

    def read_field(
        self, kind: type[Value], method: str, path: str, *names: str | int, **options: Any
    ) -> Value:
        """Send a request and return a field of its response.

        Args:
            kind: type of the field.
            method: HTTP method.
            path: route.
            names: of the objects and lists around the field, and of the field.
            options: see `read`.
        """
        model = _make_model(kind, *names)  # type: ignore[arg-type]
        value: Value = self.read(model, method, path, **options).value
        return value

    def post(self, path: str, body: Any = None, **params: str) -> httpx2.Response:
        """Send a POST request; see `call`."""
        return self.call("POST", path, body, params)

    @property
    def version(self) -> str:
        """Version of its weights."""
        return self.read_field(str, "GET", "/weight_info", "weight_version")

    def list_models(self) -> list[str]:
        """Return the names of the model and of its adapters."""
        models = self.read_field(list[ServedModel], "GET", "/v1/models", "data")
        return [model.id for model in models]

    def read_config(self, *names: str) -> str:
        """Return a text of the server's configuration."""
        names = ("vllm_config", *names)
        params = {"config_format": "json"}
        return self.read_field(str, "GET", "/server_info", *names, params=params)

    @cached_property
    def copies_head(self) -> bool:
        """True if it samples with a copy of the output head; see `weight_transfer.HEAD`."""
        if self.read_config("device_config", "device") != "cpu":
            return False
        return has_head(self.post("/collective_rpc", {"method": "get_model_inspection"}).text)

    def check_logprobs(self, mode: str) -> None:
        """Raise if the server returns log-probabilities of another distribution than it samples.

        Args:
            mode: expected value of `--logprobs-mode`.

        Raises:
            ServerFailure: the server was started with another mode.
        """
        served_mode = self.read_config("model_config", "logprobs_mode")
        if served_mode != mode:
            raise ServerFailure(
                f"{self.url} runs with --logprobs-mode {excerpt(served_mode)}; start it with "
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
            route = "/reset_prefix_cache"
            if not self.read_field(bool, "POST", route, "success", params=options):
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
            response = self.read(Generated, "POST", GENERATE, body, max_bytes=max_bytes)
        except NotFound as error:
            if is_adapter:
                raise StaleWeights("another adapter") from error
            raise
        if response.finish_reason not in ("stop", "length"):
            reason = excerpt(str(response.finish_reason))
            raise ServerUnavailable(f"{self.url} (finish_reason {reason!r})")
        # A weight update during the request gives several versions.
        spans = [(str(span.version), span.start) for span in response.weight_versions or ()]
        spans = spans or [("None", 0)]
        if is_adapter:  # the server would have rejected another name
            spans = [(version, 0)]
        wrong = [
            sampled
            for sampled, _ in spans
            if sampled != version and not (in_flight and is_newer(sampled, version))
        ]
        if wrong:
            raise StaleWeights(excerpt(" and ".join(sorted(wrong))))
        try:
            result = read_result(response, request)
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
        body = {"prompt": text, "add_special_tokens": False}
        response = self.read(Tokens, "POST", TOKENIZE, body)
        return response.tokens, response.max_model_len

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
        entries = self.read_field(
            list[dict[str, Logprob] | None],
            *("POST", COMPLETIONS, "choices", 0, "prompt_logprobs"),
            body=body,
            max_bytes=max_bytes,
        )
        try:
            if len(entries) != len(ids):
                raise MalformedReply(f"log-probabilities of {len(entries)} tokens, not {len(ids)}")
            pairs = zip(ids[start:], entries[start:], strict=True)
            return [read_prompt_logprob(entry, token) for token, entry in pairs]
        except MalformedReply as error:
            raise ServerFailure(f"{self.url} returned {error}.") from error


@cache
def _make_model(kind: type[Value], *names: str | int) -> Any:
    """Return the type of a response of which one field is read."""
    field = Field(validation_alias=AliasPath(*names))  # type: ignore[arg-type]
    return create_model("Response", value=(kind, field))


def has_head(inspection: str) -> bool:
    """Return True if vLLM's model has a module for the output head, also for a tied one.

    Args:
        inspection: vLLM's listing of the modules.

    Example:
        >>> has_head("LlamaForCausalLM()((lm_head): ParallelLMHead(num_embeddings=265))")
        True
    """
    return "(lm_head): ParallelLMHead" in inspection


def read_prompt_logprob(entry: dict[str, Logprob] | None, token: int) -> float:
    """Return the log-probability of a token of a prompt.

    Args:
        entry: {token id: its values}.
        token: id of the token.

    Raises:
        MalformedReply: it is missing, or no log-probability.
    """
    if entry is None or str(token) not in entry:
        raise MalformedReply(f"no log-probability of token {token}")
    logprob = entry[str(token)].logprob
    if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
        raise MalformedReply(
            f"log-probability {repr_of(logprob)}; expected {MIN_LOGPROB:g} to 0 (--logprobs-mode "
            "raw_logprobs or processed_logprobs)"
        )
    return logprob


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


def read_result(response: Generated, request: SampleRequest) -> SampleResult:
    """Return tokens and log-probabilities of a response.

    Raises:
        MalformedReply: a field is missing, or the parts contradict each other.
    """
    ids, logprobs, prompt_tokens = response.token_ids, response.logprobs, response.prompt_tokens
    if ids is None or logprobs is None:
        raise MalformedReply("a response without token_ids or logprobs")
    if prompt_tokens != len(request.ids) or [each.token_id for each in logprobs] != ids:
        raise MalformedReply(
            f"tokens for another prompt ({prompt_tokens} tokens instead of {len(request.ids)}), or "
            "log-probabilities of other tokens"
        )
    return SampleResult(ids, [each.logprob for each in logprobs], str(response.finish_reason))
