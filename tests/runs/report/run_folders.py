"""Write run folders: an ordinary one, and ones with hostile texts."""

import json
import math
from pathlib import Path

import yaml

from litgrpo.run_folder import COMMAND, CONFIG, HEADER
from litgrpo.runs.doctor.finding import Diagnosis, Finding

NUM_PROMPTS = 20
HOSTILE = {
    "script": "<script>document.title = 'taken'</script><img src=http://there.invalid/x onerror=x>",
    "svg": "</svg></title></style></pre><iframe src=http://there.invalid></iframe>",
    "link": '<a href="javascript:alert(1)">link</a>" onmouseover="alert(1)',
    "directions": "right \u202e to \u2066 left \u200f marks",
    "control": "nul \x00 bell \x07 escape \x1b[31m delete \x7f",
    "half": "half a character \ud800",
    "template": "{{ 7 * 7 }} {% raw %} ${7*7}",
    "long": "x" * 1_000_000,
    "emoji": "family \U0001f468\u200d\U0001f469\u200d\U0001f467 " + "\u0301" * 500,
    "table": "| a | b |\n" * 300,
}


def sample(text: str, right: bool, **more) -> dict:
    rewards = {"correct": float(right), "format": 1.0}
    row = {"completion": text, "reward": float(right), "rewards": rewards, "correct": right}
    return row | {"length": len(text.split()), "truncated": False} | more


def evaluation(right_below: int, texts: list[str], **more) -> list[dict]:
    """Prompts with two samples each; the first `right_below` are correct."""
    return [
        {
            "index": n,
            "prompt": f"{n}+1?",
            "reward": float(n < right_below),
            "correct": float(n < right_below),
            "samples": [sample(texts[n % len(texts)], n < right_below, **more)] * 2,
            "greedy": sample(texts[n % len(texts)], n < right_below),
        }
        for n in range(NUM_PROMPTS)
    ]


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def metrics(iterations: int) -> str:
    head = "step,val/avg@2,val/avg@2_low,val/avg@2_high,reward/mean,reward/correct"
    head += ",reward/correct_std,policy/log_ratio,optim/grad_norm"
    rows = [head, "0,0.25,0.1,0.4,,,,,"]
    for n in range(1, iterations + 1):
        reward = 0.5 + 0.4 * math.sin(n / 50)
        spike = 99.0 if n == iterations // 2 else 1.0 + n % 7 / 7
        rows.append(f"{n},,,,{reward:.6f},{reward / 2:.6f},0.1,0.0,{spike:.6f}")
    return "\n".join([*rows, f"{iterations},0.75,0.6,0.9,,,,,", ""])


def make_run(
    folder: Path, *, iterations: int = 60, texts: list[str] | None = None, right: int = 15, **more
) -> Path:
    """Write a finished run; `texts` are the completions after training."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation").mkdir()
    config = {
        "seed_everything": 0,
        "run_dir": f"runs/{folder.name}",
        "model": {
            "class_path": "litgrpo.GRPO",
            "init_args": {
                "group_size": 4,
                "max_iterations": iterations,
                "rewards": {"correct": {"weight": 0.8}},
            },
        },
    }
    started = f"{COMMAND}python cli.py fit -c configs/quickstart.yaml --model.group_size 4\n"
    (folder / CONFIG).write_text(HEADER + started + yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(metrics(iterations))
    (folder / "summary.json").write_text(json.dumps({"seconds": 12.0, "seed": 0}))
    for n, rows in {
        0: evaluation(5, ["I do not know."]),
        iterations: evaluation(right, texts or ["The answer is 2."], **more),
    }.items():
        (folder / "evaluation" / f"iteration-{n:06d}.jsonl").write_text(lines(rows))
    return folder


def make_finding(**fields) -> Finding:
    return Finding(
        **{
            "rule": "no_signal",
            "problem": "Rewards are equal in every group.",
            "severity": "warning",
            "first_iteration": 7,
            "evidence": ("reward/zero_variance_groups_frac is 0.9",),
            "setting": "model.group_size",
            "command": "python cli.py fit -c configs/quickstart.yaml --model.group_size 16",
            **fields,
        }
    )


def make_diagnosis(*findings: Finding) -> Diagnosis:
    return Diagnosis(
        findings, {"truncated": "Completions end."}, {"sampler_mismatch": "needs a metric"}
    )
