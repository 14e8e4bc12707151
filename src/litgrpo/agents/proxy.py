"""HTTP server on the loopback interface that answers agents from the run's rollout engine.

Each connection is read in a separate thread, which puts requests into a queue. The thread of the
rollout takes the requests, samples the replies together, and sets their results.

Every user of the machine can connect. Until a connection has sent a valid key, it costs a thread, a
descriptor and a few KiB, for a few seconds. Above a limit, the oldest of them is closed.
"""

from __future__ import annotations

import json
import logging
import queue
import resource
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from litgrpo.agents.chat_api import ApiError, ChatReply, ChatRequest

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
MODEL = "policy"
MAX_BODY = 4_000_000  # bytes of a request
CLOSE_S = 0.05  # time between looks for `close`
IDLE_S = 120.0  # a connection on which nothing arrives for so long is closed
KEY_S = 10.0  # from the connection to the end of the headers with a valid key
MAX_HEAD = 65_536  # bytes of request line and headers
MAX_STRANGERS = 128  # connections that have not sent a valid key, and at most ...
DESCRIPTORS_FRAC = 1 / 8  # ... this fraction of the descriptors that a process may open
DISCARD = 65_536  # bytes that are read at once of a body that is thrown away
OVER = ApiError(410, "the episode of this API key is over", "episode_over")


