"""Compare the time of training steps with a baseline's on the same work, alternating.

    python -m tests.benchmarks.step --against trl --size tiny --stop-prob 0.02 \
        --baseline-python PATH/bin/python [--bf16] [--json]

    python -m tests.benchmarks.step --against before --size tiny --baseline-checkout PATH

Each side runs in separate processes, alternating; a step is generation, rewards, loss, backward and
optimizer. Printed: medians over the turns of each turn's median step, their ratios, tokens per
second by phase and peak memory.

The baseline is `tests.benchmarks.trl_steps` in its own environment, or a clone of this project, of
another version. Ends are drawn, so that the two sides do not say equally much: ratios are divided
by that of the mean lengths of their completions.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.workload import SIZES, Size, Work, even_words

if TYPE_CHECKING:
    from lightning import Callback

ROOT = Path(__file__).parents[2]
Measures = dict[str, Any]


def steps_of_litgrpo(
    work: Work,
    steps: int,
    warmup: int,
    *,
    device: str = "cpu",
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Measures:
    """Train in this process; medians over the steps after the warm-up.

    Args:
        work: of a step.
        steps: that count.
        warmup: before them.
        device: `cpu` or `cuda`.
        callbacks: of the trainer. With some, there is one more step, which does not count.
        settings: of GRPO, such as `engine`.
    """
    import torch
    from lightning import Callback, Trainer, seed_everything

    from litgrpo.algorithms.objective import Objective
    from litgrpo.modules.grpo import GRPO
    from litgrpo.rewards.reward import Reward

    torch.set_num_threads(work.threads)
    seed_everything(work.seed, verbose=False)
    on_gpu = device == "cuda"

    def clocks() -> tuple[float, float]:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    class Watch(Callback):
        """Record the cost of each step."""

        def __init__(self) -> None:
            self.steps: list[Measures] = []
            self.wall, self.cpu = 0.0, 0.0

        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            self.wall, self.cpu = clocks()

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            wall, cpu = clocks()
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            lengths = args[1]["iteration"].rollout.lengths
            self.steps.append(
                {
                    "step_s": wall - self.wall,
                    "cpu_s": cpu - self.cpu,
                    "rollout_s": metrics["time/rollout_s"],
                    "learn_s": metrics["time/learn_s"],
                    "mean_completion_len": float(lengths.double().mean()),
                }
            )
            self.wall, self.cpu = clocks()

    watch, total = Watch(), warmup + steps + bool(callbacks)
    grpo = GRPO(
        "",
        {"even": Reward(even_words)},
        group_size=work.group,
        max_completion_length=work.max_new,
        objective=Objective(),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-6, weight_decay=0.0, fused=True),
        max_iterations=total,
        **settings,
    )
    grpo.policy = work.policy()
    trainer = Trainer(
        accelerator=device,
        devices=1,
        precision="bf16-mixed" if work.bf16 else "32-true",
        max_epochs=-1,
        logger=False,
        callbacks=[watch, *callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(grpo, work.loader(total))
    measured = watch.steps[warmup : warmup + steps]
    measures: Measures = {
        name: statistics.median(step[name] for step in measured) for name in measured[0]
    }
    measures["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    measures["peak_device_mib"] = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    measures["kernels"] = asdict(grpo.policy.linear_kernels)
    return measures


def turn_of_baseline(args: argparse.Namespace) -> Measures:
    """Run one repetition of the baseline, in its environment."""
    if args.baseline_checkout:
        return turn_of_checkout(args)
    size = work_of(args).size
    options = {"prompts": size.prompts, "group": args.group, "prompt-len": size.prompt_len}
    options |= {"max-new": args.max_new, "threads": args.threads}
    options |= {"warmup": args.baseline_warmup, "accumulate": args.baseline_accumulate}
    options |= {"steps": args.baseline_steps + args.baseline_warmup}
    command = [str(args.baseline_python), "-m", "tests.benchmarks.trl_steps"]
    command += ["--sizes", *map(str, size.numbers)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    if args.stop_prob is not None:
        command += ["--stop-prob", str(args.stop_prob)]
    return last_line(command + ["--bf16"] * args.bf16, ROOT)


def turn_of_checkout(args: argparse.Namespace) -> Measures:
    """Run one repetition of another version of litgrpo, with the options of a baseline."""
    folder, python = args.baseline_checkout.absolute(), args.baseline_python or sys.executable
    command = [str(python), "-m", "tests.benchmarks.step", "--turn", "--size", args.size]
    command += ["--change", args.change]
    for name in ("group", "max_new", "threads", "steps", "warmup"):
        command += [f"--{name.replace('_', '-')}", str(vars(args)[name])]
    if args.stop_prob is not None:
        command += ["--stop-prob", str(args.stop_prob)]
    command += ["--bf16"] * args.bf16
    measures = last_line(command, folder, sources=folder / "src")
    return measures | {"gen_s": measures["rollout_s"], "train_s": measures["learn_s"]}


def last_line(
    command: list[str], folder: Path, sources: Path | None = None, timeout: float | None = None
) -> Measures:
    """Run a command in a folder and return its last line.

    Args:
        command: prints a line of JSON.
        folder: to run it in.
        sources: of another version, before those that its environment has installed.
        timeout: seconds until it is stopped.

    Raises:
        SystemExit: it fails, or takes longer.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"stopped after {timeout:.0f} s") from None
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
    measures: Measures = json.loads(lines[-1])
    return measures


