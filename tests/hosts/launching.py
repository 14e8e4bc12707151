"""`cli.py fit` by torchrun over several hosts, with a separate launcher on each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from litgrpo.models.loading.load import resolve_pretrained
from tests.faults.launching import ENVIRONMENT, ROOT
from tests.faults.running import RECIPE, Run, merge_runs
from tests.faults.servers import ENGINE, MODEL
from tests.hosts.network import LINK, Host

RENDEZVOUS_PORT, SERVER_PORT = 29500, 8000
# The network of the processes. With the second, a launcher that is started again can join others
# that were not: torch 2.13 publishes the address of a shared store in the first round only.
VARIABLES = {"GLOO_SOCKET_IFNAME": LINK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Long enough for two busy cores; a hang is a failure.
LIMIT_S = 1200.0
FOUR_ITERATIONS = {
    "model": {"init_args": {"max_iterations": 4}},
}
# An ignored signal: a test waits for the marker, then acts while training continues.
MARK = {"signum": int(signal.SIGURG)}
HANG = {"signum": 0}


def recipe_of(
    strategy: Any, servers: Sequence[str] = (), wait_s: float = LIMIT_S
) -> dict[str, Any]:
    """Four iterations with a validation and two checkpoints, one process on each host.

    Args:
        strategy: of the trainer.
        servers: URLs of vLLM servers that sample.
        wait_s: how long the run retries if none of them responds.
    """
    trainer = {"accelerator": "cpu", "devices": 1, "strategy": strategy}
    recipe = merge_runs(RECIPE, FOUR_ITERATIONS, {"trainer": trainer})
    if servers:
        given = {"urls": [*servers], "send_uniforms": True, "wait_s": wait_s}
        engine = {"engine": {"class_path": ENGINE, "init_args": given}}
        recipe = merge_runs(recipe, {"model": {"init_args": engine}})
    return recipe


def run_on_one_host(folder: Path, recipe: dict[str, Any]) -> Run:
    """The undisturbed run, as two processes on this machine."""
    here = merge_runs(recipe, {"trainer": {"devices": 2}})
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = Run(folder, here, program=(*torchrun, "cli.py"))
    code = run.go(timeout_s=LIMIT_S)
    assert code == 0, run.said[-3000:]
    return run


@dataclass
class Launch:
    """A run and its launchers, one on each host.

    Args:
        run: the run folder and the recipe.
        hosts: the first has the rendezvous.
        max_restarts: as torchrun's.
        join_s: how long a launcher waits for those of the other hosts.
    """

    run: Run
    hosts: list[Host]
    max_restarts: int = 0
    join_s: int = 600
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, number: int) -> list[str]:
        """The line for one host; docs/explanation/scale.md explains its settings."""
        first, here = self.hosts[0].address, self.hosts[number].address
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
            *("--nnodes", str(len(self.hosts)), "--max-restarts", str(self.max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{RENDEZVOUS_PORT}"),
            *(
                "--rdzv-conf",
                f"is_host={number == 0},join_timeout={self.join_s}",
                "--local-addr",
                here,
            ),
            *("cli.py", "fit", "-c", self.run.base, "-c", str(self.run.folder / "recipe.yaml")),
            *("--trainer.num_nodes", str(len(self.hosts))),
            *("--run_dir", str(self.run.run), "--auto_resume", "true"),
        ]

    def output(self, number: int) -> Path:
        return self.run.folder / f"host-{number + 1}.log"

    def start(self, *numbers: int) -> None:
        """Start the launchers of these hosts; default: of all."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        (self.run.folder / "recipe.yaml").write_text(yaml.safe_dump(self.run.recipe))
        self.launchers = self.launchers or [None] * len(self.hosts)  # type: ignore[list-item]
        for number in numbers or range(len(self.hosts)):
            self.launchers[number] = self.hosts[number].start(
                self.command(number),
                self.output(number),
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | VARIABLES,
            )

    def wait(self) -> list[int]:
        """Exit codes of all launchers; they must end within the limit."""
        until = time.monotonic() + LIMIT_S
        try:
            return [each.wait(max(0.0, until - time.monotonic())) for each in self.launchers]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"not ended within {LIMIT_S:.0f} s: {self.said[-6000:]}"
            ) from error

    def wait_for(self, there: Callable[[], bool]) -> None:
        """Wait until a condition holds while all launchers run."""
        until = time.monotonic() + LIMIT_S
        while not there():
            ended = [each.poll() for each in self.launchers if each.poll() is not None]
            assert not ended, (ended, self.said[-6000:])
            assert time.monotonic() < until, self.said[-6000:]
            time.sleep(0.05)

    @property
    def said(self) -> str:
        files = [self.output(number) for number in range(len(self.hosts))]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def list_resumes(self) -> list[int]:
        """Iterations that this run resumed from, in order."""
        lines = self.said.splitlines()
        return [int(line.split()[3]) for line in lines if line.startswith("Resuming from")]


def start_server(host: Host, folder: Path, *words: str) -> str:
    """Start a vLLM stand-in on a host; its URL, once it answers."""
    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_pretrained(MODEL)
    module = [sys.executable, "-m", "tests.support.vllm_stand_in", model, str(SERVER_PORT)]
    output = folder / "server.log"
    output.unlink(missing_ok=True)
    options = {"cwd": ROOT, "env": os.environ | ENVIRONMENT}
    process = host.start([*module, "--host", host.address, *words], output, **options)
    until = time.monotonic() + LIMIT_S
    while "http://" not in output.read_text():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    return output.read_text().split()[-1]
