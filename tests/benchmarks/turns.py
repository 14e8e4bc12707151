"""Compare the time of steps on tool-use episodes with a baseline's on the same work, alternating.

    python -m tests.benchmarks.turns --size 30m --baseline-python PATH/bin/python [--tool-s 0.05]

Both sides have the same model sizes, prompt lengths, stop probability, number of turns and tool,
whose answer has the same length; a random model calls no tool, so every turn is taken for a call.
Each side runs in separate processes, alternating. Printed: medians over the repetitions, their
ratio (the baseline draws other lengths, so it is divided by the ratio of generated tokens), and how
many tokens the model read for each that it spoke.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.step import ROOT, Measures, last_line
from tests.benchmarks.trl_turns import SIZES
from tests.benchmarks.workload import SIZES as OUR_SIZES
from tests.benchmarks.workload import Work, even_words

SAME = (
    "size",
    "prompts",
    "group",
    "prompt_len",
    "max_new",
    "turns",
    "observed",
    "threads",
    "stop_prob",
)


@dataclass
class Look:
    """A tool that takes its time and always answers the same.

    Args:
        answer: what it says.
        seconds: that it takes.
    """

    answer: str
    seconds: float

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Add nothing."""
        return ""

    def step(self, action: str) -> Any:
        """Answer any turn."""
        from litgrpo.environments import StepResult

        time.sleep(self.seconds)
        return StepResult(self.answer, calls={"look": (1, 0)})


def steps_of_litgrpo(args: argparse.Namespace) -> Measures:
    """Train in this process; medians over the steps after the warm-up."""
    import torch
    from lightning import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader

    from litgrpo.algorithms.losses import Objective
    from litgrpo.rewards.reward import Reward
    from litgrpo.rollout.episodes import EpisodeSettings
    from litgrpo.training.grpo import GRPO

    torch.set_num_threads(args.threads)
    seed_everything(0, verbose=False)
    size = OUR_SIZES[args.size]
    sizes = {**vars(size), "prompts": args.prompts, "prompt_len": args.prompt_len}
    work = Work(type(size)(**sizes), args.group, args.max_new, args.stop_prob, False, args.threads)
    policy = work.policy()
    answer = " ".join(work.random().words[-100:][: args.observed])
    rows: list[Measures] = []

    class Watch(Callback):
        """Record the cost of each step."""

        def on_train_batch_start(self, *_: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
            row = {
                "step_s": time.perf_counter() - self.wall,
                "cpu_s": time.process_time() - self.cpu,
            }
            rollout = outputs["rollout"]
            seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
            row |= {"gen_s": seen["time/rollout_s"], "env_s": seen["time/env_s"]}
            row["generated"] = float(rollout.loss_mask.sum())
            # A prompt is read once for its group, and no token twice.
            row["read"] = float(rollout.completion_mask.sum() + rollout.prompts.prompt_mask.sum())
            row["turns"] = statistics.mean(len(each.assistant_texts) for each in rollout.episodes)
            rows.append(row)

    grpo = GRPO(
        "",
        {"even": Reward(even_words)},
        group_size=args.group,
        max_completion_length=args.max_new,
        objective=Objective(),
        environment=Look(answer, args.tool_s),
        episode=EpisodeSettings(
            max_turns=args.turns,
            max_turn_tokens=args.max_new,
            max_observation_tokens=max(8, args.observed),
            turn_format="inline",
            num_workers=args.workers,
        ),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-6, weight_decay=0.0, fused=True),
        max_iterations=args.warmup + args.steps,
        check_invariants=False,  # they are not part of a step
    )
    grpo.policy = policy
    Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        callbacks=[Watch()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(grpo, DataLoader(work.batches(args.warmup + args.steps), batch_size=None))
    kept, count = rows[args.warmup :], args.prompts * args.group
    measures: Measures = {name: statistics.median(row[name] for row in kept) for name in kept[0]}
    generated = sum(row["generated"] for row in kept)
    measures |= {
        "mean_completion_len": generated / count / len(kept),
        "fed_per_token": sum(row["read"] for row in kept) / generated,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return measures


def compare_sides(args: argparse.Namespace) -> Measures:
    """Turns of both sides, one after the other, and what they come to."""
    sides: dict[str, list[Measures]] = {"litgrpo": [], "baseline": []}
    asked = [
        text for name in SAME for text in (f"--{name.replace('_', '-')}", str(vars(args)[name]))
    ]
    asked += ["--tool-s", str(args.tool_s)]
    litgrpo = [*asked, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    litgrpo += ["--once"] + (["--workers", str(args.workers)] if args.workers is not None else [])
    theirs = [*asked, "--steps", str(args.baseline_steps), "--warmup", "1"]
    for _ in range(args.repeats):
        sides["litgrpo"].append(last_line([sys.executable, "-m", __spec__.name, *litgrpo], ROOT))
        if args.baseline_python:
            command = [args.baseline_python, "-m", "tests.benchmarks.trl_turns", *theirs]
            sides["baseline"].append(last_line(command, ROOT))
    result: Measures = {name: vars(args)[name] for name in (*SAME, "tool_s", "repeats")}
    for name, measures in sides.items():
        if measures:
            result[name] = {
                key: statistics.median(each[key] for each in measures) for key in measures[0]
            }
            result[name]["spread"] = [each["step_s"] for each in measures]
    if args.baseline_python:
        baseline, own = result["baseline"], result["litgrpo"]
        result["length_ratio"] = baseline["mean_completion_len"] / own["mean_completion_len"]
        result["ratio_wall"] = baseline["step_s"] / own["step_s"] / result["length_ratio"]
    return result


def shown(result: Measures) -> str:
    """The result in lines."""
    lines = [
        f"{result['size']}: {result['prompts']} x {result['group']} rows, prompts of "
        f"{result['prompt_len']} tokens, {result['turns']} turns, stop_prob {result['stop_prob']}, "
        f"{result['observed']} observation tokens, tool {1000 * result['tool_s']:.0f} ms, "
        f"{result['threads']} threads, {result['repeats']} repeats"
    ]
    for name in ("litgrpo", "baseline"):
        if name in result:
            each = result[name]
            lines.append(
                f"{name}: step {each['step_s']:.3f} s (of these rollout {each['gen_s']:.3f}), "
                f"{each['mean_completion_len']:.1f} tokens generated in {each['turns']:.2f} turns, "
                f"{each['fed_per_token']:.2f} read for each, peak {each['peak_rss_mib']:.0f} MiB"
            )
    if "ratio_wall" in result:
        lines.append(f"ratio {result['ratio_wall']:.2f}, at equal generated tokens")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Parse the size of the work."""
    parser.add_argument("--size", choices=SIZES, default="tiny")
    numbers = dict(prompts=4, group=8, prompt_len=64, max_new=256, turns=3, observed=16)
    numbers |= dict(steps=4, warmup=1, baseline_steps=2, repeats=3, threads=os.cpu_count() or 1)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--stop-prob", type=float, default=0.05)
    parser.add_argument("--tool-s", type=float, default=0.0)
    parser.add_argument("--workers", type=int, help="workers of litgrpo; 0: none")


def main() -> None:
    """Compare, or take one turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--baseline-python", help="of an environment with trl")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(steps_of_litgrpo(args)))
        return
    result = compare_sides(args)
    print(json.dumps(result) if args.json else shown(result))


if __name__ == "__main__":
    main()
