"""HTTP connection to one server, with limits in time and size, in a private network."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import weakref
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

from litgrpo.arguments import require
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
)
from litgrpo.rollout.servers.client import ServerFailure, ServerUnavailable
from litgrpo.text.visible import excerpt

# Largest responses: of the routes for weights and settings, for each token of a row, and for each
# of the most likely tokens at its position.
MAX_BYTES, MAX_BYTES_PER_TOKEN, MAX_BYTES_PER_CANDIDATE = 16 * MIB, 4096, 512


class NotFound(ServerFailure):
    """A server does not have what a request names."""


class InternalError(ServerUnavailable):
    """A server reports an internal error (500)."""


def normalize_url(url: str, allow_public: bool, option: str = "model.engine.urls") -> str:
    """Return an address without trailing slash; `option` has it, for messages.

    Host names are resolved at the first request, not here: a server may start later.

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


class HttpServer:
    """Sends requests to a server and reads its replies.

    Args:
        url: address of the server.
        timeout_s: seconds that a request may take, to the last byte of the response.
        allow_public: allow a public address.

    Example::

        class Health(BaseModel):
            ready: bool

        HttpServer("http://10.0.0.2:8000").read(Health, "GET", "/health").ready
    """

    missing_route = ""  # what to do if the server does not have a route, for the message

    def __init__(self, url: str, timeout_s: float = 600.0, allow_public: bool = False) -> None:
        self.url, self.timeout_s, self.allow_public = url, timeout_s, allow_public
        self.is_public: bool | None = None  # not resolved yet

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

    async def _resolve_public(self) -> bool:
        """Return True if its host name resolves to a public address."""
        parts, loop = urlsplit(self.url), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                addresses = await loop.getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
        except ValueError as error:  # a malformed name
            raise OSError(str(error)) from error
        return any(ipaddress.ip_address(address[4][0]).is_global for address in addresses)

    async def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        if not self.allow_public and self.is_public is None:
            self.is_public = await self._resolve_public()
        if self.is_public and not self.allow_public:
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
        """Send a request, its body as JSON, and return a response of at most `max_bytes`.

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
            raise self.invalid(path, error) from error
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
            missing = response.status_code in (404, 405) and self.may_miss(path)
            hint = f" {self.missing_route}" if missing else ""
            kind = NotFound if response.status_code == HTTPStatus.NOT_FOUND else ServerFailure
            raise kind(
                f"{self.url}{path} rejected the request ({describe_response(response)}).{hint}"
            )
        return response

    def may_miss(self, path: str) -> bool:
        """Return True if servers have the route only with certain settings."""
        return bool(self.missing_route)

    def invalid(self, path: str, problem: object) -> ServerFailure:
        """Return the error for a reply that is not what the interface defines."""
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
        """Send a request and return its response as a model; see `call`."""
        response = self.call(method, path, body, params, max_bytes)
        try:
            return read_reply(response.content, model)
        except MalformedReply as error:
            raise self.invalid(path, error) from error

    def post(self, path: str, body: Any = None, **params: str) -> httpx2.Response:
        """Send a POST request; see `call`."""
        return self.call("POST", path, body, params)
