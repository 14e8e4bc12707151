"""Tools of MCP servers (Model Context Protocol), through the official `mcp` package."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import (
    did_you_mean,
    import_package,
    require,
    summarize_error,
)
from litgrpo.environments.adapters.external import no_connection, schema_of
from litgrpo.environments.adapters.mcp_process import (
    EXIT_S,
    MAX_BYTES,
    ServerProcess,
    exchange_messages,
)
from litgrpo.environments.tool import EpisodeError, Tool
from litgrpo.event_loops import event_loop, wait_for
from litgrpo.http import LOOP, LimitedClient
from litgrpo.text.secrets import fill_variables
from litgrpo.text.visible import excerpt

INSTALL = "'mcp>=2'"
START_S = 60.0  # limit for starting a server, listing its tools and checking their schemas
CALL_S = 300.0  # limit of a call; the time limit of a step is usually shorter
MAX_PAGES = 100
MAX_TOOLS = 1000


@check_field_types
@dataclass(frozen=True)
class McpServer:
    """A server with its transport: `command` (stdio) or `url` (streamable HTTP).

    The keys are those of an entry of `mcpServers` in the settings of other MCP clients. In `args`,
    `cwd`, `url` and the values of `env` and `headers`, `${NAME}` is replaced by the environment
    variable, `{column}` by the value of the row's column and `{seed}` by the seed of the group.

    Args:
        command: program that is started for each episode, such as `python`.
        args: its arguments.
        env: its environment variables; of this process it inherits only PATH, HOME and the like.
        cwd: its working folder.
        url: address of a running server instead of `command`, such as http://127.0.0.1:8000/mcp.
        headers: HTTP headers for `url`, such as `{Authorization: "Bearer ${MY_TOKEN}"}`; keys that
            are written out are masked in all files.
        tools: names of the tools that the policy may call; default: all.

    Example:
        >>> server = McpServer(command="python", args=["server.py", "--level", "{level}"])
        >>> server.fill({"level": 3, "seed": 7}).args
        ['server.py', '--level', '3']
    """

    command: str = ""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(
            bool(self.command) != bool(self.url),
            "an MCP server needs either command: python (with args) or url: http://host:port/mcp.",
        )
        of_command = bool(self.args or self.env or self.cwd)
        require(not (self.url and of_command), "args, env and cwd belong to command, not to url.")
        require(not (self.command and self.headers), "headers belong to url, not to command.")
        parts = urlsplit(self.url)
        require(
            not self.url or (parts.scheme in ("http", "https") and bool(parts.netloc)),
            f"url of an MCP server is {self.url!r}; it must begin with http:// or https://.",
        )
        require(
            "@" not in parts.netloc,
            "url of an MCP server must not contain a user name or a password, which would be "
            "written to files and logs; use headers.",
        )

    def fill(self, columns: Mapping[str, Any]) -> McpServer:
        """Replace `{column}` by the values of a row."""

        def fill(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: str(columns.get(match[1], match[0])), text)

        return replace(
            self,
            args=[fill(argument) for argument in self.args],
            env={name: fill(value) for name, value in self.env.items()},
            cwd=self.cwd and fill(self.cwd),
            url=fill(self.url),
            headers={name: fill(value) for name, value in self.headers.items()},
        )

    async def start(self) -> ServerProcess | None:
        """Start the server; None if it runs already."""
        if not self.command:
            return None
        return await ServerProcess.start([self.command, *self.args], self.env, self.cwd)

    @asynccontextmanager
    async def connect(self, process: ServerProcess | None) -> AsyncIterator[Any]:
        """Reach the server and agree on a protocol version; yields `mcp.Client`."""
        mcp = _import_mcp()
        async with AsyncExitStack() as stack:
            if process is not None:
                transport: Any = exchange_messages(process)
            else:
                limits = httpx2.Timeout(START_S, read=CALL_S)
                client = LimitedClient(MAX_BYTES, headers=self.headers, timeout=limits)
                sends = import_package("mcp.client.streamable_http", INSTALL)
                transport = sends.streamable_http_client(
                    self.url, http_client=await stack.enter_async_context(client)
                )
            yield await stack.enter_async_context(mcp.Client(transport))


class McpConnection:
    """Open session with a server, whose settings have no placeholders left."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name = name
        self._process: ServerProcess | None = None
        self._closing, self._ended = asyncio.Event(), threading.Event()
        started: Future[Any] = Future()
        # The package requires that the task which opened a client closes it.
        self._session = asyncio.run_coroutine_threadsafe(
            self._hold(server, started), event_loop(LOOP)
        )
        try:
            self._client = started.result(START_S)
        except BaseException as error:  # also an interrupt: nothing may stay behind
            is_late = not started.done()
            self._kill()
            if not isinstance(error, Exception):
                raise
            reason = f"no answer within {START_S:g} s" if is_late else summarize_error(error)
            raise EpisodeError(
                f"the MCP server {name!r} cannot be used: {self._explain(reason)}"
            ) from error

    def list_tools(self, timeout_s: float) -> list[Any]:
        """Return the server's tools (`mcp.types.Tool`)."""
        return self._ask(self._list_tools(), timeout_s)

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text."""
        # ValueError is for the policy: the tool failed. All else ends the episode.
        result = self._ask(self._client.call_tool(tool, dict(arguments)), CALL_S)
        text = "\n".join(map(_text_of, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ValueError(text or f"{tool} failed")
        return text

    def close(self) -> None:
        """End the session; a server that was started by `command` exits, or is killed."""
        event_loop(LOOP).call_soon_threadsafe(self._closing.set)
        if not self._ended.wait(2 * EXIT_S):
            self._kill()

    def _kill(self) -> None:
        """End a session that does not respond, and its server."""
        self._session.cancel()
        self._ended.wait(2 * EXIT_S)
        if self._process is not None:
            self._process.kill()

    async def _hold(self, server: McpServer, started: Future[Any]) -> None:
        try:
            self._process = await server.start()
            async with server.connect(self._process) as client:
                started.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise
        finally:
            if self._process is not None:
                self._process.kill()
            self._ended.set()

    def _explain(self, reason: str) -> str:
        """Return a reason with what to do and what the server's process wrote, in one line."""
        written = self._process.describe() if self._process is not None else ""
        hint = "is a server running at its url?" if reason.startswith("ConnectError") else ""
        return "; ".join(filter(None, [reason.removeprefix("ValueError: "), hint, written]))

    async def _list_tools(self) -> list[Any]:
        tools: list[Any] = []
        cursor, size = None, 0
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            size += sum(len(tool.model_dump_json()) for tool in page.tools)
            require(
                len(tools) <= MAX_TOOLS and size <= MAX_BYTES,
                f"its list of tools has more than {MAX_TOOLS:,} tools or {MAX_BYTES:,} bytes",
            )
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")

    def _ask(self, request: Any, timeout_s: float) -> Any:
        """Return the response to a request, within a time limit."""
        # ValueError is for the policy: the server rejected the parameters. All else ends the
        # episode.
        mcp = _import_mcp()
        try:
            return wait_for(asyncio.wait_for(request, timeout_s), LOOP)
        except mcp.MCPError as error:
            if error.error.code == mcp.types.INVALID_PARAMS:
                raise ValueError(error.error.message) from error
            lost: Exception = error
        except TimeoutError:
            lost = TimeoutError(f"no answer within {timeout_s:.3g} s")
        except Exception as error:  # httpx2, anyio, pydantic
            lost = error
        raise EpisodeError(
            f"the MCP server {self.name!r} failed: {self._explain(summarize_error(lost))}"
        ) from lost


