"""Training over several hosts ends as on one, also after faults of hosts and of their network."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import STRATEGIES
from tests.faults.running import Run, calls, differences, merge_runs
from tests.faults.servers import server
from tests.hosts.launching import HANG, MARK, Launch, recipe_of, run_on_one_host, start_server
from tests.hosts.network import Host, connect_hosts
from tests.vllm.serving import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SLOW_LINK = {"delay_ms": 50.0, "loss": 0.01, "bytes_per_s": 10e6}


class Wholes:
    """Undisturbed runs on one host, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, dict[str, Run]()

    def __call__(self, strategy: str, processes: int = 2, served: bool = False) -> Run:
        name = f"{strategy}-{processes}-{served}"
        if name not in self.runs and served:
            port = free_port()
            with server(port):
                recipe = recipe_of(STRATEGIES[strategy], processes, [f"http://127.0.0.1:{port}"])
                self.runs[name] = run_on_one_host(self.folder / name, recipe, processes)
        elif name not in self.runs:
            recipe = recipe_of(STRATEGIES[strategy], processes)
            self.runs[name] = run_on_one_host(self.folder / name, recipe, processes)
        return self.runs[name]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wholes]:
    with connect_hosts(1):  # skips before the long part
        yield Wholes(tmp_path_factory.mktemp("one-host"))


def launch_of(folder: Path, recipe: dict[str, Any], hosts: list[Host], **options: Any) -> Launch:
    return Launch(Run(folder, recipe), hosts, **options)


def start_until_marked(launch: Launch, rank: int, **kind: Any) -> None:
    """Start with a callback that leaves a marker in the third iteration, and wait for it."""
    original, run = launch.run.recipe, launch.run
    hit = calls("Kill", at="start", count=3, rank=rank, marker=str(run.marker), **kind)
    run.recipe = merge_runs(original, hit)
    launch.start()
    launch.wait_for(run.marker.exists)
    run.recipe = original


@pytest.mark.parametrize(("strategy", "count"), [("DDP", 2), ("FSDP2", 2), ("FSDP2", 3)])
def test_hosts_train_as_processes_of_one_host(strategy, count, wholes, tmp_path):
    with connect_hosts(count) as network:
        launch = launch_of(tmp_path, recipe_of(STRATEGIES[strategy], count), network.hosts)
        launch.start()
        assert launch.wait() == [0] * count, launch.said[-6000:]
    assert network.packets["passed"] > 1000  # it did use the network
    assert differences(launch.run, wholes(strategy, count)) == []


def test_latency_loss_and_a_rate_change_no_bit(wholes, tmp_path):
    with connect_hosts(2, **SLOW_LINK) as network:
        launch = launch_of(tmp_path, recipe_of(STRATEGIES["DDP"]), network.hosts)
        launch.start()
        assert launch.wait(1500) == [0, 0], launch.said[-6000:]
    assert network.packets["lost"] > 10
    assert differences(launch.run, wholes("DDP")) == []


def test_a_server_on_a_third_host_over_a_slow_link(wholes, tmp_path):
    with connect_hosts(3, **SLOW_LINK) as network:
        *trainers, third = network.hosts
        recipe = recipe_of(STRATEGIES["FSDP2"], servers=[start_server(third, tmp_path)])
        launch = launch_of(tmp_path, recipe, trainers)
        launch.start()
        assert launch.wait(1500) == [0, 0], launch.said[-6000:]
    assert differences(launch.run, wholes("FSDP2", served=True)) == []


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


def test_without_the_first_host_all_end_and_both_launchers_resume(wholes, tmp_path):
    with connect_hosts(2) as network:
        recipe = recipe_of(STRATEGIES["DDP"])
        launch = launch_of(tmp_path, recipe, network.hosts, max_restarts=2)
        start_until_marked(launch, 0, **HANG)
        network.hosts[0].kill()
        assert launch.wait()[0] == -signal.SIGKILL
        assert launch.launchers[1].returncode > 0, launch.said[-6000:]
        assert network.hosts[1].pids() == []
        launch.start()
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert launch.list_resumes() == [2]
    assert differences(launch.run, wholes("DDP")) == []


def test_a_host_that_loses_power_and_comes_back(wholes, tmp_path):
    with connect_hosts(2) as network:
        recipe = recipe_of(STRATEGIES["DDP"])
        launch = launch_of(tmp_path, recipe, network.hosts, max_restarts=2)
        start_until_marked(launch, 1, **HANG)
        network.power_off(network.hosts[1])
        launch.start(1)
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert launch.list_resumes() == [2]
    assert differences(launch.run, wholes("DDP")) == []


def test_a_partition_of_20_s_heals(wholes, tmp_path):
    with connect_hosts(2) as network:
        launch = launch_of(tmp_path, recipe_of(STRATEGIES["DDP"]), network.hosts)
        start_until_marked(launch, 1, **MARK)
        network.cut = {network.hosts[1].address}
        time.sleep(20)
        network.cut = set()
        assert launch.wait() == [0, 0], launch.said[-6000:]
    assert network.packets["cut"] > 0
    assert launch.list_resumes() == []
    assert differences(launch.run, wholes("DDP")) == []
