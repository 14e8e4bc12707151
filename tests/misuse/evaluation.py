"""Evaluations, what is written of them, and loggers."""

import json
from pathlib import Path

from tests.misuse.probe import QUICK, RECIPE, Probe

VALIDATED = (
    QUICK.replace(" --data.val null", "").replace(" --trainer.num_sanity_val_steps 0", "")
    + " --trainer.limit_val_batches 1 --data.eval_batch_size 4"
)
VALIDATE = (
    "validate -c {recipe} --run_dir {folder}/run --trainer.limit_val_batches 1"
    " --data.eval_batch_size 4 --trainer.accelerator cpu --model.max_completion_length 8"
)
GRADED = """
def words(prompts, completions, **_):
    return [0.1 * len(set(text.split())) for text in completions]
"""


def check_graded_reward(folder: Path) -> str:
    """Return the faults in the summary of a run whose reward never reaches a success."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    after, change = summary["after"], summary["change"][""]
    faults = [] if after["avg_at_k"] == 0 else ["something succeeded"]
    faults += [] if after["reward"]["low"] <= after["reward"]["mean"] else ["no interval"]
    faults += [] if {"mean", "low", "high"} == change["reward"].keys() else ["no paired difference"]
    faults += (
        [] if {"initial_kl", "distinct_2"} <= after["text_quality"].keys() else ["no text_quality"]
    )
    lines = (folder / "run" / "evaluation" / "iteration-000001.jsonl").read_text().splitlines()
    faults += [] if len(lines) == 4 else ["not every prompt has a line"]
    faults += [] if "[cut]" in lines[0] else ["what was cut off is not marked"]
    return ", ".join(faults)


PROBES = [
    Probe(
        "monitor that is not measured", f"{VALIDATED} --checkpoint.monitor nothing", ("nothing",)
    ),
    Probe(
        "success that is no reward",
        f"{QUICK} --model.evaluation.success_reward nothing",
        ("nothing",),
    ),
    Probe("pass@k beyond the samples", f"{QUICK} --model.evaluation.pass_at_k [9]", ("samples",)),
    Probe(
        "a reward with the name of a number",
        f"{QUICK} --model.rewards '{{distinct_2: {{function: litgrpo.rewards.correctness}}}}'",
        ("distinct_2",),
    ),
    Probe(
        "validate without a checkpoint",
        VALIDATE,
        ("--ckpt_path",),
        code=0,
        after=lambda f: "" if list((f / "run" / "evaluation").glob("*.jsonl")) else "no answers",
    ),
    Probe(
        "a graded reward that never reaches the threshold",
        f"{VALIDATED} --model.rewards '{{words: {{function: my_words.words}}}}'"
        " --model.evaluation.success_threshold 1000",
        ("reward ", "95 % intervals"),
        code=0,
        files={"my_words.py": GRADED},
        before=lambda f: __import__("sys").path.insert(0, str(f)),
        after=check_graded_reward,
    ),
    Probe(
        "compare of one algorithm",
        f"compare {RECIPE} --algorithms '[plain]' --run_dir here",
        ("algorithms", "at least 2"),
    ),
]
