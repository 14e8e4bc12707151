"""The faults of what samples elsewhere and ahead, each a function of the bench."""

import csv
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from litgrpo.models.loading.load import resolve_pretrained
from tests.faults.processes import SECOND, TORCHRUN, of_two
from tests.faults.running import ITERATIONS, RECIPE, Run, calls, differences, merge_runs
from tests.vllm.serving import free_port

ROOT, ENGINE = Path(__file__).parents[2], "litgrpo.rollout.servers.vllm.ServerEngine"
MODEL = "builtin:tiny-gemma2"


AHEAD = {"class_path": "litgrpo.Ahead", "init_args": {"staleness": 2}}
IN_FLIGHT = {"class_path": "litgrpo.InFlight", "init_args": {"max_staleness": 2}}


def recipe(port: int, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """The recipe of the faults with a server."""
    given = {"urls": [f"http://127.0.0.1:{port}"], "send_uniforms": True, "wait_s": 120.0}
    keys = {"engine": {"class_path": ENGINE, "init_args": given}, "source": source}
    return merge_runs(RECIPE, {"model": {"init_args": keys}})


def start_server(port: int, *words: str) -> subprocess.Popen[str]:
    """A server, when it answers."""
    module = "tests.support.vllm_stand_in"
    command = [sys.executable, "-m", module, resolve_pretrained(MODEL), str(port), *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@contextmanager
def server(port: int, *words: str):
    """A server that is ended, whichever it is by then."""
    running = [start_server(port, *words)]
    try:
        yield running
    finally:
        running[-1].kill()
        for process in running:
            process.communicate()


def whole(bench: Any, port: int, source: dict[str, Any] | None = None) -> Run:
    """The run with a server to which nothing happens."""
    run: Run = bench.whole(f"served-{source is not None}", recipe(port, source))
    return run


def _start_again(running: list[subprocess.Popen[str]], port: int, *words: str) -> None:
    """Start a server when it has died."""
    assert running[-1].wait() == 9
    running.append(start_server(port, *words))


def f24(bench: Any) -> dict[str, str]:
    """the server is killed in the middle of an iteration and started again: the same"""
    port = free_port()
    with server(port):
        expected = whole(bench, port)
    run = Run(bench.folder / "F24", recipe(port))
    with server(port, "--dies_after", "77") as running:
        watching = threading.Thread(target=_start_again, args=(running, port))
        watching.start()
        code = run.go()
        watching.join()
    wrong = "" if code == 0 else f"exit code {code}: {run.said[-500:]}"
    for said in ("is unavailable", "had weights of version default; sent again"):
        wrong = wrong or ("" if said in run.said else f"not said: {said}")
    return {"killed": wrong or ", ".join(differences(run, expected))}


def f26(bench: Any) -> dict[str, str]:
    """killed with rollouts that were sampled ahead, then the same command again: the same"""
    from tests.faults.cases import stop_and_resume

    port, found = free_port(), {}
    with server(port):
        expected = whole(bench, port, AHEAD)
        for name, point in {
            "SIGKILL in learning": {"at": "backward", "count": 4},
            "SIGKILL while it samples": {"at": "start", "count": 5},
            "SIGTERM": {"at": "backward", "count": 4, "signum": int(signal.SIGTERM)},
        }.items():
            run = Run(bench.folder / name.replace(" ", "-"), recipe(port, AHEAD))
            found[name] = stop_and_resume(run, expected, **point)
    # Each of two processes samples its own rollout ahead.
    two = merge_runs(of_two("ddp"), {"model": {"init_args": {"source": AHEAD}}})
    expected = bench.whole("two-ahead", two, program=TORCHRUN)
    run = Run(bench.folder / "two-ahead", two, program=TORCHRUN)
    run.recipe = merge_runs(two, calls("Kill", **SECOND, marker=str(run.marker)))
    code = run.go("--auto_resume", "true")
    wrong = f"exit code {code}: {run.said[-800:]}" if code else ""
    found["one of two processes"] = wrong or ", ".join(differences(run, expected))
    return found


def f27(bench: Any) -> dict[str, str]:
    """killed while weights are updated in flight, started again: ends; none is too old"""
    from tests.faults.cases import kill_run

    port, found = free_port(), {}
    with server(port, "--at_once", "4"):
        for name, point in {
            "SIGKILL in learning": {"at": "backward", "count": 4},
            "SIGKILL while it samples": {"at": "start", "count": 5},
            "SIGTERM": {"at": "backward", "count": 4, "signum": int(signal.SIGTERM)},
        }.items():
            folder = bench.folder / f"in-flight-{name.replace(' ', '-')}"
            run = Run(folder, recipe(port, IN_FLIGHT))
            found[name] = kill_run(run, **point) or _end_of(run)
    with server(port, "--at_once", "4", "--dies_after", "77") as running:
        watching = threading.Thread(target=_start_again, args=(running, port, "--at_once", "4"))
        watching.start()
        run = Run(bench.folder / "in-flight-server", recipe(port, IN_FLIGHT))
        found["the server is killed and started again"] = _end_of(run)
        watching.join()
    return found


def _end_of(run: Run) -> str:
    """Say what is wrong with the end of a run whose tokens are at most two iterations old."""
    code = run.go("--auto_resume", "true")
    if code:
        return f"exit code {code}: {run.said[-500:]}"
    with (run.run / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["async/staleness_max"]]
    oldest = max(float(row["async/staleness_max"]) for row in logged)
    steps = [int(float(row["step"])) for row in logged]
    good = oldest <= 2 and steps == [*range(1, ITERATIONS + 1)]
    return "" if good else f"steps {steps}, weights up to {oldest} iterations old"
