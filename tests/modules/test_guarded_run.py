"""A whole fit with a reward function that hangs in C code now and then, in its own process."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import re, sys, time
from lightning import Trainer
from torch.utils.data import DataLoader
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards import Reward, Scoring
from tests.support.models import prompt_batch, tiny_policy

calls = []

def sometimes_hangs(prompts, completions):
    calls.append(len(completions))
    if len(calls) in (2, 3):  # once for all rows, once more for the first of them
        re.match("(a+)+$", "a" * 60 + "b")
    return [float(len(set(text))) for text in completions]

scoring = Scoring(timeout_s=1.0, num_workers=1)
module = GRPO("", {"letters": Reward(sometimes_hangs)}, group_size=4, max_completion_length=8,
              max_iterations=4, check_invariants=False, scoring=scoring)
module.policy = tiny_policy("llama")
start = time.monotonic()
batch = prompt_batch("one", "two")
trainer = Trainer(max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, DataLoader([batch] * 4, batch_size=None))
print("iterations", module.iteration, "failures", dict(module.scorer.failures))
print("workers left", len(module.scorer.runner.workers))
"""


def test_a_script_without_a_main_guard_trains_through_a_hanging_reward(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert result.returncode == 0, result.stderr
    assert "iterations 4" in result.stdout
    assert "TimeoutError" in result.stderr
    assert "workers left 0" in result.stdout
