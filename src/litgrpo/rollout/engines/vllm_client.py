"""HTTP client of one vLLM server: requests, weight versions, and the errors of servers.

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
from litgrpo.rollout.engines.served import SampleRequest, SampleResult

GENERATE = "/inference/v1/generate"
MISSING_ROUTE = (
    "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out; see "
    "docs/scale.md."
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
        f"model.engine.urls has {url!r:.100}; expected an address such as http://127.0.0.1:8000.",
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
        timeout_s: seconds that a response may take.
        allow_public: allow a public address.

    Example::

        server = Server("http://10.0.0.2:8000")
        server.version  # of its weights, such as "12-5f0c9a1be2d4"
    """

    def __init__(self, url: str, timeout_s: float = 600.0, allow_public: bool = False) -> None:
        self.url, self.timeout_s, self.allow_public = url, timeout_s, allow_public

    @cached_property
    def client(self) -> httpx.Client:
        """HTTP client with persistent connections and without a proxy."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        client = httpx.Client(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)
        weakref.finalize(self, client.close)
        return client

    @cached_property
    def is_private(self) -> bool:
        """True if its host name resolves to no public address.

        Raises:
            ServerUnavailable: the host name cannot be resolved.
        """
        parts = urlsplit(self.url)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerUnavailable(f"{self.url} ({error})") from error
        return not any(ipaddress.ip_address(each[4][0]).is_global for each in found)

    def call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """Send a request and return the JSON of its response.

        Raises:
            ServerUnavailable: the server cannot be reached, closes the connection, or reports an
                internal error (5xx).
            ServerFailure: the server rejects the request (4xx), or the response is not JSON.
        """
        if not self.allow_public and not self.is_private:
            raise public_url_error(self.url)
        try:
            response = self.client.request(method, path, json=body, params=params)
            if response.is_server_error:
                raise ServerUnavailable(f"{self.url}{path} ({_describe_error(response)})")
            if response.is_client_error:
                hint = f" {MISSING_ROUTE}" if response.status_code in (404, 405) else ""
                raise ServerFailure(
                    f"{self.url}{path} rejected the request ({_describe_error(response)}).{hint}"
                )
            return response.json() if response.content else {}
        except httpx.TransportError as error:  # includes timeouts
            raise ServerUnavailable(f"{self.url} ({type(error).__name__}: {error})") from error
        except ValueError as error:
            raise ServerFailure(f"{self.url}{path} did not return JSON: {error}") from error

    def post(self, path: str, body: Any = None, **params: str) -> Any:
        """Send a POST request; see `call`."""
        return self.call("POST", path, body, **params)

    @property
    def version(self) -> str:
        """Version of its weights."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def check_logprobs(self, mode: str) -> None:
        """Raise if the server returns log-probabilities of another distribution than it samples.

        Args:
            mode: expected value of `--logprobs-mode`.

        Raises:
            ServerFailure: the server was started with another mode.
        """
        config = self.call("GET", "/server_info", config_format="json")["vllm_config"]
        found = config["model_config"]["logprobs_mode"]
        if found != mode:
            raise ServerFailure(
                f"{self.url} runs with --logprobs-mode {found}; start it with --logprobs-mode "
                f"{mode}."
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
        response = self.post(GENERATE, body)
        choice = response["choices"][0]
        ids, spans = choice["token_ids"] or [], choice["weight_versions"] or []
        finish_reason = choice["finish_reason"]
        if finish_reason not in ("stop", "length"):
            raise ServerUnavailable(f"{self.url} (finish_reason {finish_reason!r})")
        # A weight update during the request would give several versions.
        versions = {span["version"] for span in spans} or {None}
        if versions != {version}:
            raise StaleWeights(" and ".join(map(str, sorted(versions, key=str))))
        entries = choice["logprobs"]["content"]
        same_prompt = response["usage"]["prompt_tokens"] == len(request.ids)
        if not (same_prompt and ids and [each["token_id"] for each in entries] == ids):
            raise ServerFailure(
                f"{self.url} returned tokens for another prompt, or no log-probabilities."
            )
        if finish_reason == "length" and len(ids) != request.params["max_tokens"]:
            raise ServerFailure(
                f"{self.url} ended a row after {len(request.ids) + len(ids)} tokens; start it with "
                f"--max-model-len {len(request.ids) + request.params['max_tokens']} or more."
            )
        return SampleResult(ids, [each["logprob"] for each in entries])


def _describe_error(response: httpx.Response) -> str:
    return f"status {response.status_code}: {' '.join(response.text.split())[:200]}"