@dataclass(eq=False)
class PendingCall:
    """Request of an agent that waits for its reply."""

    row: int  # of the rollout
    request: ChatRequest
    reply: Future[ChatReply] = field(default_factory=Future)  # set by the thread of the rollout
    arrived: float = field(default_factory=time.monotonic)

    def answer(self, reply: ChatReply | ApiError) -> None:
        """Set the reply, or the error."""
        if isinstance(reply, ApiError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class AgentProxy:
    """Answers `/v1/chat/completions` and `/v1/models` on 127.0.0.1.

    Every row of a rollout has its own API key: `open` returns it, `take` the calls of all rows.
    """

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[PendingCall] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.rows: dict[str, int] = {}
        self.ended: set[str] = set()
        self.waiting: dict[int, list[PendingCall]] = {}  # of rows that are not over
        self.server = _Server(self)
        serve = partial(self.server.serve_forever, CLOSE_S)
        threading.Thread(target=serve, daemon=True).start()

    @property
    def base_url(self) -> str:
        """Address for clients of the API."""
        return f"http://{HOST}:{self.server.server_address[1]}/v1"

    def open(self, row: int) -> str:
        """Return a new API key for a row."""
        key = f"row-{secrets.token_urlsafe(24)}"
        with self.lock:
            self.rows[key] = row
            self.waiting[row] = []
        return key

    def end(self, row: int) -> None:
        """Reject the row's later calls, and those that wait for a reply."""
        with self.lock:
            keys = [key for key, key_row in self.rows.items() if key_row == row]
            self.ended.update(keys)
            for key in keys:
                del self.rows[key]
            abandoned = self.waiting.pop(row, [])
        for call in abandoned:
            if not call.reply.done():
                call.answer(OVER)

    def reset(self) -> None:
        """End all rows, and forget their keys."""
        for row in list(self.waiting):
            self.end(row)
        with self.lock:
            self.ended.clear()
        with suppress(queue.Empty):
            while True:
                self.calls.get_nowait()

    def take(self, timeout_s: float) -> list[PendingCall]:
        """Return the new calls of rows that are not over; wait up to `timeout_s` for the first."""
        calls: list[PendingCall] = []
        with suppress(queue.Empty):
            calls.append(self.calls.get(timeout=timeout_s))
            while True:
                calls.append(self.calls.get_nowait())
        return [call for call in calls if not call.reply.done()]

    def submit(self, key: str, request: ChatRequest) -> PendingCall:
        """Queue a request.

        Raises:
            ApiError: the key is unknown, or its episode is over.
        """
        with self.lock:
            row = self._find_row(key)
            call = PendingCall(row, request)
            self.waiting[row].append(call)
        self.calls.put(call)
        return call

    def authorize(self, key: str) -> None:
        """Check an API key.

        Raises:
            ApiError: it is unknown, or its episode is over.
        """
        with self.lock:
            self._find_row(key)

    def _find_row(self, key: str) -> int:
        if key in self.ended:
            raise OVER
        if key not in self.rows:
            raise ApiError(401, "missing or unknown API key", "invalid_api_key")
        return self.rows[key]

    def close(self) -> None:
        """End all rows and stop the server."""
        self.reset()
        self.server.shutdown()
        self.server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    """One thread per connection."""

    daemon_threads = True
    request_queue_size = 512  # agents that connect at the same time

    def __init__(self, proxy: AgentProxy) -> None:
        self.proxy = proxy
        self.lock = threading.Lock()
        # Connections that have not sent a valid key, the oldest first, and the time of their end.
        self.strangers: dict[socket.socket, float] = {}
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = MAX_STRANGERS if descriptors < 0 else int(descriptors * DESCRIPTORS_FRAC)
        self.max_strangers = max(1, min(MAX_STRANGERS, few))
        super().__init__((HOST, 0), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is left; the connection stays ready, so the loop would spin
            self._close_strangers(limit=len(self.strangers) // 2)
            time.sleep(CLOSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        # The oldest connection without a key is closed if there are too many.
        with self.lock:
            self.strangers[request] = time.monotonic() + KEY_S
        self._close_strangers(limit=self.max_strangers)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        # Called at each look for `close`: connections that sent no key in time are closed.
        self._close_strangers(limit=self.max_strangers)

    def trust(self, request: socket.socket) -> None:
        """Remember that a connection has sent a valid key."""
        with self.lock:
            self.strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def _close_strangers(self, limit: int) -> None:
        """Close connections without a key, the oldest first, whose time is up or above a number."""
        now = time.monotonic()
        with self.lock:
            late = [connection for connection, end in self.strangers.items() if end < now]
            old = [*self.strangers][: max(0, len(self.strangers) - limit)]
            for connection in {*late, *old}:
                del self.strangers[connection]
                with suppress(OSError):  # closed by the other side
                    connection.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        # An agent was killed, or closed its connection: no traceback on the screen.
        log.debug("a connection of an agent failed", exc_info=True)


class _HeadReader:
    """Reads a connection, with a limit on the bytes of request line and headers."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, MAX_HEAD

    def readline(self, size: int) -> bytes:
        """Read a line of the head.

        Raises:
            ConnectionError: the head is too long.
        """
        line: bytes = self.stream.readline(min(size, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionError(f"the head of a request has more than {MAX_HEAD:,} bytes")
        return line

    def read(self, size: int) -> bytes:
        """Read bytes of a body."""
        return bytes(self.stream.read(size))

    def close(self) -> None:
        """Close the file."""
        self.stream.close()


class _Handler(BaseHTTPRequestHandler):
    """Reads the requests of one connection."""

    server: _Server
    protocol_version = "HTTP/1.1"  # keeps connections open
    server_version = "litgrpo"
    disable_nagle_algorithm = True  # else short replies wait 40 ms for an acknowledgement
    timeout = IDLE_S

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _HeadReader(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.left = MAX_HEAD
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer `/v1/models`."""
        self._handle(self._get)

    def do_POST(self) -> None:
        """Answer `/v1/chat/completions`."""
        self._handle(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _handle(self, answer: Any) -> None:
        try:
            answer()
        except ApiError as error:
            self._send(error.status, error.body)

    @property
    def _page(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _get(self) -> None:
        self._authorize()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "litgrpo"}
        if self._page == MODELS:
            self._send(200, {"object": "list", "data": [model]})
        elif self._page == f"{MODELS}/{MODEL}":
            self._send(200, model)
        else:
            raise self._unknown_page()

    def _post(self) -> None:
        key = self._authorize()
        body = self._read_body()
        if self._page != COMPLETIONS:
            raise self._unknown_page()
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "the body is not JSON") from error
        call = self.server.proxy.submit(key, ChatRequest.read(parsed))
        reply = call.reply.result()
        if call.request.stream:
            self._stream(reply)
        else:
            self._send(200, reply.body)

    def _authorize(self) -> str:
        """Return the key of the request, which is checked before the body is read.

        Raises:
            ApiError: the key is unknown, or its episode is over.
        """
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        try:
            self.server.proxy.authorize(key)
        except ApiError:
            self.close_connection = True
            self._discard_body()
            raise
        self.server.trust(self.connection)
        return key

    def _unknown_page(self) -> ApiError:
        served = f"this server has POST {COMPLETIONS} and GET {MODELS}"
        return ApiError(404, f"no {self.command} {self._page[:80]}; {served}", "not_found")

    def _body_length(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise ApiError(411, "a request needs a Content-Length")
        # A number with more digits is not converted: that takes long for thousands of digits.
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            self.close_connection = True  # the body is not read
            raise ApiError(413, f"a request has at most {MAX_BODY:,} bytes", "request_too_large")
        return int(length)

    def _discard_body(self) -> None:
        """Read a body without keeping it: closing before would lose the error for the client."""
        with suppress(ApiError):
            left = self._body_length()
            while left and (part := self.rfile.read(min(left, DISCARD))):
                left -= len(part)

    def _read_body(self) -> bytes:
        length = self._body_length()
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            raise ApiError(400, "the body is shorter than its Content-Length")
        return body

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, reply: ChatReply) -> None:
        data = "".join(f"data: {event}\n\n" for event in reply.events()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
