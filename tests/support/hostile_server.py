"""A server that sends any bytes, and responses that a client must survive."""

import gzip
import json
import socket
import threading
import time
import zlib
from contextlib import suppress
from itertools import chain, repeat

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ZEROS = b" " * 30_000_000


def body_of(value):
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def reply(value, status=b"200 OK"):
    """A well-formed response with this body."""
    body = body_of(value)
    yield b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\n"
    # Without this header a client may send the next request on the connection as it closes.
    yield b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def drip(start, rest):
    """Send `rest` byte by byte, slowly: no single read takes long."""
    yield start
    for byte in rest:
        time.sleep(0.02)
        yield bytes([byte])


def compress_reply(name, body):
    return [OK + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (name, len(body)), body]


FOREVER = repeat(b" "[0], 10**9)


def silence():
    while True:
        time.sleep(0.02)
        yield b""


def slow_chunks():
    yield CHUNKED
    while True:
        time.sleep(0.02)
        yield b"1\r\n \r\n"


# {name: function that returns the pieces to send}
SLOW = {
    "silence": silence,
    "slow status line": lambda: drip(b"", OK * 100),
    "slow headers": lambda: drip(OK, b"X-Header: 1\r\n" * 100),
    "slow body": lambda: drip(OK + b"Content-Length: 100000\r\n\r\n", FOREVER),
    "slow chunks": slow_chunks,
    "endless interim responses": lambda: drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
}
LARGE = {
    "endless headers": lambda: chain([OK], repeat(b"X-Header: 1\r\n" * 1000)),
    "one endless header": lambda: chain([OK, b"X: "], repeat(b"x" * 10_000)),
    "endless body": lambda: chain([OK, b"\r\n"], repeat(b" " * 60_000)),
    "endless chunks": lambda: chain([CHUNKED], repeat(b"ea60\r\n" + b" " * 60_000 + b"\r\n")),
    "large body": lambda: reply(b" " * 40_000_000),
    "gzip": lambda: compress_reply(b"gzip", gzip.compress(ZEROS)),
    "deflate": lambda: compress_reply(b"deflate", zlib.compress(ZEROS)),
    "gzip twice": lambda: compress_reply(b"gzip, gzip", gzip.compress(gzip.compress(ZEROS))),
    "brotli": lambda: compress_reply(b"br", b"\x0b\x02\x80abc\x03"),
    "zstd": lambda: compress_reply(b"zstd", b"\x28\xb5\x2f\xfd"),
}
BROKEN = {
    "closed at once": list,
    "no HTTP": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n\r\n"],
    "no status": lambda: [b"HTTP/1.1 abc\r\n\r\n"],
    "negative length": lambda: [OK, b"Content-Length: -5\r\n\r\n{}"],
    "two lengths": lambda: [OK, b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"],
    "malformed chunk": lambda: [CHUNKED, b"zz\r\n{}\r\n"],
    "cut off": lambda: [OK, b"Content-Length: 100\r\n\r\n{"],
    "redirect to itself": lambda: reply({}, b"307 Temporary Redirect\r\nLocation: /v1"),
}
NOT_JSON = {
    "200,000 brackets": b"[" * 200_000,
    "deep objects": b'{"choices":' * 100_000,
    "text": b"Internal error",
    "HTML": b"<html><body>busy</body></html>",
    "half": b'{"choices": [',
    "nothing but spaces": b"   ",
    "not UTF-8": b'{"choices": "\xff\xfe\xff"}',
    "a long number": b"9" * 10_000,
    "NaN": b"NaN",
    "minus infinity": b'{"choices": [-Infinity]}',
    "null": b"null",
    "true": b"true",
    "a list": b"[]",
    "a string": b'"choices"',
    "a number": b"1e999",
    "an empty object": b"{}",
    "event stream": b'data: {"choices": []}\n\ndata: [DONE]\n\n',
}
TRANSPORT = SLOW | LARGE | BROKEN
RESPONSES = TRANSPORT | {name: lambda body=body: reply(body) for name, body in NOT_JSON.items()}


class HostileServer:
    """Answers every connection by the pieces of a function, and then closes it.

    Args:
        answer: function that returns pieces of bytes.
    """

    def __init__(self, answer):
        self.answer, self.requests, self.stopped = answer, [], threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.listener.close()

    def accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(65536)
            self.requests.append(request)
            for piece in self.answer():
                if self.stopped.is_set():
                    return
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # a reset would hide what was sent
                pass
