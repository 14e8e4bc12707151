"""Run a recipe of GSM8K on N devices, test it, and show what others published beside it.

    python -m tests.benchmarks.published -c configs/gsm8k_qwen2.5_0.5b.yaml --devices 4

Not run yet: it needs GPUs, the weights and the data. Further words go to `fit`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Published:
    """A number of others on GSM8K's test set.

    Args:
        method: what was trained, and how.
        score: fraction of correct answers.
    """

    method: str
    score: float


# verl, docs/algo/baseline.md at 003ef109, which links commands and logs. Prompts, answers that are
# read and batch sizes differ from litgrpo's.
PUBLISHED = {
    "gsm8k_qwen2.5_0.5b": (
        Published("initial policy, corrected by verl in November 2025 (#4171)", 0.496),
        Published("PPO", 0.567),
        Published("PRIME", 0.587),
        Published("GRPO, LoRA", 0.543),
    ),
    "gsm8k_qwen2.5_1.5b": (Published("GRPO, LoRA", 0.779),),
    "gsm8k_gemma2_2b": (
        Published("the start, by its model card", 0.239),
        Published("SFT", 0.5206),
        Published("SFT, then PPO", 0.6402),
    ),
}


def commands(recipe: Path, folder: Path, devices: int, further: list[str]) -> list[list[str]]:
    """The commands, in order: test the start, train, test the best checkpoint."""
    cli = [sys.executable, str(ROOT / "cli.py")]
    where = ["-c", str(ROOT / "configs/hardware/cuda.yaml"), "--trainer.devices", str(devices)]
    if devices > 1:
        where += ["--trainer.strategy", "ddp"]
    words = ["-c", str(recipe), *where, *further]
    start, run = (str(folder / name) for name in ("start", "run"))
    return [
        [*cli, "test", *words, "--run_dir", start],
        [*cli, "fit", *words, "--run_dir", run],
        [*cli, "test", *words, "--run_dir", run, "--ckpt_path", "best"],
    ]


def table(name: str, litgrpo: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table: litgrpo's numbers, then the published ones.

    Args:
        name: of the recipe, without its ending.
        litgrpo: {what: contents of its test.json}.
    """
    lines = ["| GSM8K's test set | sampled | greedy |", "|---|---|---|"]
    for what, tested in litgrpo.items():
        sampled, bounds = tested["avg_at_k"], f"[{tested['low']:.3f}, {tested['high']:.3f}]"
        lines.append(f"| litgrpo, {what} | {sampled:.3f} {bounds} | {tested['greedy']:.3f} |")
    lines += [f"| published by verl: {one.method} | | {one.score:.3f} |" for one in PUBLISHED[name]]
    return "\n".join(lines)


def main() -> None:
    """Run the commands one after another and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", dest="recipe", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/published"))
    options, further = parser.parse_known_args()
    name = options.recipe.stem
    if name not in PUBLISHED:
        parser.error(f"nothing is known of {name}; there is {sorted(PUBLISHED)}")
    folder = options.folder.absolute() / name
    for command in commands(options.recipe.absolute(), folder, options.devices, further):
        subprocess.run(command, check=True, cwd=ROOT)
    tested = {
        what: json.loads((folder / place / "test.json").read_text())
        for what, place in (("start", "start"), ("after GRPO", "run"))
    }
    print(table(name, tested))


if __name__ == "__main__":
    main()
