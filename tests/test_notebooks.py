"""Every notebook runs from top to bottom, quietly, and is committed with what it shows."""

import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from litgrpo.plan.devices import DEVICES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 150_000  # bytes of a notebook with its outputs
of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def run_notebook(notebook, folder: Path, monkeypatch) -> None:
    """Run a notebook in a folder, with a kernel of this interpreter that finds litgrpo.

    No folder is searched for installed kernels, so none of another environment is taken, and
    nothing is left in the home folder.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("LITGRPO_SMALL", "1")  # of what would need a GPU and the Hub
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(folder / name))
    specs = KernelSpecManager(kernel_dirs=[])
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernel, timeout=900, resources=resources)
    client.execute(cleanup_kc=True)  # stops the kernel
    assert not standard_error(notebook)


@pytest.mark.slow
@of_each
def test_a_notebook_runs_as_it_is(path, tmp_path, monkeypatch):
    run_notebook(nbformat.read(path, 4), tmp_path, monkeypatch)


def outputs(notebook) -> list:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def standard_error(notebook) -> list[str]:
    """Return the lines of standard error, without warnings about slow rewards."""
    texts = [out.text for out in outputs(notebook) if out.get("name") == "stderr"]
    lines = "".join(texts).splitlines()
    return [line for line in lines if not re.match(r"reward '\w+' took [\d.]+ s for ", line)]


@of_each
def test_a_notebook_is_valid_and_committed_with_small_outputs_of_one_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, 1 + len(counts)))  # from top to bottom, once
    assert not standard_error(notebook)
    assert path.stat().st_size < LARGEST
    assert str(Path.home()) not in path.read_text()


def test_what_a_notebook_installs_has_the_versions_of_the_tests():
    text = "".join(path.read_text() for path in NOTEBOOKS).partition("PINS = [")[2]
    pins = re.findall(r'\\"([^"\\]+==[^"\\]+)\\"', text.partition('"]')[0])
    assert len(pins) > 3
    assert not set(pins) - set((ROOT / "requirements.txt").read_text().splitlines())


def test_chips_that_a_notebook_asks_for_are_known():
    text = (ROOT / "notebooks" / "04_your_model_on_colab_or_kaggle.ipynb").read_text()
    chips = re.findall(r'\\": \\"([\w-]+)\\"', text.partition("chip = {")[2].partition("}")[0])
    assert len(chips) == 3
    assert set(chips) <= DEVICES["cuda"].keys()
