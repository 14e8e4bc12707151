"""Tools of real MCP servers, by stdio and by HTTP."""

import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.environments import EpisodeError, Tools
from litgrpo.environments.adapters import mcp_tools
from litgrpo.environments.base import EpisodeStart, FailedEpisode
from litgrpo.environments.workers import EpisodeWorkers
from tests.environments.adapters.foreign.serving import serve
from tests.support.hostile_server import TRANSPORT, HostileServer

pytest.importorskip("mcp")
SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER, "{level}"]}


def tools(entry=STDIO, **settings):
    made = Tools(mcp_servers={"tests": entry}, call_format="python", **settings)
    return pickle.loads(pickle.dumps(made))


def texts(result):
    return [message["content"] for message in result.observation]


@pytest.fixture(scope="module")
def address():
    with serve(SERVER, "5") as url:
        yield f"{url}/mcp"


def test_every_episode_has_a_server_with_the_values_of_its_row():
    game = tools()
    for level in (3, 4):
        assert game.reset({"level": level}, seed=0) == ""
        heard = game.step("[recall(name='level'), recall(name='x'), keep(name='x', value='y')]")
        assert texts(heard) == [str(level), "error: nothing is kept as x", "kept"]
        assert heard.calls == {"recall": (2, 1), "keep": (1, 0)}
        assert texts(game.step("[recall(name='x'), draw()]")) == ["y", "drawn:\n[image]"]
    game.close()


def test_arguments_are_checked_exactly_before_the_server_gets_them():
    game = tools()
    game.reset({"level": 1}, seed=0)
    for turn, why in {
        "[add(a='1')]": "add: 'a' must be an integer",
        "[add(a=1.0)]": "add: 'a' must be an integer",
        "[add(b=1)]": "add needs a",
        "[add(a=1, c=2)]": "add has no argument 'c'; it takes a, b",
    }.items():
        assert texts(game.step(turn)) == [f"error: {why}"]
    assert texts(game.step("[add(a=1), add(2, 3)]")) == ["2", "5"]
    assert texts(game.step("[route(server='a', tool='b')]")) == ["a/b"]
    game.close()


def test_functions_stand_beside_servers_and_a_list_selects_tools():
    chosen = {**STDIO, "tools": ["add"]}
    game = tools(chosen, functions=["litgrpo.environments.examples.calculate"])
    assert [each["function"]["name"] for each in game.tools] == ["calculate", "add"]
    game.reset({"level": 1}, seed=0)
    assert texts(game.step("[calculate(expression='6*7'), add(a=41)]")) == ["42", "42"]
    assert texts(game.step("[keep(name='a', value='b')]"))[0].startswith("error: unknown tool")
    game.close()


def test_a_lost_server_fails_the_episode_and_the_next_one_plays():
    game = tools()
    game.reset({"level": 1}, seed=0)
    with pytest.raises(EpisodeError, match="'tests' failed: MCPError: Connection closed"):
        game.step("[leave()]")
    game.reset({"level": 2}, seed=0)
    assert texts(game.step("[recall(name='level')]")) == ["2"]
    game.close()


def test_a_hanging_tool_is_killed_with_its_server():
    pool = EpisodeWorkers(tools(), timeout_s=15)
    try:
        starts = [EpisodeStart({"level": n}, 0, (0, 0, 0, n)) for n in range(2)]
        assert pool.reset(starts) == ["", ""]
        pool.send(0, "[sleep()]")
        pool.send(1, "[recall(name='level')]")
        heard = {}
        while len(heard) < 2:
            heard |= pool.receive(wait=True)
        assert heard[0] == FailedEpisode("timed out after 15 s")
        assert texts(heard[1]) == ["1"]
    finally:
        pool.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = subprocess.run(["pgrep", "-f", SERVER], capture_output=True, text=True, check=False)
        if not found.stdout:
            return
        time.sleep(0.2)
    raise AssertionError(f"servers are left: {found.stdout}")


def test_a_server_by_http_has_a_session_per_episode_and_gets_headers(address):
    game = tools({"url": address, "headers": {"Authorization": "Bearer {level}"}})
    game.reset({"level": 1}, seed=0)
    heard = game.step("[add(a=1), recall(name='level'), sender()]")
    assert texts(heard) == ["2", "5", "Bearer 1"]
    game.close()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"command": "no-such-program"}, "FileNotFoundError"),
        ({"command": sys.executable, "args": ["-c", "1"]}, "Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be used: ConnectError"),
        ({**STDIO, "tools": ["ad"]}, "no tool 'ad' .did you mean 'add'..; it has: add, keep"),
    ],
)
def test_servers_that_cannot_be_used_are_found_at_the_start(entry, why):
    with pytest.raises(ValueError, match=why):
        tools(entry)


