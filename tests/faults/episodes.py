"""The faults of environments, each a function of the bench."""

import csv
import shutil
import signal
import sys
from math import isclose
from pathlib import Path
from typing import Any

from tests.faults.running import ITERATIONS, RECIPE, Run, differences, merge_runs, metrics_of

EPISODE = {
    "turn_format": "inline",
    "max_turns": 2,
    "max_turn_tokens": 8,
    "max_observation_tokens": 8,
}
EPISODE |= {"close_truncated_turns": True}
AT_SAMPLING = ("policy/entropy", "policy/sampler_mismatch", "/initial_kl", "/initial_perplexity")


def recipe(bad: str = "nothing", folder: str = "", of: int = 32, **episode: Any) -> dict[str, Any]:
    """The recipe of the faults with two turns, and an environment that is bad in one way."""
    environment = {
        "class_path": "tests.faults.tools.Numbers",
        "init_args": {"bad": bad, "folder": folder, "of": of},
    }
    keys = {"environment": environment, "episode": EPISODE | {"num_workers": 4} | episode}
    keys["rewards"] = {"environment": {"weight": 1.0}}
    return merge_runs(RECIPE, {"model": {"init_args": keys}})


def agent_recipe(
    bad: str = "nothing", folder: str = "", of: int = 32, **episode: Any
) -> dict[str, Any]:
    """The recipe of the faults with an agent as a program, which is bad in one way."""
    program = Path(__file__).with_name("agent.py")
    environment = {
        "class_path": "litgrpo.environments.Agent",
        "init_args": {"command": [sys.executable, str(program), bad, folder, str(of)]},
    }
    limits = {"turn_format": "inline", "max_turn_tokens": 8, "timeout_s": 60.0} | episode
    keys = {"environment": environment, "episode": limits, "group_size": 2}
    keys["rewards"] = {"environment": {"weight": 1.0}}
    few = {"data": {"init_args": {"val": {"limit": 4}}}}  # every row starts a program
    return merge_runs(RECIPE, {"model": {"init_args": keys}}, few)


def whole(bench: Any) -> Run:
    run: Run = bench.whole("episodes", recipe())
    return run


def unlike(run: Run, other: Run) -> str:
    """Differences; what is made of the engine's log-probabilities may in its last digits.

    Which rows are decoded beside each other depends on when their answers come, and the rounding of
    these on that; tokens, weights, optimizer state and all other numbers do not.
    """
    found = {*differences(run, other)} - {"metrics.csv", "TensorBoard"}
    for mine, theirs in zip(metrics_of(run), metrics_of(other), strict=True):
        names = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
        found |= {name for name in names if not is_rounding(name, mine.get(name), theirs.get(name))}
    return ", ".join(sorted(found))


def is_rounding(name: str, mine: str | None, theirs: str | None) -> bool:
    """Return True if two numbers may differ, and do so by rounding only."""
    close = mine and theirs and isclose(float(mine), float(theirs), rel_tol=1e-4, abs_tol=1e-6)
    return name.endswith(AT_SAMPLING) and bool(close)


def fraction_failed(run: Run) -> float:
    """The largest share of episodes that failed in an iteration."""
    with (run.run / "metrics.csv").open(newline="") as file:
        return max(float(row.get("env/failed_frac") or 0) for row in csv.DictReader(file))


def costs_rows(
    bench: Any, name: str, bad: str, said: str, build: Any = recipe, timeout_s: float = 1.0
) -> str:
    """Some rows fail, named and counted; the run continues, and ends in the same bits again."""
    runs = [Run(bench.folder / f"{name}-{n}", build(bad, timeout_s=timeout_s)) for n in range(2)]
    for run in runs:
        code = run.go()
        if code or said not in run.said:
            return f"exit code {code}, not {said!r}: {run.said[-500:]}"
    if not 0 < fraction_failed(runs[0]) <= 0.5:
        return f"failed_frac is {fraction_failed(runs[0])}"
    return unlike(*runs)


def stops_the_run(bench: Any, name: str, bad: str, said: str, build: Any = recipe) -> str:
    """More than half of the rows fail: one line, exit code 2."""
    run = Run(bench.folder / name, build(bad, of=1, timeout_s=1.0))
    code = run.go()
    lines = [line for line in run.said.splitlines() if "episodes failed" in line and said in line]
    return "" if code == 2 and lines else f"exit code {code}: {run.said[-500:]}"


