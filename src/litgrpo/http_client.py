"""HTTP requests with limits in time and size, for servers that may be slow, broken or hostile.

The timeouts of httpx are those of single reads, so a server that sends a byte now and then is never
timed out, and a response has any size. Here one limit holds for the whole request, and a response
is read up to a number of bytes. Compressed responses are rejected: a few bytes may hold gigabytes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import httpx

from litgrpo.text.visible import excerpt

MIB = 2**20
Result = TypeVar("Result")
MAX_CONNECT_S = 10.0  # an address without a machine does not answer at all
# Seconds between probes of an idle connection, and how many may be lost: 75 s without a response.
PROBE_S, MAX_PROBES = 15, 4


class ConnectionLost(ConnectionError):
    """A server gave no complete response in time; a retry may help."""


class TLSFailed(ConnectionLost):
    """No encrypted connection is possible, so a retry does not help."""


class MalformedReply(ValueError):
    """A server's response is not what its interface defines."""


@dataclass(frozen=True)
class Reply:
    """Response of a server.

    Args:
        status: HTTP status.
        headers: its headers.
        content: its body.

    Example:
        >>> Reply(200, httpx.Headers(), b'{"a": 1}').json()
        {'a': 1}
    """

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def is_success(self) -> bool:
        """True for 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004

    @property
    def is_server_error(self) -> bool:
        """True for 5xx."""
        return 500 <= self.status < 600  # noqa: PLR2004

    def json(self) -> Any:
        """Return the JSON of the body, which has no NaN or infinity.

        Raises:
            MalformedReply: it is not JSON, or too deep.
        """
        return parse_json(self.content)

    def describe(self) -> str:
        """Return status and beginning of the body, for a message."""
        return f"status {self.status}: {excerpt(self.content.decode('utf-8', 'replace'))}"


async def send(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    body: Any = None,
    headers: dict[str, str] | None = None,
    params: dict[str, str] | None = None,
    timeout_s: float,
    max_bytes: int,
) -> Reply:
    """Send a request and read the response.

    Redirects are not followed: a key would go to another server.

    Args:
        client: as `make_client` returns it.
        method: HTTP method.
        url: address.
        body: sent as JSON, unless it is None.
        headers: headers of the request.
        params: query of the request.
        timeout_s: seconds for the whole request, from the connection to the last byte.
        max_bytes: largest body.

    Raises:
        ConnectionLost: no complete response within the limit.
        TLSFailed: the server does not use TLS, or its certificate is not accepted.
        MalformedReply: the body is compressed or too large.
    """
    sent = dict(headers or {}) | {"Accept-Encoding": "identity"}
    content = None
    if body is not None:
        content = json.dumps(body).encode()
        sent["Content-Type"] = "application/json"
    try:
        async with asyncio.timeout(timeout_s):
            request = client.build_request(
                method, url, content=content, headers=sent, params=params or None
            )
            response = await client.send(request, stream=True)
            try:
                _reject_compression(response.headers)
                found = bytearray()
                async for chunk in response.aiter_raw():
                    found += chunk
                    if len(found) > max_bytes:
                        raise MalformedReply(f"the response has more than {max_bytes:,} bytes")
            finally:
                await response.aclose()
    except TimeoutError as error:
        raise ConnectionLost(f"no complete response within {timeout_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        problem = excerpt(f"{type(error).__name__}: {_find_text(error)}")
        if _is_tls_mistake(error):
            raise TLSFailed(
                f"{problem}. Use http:// for a server without TLS; the certificate of a server "
                "with TLS must be trusted on this machine"
            ) from error
        raise ConnectionLost(problem) from error
    return Reply(response.status_code, response.headers, bytes(found))


def _reject_compression(headers: Any) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise MalformedReply(f"the response is compressed ({excerpt(encoding)})")


def make_limits(http: Any, max_bytes: int) -> dict[str, Any]:
    """Return options for the client of another library: limits of size, and no compression.

    Args:
        http: its module, httpx or one with the same interface.
        max_bytes: largest body of a response.

    Example:
        >>> client = httpx.AsyncClient(**make_limits(httpx, 1000))
    """

    class Limited(http.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, max_bytes

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self.stream:
                self.left -= len(part)
                if self.left < 0:
                    raise http.ReadError(f"the response has more than {max_bytes:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self.stream.aclose()

    async def ask_for_plain(request: Any) -> None:
        request.headers["Accept-Encoding"] = "identity"

    async def limit(response: Any) -> None:
        try:
            _reject_compression(response.headers)
        except MalformedReply as error:
            raise http.DecodingError(str(error)) from error
        response.stream = Limited(response.stream)

    return {"event_hooks": {"request": [ask_for_plain], "response": [limit]}}


def _find_text(error: BaseException) -> str:
    """Return the text of an error; if it has none, that of the kernel's error that caused it."""
    link: BaseException | None = error
    while link is not None and not (str(link) and (link is error or isinstance(link, OSError))):
        link = link.__cause__ or link.__context__
    return "" if link is None else str(link)


