"""Tools of MCP servers (Model Context Protocol), through the official `mcp` package."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import (
    did_you_mean,
    import_package,
    require,
    require_trusted,
    summarize_error,
)
from litgrpo.environments.adapters.external import SchemaTool, no_connection, schema_of
from litgrpo.environments.tool import EpisodeError, Tool
from litgrpo.http_client import event_loop, wait_for

INSTALL = "'mcp>=2'"
START_S = 60.0  # limit for starting a server and listing its tools
READ_S = 300.0  # silence of an HTTP server; the time limit of a step is usually shorter
MAX_PAGES = 100


@check_field_types
@dataclass(frozen=True)
class McpServer:
    """A server with its transport: `command` (stdio) or `url` (streamable HTTP).

    The keys are those of an entry of `mcpServers` in the settings of other MCP clients. In `args`,
    `cwd`, `url` and the values of `env` and `headers`, `{column}` is replaced by the value of the
    row's column and `{seed}` by the seed of the group.

    Args:
        command: program that is started for each episode, such as `python`.
        args: its arguments.
        env: its environment variables; of this process it inherits only PATH, HOME and the like.
        cwd: its working folder.
        url: address of a running server instead of `command`, such as http://127.0.0.1:8000/mcp.
        headers: HTTP headers for `url`; their keys and tokens are masked in all files.
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
        """Check that there is one transport."""
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
        require_trusted(*filter(None, (self.command, *self.args, self.cwd, self.url)))

    def fill(self, columns: Mapping[str, Any]) -> McpServer:
        """Replace `{column}` by the values of a row."""

        def fill(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda found: str(columns.get(found[1], found[0])), text)

        return replace(
            self,
            args=[fill(each) for each in self.args],
            env={name: fill(value) for name, value in self.env.items()},
            cwd=self.cwd and fill(self.cwd),
            url=fill(self.url),
            headers={name: fill(value) for name, value in self.headers.items()},
        )

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Start or reach the server and agree on a protocol version; yields `mcp.Client`."""
        mcp = _import_mcp()
        async with AsyncExitStack() as stack:
            if self.command:
                transport: Any = mcp.StdioServerParameters(
                    command=self.command, args=self.args, env=self.env, cwd=self.cwd
                )
            else:
                http = import_package("httpx2", INSTALL)
                limits = http.Timeout(START_S, read=READ_S)
                client = http.AsyncClient(headers=self.headers, timeout=limits)
                sends = import_package("mcp.client.streamable_http", INSTALL)
                transport = sends.streamable_http_client(
                    self.url, http_client=await stack.enter_async_context(client)
                )
            yield await stack.enter_async_context(mcp.Client(transport))


class McpConnection:
    """Open session with a server.

    Args:
        name: of the server, for messages.
        server: its settings without placeholders.

    Raises:
        EpisodeError: the server did not start or answer.

    Example::

        connection = McpConnection("files", McpServer(command="python", args=["server.py"]))
        connection.call("read", {"path": "a.txt"})
        connection.close()
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.name = name
        self._closing = asyncio.Event()
        started: Future[Any] = Future()
        # The package requires that the task which opened a client closes it.
        self._session = asyncio.run_coroutine_threadsafe(self._hold(server, started), event_loop())
        try:
            self._client = started.result(START_S)
        except Exception as error:
            self._session.cancel()
            raise EpisodeError(
                f"the MCP server {name!r} cannot be used: {summarize_error(error)}"
            ) from error

    def list_tools(self) -> list[Any]:
        """Return the server's tools (`mcp.types.Tool`)."""
        return self._ask(self._list_tools())

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text.

        Raises:
            ValueError: the tool failed, with its text for the policy.
            EpisodeError: the connection was lost, or the server broke the protocol.
        """
        result = self._ask(self._client.call_tool(tool, dict(arguments)))
        text = "\n".join(map(_text_of, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ValueError(text or f"{tool} failed")
        return text

    def close(self) -> None:
        """End the session; a server that was started by `command` exits."""
        event_loop().call_soon_threadsafe(self._closing.set)
        with suppress(Exception):  # a lost connection cannot be closed
            self._session.result(START_S)

    async def _hold(self, server: McpServer, started: Future[Any]) -> None:
        try:
            async with server.connect() as client:
                started.set_result(client)
                await self._closing.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    async def _list_tools(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")

    def _ask(self, request: Any) -> Any:
        """Return the response to a request.

        Raises:
            ValueError: the server rejected the request's parameters.
            EpisodeError: anything else went wrong.
        """
        mcp = _import_mcp()
        try:
            return wait_for(request)
        except mcp.MCPError as error:
            if error.error.code == mcp.types.INVALID_PARAMS:
                raise ValueError(error.error.message) from error
            lost: Exception = error
        except Exception as error:  # httpx2, anyio, pydantic
            lost = error
        raise EpisodeError(
            f"the MCP server {self.name!r} failed: {summarize_error(lost)}"
        ) from lost


@dataclass(frozen=True)
class McpTool(SchemaTool):
    """Tool of a server.

    Args:
        server: name of its server.

    Example::

        McpTool("read", function=no_connection, schema=schema, server="files")
    """

    server: str = ""


class McpTools:
    """Tools of several servers, and their connections during an episode.

    Episodes share no connection; each is opened at the first call of a tool of its server.

    Args:
        servers: {name: entry}, as `mcpServers` in the settings of other MCP clients.

    Raises:
        ValueError: an entry is wrong, `mcp` is not installed, or a server does not answer.

    Example::

        tools = McpTools({"files": {"command": "python", "args": ["server.py"]}})
        tools.begin(row, seed=0)["read"].function(path="a.txt")
        tools.close()
    """

    def __init__(self, servers: Mapping[str, Any]) -> None:
        self.servers = {str(name): _server(str(name), given) for name, given in servers.items()}
        self._filled: dict[str, McpServer] = {}
        self._open: dict[str, McpConnection] = {}
        self.tools = [each for name in self.servers for each in self._list(name)]

    def begin(self, row: Mapping[str, Any], seed: int) -> dict[str, Tool]:
        """Begin an episode.

        Returns:
            {name: tool}, callable.
        """
        self.close()
        columns = {**row, "seed": seed}
        self._filled = {name: each.fill(columns) for name, each in self.servers.items()}
        return {
            each.name: replace(each, function=partial(self._call, each.server, each.name))
            for each in self.tools
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
        try:
            connection = McpConnection(name, self.servers[name])
            try:
                listed = connection.list_tools()
            finally:
                connection.close()
        except EpisodeError as error:
            raise ValueError(f"mcp_servers: {error}") from error
        tools = {each.name: each for each in listed}
        wanted = self.servers[name].tools or list(tools)
        for each in wanted:
            known = f"{did_you_mean(each, tools)}; it has: {', '.join(tools)}"
            require(each in tools, f"mcp_servers: {name!r} has no tool {each!r}{known}.")
        return [
            McpTool(
                each, no_connection, schema_of(each, given.description, given.input_schema), name
            )
            for each in wanted
            if (given := tools[each])
        ]


def _import_mcp() -> Any:
    mcp = import_package("mcp", INSTALL)
    require(
        hasattr(mcp, "Client") and find_spec("httpx2") is not None,
        f"mcp_servers needs version 2 of the package mcp; `pip install {INSTALL}` installs it.",
    )
    return mcp


def _server(name: str, given: Any) -> McpServer:
    keys = [each.name for each in fields(McpServer)]
    require(
        isinstance(given, Mapping),
        f"mcp_servers: {name!r} is {given!r}; it must have command or url.",
    )
    for key in given:
        hint = f"{did_you_mean(str(key), keys)}; an entry has: {', '.join(keys)}"
        require(key in keys, f"mcp_servers: {name!r} has the unknown key {key!r}{hint}.")
    try:
        return McpServer(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mcp_servers: {name!r}: {error}") from error


def _text_of(block: Any) -> str:
    """Return a block of a result as text; images and audio are named only."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type}]"
