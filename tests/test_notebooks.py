"""Every notebook runs from top to bottom, quietly, and is committed with what it shows."""

import re
import resource
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from litgrpo.tools.plan.devices import load_devices

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 150_000  # bytes of a notebook with its outputs
names = [path.name for path in NOTEBOOKS]


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> AsyncKernelManager:
    """A kernel of this interpreter that finds litgrpo and leaves nothing in the home folder.

    No folder is searched for installed kernels, so none of another environment is taken.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("LITGRPO_SMALL", "1")  # of what would need a GPU and the Hub
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    specs = KernelSpecManager(kernel_dirs=[])
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


@pytest.fixture
def client(path, kernel, tmp_path) -> NotebookClient:
    """Return a function that runs a notebook in a separate folder."""
    resources = {"metadata": {"path": str(tmp_path)}}
    return NotebookClient(nbformat.read(path, 4), km=kernel, timeout=900, resources=resources)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_runs_from_top_to_bottom_with_short_trainings(client):
    for cell in client.nb.cells:
        cell.source = shorten(cell.source)
    client.execute(cleanup_kc=True)  # stops the kernel, which a given manager would keep
    assert not loud(client.nb)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_as_it_is_takes_a_minute(client):
    before = measure_cpu_s()
    client.execute(cleanup_kc=True)
    assert measure_cpu_s() - before < 60
    assert not loud(client.nb)


def shorten(source: str) -> str:
    """The code of a cell with at most ten iterations of a training, and few demonstrations."""
    source = re.sub(r"max_iterations=\d\d+", "max_iterations=10", source)
    return re.sub(r"for _ in range\(\d{4,}\)", "for _ in range(200)", source)


def test_only_long_trainings_are_shortened():
    assert shorten("GRPO(max_iterations=80)") == "GRPO(max_iterations=10)"
    assert shorten("SFT(max_iterations=5)") == "SFT(max_iterations=5)"
    assert shorten("[f() for _ in range(6400)]") == "[f() for _ in range(200)]"


def loud(notebook) -> list[str]:
    """Return what cells write to standard error, without warnings about slow rewards."""
    lines = [
        line
        for out in shown(notebook)
        if out.get("name") == "stderr"
        for line in out.text.splitlines()
    ]
    return [line for line in lines if not re.match(r"reward '\w+' took [\d.]+ s for ", line)]


def measure_cpu_s() -> float:
    """Processor time of all finished child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def shown(notebook) -> list:
    """Outputs of all cells, in order."""
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_is_valid_and_committed_with_small_outputs_and_a_picture(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert all(cell.id for cell in notebook.cells)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, 1 + len(counts)))  # from top to bottom, once
    assert not loud(notebook)
    assert any("image/png" in out.get("data", {}) for out in shown(notebook))
    assert path.stat().st_size < LARGEST
    assert str(Path.home()) not in path.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_explains_every_cell_before_it(path):
    kinds = [cell.cell_type for cell in nbformat.read(path, as_version=4).cells]
    assert kinds[0] == "markdown"
    assert ("code", "code") not in pairwise(kinds)


def test_what_a_notebook_installs_has_the_versions_of_the_tests():
    (source,) = [
        cell.source
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        if "PINS = " in cell.source
    ]
    pins = re.findall(r'"([^"]+==[^"]+)"', source)
    tested = (ROOT / "requirements.txt").read_text().splitlines()
    assert len(pins) > 3
    assert not set(pins) - set(tested)


def test_chips_that_a_notebook_asks_for_are_known():
    text = (ROOT / "notebooks" / "04_your_model_on_colab_or_kaggle.ipynb").read_text()
    asked = re.findall(r'\\": \\"([\w-]+)\\"', text.partition("chip = {")[2].partition("}")[0])
    assert len(asked) == 3
    assert set(asked) <= load_devices().devices.keys()