@dataclass(frozen=True)
class McpTool(Tool):
    """Tool of a server."""

    server: str = ""  # name of its server


class McpTools:
    """Tools of several servers, and their connections during an episode.

    Episodes share no connection; each is opened at the first call of a tool of its server.
    """

    def __init__(self, servers: Mapping[str, Any]) -> None:
        self.servers = {str(name): _server(str(name), entry) for name, entry in servers.items()}
        self._filled: dict[str, McpServer] = {}
        self._open: dict[str, McpConnection] = {}
        self.tools = [tool for name in self.servers for tool in self._list(name)]

    def begin(self, row: Mapping[str, Any], seed: int) -> dict[str, Tool]:
        """Begin an episode; return {name: tool}, callable."""
        self.close()
        columns = {**row, "seed": seed}
        self._filled = {name: server.fill(columns) for name, server in self.servers.items()}
        return {
            tool.name: replace(tool, function=partial(self._call, tool.server, tool.name))
            for tool in self.tools
        }

    def close(self) -> None:
        """Close the connections of the episode."""
        opened, self._open = self._open, {}
        for connection in opened.values():
            connection.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without connections."""
        return vars(self) | {"_open": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import the package where workers are forked, once for all of them."""
        vars(self).update(state)
        if self.servers:
            _import_mcp()

    def _call(self, server: str, tool: str, /, **arguments: Any) -> str:
        if server not in self._open:
            self._open[server] = McpConnection(server, self._filled[server])
        return self._open[server].call(tool, arguments)

    def _list(self, name: str) -> list[McpTool]:
        """List the tools of a server that the policy may call."""
        end = time.monotonic() + START_S
        try:
            connection = McpConnection(name, self.servers[name])
            try:
                server_tools = connection.list_tools(max(0.0, end - time.monotonic()))
            finally:
                connection.close()
        except EpisodeError as error:
            raise ValueError(f"mcp_servers: {error}") from error
        by_name = {tool.name: tool for tool in server_tools}
        tools = []
        for tool_name in self.servers[name].tools or list(by_name):
            if tool_name not in by_name:
                hint = f"{did_you_mean(tool_name, by_name)}; it has: {excerpt(', '.join(by_name))}"
                raise ValueError(f"mcp_servers: {name!r} has no tool {tool_name!r}{hint}.")
            late = f"mcp_servers: {name!r}: its schemas took more than {START_S:g} s to check."
            require(time.monotonic() < end, late)
            tool = by_name[tool_name]
            try:
                schema = schema_of(tool_name, tool.description, tool.input_schema)
            except ValueError as error:
                raise ValueError(f"mcp_servers: {name!r}: {error}") from error
            tools.append(McpTool(tool_name, no_connection, schema, name))
        return tools


@functools.cache
def _import_mcp() -> Any:
    mcp = import_package("mcp", INSTALL)
    # It logs what a server wrote, which would reach the terminal; errors say what went wrong.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    require(
        hasattr(mcp, "Client"),
        f"mcp_servers needs version 2 of the package mcp; `pip install {INSTALL}` installs it.",
    )
    return mcp


def _server(name: str, entry: Any) -> McpServer:
    keys = [option.name for option in fields(McpServer)]
    require(
        isinstance(entry, Mapping),
        f"mcp_servers: {name!r} is {entry!r}; it must have command or url.",
    )
    for key in entry:
        hint = f"{did_you_mean(str(key), keys)}; an entry has: {', '.join(keys)}"
        require(key in keys, f"mcp_servers: {name!r} has the unknown key {key!r}{hint}.")
    try:
        # Before `fill`: a row must not name a variable.
        return McpServer(**fill_variables(dict(entry)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"mcp_servers: {name!r}: {error}") from error


def _text_of(block: Any) -> str:
    """Return a block of a result as text; images and audio are named only."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type}]"
