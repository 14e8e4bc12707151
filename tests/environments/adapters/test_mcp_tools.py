"""Settings of MCP servers; `foreign/check_mcp.py` plays with real ones."""

import pytest

from litgrpo.environments import EpisodeError, Tools
from litgrpo.environments.adapters.mcp_tools import McpServer, McpTools
from litgrpo.environments.base import EpisodeStart, FailedEpisode
from litgrpo.environments.episode import EpisodePlayer
from litgrpo.text.secrets import mask_settings


def test_placeholders_are_columns_and_other_braces_stay():
    server = McpServer(
        command="run",
        args=["{level}", "{seed}", "{no}", "{}"],
        env={"A": "{level}!"},
        cwd="/{level}",
    )
    filled = server.fill({"level": 3, "seed": 7, "prompt": "x"})
    assert (filled.args, filled.env, filled.cwd) == (["3", "7", "{no}", "{}"], {"A": "3!"}, "/3")
    filled = McpServer(url="http://h/{level}", headers={"X": "{level}"}).fill({"level": 3})
    assert (filled.url, filled.headers) == ("http://h/3", {"X": "3"})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (3, "is 3; it must have command or url"),
        ({}, "either command: python"),
        ({"command": "a", "url": "http://h"}, "either command: python"),
        ({"comand": "a"}, "unknown key 'comand' .did you mean 'command'."),
        ({"command": 3}, "command is 3"),
        ({"command": "a", "headers": {"a": "b"}}, "headers belong to url"),
        ({"url": "http://h", "args": ["a"]}, "args, env and cwd belong to command"),
        ({"url": "h:80"}, "must begin with http"),
        ({"url": "http://me:secret@h"}, "must not contain a user name"),
    ],
)
def test_wrong_entries_are_named(entry, why):
    with pytest.raises(ValueError, match=f"mcp_servers: 'files'.*{why}"):
        McpTools({"files": entry})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"command": "no-such-program"}, "command 'no-such-program' cannot be started .FileNotFou"),
        ({"command": "/etc/passwd"}, "command '/etc/passwd' cannot be started .PermissionError"),
        ({"command": "a\0b"}, "command 'a.x00b' cannot be started"),
        ({"command": "python", "cwd": "/no/folder"}, "cwd '/no/folder' is not a folder"),
    ],
)
def test_a_command_that_cannot_be_started_is_named_with_its_option(entry, why):
    with pytest.raises(ValueError, match=f"mcp_servers: the MCP server 'files' .*{why}"):
        McpTools({"files": entry})


def test_variables_of_the_environment_are_filled_in_by_the_recipe_and_not_by_a_row(monkeypatch):
    with pytest.raises(ValueError, match="'files': the environment variable MY_TOKEN is not set"):
        McpTools({"files": {"url": "http://h", "headers": {"A": "Bearer ${MY_TOKEN}"}}})
    monkeypatch.setenv("MY_TOKEN", "aaaa-bbbb-7777")
    server = McpServer(url="http://h", headers={"A": "{a}"})
    assert server.fill({"a": "${MY_TOKEN}"}).headers == {"A": "${MY_TOKEN}"}


def test_keys_of_a_server_are_masked():
    entry = {"url": "http://h", "headers": {"Authorization": "Bearer abcdefgh"}}
    other = {"command": "a", "env": {"API_KEY": "ijklmnop"}}
    masked = mask_settings({"mcp_servers": {"a": entry, "b": other}})
    assert masked["mcp_servers"]["a"]["headers"] == {"Authorization": "<masked>"}
    assert masked["mcp_servers"]["b"]["env"] == {"API_KEY": "<masked>"}


def break_off() -> str:
    """Fail the episode."""
    raise EpisodeError("the database is gone")


def test_a_tool_can_fail_its_episode():
    player = EpisodePlayer(Tools([break_off], call_format="python"))
    start = EpisodeStart({}, 0, (0, 0, 0, 0))
    heard = player.play(start, ("[break_off()]",))
    assert isinstance(heard, FailedEpisode)
    assert "EpisodeError: the database is gone" in heard.reason
