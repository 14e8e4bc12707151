"""Processes of MCP servers: what cannot be started, limits, and their end."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from litgrpo.environments.adapters import mcp_process
from litgrpo.environments.adapters.mcp_process import ServerProcess


def play(code, use):
    """Start a Python program and return what `use(process)` does."""

    async def run():
        process = await ServerProcess.start([sys.executable, "-c", code], {"A": "b"}, None)
        try:
            return await use(process)
        finally:
            await process.stop()

    return asyncio.run(run())


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def first_line(process):
    return await anext(process.lines())


def test_it_has_few_environment_variables_and_answers_by_lines(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "1")

    async def use(process):
        before = await first_line(process)
        await process.write(b"hi\n")
        return before, await first_line(process)

    code = "import os; print(sorted(os.environ), flush=True); print(input())"
    before, after = play(code, use)
    assert b"'A'" in before
    assert b"PATH" in before
    assert b"SECRET_KEY" not in before
    assert after == b"hi\n"


@pytest.mark.parametrize(
    "writes", ["sys.stdout.write('x' * 300_000)", "while True: print(end='x')"]
)
def test_a_line_above_the_limit_is_the_end(writes, monkeypatch):
    monkeypatch.setattr(mcp_process, "MAX_BYTES", 100_000)
    monkeypatch.setattr(mcp_process, "EXIT_S", 0.1)

    async def use(process):
        return [line async for line in process.lines()], process.describe()

    lines, problem = play(f"import sys\nprint('a', flush=True)\n{writes}", use)
    assert lines == [b"a\n"]
    assert problem == "a message has more than 100,000 bytes"


def test_only_the_end_of_stderr_is_kept_and_nothing_in_it_acts(capfd):
    async def use(process):
        async for _ in process.lines():
            pass
        await asyncio.sleep(0.1)
        return process.describe(), len(process._stderr)

    code = "import sys; sys.stderr.write('y' * 10**7 + '\\nwhy\\x1b[2J\\n')"
    assert play(code, use) == ("stderr: why[U+001B][2J", mcp_process.STDERR_BYTES)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.stdin.read()"])
@pytest.mark.parametrize("leaves_group", [False, True])
def test_what_a_server_started_ends_with_it(end, leaves_group, monkeypatch):
    monkeypatch.setattr(mcp_process, "EXIT_S", 0.2)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '60'], start_new_session={leaves_group})\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        f"{end}"
    )

    async def use(process):
        return [int(pid) for pid in (await first_line(process)).split()]

    start = time.monotonic()
    pids = play(code, use)
    while any(map(is_running, pids)):
        assert time.monotonic() - start < 10
        time.sleep(0.01)
    assert os.getpgid(0) not in pids
