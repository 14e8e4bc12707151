"""Real attacks on the sandbox; skipped if bubblewrap is not available."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.workers import sandbox
from litgrpo.workers.sandbox import SandboxLimits, bubblewrap
from litgrpo.workers.server import descendants
from tests.support.raises import raises_for

in_sandbox = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)


def run_and_read(code, **settings):
    ran = sandbox.run(code, SandboxLimits(**{"seconds": 10.0} | settings))
    return ran.output.strip()


@in_sandbox
def test_code_runs_with_the_standard_library_and_names():
    code = "import json, math\nprint(json.dumps([math.gcd(12, 18), n]))"
    ran = sandbox.run(code, names={"n": 7})
    assert (ran.code, ran.output, ran.exceeded) == (0, "[6, 7]\n", "")


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
        assert run_and_read(code) == "none\nnone"


@in_sandbox
def test_a_fork_bomb_stops_at_the_process_limit():
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
    assert int(run_and_read(code, processes=12)) <= 13  # and bubblewrap's own


@in_sandbox
@pytest.mark.parametrize(
    ("code", "exceeded"),
    [
        ("while True: pass", "seconds"),
        ("import time; time.sleep(99)", "seconds"),
        ("import os, time; os.close(1); os.close(2); time.sleep(99)", "seconds"),
        ("while True: print('x' * 10_000)", "seconds"),
        (
            "import os, time\nfor _ in range(6):\n if os.fork() == 0: break\n"
            "kept = bytearray(40 << 20)\ntime.sleep(99)",
            "memory_mib",
        ),
    ],
)
def test_code_that_exceeds_a_limit_is_killed_and_the_limit_is_named(code, exceeded):
    seconds = 1.0 if exceeded == "seconds" else 60.0
    ran = sandbox.run(code, SandboxLimits(seconds, memory_mib=128, output_chars=50_000))
    assert ran.exceeded == exceeded
    assert len(ran.output) <= 50_000


@in_sandbox
def test_an_allocation_of_a_gigabyte_raises_memory_error():
    assert run_and_read("x = bytearray(1 << 30)").endswith("MemoryError")


@in_sandbox
def test_only_tmp_is_writable_up_to_its_size():
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
    assert run_and_read(code, disk_mib=4) == "full at 4"


@in_sandbox
def test_other_processes_cannot_be_traced_or_killed():
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
    os.kill(1, signal.SIGKILL)  # the first process of the sandbox, so that nothing outside dies
except OSError:
    pass
print('done')
"""
    assert run_and_read(code) == "[-1, -1, -1]\nnot there\nnot there\ndone"


@in_sandbox
def test_background_processes_are_killed_when_the_code_exits(tmp_path):
    code = "import os, time\nif os.fork() == 0:\n os.setsid(); os.close(1); os.close(2)\n"
    ran = sandbox.start(code + " time.sleep(99)\nprint('x')", SandboxLimits(seconds=10.0))
    assert ran.wait().output == "x\n"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "--clearenv" not in listed.stdout


@in_sandbox
def test_stdin_is_empty_and_sandboxes_share_nothing():
    assert run_and_read("import sys; print(repr(sys.stdin.read()))") == "''"
    assert (
        run_and_read("open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")
        == ""
    )
    assert run_and_read("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "[] []"


@in_sandbox
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02, 0.05, 0.1])
def test_kill_stops_a_sandbox_also_while_it_starts_and_can_be_repeated(delay_s):
    running = sandbox.start("import time; time.sleep(99)", SandboxLimits(seconds=60.0))
    time.sleep(delay_s)
    started = descendants(running.process.pid)
    running.kill()
    running.kill()  # again: nothing happens
    assert running.process.returncode == -9
    assert running.wait().exceeded == ""
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}/exe")]  # a zombie has none


def test_without_bubblewrap_start_raises_with_the_fix(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"bubblewrap.*apt install"):
            sandbox.run("print(1)")
    finally:
        bubblewrap.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (
            "bwrap: No permissions to create new namespace",
            ("No permissions to create new namespace", "user namespaces"),
        ),
        ("bwrap: The --size option is not permitted in setuid mode", ("chmod u-s",)),
        ("bwrap: Unknown option --size", ("older than 0.7",)),
    ],
)
def test_the_reason_names_what_bubblewrap_printed_and_the_fix(monkeypatch, printed, words):
    script = f"print({printed!r}); raise SystemExit(1)"
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(bubblewrap, "_help", lambda: "")
    failing = subprocess.Popen

    def popen(command, **settings):
        return failing([sys.executable, "-c", script], **settings)

    monkeypatch.setattr(bubblewrap.subprocess, "Popen", popen)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        for word in words:
            assert word in bubblewrap.unavailable_reason()
    finally:
        bubblewrap.unavailable_reason.cache_clear()


def test_a_machine_without_a_system_call_filter_has_no_sandbox(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/usr/bin/bwrap")
    monkeypatch.setattr(bubblewrap.platform, "machine", lambda: "riscv64")
    bubblewrap.unavailable_reason.cache_clear()
    try:
        assert "riscv64" in bubblewrap.unavailable_reason()
    finally:
        bubblewrap.unavailable_reason.cache_clear()


def test_limits_too_small_for_python_are_rejected():
    with raises_for("memory_mib"):
        SandboxLimits(memory_mib=1)


@in_sandbox
def test_memory_that_cannot_be_read_is_a_reason_to_have_no_sandbox(monkeypatch):
    monkeypatch.setattr(bubblewrap, "memory_of", lambda first: None)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        assert "CONFIG_PROC_CHILDREN" in bubblewrap.unavailable_reason()
    finally:
        bubblewrap.unavailable_reason.cache_clear()
