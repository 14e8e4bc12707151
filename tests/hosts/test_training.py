"""Training over several hosts ends as on one, also after faults of hosts and of their network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from litgrpo.cli.main import CONNECTION_LOST
from tests.faults.processes import STRATEGIES
from tests.faults.running import Run, calls, differences, merge_runs
from tests.faults.servers import server
from tests.hosts.launching import HANG, MARK, Launch, recipe_of, run_on_one_host, start_server
from tests.hosts.network import Host, connect_hosts
from tests.vllm.serving import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Wholes:
    """Undisturbed runs on one host, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, dict[str, Run]()

    def __call__(self, strategy: str, served: bool = False) -> Run:
        name = f"{strategy}-{served}"
        if name not in self.runs and served:
            port = free_port()
            with server(port):
                recipe = recipe_of(STRATEGIES[strategy], [f"http://127.0.0.1:{port}"])
                self.runs[name] = run_on_one_host(self.folder / name, recipe)
        elif name not in self.runs:
            recipe = recipe_of(STRATEGIES[strategy])
            self.runs[name] = run_on_one_host(self.folder / name, recipe)
        return self.runs[name]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wholes]:
    with connect_hosts(1):  # skips before the long part
        yield Wholes(tmp_path_factory.mktemp("one-host"))


def launch_of(folder: Path, recipe: dict[str, Any], hosts: list[Host], **options: Any) -> Launch:
    return Launch(Run(folder, recipe), hosts, **options)


def start_until_stalled(launch: Launch, servers: Path) -> None:
    """Start, and wait until a server with `stalls_at` leaves requests without an answer."""
    launch.start()
    launch.wait_for(lambda: "stalls" in (servers / "server.log").read_text())


def start_until_marked(launch: Launch, rank: int, **kind: Any) -> None:
    """Start with a callback that leaves a marker in the third iteration, and wait for it.

    The checkpoint of the second iteration is complete then; a thread writes it.
    """
    original, run = launch.run.recipe, launch.run
    hit = calls("Kill", at="start", count=3, rank=rank, marker=str(run.marker), **kind)
    run.recipe = merge_runs(original, hit)
    launch.start()
    launch.wait_for(lambda: run.marker.exists() and (run.checkpoints / "last.ckpt").exists())
    run.recipe = original


@pytest.mark.parametrize("strategy", ["DDP", "FSDP2"])
def test_hosts_train_as_processes_of_one_host(strategy, wholes, tmp_path):
    with connect_hosts(2) as network:
        launch = launch_of(tmp_path, recipe_of(STRATEGIES[strategy]), network.hosts)
        launch.start()
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert network.packets > 1000  # it did use the network
    assert differences(launch.run, wholes(strategy)) == []


def test_a_killed_host_that_comes_back_joins_the_restart(wholes, tmp_path):
    with connect_hosts(2) as network:
        recipe = recipe_of(STRATEGIES["DDP"])
        launch = launch_of(tmp_path, recipe, network.hosts, max_restarts=2)
        start_until_marked(launch, 1, **HANG)
        network.hosts[1].kill()
        launch.start(1)
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert launch.list_resumes() == [2]
    assert differences(launch.run, wholes("DDP")) == []


def test_a_network_that_stays_cut_ends_all_and_both_launchers_resume(wholes, tmp_path):
    with connect_hosts(2) as network:
        for host in network.hosts:
            host.set_option("net.ipv4.tcp_retries2", 6)
        launch = launch_of(
            tmp_path, recipe_of(STRATEGIES["DDP"]), network.hosts, max_restarts=2, join_s=60
        )
        start_until_marked(launch, 1, **MARK)
        network.cut = {network.hosts[1].address}
        assert launch.wait() == [1, 1], launch.said[-6000:]
        for rank in (0, 1):
            assert f"[rank{rank}]: {CONNECTION_LOST}" in launch.said
        assert [host.pids() for host in network.hosts] == [[], []]
        network.cut = set()
        launch.start()
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert launch.list_resumes() == [2]
    assert differences(launch.run, wholes("DDP")) == []


def test_rows_of_a_lost_server_go_to_the_other(wholes, tmp_path):
    with connect_hosts(4) as network:
        *trainers, third, fourth = network.hosts
        lost, other = tmp_path / "lost", tmp_path / "other"
        # In the third iteration, which has requests of both processes.
        servers = [
            start_server(third, lost, "--stalls_at", "/inference/v1/generate:77"),
            start_server(fourth, other),
        ]
        launch = launch_of(tmp_path, recipe_of(STRATEGIES["DDP"], servers=servers), trainers)
        start_until_stalled(launch, lost)
        network.power_off(third)
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert f"server is unavailable: {servers[0]}" in launch.said
    assert launch.list_resumes() == []
    assert differences(launch.run, wholes("DDP", served=True)) == []


# A row of the third iteration, and the weights of the iteration after it.
@pytest.mark.parametrize(
    ("strategy", "stalls_at"),
    [("FSDP2", "/inference/v1/generate:154"), ("DDP", "/collective_rpc:4")],
    ids=["in a rollout", "while it gets weights"],
)
def test_without_its_server_a_run_ends_and_resumes_once_it_is_back(
    strategy, stalls_at, wholes, tmp_path
):
    with connect_hosts(3) as network:
        *trainers, third = network.hosts
        url = start_server(third, tmp_path, "--stalls_at", stalls_at)
        recipe = recipe_of(STRATEGIES[strategy], servers=[url], wait_s=20.0)
        launch = launch_of(tmp_path, recipe, trainers)
        start_until_stalled(launch, tmp_path)
        new = network.power_off(third)
        assert all(code > 0 for code in launch.wait()), launch.said[-6000:]
        # One line of each process.
        assert launch.said.count(f"error: No server responds: {url} unavailable") == 2
        assert [host.pids() for host in trainers] == [[], []]
        network.cut = set()
        assert start_server(new, tmp_path) == url
        launch.start()
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert launch.list_resumes() == [2]
    assert differences(launch.run, wholes(strategy, served=True)) == []
