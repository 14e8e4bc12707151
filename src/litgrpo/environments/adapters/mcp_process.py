"""Run an MCP server as a process, with a limit on its messages and an end of all it started.

The transport of the package `mcp` keeps a line of any length, shows the server's stderr on the
terminal, and leaves a server behind whose session is not closed in time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from litgrpo.arguments import import_package
from litgrpo.http import MIB
from litgrpo.text.visible import excerpt
from litgrpo.workers import server

MAX_BYTES = 16 * MIB  # of a message
INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")  # environment variables
EXIT_S = 2.0  # from the end of stdin until a server is killed
POLL_S = 0.01
STDERR_BYTES = 4_000  # the end of stderr, which is kept for messages


class ServerProcess:
    """A server, its messages, and the end of what it wrote to stderr.

    Its processes are killed at the end: its group, and those that left it for one of their own.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.problem, self._stderr = process, "", b""
        self._group: int | None = process.pid
        self._started: set[int] = set()
        self._reader = asyncio.create_task(self._read_stderr())

    @staticmethod
    async def start(command: list[str], env: dict[str, str], cwd: str | None) -> ServerProcess:
        """Start a program; `env` is added to PATH, HOME and the like."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                cwd=cwd or None,
                env=inherited | env,
                start_new_session=True,
                limit=MAX_BYTES,
            )
        except (OSError, ValueError) as error:
            reason = f"({type(error).__name__}: {error})"
            if cwd and not os.path.isdir(cwd):
                raise ValueError(f"cwd {cwd!r:.100} is not a folder {reason}") from error
            raise ValueError(
                f"command {command[0]!r:.100} cannot be started {reason}; give a program on PATH, "
                "or its whole path"
            ) from error
        return ServerProcess(process)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines that it writes; a line above the limit is the end."""
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                yield line
        except ValueError:
            self.problem = f"a message has more than {MAX_BYTES:,} bytes"

    async def write(self, line: bytes) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        await self.process.stdin.drain()

    async def stop(self) -> None:
        """Close stdin, wait a little, and kill it and all processes that it started."""
        assert self.process.stdin is not None
        try:
            # They are nobody's children once the server has exited.
            self._started.update(server.descendants(self.process.pid))
            self.process.stdin.close()
            end = time.monotonic() + EXIT_S
            while self.process.returncode is None and time.monotonic() < end:
                await asyncio.sleep(POLL_S)
        finally:
            self.kill()
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.process.wait(), EXIT_S)
            finally:
                # A process that left the group may hold the pipes; nothing public closes them here.
                self.process._transport.close()  # type: ignore[attr-defined]
                self._reader.cancel()

    def kill(self) -> None:
        """Kill it and all processes that it started, at once; later calls have no effect."""
        group, self._group = self._group, None
        if group is not None:
            # The number of a process that has exited may belong to another one.
            if self.process.returncode is None:
                self._started.update(server.descendants(group))
            for pid in self._started:
                server.kill(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def describe(self) -> str:
        """Return what went wrong and the last line of stderr, for a message; "" if nothing did."""
        lines = self._stderr.decode("utf-8", "replace").strip().splitlines()
        written = [f"stderr: {excerpt(lines[-1])}"] if lines else []
        return "; ".join(filter(None, [self.problem, *written]))

    async def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        while part := await self.process.stderr.read(STDERR_BYTES):
            self._stderr = (self._stderr + part)[-STDERR_BYTES:]


@asynccontextmanager
async def exchange_messages(process: ServerProcess) -> AsyncIterator[tuple[Any, Any]]:
    """Connect a process with `mcp.Client`; yields the streams of messages, and stops it."""
    anyio = import_package("anyio", "'mcp>=2'")
    types = import_package("mcp.types", "'mcp>=2'")
    session_message = import_package("mcp.shared.message", "'mcp>=2'").SessionMessage
    incoming, received = anyio.create_memory_object_stream(0)
    sent, outgoing = anyio.create_memory_object_stream(0)

    async def receive() -> None:
        async with incoming:
            async for line in process.lines():
                try:
                    parsed = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError as error:  # such as a line of a log
                    await incoming.send(error)
                else:
                    await incoming.send(session_message(parsed))

    async def send() -> None:
        async with outgoing:
            async for message in outgoing:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.write(text.encode("utf-8", "replace") + b"\n")

    async def run(task: Any) -> None:
        # A lost process ends the session, and with it what waits for a message.
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await task()
        incoming.close()

    tasks = [asyncio.create_task(run(task)) for task in (receive, send)]
    try:
        yield received, sent
    finally:
        # The session is often cancelled, and its cancellation comes again at every `await`.
        with anyio.CancelScope(shield=True):
            await process.stop()
        for task in tasks:
            task.cancel()
        for stream in (received, sent, incoming, outgoing):
            stream.close()