def _is_tls_mistake(error: BaseException | None) -> bool:
    """Return True if a server does not use TLS, or its certificate is not accepted.

    A connection that is closed during the handshake (`SSLEOFError`) may work later.
    """
    closed = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, closed)


def make_client(*, base_url: str = "", direct: bool = False) -> httpx.AsyncClient:
    """Return a client for `send`: without a limit on the time of reads and on connections.

    Args:
        base_url: prefix of the URLs.
        direct: ignore the proxies and certificates that environment variables name, and probe idle
            connections: a machine that loses its power or its network closes none of them.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    # With a transport, httpx ignores the proxies of the environment.
    transport = (
        httpx.AsyncHTTPTransport(trust_env=False, limits=limits, socket_options=_probes())
        if direct
        else None
    )
    return httpx.AsyncClient(
        base_url=base_url,
        timeout=httpx.Timeout(None, connect=MAX_CONNECT_S),
        limits=limits,
        follow_redirects=False,
        trust_env=not direct,
        transport=transport,
    )


def _probes() -> list[tuple[int, int, int]]:
    """Socket options that end a connection to a machine that does not respond.

    Without them a request waits for its whole time limit. A machine that has restarted answers the
    first probe with a reset.
    """
    values = {
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPALIVE": PROBE_S,  # its name on macOS
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": MAX_PROBES,
        # Probes wait while data is not acknowledged; this limit, in milliseconds, holds then.
        "TCP_USER_TIMEOUT": 1000 * PROBE_S * (MAX_PROBES + 1),
    }
    found = [
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in values.items()
        if hasattr(socket, name)
    ]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *found]


# `functools.cache` alone would let two threads make a loop each, and connections belong to one.
_one_loop = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of requests that threads wait for; it runs in a daemon thread."""
    with _one_loop:
        return _start_loop()


@functools.cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="litgrpo-http").start()
    return loop


# A forked process inherits the loop but not its thread.
os.register_at_fork(after_in_child=_start_loop.cache_clear)


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that runs in `event_loop`, from any other thread."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result()
    except BaseException:  # also an interrupt: the response is not needed
        future.cancel()
        raise


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of a client without a time limit; its thread stays behind if it is late.

    Raises:
        ConnectionLost: no result within the limit.
    """
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


def close_client(client: httpx.AsyncClient) -> None:
    """Close the connections of a client that was used with `wait_for`."""
    asyncio.run_coroutine_threadsafe(client.aclose(), event_loop())


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text without NaN and infinity.

    Raises:
        MalformedReply: it is not JSON, or too deep.

    Example:
        >>> parse_json('{"a": [1, null]}')
        {'a': [1, None]}
    """
    try:
        return json.loads(content, parse_constant=_reject_constant)
    except RecursionError as error:
        raise MalformedReply("the response is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise MalformedReply(f"the response is not JSON: {excerpt(str(error))}") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def read_field(value: Any, name: str, *kinds: type) -> Any:
    """Return a field of a JSON object.

    Args:
        value: value of a response.
        name: of the field.
        kinds: allowed types; bool is not an int.

    Raises:
        MalformedReply: `value` is not an object, or has no such field of these types.

    Example:
        >>> read_field({"id": 7}, "id", int)
        7
    """
    if not isinstance(value, dict) or name not in value:
        found = f"an object with {excerpt(str(list(value)))}" if isinstance(value, dict) else value
        raise MalformedReply(f"expected an object with '{name}', got {excerpt(repr_of(found))}")
    found = value[name]
    if type(found) not in kinds:
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise MalformedReply(f"'{name}' is {excerpt(repr_of(found))}; expected {allowed}")
    return found


def repr_of(value: Any) -> str:
    """Return the type of a JSON value, and the value of a plain one."""
    if isinstance(value, str | int | float | None):
        return excerpt(f"{value!r:.60}")
    return type(value).__name__
