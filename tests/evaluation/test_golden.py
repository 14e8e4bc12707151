"""Reports of seeded evaluations, which `golden.json` holds.

Its intervals are those of hand-written formulas, its evaluation that of eight torchmetrics classes,
which scipy and plain functions replaced.
"""

import json
import random
from math import isnan, nan
from pathlib import Path

import pytest
import torch

from litgrpo.callbacks.evaluation_files import gather_rows, prompt_rows, unique_prompts
from litgrpo.evaluation import (
    DialogueScores,
    compute_paired_difference,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from litgrpo.evaluation.evaluator import Evaluation, Evaluator
from litgrpo.evaluation.intervals import bootstrap_ratio, compare_evaluations, mcnemar
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from litgrpo.runs.pairing import per_prompt_values
from litgrpo.types import PromptBatch, Rollout

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
WORDS = ["a", "cat", "and", "the", "dog", "sit", "on", "one", "mat"]


def compute_intervals() -> dict[str, list[float]]:
    """Every interval and test of a few seeded numbers."""
    draw = random.Random(0)
    before, after = ([draw.randrange(5) / 4 for _ in range(60)] for _ in range(2))
    graded = [draw.gauss(0.2, 1) for _ in range(60)]
    change = compute_paired_difference(before, graded, 0.9)
    compared = compare_evaluations(
        {"index": range(60), "reward": before, "avg@4": before},
        {"index": range(10, 70), "reward": graded, "avg@4": after},
    )
    assert compared is not None
    trials = [(0, 7), (1, 29), (2.5, 6.25), (81, 263), (7, 7)]
    return {
        "wilson": [x for successes, n in trials for x in wilson_interval(successes, n)]
        + [x for successes, n in trials for x in wilson_interval(successes, n, 0.8)],
        "clustered": [*proportion_interval([round(4 * share) for share in before], 4)],
        "mean": [x for n in (2, 3, 10, 60) for x in mean_interval(graded[:n], 0.99)],
        "paired": [change.mean, change.low, change.high, change.p_value],
        "mcnemar": [mcnemar(*pair) for pair in ((0, 0), (1, 0), (7, 2), (30, 31), (400, 320))],
        "bootstrap": [*bootstrap_ratio(graded, [1.0 + n % 3 for n in range(60)], 0.9)],
        "compared": [x for each in compared.changes.values() for x in vars(each).values()],
        "gained and lost": [*map(float, compared.gained), -1, *map(float, compared.lost)],
        "p": [compared.p_value],
    }


class SeededRollouter:
    """Completions of random words; log-probabilities are multiples of 1/8, whose sums are exact."""

    def generate(self, prompts, purpose, iteration, *, group_size, sampling):
        rows, length = len(prompts) * group_size, 6
        draws = [random.Random(f"{index} {group_size}") for index in prompts.index.tolist()]
        ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length).bool()
        logprobs, texts = torch.zeros(rows, length), []
        for row in range(rows):
            draw = draws[row // group_size]
            words = [draw.randrange(len(WORDS)) for _ in range(draw.randint(1, length))]
            ids[row, : len(words)], mask[row, : len(words)] = torch.tensor(words), True
            logprobs[row, : len(words)] = torch.tensor([-draw.randrange(30) / 8 for _ in words])
            texts.append(" ".join(WORDS[word] for word in words))
        return Rollout(prompts, group_size, ids, mask, logprobs, mask.all(1), texts)


def has_cat(completions):
    """1 with a cat, 0 without, None if there is only one word."""
    return [float("cat" in text) if " " in text else None for text in completions]


def brevity(completions):
    return [1 / len(text) for text in completions]


def broken(completions):
    return [nan if text.startswith("dog") else 0.3 for text in completions]


def initial_logprobs(rollout):
    return rollout.sampler_logprobs - 0.125 * (rollout.completion_ids % 3)


def batch_of(indices: list[int]) -> PromptBatch:
    ids = torch.ones(len(indices), 2, dtype=torch.long)
    texts = [f"prompt {index}" for index in indices]
    columns = {"answers": [[f"the cat {index}", "one dog and a mat"] for index in indices]}
    return PromptBatch(ids, ids.bool(), texts, columns, torch.tensor(indices))


def report_of(batches: list[list[int]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Report of prompts, and what the evaluation file holds of each, over all processes."""
    rewards = {"cat": Reward(has_cat), "brevity": Reward(brevity, weight=0.3)}
    rewards["broken"] = Reward(broken, weight=0.1)
    settings = Evaluation(num_samples=4, corpus_metrics=DialogueScores())
    scorer = Scorer(rewards, Scoring(num_workers=0, max_failed_frac=1.0))
    evaluator = Evaluator(settings, scorer)
    rows = []
    for indices in batches:
        evaluated = evaluator.evaluate(SeededRollouter(), batch_of(indices), "val", 0)
        rows += prompt_rows(vars(evaluated))
    evaluator.measure_initial_distance(initial_logprobs)
    report = evaluator.report("val")
    return report, per_prompt_values(unique_prompts(gather_rows(rows)), "avg@4")


def close_to(numbers):
    return pytest.approx(numbers, rel=1e-12, abs=1e-12, nan_ok=True)


def test_intervals_and_tests_are_golden():
    found = compute_intervals()
    assert found.keys() == GOLDEN["intervals"].keys()
    for name, numbers in GOLDEN["intervals"].items():
        assert found[name] == close_to(numbers), name


def test_the_report_of_an_evaluation_is_golden():
    """Uneven batches, and prompts that come twice."""
    report, per_prompt = report_of([[0, 5, 2, 11], [7, 1, 3], [4, 6, 8, 9, 10, 5, 0]])
    assert report == close_to(GOLDEN["report"])
    # Levels are means of what changes are paired by, also with unscored samples.
    for name in ("avg@4", "greedy", "reward", "cat", "brevity", "broken"):
        scored = [value for value in per_prompt[name] if not isnan(value)]
        assert report[f"val/{name}"] == pytest.approx(sum(scored) / len(scored)), name
    assert per_prompt.keys() == GOLDEN["per_prompt"].keys()
    for name, numbers in GOLDEN["per_prompt"].items():
        assert per_prompt[name] == close_to(numbers), name
