"""HTTP server on the loopback interface that answers agents from the run's rollout engine.

Each connection is read in a separate thread, which puts requests into a queue. The thread of the
rollout takes the requests, samples the replies together, and sets their results.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from litgrpo.rollout.agents.chat_api import ApiError, ChatReply, ChatRequest

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/models"
MODEL = "policy"
MAX_BODY = 4_000_000  # bytes of a request
CLOSE_S = 0.05  # time between looks for `close`
IDLE_S = 120.0  # a connection on which nothing arrives for so long is closed
OVER = ApiError(410, "the episode of this API key is over", "episode_over")


@dataclass(eq=False)
class PendingCall:
    """Request of an agent that waits for its reply.

    Args:
        row: row of the rollout.
        request: the request.
        reply: set by the thread of the rollout.
    """

    row: int
    request: ChatRequest
    reply: Future[ChatReply] = field(default_factory=Future)

    def answer(self, reply: ChatReply | ApiError) -> None:
        """Set the reply, or the error."""
        if isinstance(reply, ApiError):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class AgentProxy:
    """Answers `/v1/chat/completions` and `/v1/models` on 127.0.0.1.

    Every row of a rollout has its own API key.

    Example::

        proxy = AgentProxy()
        key = proxy.open(row=0)  # for a client with this key and `base_url=proxy.base_url`
        for call in proxy.take(timeout_s=1.0):
            call.answer(ChatReply(call.request, choices, prompt_tokens=12))
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
            keys = [key for key, its in self.rows.items() if its == row]
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
        """Return the calls that arrived since the last time, of rows that are not over.

        Args:
            timeout_s: longest time to wait for the first one.
        """
        found: list[PendingCall] = []
        with suppress(queue.Empty):
            found.append(self.calls.get(timeout=timeout_s))
            while True:
                found.append(self.calls.get_nowait())
        return [call for call in found if not call.reply.done()]

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
        super().__init__((HOST, 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log instead of printing a traceback: an agent was killed, or closed its connection."""
        log.debug("a connection of an agent failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Reads the requests of one connection."""

    server: _Server
    protocol_version = "HTTP/1.1"  # keeps connections open
    server_version = "litgrpo"
    disable_nagle_algorithm = True  # else short replies wait 40 ms for an acknowledgement
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer `/v1/models`."""
        self._handle(self._get)

    def do_POST(self) -> None:
        """Answer `/v1/chat/completions`."""
        self._handle(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at level debug instead of printing."""
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
        body = self._read_body()
        key = self._authorize()
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
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        self.server.proxy.authorize(key)
        return key

    def _unknown_page(self) -> ApiError:
        served = f"this server has POST {COMPLETIONS} and GET {MODELS}"
        return ApiError(404, f"no {self.command} {self._page[:80]}; {served}", "not_found")

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise ApiError(411, "a request needs a Content-Length")
        # A number with more digits is not converted: that takes long for thousands of digits.
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            self.close_connection = True  # the body is not read
            raise ApiError(413, f"a request has at most {MAX_BODY:,} bytes", "request_too_large")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
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