# A server that follows the protocol until it is asked for its tools: `act` is what it does then.
HOSTILE = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
    sys.stdout.flush()

def hang():
    while True:
        time.sleep(1)

def drip(text):
    for letter in text:
        sys.stdout.write(letter)
        sys.stdout.flush()
        time.sleep(0.02)

def tool(name, schema):
    return {"name": name, "inputSchema": {"type": "object", **schema}}

for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        send(id=asked["id"], result={
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
            "serverInfo": {"name": "hostile", "version": "1"}})
    elif asked.get("method") == "tools/list":
        number = asked["id"]
        ACT
    elif "id" in asked:
        send(id=asked["id"], error={"code": -32601, "message": "no"})
"""
HANGING = {
    "never": "hang()",
    "drip": "drip('{' * 100_000)",
    "deep": "sys.stdout.write('[' * 100_000 + '\\n'); sys.stdout.flush(); hang()",
    "flood": "[send(method='notifications/progress', params={'progressToken': 1, 'progress': 1})"
    " for _ in iter(int, 1)]",
    "deaf": "sys.stdin.close(); os.close(0); hang()",
    "child": "subprocess.Popen(['sleep', '612.5']); hang()",
    "same page": "send(id=number, result={'tools': [], 'nextCursor': 'x'}); time.sleep(0.2)",
}
BROKEN = {
    "long line": ("sys.stdout.write('x' * 40_000_000); sys.stdout.flush(); hang()", "more than"),
    "endless line": ("[sys.stdout.write('x' * 65_536) for _ in iter(int, 1)]", "more than"),
    "many tools": (
        "send(id=number, result={'tools': [tool(str(n), {}) for n in range(2_000)]})",
        "more than 1,000 tools",
    ),
    "schema": (
        "send(id=number, result={'tools': [tool('f', {'properties': {'a': {'$ref': 'file:///x'}}})]})",
        "the tool 'f'",
    ),
    "stderr": (
        "sys.stderr.write('why\\x1b[2J\\n'); sys.stderr.flush(); os._exit(1)",
        "why.U.001B..",
    ),
}


def hostile(act):
    return {"command": sys.executable, "args": ["-c", HOSTILE.replace("ACT", act), "hostile-mcp"]}


def processes_of_servers():
    words = ["pgrep", "-f", "hostile-mcp|sleep 612.5"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", HANGING)
def test_a_server_that_hangs_at_the_start_is_an_error_in_time_and_is_killed(name, monkeypatch):
    monkeypatch.setattr(mcp_tools, "START_S", 4.0)
    start = time.monotonic()
    with pytest.raises(ValueError, match="mcp_servers: the MCP server 'tests'"):
        tools(hostile(HANGING[name]))
    assert time.monotonic() - start < 12
    assert not processes_of_servers()


@pytest.mark.parametrize("name", BROKEN)
def test_a_list_of_tools_that_is_too_large_or_wrong_is_an_error(name, capfd):
    act, why = BROKEN[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=f"mcp_servers: .*{why}"):
        tools(hostile(act))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert not processes_of_servers()
    assert "\x1b" not in "".join(capfd.readouterr())


def test_many_tools_take_no_quadratic_time():
    act = "send(id=number, result={'tools': [tool('t' * 40 + str(n), {}) for n in range(900)]})"
    start = time.monotonic()
    assert len(tools(hostile(act)).tools) == 900
    assert time.monotonic() - start < 15


SLOW_OR_LARGE = ("silence", "slow body", "slow chunks", "endless body", "large body", "gzip")


@pytest.mark.parametrize("name", SLOW_OR_LARGE)
def test_a_response_by_http_has_limits(name, monkeypatch):
    monkeypatch.setattr(mcp_tools, "START_S", 4.0)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with HostileServer(TRANSPORT[name]) as server, pytest.raises(ValueError, match="mcp_servers: "):
        tools({"url": f"{server.url}/mcp"})
    assert time.monotonic() - start < 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