def f17(bench: Any) -> dict[str, str]:
    """a tool hangs: its rows are left out, counted, named; too many stop the run"""
    return {
        "some rows": costs_rows(bench, "f17", "hangs", "timed out after 1 s"),
        "all rows": stops_the_run(bench, "f17-all", "hangs", "timed out after 1 s"),
    }


def f18(bench: Any) -> dict[str, str]:
    """a tool kills its worker: once, and nothing changes; always, and its rows are left out"""
    once = Run(bench.folder / "f18-once", {})
    once.recipe = recipe("dies_once", str(once.folder))
    code = once.go()
    wrong = once.said[-500:] if code or not once.marker.exists() else ""
    return {
        "once": wrong or unlike(once, whole(bench)),
        "always": costs_rows(bench, "f18", "dies", "exited with 3, twice"),
        "all rows": stops_the_run(bench, "f18-all", "dies", "exited with 3, twice"),
    }


def f19(bench: Any) -> dict[str, str]:
    """SIGKILL while a tool runs, also one that is no function: the same after resuming"""
    found = {}
    for of in (5, 150):
        run = Run(bench.folder / f"f19-{of}", {})
        run.recipe = recipe("kills_the_run", str(run.folder), of)
        code = run.go("--auto_resume", "true")
        wrong = "" if code == 128 + signal.SIGKILL else f"exit code {code}: {run.said[-500:]}"
        if not wrong:
            code = run.resume()
            wrong = run.said[-500:] if code else unlike(run, whole(bench))
        found[f"one of {of} turns"] = wrong
    found["a search"] = went_on(bench, "f19-search", forget=False)
    different = went_on(bench, "f19-no-response-log", forget=True)
    found["a search without its response log"] = (
        "" if "weights" in different else "the same weights"
    )
    return found


def went_on(bench: Any, name: str, *, forget: bool) -> str:
    """Differences if a run with a tool that answers at random is resumed after iteration 4."""
    searching = bench.whole("searching", recipe("searches", of=1, record_responses=True))
    again = bench.copy_run(name, searching)
    shutil.rmtree(again.run / "final_model")
    for number in (ITERATIONS, ITERATIONS - 1):
        (again.checkpoints / f"iteration={number:06d}.ckpt").unlink(missing_ok=True)
    if forget:
        shutil.rmtree(again.run / "tool_responses")
    code = again.resume()
    if code or not again.iteration_of_resume():
        return f"exit code {code}, not resumed: {again.said[-500:]}"
    return unlike(again, searching)


def f20(bench: Any) -> dict[str, str]:
    """an environment leaks state from one episode to the next: rejected before the first step"""
    run = Run(bench.folder / "f20", recipe("leaks"))
    run.recipe["model"]["init_args"]["check_invariants"] = True
    code = run.go()
    # Invariant 10: the environment answers the same actions with the same observations.
    line = run.said.splitlines()[-1]
    named = "10" in line and "environment" in line
    return {"a class attribute": "" if code == 2 and named else f"code {code}: {run.said[-500:]}"}


def f28(bench: Any) -> dict[str, str]:
    """an agent hangs or dies: its rows are left out, too many stop the run; SIGKILL while agents run: the same after resuming"""  # noqa: E501
    run = Run(bench.folder / "f28-killed", {})
    run.recipe = agent_recipe("kills_the_run", str(run.folder), 8)
    code = run.go("--auto_resume", "true")
    wrong = "" if code == 128 + signal.SIGKILL else f"exit code {code}: {run.said[-500:]}"
    if not wrong:
        code = run.resume()
        undisturbed = bench.whole("agents", agent_recipe())
        wrong = run.said[-500:] if code else unlike(run, undisturbed)
    late, died = "timed out after 5 s", "died of signal 9"
    return {
        "hangs": costs_rows(bench, "f28-hangs", "hangs", late, agent_recipe, 5.0),
        "dies": costs_rows(bench, "f28-dies", "dies", died, agent_recipe, 60.0),
        "all rows": stops_the_run(bench, "f28-all", "dies", died, agent_recipe),
        "SIGKILL": wrong,
    }
