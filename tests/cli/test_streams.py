"""Commands on a terminal whose encoding lacks characters of the data and of the reports."""

import os
import subprocess
import sys

from tests.support.command_line import ROOT

# One process for all commands, which imports everything once.
SCRIPT = """
import sys
from litgrpo.cli.main import main
recipe = ["-c", "mine.yaml"]
for words in (
    ["fit", *recipe, "--run_dir", "run"],
    ["predict", *recipe, "--data.prompts", '["\\u6570 \\u2192 ?"]', "--ckpt_path", "run"],
    ["doctor", "run"],
    ["plan", *recipe, "--chip", "h100"],
):
    sys.argv = ["cli.py", *words]
    print("command", words[0], "exit code", main(), flush=True)
print("encoding", sys.stdout.encoding)
"""
RECIPE = """
model:
  class_path: GRPO
  init_args:
    pretrained: builtin:tiny-gemma2
    rewards: {\u6570\u91cf: {function: litgrpo.rewards.correctness}}
    group_size: 2
    max_completion_length: 4
    max_iterations: 1
    check_invariants: false
data:
  class_path: PromptData
  init_args:
    train: train.jsonl
    val_fraction: 0.5
    batch_size: 2
trainer: {accelerator: cpu}
"""


def test_characters_that_the_terminal_lacks_are_escaped_and_cost_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    rows = [f'{{"prompt": "\u6570 {n} \u2192", "answer": "\u00e9 {n}"}}\n' for n in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    printed = ended.stdout.decode("ascii")
    assert ended.returncode == 0, printed + ended.stderr.decode("ascii")
    assert "encoding ascii" in printed
    for command in ("fit", "predict", "doctor", "plan"):
        assert f"command {command} exit code 0" in printed, printed
    assert "\\u6570" in printed
    for file in ("final_model/config.json", "report.html", "summary.json"):
        assert (tmp_path / "run" / file).exists()
