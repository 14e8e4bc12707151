"""Compare turn-level advantages on the number game, at equal generated tokens.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.credit --seeds 0 1 2 3 4
    python -m tests.benchmarks.credit --show

The first command trains what docs/evidence/credit.json does not have; the second prints the table
of docs/evidence/results.md. A number from 1 to 7 is to be found in three guesses; who halves what
is left always wins. `outcome` pays 1 for the number and nothing else. `graded` also pays each turn
for what it found out: half of the share of the bits that were missing at the start. In both a turn
without a number makes no guess: it is what SimpleTIR calls void. All rules of a seed begin with the
same small model, fine-tuned on noisy demonstrations. GRPO is used without its KL penalty, so that
rules differ in nothing but the credit (ReBN in the loss_aggregation of tokens, too).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning import Callback, Trainer, seed_everything

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.cli.console import keep_quiet
from litgrpo.data import EpisodePrompts
from litgrpo.environments import StepResult
from litgrpo.environments.examples import NumberGame
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.evaluation.intervals import compute_paired_difference, mean_interval
from litgrpo.models.export import export
from litgrpo.models.scratch import Scratch
from litgrpo.rewards import Reward
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.sampling import Sampling
from litgrpo.tools.compare import holm
from tests.support.algorithms import PUBLISHED

RESULTS = Path(__file__).parents[2] / "docs" / "evidence" / "credit.json"
RULES = ("grpo", "gigpo", "mt_grpo", "gtpo", "rebn", "simpletir")
GREATEST, TRIES, FOUND_OUT = 7, 3, 0.5
FORGETS, SILENT = 0.33, 0.05  # shares of the teacher's turns
TOKENS = 36_000  # generated in training
HELD_OUT, SAMPLES = 100, 8
QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False),
    **{"enable_progress_bar": False, "accelerator": "cpu", "max_epochs": -1},
}
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
Result = dict[str, float]


@dataclass
class Outcome(NumberGame):
    """The number game, where a turn without a number makes no guess."""

    paid: float = 0.0

    def step(self, action: str) -> StepResult:
        """Answer a guess; see `NumberGame.step`."""
        before = self._bits()
        observed = super().step(action)
        reward = (observed.reward or 0.0) + self.paid * (before - self._bits()) / math.log2(
            GREATEST
        )
        silent = observed.calls["guess"][1] > 0
        return replace(observed, reward=reward, calls={} if silent else observed.calls)

    def _bits(self) -> float:
        """Return the unknown part of the number."""
        least, greatest = self._possible
        return math.log2(greatest - least + 1)


GAMES = {"graded": Outcome(maximum=GREATEST, max_guesses=TRIES, paid=FOUND_OUT)}
GAMES["outcome"] = Outcome(maximum=GREATEST, max_guesses=TRIES)


def careless(rng: random.Random) -> str:
    """Write a noisy demonstration: it forgets observations and sometimes names no number."""
    number, low, high, text = rng.randint(1, GREATEST), 1, GREATEST, ""
    for _ in range(TRIES):
        if rng.random() < SILENT:
            text += "?.<invalid>"
            continue
        guess = rng.randint(1, GREATEST) if rng.random() < FORGETS else rng.randint(low, high)
        text += f"{guess}."
        if guess == number:
            break
        text += "<low>" if guess < number else "<high>"
        if low <= guess <= high:
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return text


def start(seed: int, folder: str) -> None:
    """A small model that has imitated the teacher."""
    seed_everything(seed, verbose=False)
    rng = random.Random(seed)
    pairs = [{"prompt": "Guess:", "completion": careless(rng)} for _ in range(6_400)]
    tags = ["<low>", "<high>", "<invalid>"]
    sft = SFT(
        scratch=Scratch({"model_type": "qwen2", **SIZES, **HEADS}, 300, tags=tags),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_iterations=120,
    )
    Trainer(**QUIET).fit(sft, PairData(train=pairs, batch_size=64))
    export(sft.policy, folder)


class Played(Callback):
    """Return the episodes of the last validation."""

    def __init__(self) -> None:
        self.result: Result = {}

    def on_validation_batch_end(self, trainer, module, outputs, *args, **kwargs) -> None:
        rollout = outputs["rollout"]
        earned = rollout.turn_rewards.nan_to_num(0.0)
        logged = [each.log.get("contradicted", (0.0, 0)) for each in rollout.episodes]
        self.result = {
            "won": (earned >= 1).any(1).double().mean().item(),
            "reward": earned.sum(1).double().mean().item(),
            "contradicted": sum(each[0] for each in logged) / sum(each[1] for each in logged),
            "turns": (rollout.turns.amax(1) + 1).double().mean().item(),
        }


def play_games(folder: str, game: str, rule: str, seed: int) -> tuple[Result, Result]:
    """Return the result of a rule before and after training."""
    seed_everything(seed, verbose=False)
    grpo = GRPO(
        folder,
        {"environment": Reward(weight=1.0)},
        environment=GAMES[game],
        episode=EpisodeSettings(
            max_turns=TRIES, max_turn_tokens=4, turn_format="inline", num_workers=0
        ),
        objective=replace(PUBLISHED[rule], kl_coef=0.0),
        sampling=Sampling(stop=(".",)),
        group_size=8,
        max_completion_length=16,
        evaluation=Evaluation(num_samples=SAMPLES, pass_at_k=[1], greedy=False, text_quality=False),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        max_iterations=None,
        max_generated_tokens=TOKENS,
        seed=seed,
    )
    data = PromptData(
        train=EpisodePrompts(size=100_000, prompt="Guess:"),
        val=EpisodePrompts(size=HELD_OUT, prompt="Guess:", first_episode=100_000),
        batch_size=16,
        eval_batch_size=HELD_OUT,
    )
    seen = Played()
    limits = {"num_sanity_val_steps": 0, "val_check_interval": 1_000_000}
    trainer = Trainer(callbacks=[seen], check_val_every_n_epoch=None, **limits, **QUIET)
    trainer.validate(grpo, data, verbose=False)
    before, began = seen.result, time.perf_counter()
    trainer.fit(grpo, data)
    counted = {"seconds": time.perf_counter() - began, "tokens": float(grpo.generated_tokens)}
    counted["iterations"] = float(grpo.iteration)
    trainer.validate(grpo, data, verbose=False)
    return before, seen.result | counted


def train(seeds: list[int], games: list[str], rules: list[str]) -> None:
    """Train what is not there yet, a seed after the other; each run is kept at once."""
    for seed in seeds:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        todo = [(g, r) for g in games for r in rules if f"{g} {r} {seed}" not in results]
        if not todo:
            continue
        with TemporaryDirectory() as folder:
            start(seed, folder)
            for game, rule in todo:
                before, after = play_games(folder, game, rule, seed)
                results[f"{game} before {seed}"] = before
                results[f"{game} {rule} {seed}"] = after
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(game, rule, seed, before, after, flush=True)


def complete(results: dict[str, Result], game: str) -> list[int]:
    """Seeds that every rule was trained with."""
    seeds = sorted({int(key.split()[-1]) for key in results})
    return [seed for seed in seeds if all(f"{game} {rule} {seed}" in results for rule in RULES)]


def table(results: dict[str, Result], game: str) -> str:
    """A Markdown row for each rule: shares over seeds with intervals, and the gain over GRPO."""
    seeds = complete(results, game)

    def of(rule: str, name: str) -> list[float]:
        return [results[f"{game} {rule} {seed}"][name] for seed in seeds]

    def shown(rule: str, name: str) -> str:
        low, high = mean_interval(of(rule, name))
        return f"{fmean(of(rule, name)):.3f} [{low:.3f}, {high:.3f}]"

    gains = {r: compute_paired_difference(of(RULES[0], "won"), of(r, "won")) for r in RULES[1:]}
    corrected = holm({rule: gain.p_value for rule, gain in gains.items()})
    lines = [
        "| credit | won | guesses that contradict | won, over GRPO | p |",
        "|---|---|---|---|---|",
    ]
    for rule in ("before", *RULES):
        found = [rule, shown(rule, "won"), shown(rule, "contradicted"), "", ""]
        if rule in gains:
            gain = gains[rule]
            found[3:] = [f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"]
            found.append(f"{corrected[rule]:.2f}")
        lines.append(f"| {' | '.join(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--games", nargs="+", choices=list(GAMES), default=["graded"])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--show", action="store_true", help="train nothing")
    options = parser.parse_args()
    keep_quiet()
    warnings.filterwarnings("ignore")
    logging.getLogger("litgrpo").setLevel(logging.WARNING)
    if not options.show:
        train(options.seeds, options.games, options.rules)
    results = json.loads(RESULTS.read_text())
    for game in options.games:
        if len(seeds := complete(results, game)) > 1:
            print(f"\n{game}, seeds {seeds}\n\n{table(results, game)}")


if __name__ == "__main__":
    main()
