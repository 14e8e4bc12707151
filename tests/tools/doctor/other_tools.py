"""Run rldoctor and rlwatch on the labelled runs, in an environment that has both.

cd tests/tools/doctor; python other_tools.py labelled/held_out.jsonl.gz > verdicts.json

Metrics are passed by the names that they know; thresholds are their defaults.
"""

import gzip
import json
import sys

NAMES = {
    "step": "step",
    "reward": "reward/mean",
    "reward/std": "reward/std",
    "reward/min": "reward/min",
    "reward/max": "reward/max",
    "frac_reward_zero_std": "reward/zero_variance_groups_frac",
    "eval/score": "val/avg@2",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "clip_ratio/low_mean": "policy/clip_low_frac",
    "clip_ratio/high_mean": "policy/clip_high_frac",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/lr",
    "loss": "policy/loss",
    "completions/mean_length": "completion/len_mean",
    "completions/max_length": "completion/len_max",
    "completions/clipped_ratio": "completion/truncated_frac",
    "advantages/std": "policy/advantage_std",
}


def records(run):
    """Return a row per iteration, with TRL's names."""
    table = run["table"]
    names = dict(NAMES)
    for part in run["config"]["model"]["init_args"]["rewards"]:
        names |= {f"rewards/{part}/mean": f"reward/{part}"}
        names |= {f"rewards/{part}/std": f"reward/{part}_std"}
    rows = {}
    for n, step in enumerate(table["step"]):
        row = rows.setdefault(step, {})
        found = {theirs: table.get(ours, {}) for theirs, ours in names.items()}
        row |= {name: cells[n] for name, cells in found.items() if cells and cells[n] is not None}
    return [rows[step] for step in sorted(rows)]


def rldoctor(run):
    """Return findings of at least warning; rldoctor reports no first step."""
    from rl_doctor import Severity, diagnose, run_from_records

    settings = run["config"]["model"]["init_args"]
    config = {"num_generations": settings["group_size"]}
    config["max_completion_length"] = settings["max_completion_length"]
    found = diagnose(run_from_records(records(run), config=config)).findings
    return [
        [each.detector, None, each.severity.name.lower()]
        for each in found
        if each.severity >= Severity.WARNING
    ]


def rlwatch(run):
    """Return alerts of at least warning, with their steps."""
    from rlwatch.config import RLWatchConfig
    from rlwatch.detectors import DetectorSuite

    suite, found = DetectorSuite(RLWatchConfig()), []
    for row in records(run):
        if "reward" not in row and "loss" not in row:
            continue
        alerts = suite.check_step(
            int(row["step"]),
            entropy=row.get("entropy"),
            kl_divergence=row.get("kl"),
            reward_mean=row.get("reward"),
            reward_std=row.get("reward/std"),
            advantage_std=row.get("advantages/std"),
            loss=row.get("loss"),
            grad_norm=row.get("grad_norm"),
        )
        found += [[each.detector, each.step, each.severity] for each in alerts]
    return found


def main():
    """Read the labelled runs, print {run: {tool: findings}}."""
    with gzip.open(sys.argv[1], "rt") as file:
        runs = [json.loads(line) for line in file]
    verdicts = {run["name"]: {"rldoctor": rldoctor(run), "rlwatch": rlwatch(run)} for run in runs}
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
