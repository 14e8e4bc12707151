"""Faults of runs of several processes, with whole and with sharded weights."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import yaml

from tests.faults.launching import ENVIRONMENT, ROOT
from tests.faults.running import RECIPE, Run, calls, differences, merge_runs

if TYPE_CHECKING:
    from tests.faults.cases import Bench, Found

FSDP2 = {"class_path": "litgrpo.distributed.fsdp.strategy.FSDP2Strategy"}
STRATEGIES: dict[str, Any] = {"DDP": "ddp", "FSDP2": FSDP2}
TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "2", "cli.py"),
)
SIGKILL, SIGUSR1, REQUEUE = 9, 10, 138
SECOND = {"at": "start", "count": 5, "rank": 1}
KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("DDP", SECOND),
    "FSDP2": ("FSDP2", SECOND),
    # Half a folder has been written then.
    "FSDP2, the first, saving": ("FSDP2", {"at": "checkpoint", "count": 1, "rank": 0}),
}


def of_two(strategy: Any) -> dict[str, Any]:
    """The small recipe on two processes."""
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    return merge_runs(RECIPE, {"trainer": trainer})


def f21(bench: Bench) -> Found:
    """a worker killed under torchrun with --max-restarts: ends as the undisturbed run"""
    found = {}
    for point, (name, where) in KILLED.items():
        recipe = of_two(STRATEGIES[name])
        whole = bench.whole(f"two-{name}", recipe, program=TORCHRUN)
        run = Run(bench.folder / f"f21-{point}", recipe, program=TORCHRUN)
        kill = calls("Kill", **where, marker=str(run.marker), signum=SIGKILL)
        run.recipe = merge_runs(recipe, kill)
        code = run.go("--auto_resume", "true")
        wrong = "" if run.marker.exists() else "was not hit "
        wrong += f"exit code {code}: {run.said[-800:]}" if code else ""
        found[point] = wrong or ", ".join(differences(run, whole))
    return found


def under_slurm(run: Run, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two tasks of a SLURM job on this machine, as srun would start it."""
    variables = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    variables |= {"JOB_ID": 17, "JOB_NAME": "litgrpo", "NODELIST": "localhost", "NNODES": 1}
    slurm = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ["fit", "-c", run.base, "-c", str(run.folder / "recipe.yaml")]
    words += ["--run_dir", str(run.run), "--auto_resume", "true"]
    return subprocess.Popen(
        [sys.executable, "cli.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | slurm | here,
    )


def job(run: Run, recipe: dict[str, Any]) -> list[int]:
    """Both tasks to their end; their exit codes."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [under_slurm(run, rank, port) for rank in (0, 1)]
    run.said = "".join(task.communicate(timeout=200)[0] for task in tasks)
    return [task.returncode for task in tasks]


def f22(bench: Bench) -> Found:
    """SIGUSR1 under SLURM: saved between iterations, exit code 138; requeued: the same"""
    found = {}
    for name, strategy in STRATEGIES.items():
        recipe = of_two(strategy)
        whole = bench.whole(f"two-{name}", recipe, program=TORCHRUN)
        run = Run(bench.folder / f"f22-{name}", recipe)
        # Before an optimizer step, so that the iteration is dropped.
        signalled = calls("Kill", at="backward", count=4, marker=str(run.marker), signum=SIGUSR1)
        codes = job(run, merge_runs(recipe, signalled))
        if codes[0] != REQUEUE or list(run.run.rglob("hpc_ckpt*")):
            found[name] = f"exit codes {codes}: {run.said[-800:]}"
            continue
        codes = job(run, recipe)
        wrong = f"exit codes {codes}: {run.said[-800:]}" if any(codes) else ""
        found[name] = wrong or ", ".join(differences(run, whole))
    return found
