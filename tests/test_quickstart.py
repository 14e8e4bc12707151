import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.learns
def test_the_quickstart_reaches_its_stated_accuracy(tmp_path):
    command = [sys.executable, "cli.py", "fit", "-c", "configs/quickstart.yaml"]
    own = ["--run_dir", str(tmp_path / "run"), "--seed_everything", "7"]
    subprocess.run([*command, *own], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["before"]["avg_at_k"] <= 0.5
    assert summary["after"]["avg_at_k"] >= 0.95
    assert summary["after"]["greedy"] >= summary["before"]["greedy"] - 0.02
