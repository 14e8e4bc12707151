"""Attacks on the sandbox, really run; without bubblewrap they skip by name."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.workers import sandbox
from litgrpo.workers.sandbox import SandboxLimits, bubblewrap, system_calls

in_sandbox = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)


def printed(code, **settings):
    ran = sandbox.run(code, SandboxLimits(**{"seconds": 10.0} | settings))
    return ran.output.strip()


@in_sandbox
def test_code_runs_with_the_standard_library_files_and_names():
    code = "import json, math\nprint(json.dumps([math.gcd(12, 18), n, open('a/b.txt').read()]))"
    ran = sandbox.run(code, names={"n": 7}, files={"a/b.txt": "hello"})
    assert (ran.code, ran.output, ran.ended) == (0, '[6, 7, "hello"]\n', "")


@in_sandbox
def test_neither_the_project_nor_system_files_nor_the_environment_can_be_read(monkeypatch):
    monkeypatch.setenv("SECRET", "of-mine")
    code = """
import os
for path in paths:
    try:
        print(path, open(path).read(40))
    except OSError as error:
        pass
found = [name for top in ('/root', '/home', '/work', '/etc', '/proc/self/cwd')
         for _, _, files in os.walk(top) for name in files if 'litgrpo' in name]
print(found, 'SECRET' in os.environ, sorted(os.listdir('/tmp')))
"""
    paths = [__file__, "/etc/passwd", "/etc/shadow", "/etc/hostname", str(Path.cwd() / "README.md")]
    paths += [f"/proc/{os.getpid()}/environ", str(Path(bubblewrap.__file__))]
    assert sandbox.run(code, names={"paths": paths}).output.strip() == "[] False []"


@in_sandbox
def test_there_is_no_network_not_even_this_machines():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import socket
for address in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)):
    try:
        socket.create_connection(address, 3)
        print('connected')
    except OSError:
        print('none')
"""
        assert printed(code) == "none\nnone"


@in_sandbox
def test_a_fork_bomb_gets_no_further_than_the_limit():
    code = """
import os, time
def bomb():
    while True:
        try:
            if os.fork() == 0:
                bomb()
        except OSError:
            time.sleep(9)
if os.fork() == 0:
    bomb()
time.sleep(0.3)
print(len([name for name in os.listdir('/proc') if name.isdigit()]))
"""
    assert int(printed(code, processes=12)) <= 13  # and bubblewrap's own


@in_sandbox
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "seconds"),
        ("import time; time.sleep(99)", "seconds"),
        ("import os, time; os.close(1); os.close(2); time.sleep(99)", "seconds"),
        ("while True: print('x' * 10_000)", "output_chars"),
        (
            "import os, time\nfor _ in range(6):\n if os.fork() == 0: break\n"
            "kept = bytearray(40 << 20)\ntime.sleep(99)",
            "memory_mib",
        ),
    ],
)
def test_what_goes_beyond_a_limit_is_ended_and_the_limit_named(code, ended):
    ran = sandbox.run(code, SandboxLimits(seconds=1.0, memory_mib=128, output_chars=50_000))
    assert ran.ended == ended
    assert len(ran.output) <= 50_000


@in_sandbox
def test_a_gigabyte_is_refused_at_once():
    assert printed("x = bytearray(1 << 30)").endswith("MemoryError")


@in_sandbox
def test_only_tmp_can_be_written_and_not_much():
    code = """
import os
places = ('/', '/dev', '/usr/lib', '/proc', '/etc', os.path.dirname(os.__file__))
for place in places:
    try:
        open(os.path.join(place, 'x'), 'w').write('x')
        print('wrote', place)
    except OSError:
        pass
try:
    for n in range(9):
        open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))
except OSError:
    print('full at', n)
"""
    assert printed(code, disk_mib=4) == "full at 4"


@in_sandbox
def test_no_other_process_can_be_seen_traced_or_ended():
    code = f"""
import ctypes, os, signal
library = ctypes.CDLL(None, use_errno=True)
print([library.ptrace(16, pid, 0, 0) for pid in (1, {os.getpid()}, {os.getppid()})])
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, signal.SIGKILL)
        print('killed')
    except OSError:
        print('not there')
try:
    os.kill(1, signal.SIGKILL)  # the first process of the sandbox: ends nobody else
except OSError:
    pass
print('done')
"""
    assert printed(code) == "[-1, -1, -1]\nnot there\nnot there\ndone"


@in_sandbox
def test_memory_that_no_limit_counts_and_namespaces_are_refused():
    code = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
print(library.shmget(0, 4096, 0o1600), library.unshare(0x10000000))
try:
    os.memfd_create('x')
except OSError:
    print('no memory file')
"""
    assert printed(code) == "-1 -1\nno memory file"


@in_sandbox
def test_a_process_in_the_background_ends_with_the_code(tmp_path):
    code = "import os, time\nif os.fork() == 0:\n os.setsid(); os.close(1); os.close(2)\n"
    ran = sandbox.start(code + " time.sleep(99)\nprint('x')", SandboxLimits(seconds=10.0))
    assert ran.wait().output == "x\n"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "--clearenv" not in listed.stdout


@in_sandbox
def test_stdin_is_empty_and_sandboxes_share_nothing():
    assert printed("import sys; print(repr(sys.stdin.read()))") == "''"
    assert printed("open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')") == ""
    assert printed("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "[] []"


@in_sandbox
def test_a_killed_sandbox_is_gone_at_once():
    running = sandbox.start("import time; time.sleep(99)", SandboxLimits(seconds=60.0))
    time.sleep(0.1)
    running.kill()
    running.kill()  # again: nothing happens
    assert running.process.returncode == -9


def test_without_bubblewrap_code_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"sandbox only, and there is no bubblewrap: .*apt"):
            sandbox.run("print(1)")
    finally:
        bubblewrap.unavailable_reason.cache_clear()


def test_where_namespaces_are_not_allowed_the_reason_is_told(monkeypatch):
    said = 'print("bwrap: No permissions to create new namespace"); raise SystemExit(1)'
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/usr/bin/bwrap")
    failing = subprocess.Popen

    def popen(command, **settings):
        return failing([sys.executable, "-c", said], **settings)

    monkeypatch.setattr(bubblewrap.subprocess, "Popen", popen)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        assert "No permissions to create new namespace" in bubblewrap.unavailable_reason()
        assert "user namespaces" in bubblewrap.unavailable_reason()
    finally:
        bubblewrap.unavailable_reason.cache_clear()


def test_a_machine_whose_calls_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(bubblewrap.platform, "machine", lambda: "riscv64")
    bubblewrap.unavailable_reason.cache_clear()
    try:
        assert "riscv64" in bubblewrap.unavailable_reason()
    finally:
        bubblewrap.unavailable_reason.cache_clear()


def test_limits_under_which_nothing_runs_are_refused():
    with pytest.raises(ValueError, match="memory_mib"):
        SandboxLimits(memory_mib=1)


def test_the_filter_has_a_line_for_each_refused_call():
    _, calls = system_calls.MACHINES["x86_64"]
    assert len(system_calls.program("x86_64")) == 8 * (len(calls) + 7)
