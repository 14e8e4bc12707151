"""Train the small dialogue model in five ways, five seeds each, and compare held-out replies.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.dialogue --data PATH/dialogues.jsonl

It starts from runs/convai2_small_sft/final_model, which configs/convai2_small_sft.yaml makes. Runs
that are there already are not repeated. Intervals are over personas, because the prompts of one
persona share its dialogue: each persona counts once, with the mean over its prompts and over seeds.
BLEU is no mean over prompts: its intervals are those of corpora of as many personas, drawn again
and again from the held-out ones (percentiles of 2,000 bootstrap samples, the same for every row).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from litgrpo.data.modules import PromptData
from litgrpo.evaluation.intervals import compute_paired_difference, mean_interval
from litgrpo.evaluation.metrics import BLEU_COUNTS, ROUGES, reply_counts
from litgrpo.models.loading import load_policy
from litgrpo.rewards.builtin.dialogue import lapdog
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.text.overlap import bleu, distinct_n
from tests.benchmarks.lapdog_released import OVERLAY as RELEASED

ROOT = Path(__file__).parents[2]
RECIPE = "configs/convai2_small.yaml"
SAMPLES, LENGTH = 4, 32
RESAMPLES = 2000
VARIANTS: dict[str, list[str | dict[str, Any]]] = {
    "LAPDOG's released objective": [RELEASED],
    "REINFORCE": ["configs/algorithms/reinforce.yaml"],
    "REINFORCE, average baseline": ["configs/algorithms/reinforce_baseline.yaml"],
    "GRPO": [],
    "Dr. GRPO": ["configs/algorithms/dr_grpo.yaml"],
}
MEANS = {"reward": "reward", "f1": "F1", "rougeL": "ROUGE-L"}


def train(name: str, seed: int, start: str, folder: Path, further: list[str]) -> Path:
    """Fit one variant in a separate process, unless its final model is there already."""
    final = folder / "final_model"
    if not final.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["-c", RECIPE]
        for overlay in VARIANTS[name]:
            path = overlay
            if isinstance(overlay, dict):
                path = folder.with_suffix(".yaml")
                path.write_text(yaml.safe_dump(overlay))
            words += ["-c", str(path)]
        words += ["--model.pretrained", start, "--seed_everything", str(seed)]
        words += ["--model.seed", str(seed), "--data.seed", str(seed)]
        words += ["--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"]
        words += ["--run_dir", str(folder), "--overwrite", "true", *further]
        subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), "fit", *words],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
    return final


def judge_model(model: str, data: str) -> dict[str, Any]:
    """Held-out replies of a model, one greedy and four sampled of each prompt, and their scores.

    Args:
        model: its folder; the numbers are kept beside it.
        data: the dialogues.

    Returns:
        Per prompt: persona, reward (mean of the samples), F1 and ROUGE-L times 100, counts of BLEU;
        and the greedy replies.
    """
    kept = Path(model).parent / "judged.json"
    if kept.exists():
        return json.loads(kept.read_text())
    settings = yaml.safe_load((ROOT / RECIPE).read_text())["data"]["init_args"]
    prompts = PromptData(**settings | {"train": data, "tokenizer": model})
    prompts.setup("validate")
    policy = load_policy(model).eval()
    found: dict[str, Any] = defaultdict(list)
    for batch in prompts.val_dataloader():
        said = {}
        for group_size, sampling in ((1, Sampling(temperature=0.0)), (SAMPLES, Sampling())):
            uniforms = draw_uniforms(0, "test", 0, batch.index, group_size, LENGTH)
            requests = RolloutRequest(policy, batch, group_size, uniforms, sampling)
            rollout = LocalEngine().generate(requests)
            ids = rollout.token_lists()
            said[group_size] = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
        answers = [answer for answer in batch.columns["answers"] for _ in range(SAMPLES)]
        rewards = lapdog(answers, said[SAMPLES], answers)
        for row, (reply, answer) in enumerate(zip(said[1], batch.columns["answers"], strict=True)):
            counts = reply_counts(reply, answer)
            scores = dict(zip(("f1", *ROUGES), counts[BLEU_COUNTS:], strict=True))
            found["reward"].append(statistics.mean(rewards[row * SAMPLES :][:SAMPLES]))
            found["f1"].append(100 * scores["f1"])
            found["rougeL"].append(100 * scores["rougeL"])
            found["counts"].append(counts[:BLEU_COUNTS])
            found["reply"].append(reply.strip())
            found["persona"].append(batch.columns["persona"][row])
    kept.write_text(json.dumps(found))
    return found


def by_persona(runs: list[dict[str, Any]], name: str) -> list[float]:
    """One number per persona: the mean over its prompts and over the runs."""
    values = defaultdict(list)
    for run in runs:
        for persona, value in zip(run["persona"], run[name], strict=True):
            values[persona].append(value)
    return [statistics.mean(values[persona]) for persona in sorted(values)]


def corpus_bleu(run: dict[str, Any]) -> float:
    """BLEU of all replies together."""
    return bleu([sum(column) for column in zip(*run["counts"], strict=True)], effective_order=False)


def resample_bleu(runs: list[dict[str, Any]]) -> list[float]:
    """BLEU, a mean over runs, of corpora whose personas are drawn with replacement."""
    personas = sorted(set(runs[0]["persona"]))
    counts = [dict.fromkeys(personas, [0.0] * BLEU_COUNTS) for _ in runs]
    for found, run in zip(counts, runs, strict=True):
        for persona, count in zip(run["persona"], run["counts"], strict=True):
            found[persona] = [a + b for a, b in zip(found[persona], count, strict=True)]
    rng, scores = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = rng.choices(personas, k=len(personas))
        corpora = ([found[persona] for persona in drawn] for found in counts)
        sums = [[sum(column) for column in zip(*corpus, strict=True)] for corpus in corpora]
        scores.append(statistics.mean(bleu(total, effective_order=False) for total in sums))
    return scores


def middle(values: list[float], form: str = ".2f") -> str:
    """Return the central 95 % of the values."""
    low, *_, high = statistics.quantiles(values, n=40)
    return f"[{low:{form}}, {high:{form}}]"


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown row per variant; the first is what the others are compared with."""
    heads = ["", *MEANS.values(), "BLEU", "words", "distinct-2", "different replies"]
    lines = [heads, ["---"] * len(heads)]
    for name, found in runs.items():
        cells = []
        for measure in MEANS:
            values = by_persona(found, measure)
            low, high = mean_interval(values)
            cells.append(f"{statistics.mean(values):.3g} [{low:.3g}, {high:.3g}]")
        bleus = [corpus_bleu(run) for run in found]
        spread = f" ({', '.join(f'{score:.2f}' for score in bleus)})" if len(bleus) > 1 else ""
        cells.append(f"{statistics.mean(bleus):.2f} {middle(resample_bleu(found))}{spread}")
        replies = [reply for run in found for reply in run["reply"]]
        cells.append(f"{statistics.mean(len(reply.split()) for reply in replies):.1f}")
        cells.append(f"{statistics.mean(distinct_n(run['reply'], 2) for run in found):.2f}")
        different = [len(set(run["reply"])) / len(run["reply"]) for run in found]
        cells.append(f"{statistics.mean(different):.2f}")
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def differences(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown row per trained variant: how far it moved from the first, with intervals."""
    first, *others = runs
    heads = ["minus " + first, *MEANS.values(), "BLEU", "BLEU, lowest seed"]
    lines = [heads, ["---"] * len(heads)]
    level = resample_bleu(runs[first])
    for name in others:
        cells = []
        for measure in MEANS:
            pair = (by_persona(runs[first], measure), by_persona(runs[name], measure))
            moved = compute_paired_difference(*pair)
            cells.append(f"{moved.mean:+.3g} [{moved.low:+.3g}, {moved.high:+.3g}]")
        bleus, before = [corpus_bleu(run) for run in runs[name]], corpus_bleu(runs[first][0])
        gains = [a - b for a, b in zip(resample_bleu(runs[name]), level, strict=True)]
        cells.append(f"{statistics.mean(bleus) - before:+.2f} {middle(gains, '+.2f')}")
        lowest = min(bleus) - before
        lines.append([name, *cells, f"{lowest:+.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Train what is missing, judge, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="the dialogues, a .jsonl file")
    parser.add_argument("--start", default="runs/convai2_small_sft/final_model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="variants to train")
    parser.add_argument("--folder", type=Path, default=Path("runs/dialogue"))
    options, further = parser.parse_known_args()
    further += ["--data.train", options.data]
    start = str(Path(options.start).absolute())
    runs = {"supervised only": [judge_model(start, options.data)]}
    for seed in options.seeds:
        for name in options.only:
            folder = options.folder.absolute() / name.replace(" ", "_") / f"seed_{seed}"
            final = train(name, seed, start, folder, further)
            runs.setdefault(name, []).append(judge_model(str(final), options.data))
            print(name, seed, flush=True)
    print(table(runs), differences(runs), sep="\n\n")


if __name__ == "__main__":
    main()
