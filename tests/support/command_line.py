"""Run the program in this process, in an empty folder with two recipes, or in a new process."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from litgrpo.cli.main import main

ROOT = Path(__file__).parents[2]
# A training of seconds, in the working folder.
QUICK = (
    "fit -c quickstart --run_dir run --model.max_iterations 1 --data.batch_size 2"
    " --model.group_size 2 --model.max_completion_length 8 --trainer.num_sanity_val_steps 0"
    " --data.val null --trainer.enable_progress_bar false --trainer.accelerator cpu"
)
RECIPE = """
model:
  class_path: tests.support.standin.StandIn
data:
  class_path: tests.support.standin.StandInData
checkpoint:
  every_n_iterations: 2
"""
GRPO_RECIPE = """
model:
  class_path: GRPO
  init_args:
    pretrained: nowhere
    rewards:
      correct: {function: litgrpo.rewards.builtin.math.correctness}
data:
  class_path: PromptData
  init_args:
    train: nowhere.jsonl
"""


@pytest.fixture
def cli(monkeypatch, tmp_path, capsys):
    """Return a function that runs a command line: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored after the test, which sets it
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    Path("recipe.yaml").write_text(RECIPE)
    Path("grpo.yaml").write_text(GRPO_RECIPE)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cli.py", *words])
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def error_of(run, *words: str, code: int = 2) -> str:
    """Return the only line that a rejected command prints, by a function as of `cli`."""
    exit_code, _, err = run(*words)
    assert exit_code == code, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err
    assert "usage:" not in err
    return line


@pytest.fixture
def finished_run(cli, tmp_path_factory) -> Path:
    """Put a finished run of recipe.yaml at runs/recipe; only the first in a process is trained."""
    store = tmp_path_factory.getbasetemp() / "finished_run"
    if store.exists():
        shutil.copytree(store, "runs", symlinks=True)
    else:
        assert cli("fit", "-c", "recipe.yaml")[0] == 0
        shutil.copytree("runs", store, symlinks=True)
    return Path("runs/recipe")


def run_python(*words: str) -> tuple[str, float]:
    """Run `python` with these words; return its standard output and its processor time in s."""

    def processor_s() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = processor_s()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    return done.stdout, processor_s() - before


def without_leaks(stderr: str) -> str:
    """Drop what triton's bindings write at exit in CUDA builds of torch 2.15."""
    return stderr.partition("nanobind: ")[0]
