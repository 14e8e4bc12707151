"""HTTP requests with limits in time and size, for servers that may be slow, broken or hostile.

The timeouts of httpx2 are those of single reads, so a server that sends a byte now and then is
never timed out, and a response has any size. Here one limit holds for the whole request, and a
response is read up to a number of bytes. Compressed responses are rejected: a few bytes may hold
gigabytes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from litgrpo.event_loops import event_loop
from litgrpo.text import strict_json
from litgrpo.text.visible import excerpt

MIB = 2**20
LOOP = "http"  # name of the event loop of requests
Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
MAX_CONNECT_S = 10.0  # an address without a machine does not answer at all
# Seconds between probes of an idle connection, and how many may be lost: 75 s without a response.
PROBE_S, MAX_PROBES = 15, 4
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
# What a request raises if it fails.
REQUEST_ERRORS = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError)


class ConnectionLost(ConnectionError):
    """A server gave no complete response in time; a retry may help."""


class MalformedReply(ValueError):
    """A server's response is not what its interface defines."""


class LimitedClient(httpx2.AsyncClient):
    """Client whose responses are limited in size and time, and not compressed."""

    # A response that is too large or compressed raises `httpx2.DecodingError`, one that is late
    # `httpx2.ReadTimeout`. Redirects are not followed: a key would go to another server. A request
    # may have its own limit of bytes, as `extensions={"max_bytes": 1000}`. `timeout_s` is from the
    # connection to the last byte; with `stream`, to the headers.

    def __init__(self, max_bytes: int, timeout_s: float | None = None, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "timeout": httpx2.Timeout(None, connect=MAX_CONNECT_S),
            "limits": LIMITS,
        }
        super().__init__(**defaults | options)
        self.max_bytes, self.timeout_s = max_bytes, timeout_s

    async def send(
        self, request: httpx2.Request, *, stream: bool = False, **options: Any
    ) -> httpx2.Response:
        """Send a request; see `httpx2.AsyncClient.send`."""
        request.headers["Accept-Encoding"] = "identity"
        max_bytes = request.extensions.get("max_bytes", self.max_bytes)
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await super().send(request, stream=True, **options)
                try:
                    encoding = response.headers.get("content-encoding", "identity")
                    if encoding.strip().lower() not in ("", "identity"):
                        raise httpx2.DecodingError(
                            f"the response is compressed ({excerpt(encoding)})"
                        )
                    response.stream = LimitedStream(response.stream, max_bytes)
                    if not stream:
                        await response.aread()
                except BaseException:
                    await response.aclose()
                    raise
                return response
        except TimeoutError as error:
            raise httpx2.ReadTimeout(
                f"no complete response within {self.timeout_s:g} s", request=request
            ) from error


class LimitedStream(httpx2.AsyncByteStream):
    """Body of a response, up to a number of bytes."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self.stream, self.max_bytes = stream, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body."""
        num_bytes = 0
        async for part in self.stream:
            num_bytes += len(part)
            if num_bytes > self.max_bytes:
                raise httpx2.DecodingError(f"the response has more than {self.max_bytes:,} bytes")
            yield part

    async def aclose(self) -> None:
        """Close the connection."""
        await self.stream.aclose()


def make_direct_transport() -> httpx2.AsyncHTTPTransport:
    """Return a transport without the proxies and certificates that environment variables name."""
    # It probes idle connections: a machine that loses its power or its network closes none of them,
    # and a request would wait for its whole time limit. A machine that has restarted answers the
    # first probe with a reset.
    values = {
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPALIVE": PROBE_S,  # its name on macOS
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": MAX_PROBES,
        # Probes wait while data is not acknowledged; this limit, in milliseconds, holds then.
        "TCP_USER_TIMEOUT": 1000 * PROBE_S * (MAX_PROBES + 1),
    }
    probes = [
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in values.items()
        if hasattr(socket, name)
    ]
    probes.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
    return httpx2.AsyncHTTPTransport(trust_env=False, limits=LIMITS, socket_options=probes)


def describe_error(error: BaseException) -> str:
    """Return why a request failed, in a line; of a TLS mistake also what to do."""
    link: BaseException | None = error
    while link is not None and not (str(link) and (link is error or isinstance(link, OSError))):
        link = link.__cause__ or link.__context__  # of an error without a text, the kernel's
    problem = excerpt(f"{type(error).__name__}: {'' if link is None else link}")
    if is_tls_mistake(error):
        problem += (
            ". Use http:// for a server without TLS; the certificate of a server with TLS must be"
            " trusted on this machine"
        )
    return problem


def is_tls_mistake(error: BaseException | None) -> bool:
    """Return True if a server does not use TLS, or its certificate is not accepted.

    A connection that is closed during the handshake (`SSLEOFError`) may work later.
    """
    closed = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, closed)


def describe_response(response: httpx2.Response) -> str:
    """Return status and beginning of the body, for a message."""
    return f"status {response.status_code}: {excerpt(response.content.decode('utf-8', 'replace'))}"


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of a client without a time limit; its thread stays behind if it is late."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        if result.done():  # the client's
            raise
        raise ConnectionLost(f"no answer within {seconds:g} s") from error


def close_client(client: httpx2.AsyncClient) -> None:
    """Close the connections of a client that was used in `LOOP`."""
    asyncio.run_coroutine_threadsafe(client.aclose(), event_loop(LOOP))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a response; see `litgrpo.text.strict_json.parse_json`."""
    try:
        return strict_json.parse_json(content)
    except RecursionError as error:
        raise MalformedReply("the response is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise MalformedReply(f"the response is not JSON: {excerpt(str(error))}") from error


def read_reply(content: bytes | str, model: type[Model]) -> Model:
    """Return the JSON of a response as a model; of another type nothing is converted."""
    value = parse_json(content)
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the response"
        raise MalformedReply(
            excerpt(f"{place}: {first['msg']}, got {repr_of(first['input'])}")
        ) from error


def repr_of(value: Any) -> str:
    """Return the type of a JSON value, and the value of a plain one."""
    if isinstance(value, str | int | float | None):
        return excerpt(f"{value!r:.60}")
    return type(value).__name__