def medians(turns: list[Measures]) -> Measures:
    """The median of every number over the turns; anything else as in the first turn."""
    return {
        name: statistics.median(turn[name] for turn in turns) if isinstance(value, float) else value
        for name, value in turns[0].items()
    }


def work_of(args: argparse.Namespace) -> Work:
    """Return the work of a step with these arguments."""
    size = Size(**asdict(SIZES[args.size]) | json.loads(args.change))
    return Work(size, args.group, args.max_new, args.stop_prob, args.bf16, args.threads)


def compare_sides(args: argparse.Namespace) -> Measures:
    """Turns of both sides, one after the other, and what they come to."""
    turn = [sys.executable, "-m", "tests.benchmarks.step", *sys.argv[1:], "--turn"]
    sides: dict[str, list[Measures]] = {"litgrpo": [], "baseline": []}
    for _ in range(args.turns):
        sides["litgrpo"].append(last_line(turn, ROOT))
        if args.against:
            sides["baseline"].append(turn_of_baseline(args))
    litgrpo = medians(sides["litgrpo"])
    tokens = litgrpo["mean_completion_len"] * work_of(args).size.prompts * args.group
    litgrpo["rollout_tok_per_s"] = tokens / litgrpo["rollout_s"]
    litgrpo["learn_tok_per_s"] = tokens / litgrpo["learn_s"]
    names = ("size", "stop_prob", "bf16", "threads", "turns")
    result: Measures = {name: getattr(args, name) for name in names} | {"litgrpo": litgrpo}
    if args.against:
        baseline = medians(sides["baseline"])
        result |= {"against": args.against, "baseline": baseline, **ratios(litgrpo, baseline)}
    result["spread"] = {name: [turn["step_s"] for turn in turns] for name, turns in sides.items()}
    return result


def ratios(litgrpo: Measures, baseline: Measures) -> Measures:
    """Return the baseline's time over litgrpo's at equal lengths, and the memory ratio."""
    lengths = baseline["mean_completion_len"] / litgrpo["mean_completion_len"]
    pairs = {
        "wall": ("step_s", "step_s"),
        "cpu": ("cpu_s", "cpu_s"),
        "rollout": ("gen_s", "rollout_s"),
        "learn": ("train_s", "learn_s"),
    }
    times = {f"ratio_{name}": baseline[b] / litgrpo[a] / lengths for name, (b, a) in pairs.items()}
    memory = litgrpo["peak_rss_mib"] / baseline["peak_rss_mib"]
    return {"length_ratio": lengths, **times, "memory_frac": memory}


def shown(result: Measures) -> str:
    """The result for people."""
    litgrpo, lines = result["litgrpo"], []
    columns = [("litgrpo", litgrpo, "rollout_s", "learn_s")]
    if "baseline" in result:
        columns.append((result["against"], result["baseline"], "gen_s", "train_s"))
    for name, side, rollout, learn in columns:
        lines.append(
            f"{name:>7}: step {side['step_s']:.2f} s ({side['cpu_s']:.2f} s of CPU): rollout "
            f"{side[rollout]:.2f} s, learning {side[learn]:.2f} s; mean completion "
            f"{side['mean_completion_len']:.1f} tokens; peak memory {side['peak_rss_mib']:.0f} MiB"
        )
    if "baseline" in result:
        lines.append(
            f"  ratio: {result['ratio_wall']:.2f} of wall time, {result['ratio_cpu']:.2f} of CPU "
            f"time (rollout {result['ratio_rollout']:.2f}, learning {result['ratio_learn']:.2f}); "
            f"memory {result['memory_frac']:.2f}"
        )
    lines.append(
        f" phases: {litgrpo['rollout_tok_per_s']:.0f} and "
        f"{litgrpo['learn_tok_per_s']:.0f} tokens/s of completions; kernels {litgrpo['kernels']}"
    )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Those of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", help="name of the baseline; without it only litgrpo is timed")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--stop-prob", type=float, help="share of the vocabulary that ends a text")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--baseline-python", type=Path)
    parser.add_argument("--baseline-checkout", type=Path, help="another clone of this project")
    for name, default in (
        *(("threads", os.cpu_count()), ("turns", 3), ("group", 8), ("max-new", 128)),
        *(("steps", 6), ("warmup", 2), ("baseline-steps", 5), ("baseline-warmup", 1)),
        ("baseline-accumulate", 1),  # micro-batches of a step
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--change", default="{}", help="JSON of fields of `Size` to change")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.against and not (args.baseline_checkout or args.baseline_python):
        parser.error("--against needs --baseline-python, or --baseline-checkout")
    return args


def main() -> None:
    """Compare, and print."""
    args = arguments()
    if args.turn:
        print(json.dumps(steps_of_litgrpo(work_of(args), args.steps, args.warmup)))
        return
    result = compare_sides(args)
    print(json.dumps(result) if args.json else shown(result))


if __name__ == "__main__":
    main()
