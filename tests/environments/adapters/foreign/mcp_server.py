"""MCP server for tests: `mcp_server.py LEVEL [PORT]`; with a port it listens by HTTP."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, ImageContent, TextContent

server = MCPServer("tests")
kept = {"level": sys.argv[1]}


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def keep(name: str, value: str) -> str:
    """Keep a value."""
    kept[name] = value
    return "kept"


@server.tool()
def recall(name: str) -> CallToolResult:
    """Return a kept value."""
    if name in kept:
        return CallToolResult(content=[TextContent(type="text", text=kept[name])])
    text = TextContent(type="text", text=f"nothing is kept as {name}")
    return CallToolResult(content=[text], is_error=True)


@server.tool()
def draw() -> CallToolResult:
    """Draw something."""
    image = ImageContent(type="image", data="", mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="drawn:"), image])


@server.tool()
def route(server: str, tool: str) -> str:
    """Join two arguments that have the names of the client's."""
    return f"{server}/{tool}"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def sender(context: Context) -> str:
    """Return who sent the request."""
    return context.request_context.request.headers["authorization"]


@server.tool()
def sleep() -> str:
    """Hang."""
    time.sleep(600)
    return "awake"


if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run()
