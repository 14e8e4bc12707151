"""Measure litgrpo on a GPU against TRL, with transformers' and with vLLM's generation.

    python -m venv trl && trl/bin/pip install "trl[vllm]==1.16.0"
    python -m tests.benchmarks.gpu --baseline-python trl/bin/python

First, the quickstart trains for ten iterations on the GPU and on the CPU, in float32: losses and
gradient norms have to agree. Then come steps of random models: whole, rollout and update apart,
peak memory, kernel launches and waits of the host. The work is the same on each side; sides take
turns, each repetition in a separate process. Prints a table.

A side that fails, such as a size that does not fit the GPU, costs its row. vLLM is used if it is
installed, in this environment and in that of TRL; without `--baseline-python` only litgrpo is
measured. The rehearsal without a GPU is

    python -m tests.cuda_device -m tests.benchmarks.gpu --sizes tiny
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from lightning import Callback

from litgrpo.learning.learner import Learner
from tests.benchmarks.step import Measures, last_line, medians, steps_of_litgrpo
from tests.benchmarks.workload import SIZES, Work

ROOT = Path(__file__).parents[2]
LITGRPO = ("litgrpo", "litgrpo, vLLM")
TRL: dict[str, list[str]] = {"TRL": [], "TRL, vLLM": ["--vllm"]}
VLLM_MEMORY = 0.3  # share of the GPU, on both sides
PHASES = (("step_s",), ("rollout_s", "gen_s"), ("learn_s", "train_s"))
HEAD = (
    *("model", "side", "repetitions", "tokens of a completion", "step, s", "rollout, s"),
    *("update, s", "memory, MiB", "launches, rollout + update", "waits, rollout + update"),
    "times litgrpo's step",
)
# Of the quickstart in float32. Matrix products of a GPU round differently.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3


@dataclass
class Case:
    """A row of the table.

    Args:
        size: of the model, a name in `SIZES`.
        side: a name in `LITGRPO` or `TRL`.
        turns: numbers of each repetition.
        failure: why there are no numbers.
    """

    size: str
    side: str
    turns: list[Measures] = field(default_factory=list)
    failure: str = ""


# --- one repetition ---


class CountWork(Callback):
    """Counts launches and waits of rollout and update in one iteration.

    Args:
        iteration: its number.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.counts: dict[str, dict[str, float]] = {}
        self.patches = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Count within the engine and the learner."""
        if index == self.iteration:
            self._count("rollout", type(pl_module.engine), "generate")
            self._count("update", Learner, "update")

    def _count(self, phase: str, owner: type, name: str) -> None:
        call = getattr(owner, name)

        def count(*args: Any) -> Any:
            with count_calls() as self.counts[phase]:
                return call(*args)

        self.patches.enter_context(patch.object(owner, name, count))

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop counting."""
        self.patches.close()


@contextmanager
def count_calls() -> Iterator[dict[str, float]]:
    """Count launches and waits of a block: by the simulated device, else by torch's profiler.

    Yields:
        {"launches": n, "waits": n}, complete when the block has ended.
    """
    counts: dict[str, float] = {}
    if "CUDA_DEVICE_LIBRARY" in os.environ:
        from tests.cuda_device.device import count_work

        with count_work() as work:
            yield counts
        counts |= {"launches": float(work.num_launches), "waits": float(work.num_waits)}
    else:
        with torch.profiler.profile() as profiler:
            yield counts
        counts |= sum_calls({event.key: event.count for event in profiler.key_averages()})


def sum_calls(calls: Mapping[str, int]) -> dict[str, float]:
    """Sum the launches and waits among {name: calls} of CUDA's runtime and driver."""
    launch, wait = re.compile(r"cu(da)?(Graph)?Launch"), re.compile(r"cu(da)?\w+Synchronize")
    return {
        name: float(sum(number for call, number in calls.items() if pattern.match(call)))
        for name, pattern in {"launches": launch, "waits": wait}.items()
    }


def turn_of_litgrpo(args: argparse.Namespace) -> Measures:
    """Measure steps in this process, and count the launches of one more."""
    from litgrpo.rollout.engines.local import LocalEngine
    from litgrpo.rollout.servers.vllm import ColocatedEngine

    size = SIZES[args.sizes[0]]
    work = Work(size, args.group, args.max_new, args.stop_prob, args.bf16, args.threads)
    by_vllm, length = args.turn != LITGRPO[0], size.prompt_len + args.max_new
    count_work = CountWork(args.warmup + args.steps)
    measures = steps_of_litgrpo(
        work,
        args.steps,
        args.warmup,
        device="cuda",
        callbacks=[count_work],
        engine=ColocatedEngine(VLLM_MEMORY, length) if by_vllm else LocalEngine(),
    )
    return measures | {"counts": count_work.counts}


def command(args: argparse.Namespace, size: str, side: str) -> list[str]:
    """Return the command that measures one repetition of a side."""
    options: dict[str, Any] = {"group": args.group, "max-new": args.max_new}
    options |= {"threads": args.threads, "stop-prob": args.stop_prob, "warmup": args.warmup}
    if side in LITGRPO:
        words = [sys.executable, "-m", "tests.benchmarks.gpu", "--sizes", size, "--turn", side]
        words += ["--float32"] * (not args.bf16)
        options |= {"steps": args.steps}
    else:
        words = [str(args.baseline_python.absolute()), "-m", "tests.benchmarks.trl_steps"]
        words += ["--device", "cuda", "--size", size, *["--bf16"] * args.bf16, *TRL[side]]
        options |= {"steps": args.steps + args.warmup}
        options |= {"prompts": SIZES[size].prompts, "prompt-len": SIZES[size].prompt_len}
    return words + [part for name, value in options.items() for part in (f"--{name}", str(value))]


# --- CPU and GPU ---


def compare_with_cpu(iterations: int) -> str:
    """Train the quickstart on CPU and GPU, and compare losses and gradient norms in a sentence."""
    metrics: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        for device in ("cpu", "cuda"):
            words = ["fit", "-c", "configs/quickstart.yaml", "--data.val", "null"]
            words += ["--model.max_iterations", str(iterations)]
            words += ["--trainer.accelerator", device, "--trainer.devices", "1"]
            words += ["--run_dir", f"{folder}/{device}"]
            run = subprocess.run(
                [sys.executable, "cli.py", *words],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                return f"Quickstart on {device}: **failed**, {last_words(run.stderr)}."
            with Path(folder, device, "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
            metrics[device] = [
                {name: float(cell) for name, cell in row.items() if cell} for row in rows
            ]
    compared = compare_metrics(metrics["cpu"], metrics["cuda"])
    return (
        f"Quickstart on GPU and CPU, float32: {compared['compared']} of {iterations} "
        f"iterations before a sampled token differed; in these, losses differ by at most "
        f"{compared['loss_gap']:.1e} (tolerance {LOSS_TOLERANCE:.0e}) and gradient norms by "
        f"{compared['grad_norm_gap']:.1e} of their value (tolerance {NORM_TOLERANCE:.0e}): "
        f"{'**within tolerance**' if compared['within'] else '**outside tolerance**'}."
    )


def compare_metrics(cpu: list[dict[str, float]], gpu: list[dict[str, float]]) -> Measures:
    """Compare iterations up to the first in which different completions were sampled.

    Rounding can change a sampled token; after it, two runs differ although both are correct.

    Args:
        cpu: metrics of each iteration.
        gpu: the same.

    Returns:
        How many iterations were compared, the largest differences of losses and (relative) of
        gradient norms, and whether they are within tolerance.
    """
    sampled = ("perf/generated_tokens", "reward/mean", "reward/group_std")
    compared = 0
    for one, other in zip(cpu, gpu, strict=True):
        if any(abs(one[name] - other[name]) > 1e-6 * abs(one[name]) for name in sampled):
            break
        compared += 1
    pairs = list(zip(cpu[:compared], gpu[:compared], strict=True))
    losses = [abs(one["policy/loss"] - other["policy/loss"]) for one, other in pairs]
    norms = [abs(other["optim/grad_norm"] / one["optim/grad_norm"] - 1) for one, other in pairs]
    return {
        "compared": compared,
        "loss_gap": max(losses, default=0.0),
        "grad_norm_gap": max(norms, default=0.0),
        "within": compared > 0 and max(losses) <= LOSS_TOLERANCE and max(norms) <= NORM_TOLERANCE,
    }


# --- all of it ---


def has_vllm(python: str | Path) -> bool:
    """Return True if an environment has vLLM."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def list_sides(baseline: Path | None) -> list[str]:
    """Names of the sides that can be measured here."""
    sides = list(LITGRPO if has_vllm(sys.executable) else LITGRPO[:1])
    if baseline:
        sides += TRL if has_vllm(baseline) else list(TRL)[:1]
    return sides


def measure(args: argparse.Namespace) -> list[Case]:
    """Measure every row as often as asked for; sides take turns."""
    cases = [Case(size, side) for size in args.sizes for side in list_sides(args.baseline_python)]
    for _ in range(args.repetitions):
        for case in cases:
            if case.failure:
                continue
            try:
                words = command(args, case.size, case.side)
                case.turns.append(last_line(words, ROOT, timeout=60.0 * args.minutes))
                result = f"{case.turns[-1]['step_s']:.3f} s a step"
            except SystemExit as failure:
                case.failure, case.turns = str(failure), []
                result = case.failure
            print(f"{case.size}: {case.side}: {result}", file=sys.stderr, flush=True)
    return cases


def describe_machine() -> str:
    """Return the device of the measurement and the versions."""
    import transformers

    code = "import torch; print(torch.cuda.get_device_name(0))"
    # In another process, because a context of CUDA here would take memory from all sides.
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions = f"CUDA {torch.version.cuda}, torch {torch.__version__}"
    return f"{run.stdout.strip()}, {versions}, transformers {transformers.__version__}"


def last_words(failure: str) -> str:
    """Return the line of an error for the table."""
    if "out of memory" in failure.lower():
        return "out of memory"
    line = failure.strip().splitlines()[-1] if failure.strip() else "no message"
    return line.replace("|", "/").rstrip(".")[:120]


def build_rows(cases: list[Case]) -> list[list[str]]:
    """Cells of the table."""
    numbers = {(case.size, case.side): medians(case.turns) for case in cases if case.turns}
    rows = []
    for case in cases:
        if case.failure:
            filler = [""] * (len(HEAD) - 4)
            rows.append([case.size, case.side, "0", last_words(case.failure), *filler])
            continue
        side, ratio = numbers[case.size, case.side], ""
        times = [next(side[name] for name in names if name in side) for names in PHASES]
        if litgrpo := numbers.get((case.size, LITGRPO[0])):
            # Lengths are drawn, so that one side may have a little more to do.
            lengths = litgrpo["mean_completion_len"] / side["mean_completion_len"]
            ratio = f"{side['step_s'] / litgrpo['step_s'] * lengths:.2f}"
        counts = side.get("counts", {}).values()
        rows.append(
            [
                *(case.size, case.side, str(len(case.turns))),
                f"{side['mean_completion_len']:.0f}",
                *(f"{seconds:.3g}" for seconds in times),
                f"{side['peak_device_mib']:.0f}",
                " + ".join(f"{count['launches']:,.0f}" for count in counts),
                " + ".join(f"{count['waits']:,.0f}" for count in counts),
                ratio,
            ]
        )
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "0.5b", "1.5b"])
    parser.add_argument("--baseline-python", type=Path, help="of an environment with trl 1.16")
    parser.add_argument("--minutes", type=float, default=10, help="most time of a repetition")
    parser.add_argument(
        "--stop-prob", type=float, default=0.02, help="share of words that end a text"
    )
    parser.add_argument("--float32", dest="bf16", action="store_false", help="not bfloat16")
    for name, default in (
        *(("repetitions", 3), ("steps", 6), ("warmup", 3), ("group", 8), ("max-new", 256)),
        *(("parity-iterations", 10), ("threads", os.cpu_count() or 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--turn", choices=LITGRPO, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device. See --help for the rehearsal without one.")
    if args.turn:
        print(json.dumps(turn_of_litgrpo(args)))
        return
    print(f"{describe_machine()}; {'bf16-mixed' if args.bf16 else 'float32'}.")
    if args.parity_iterations:
        print(compare_with_cpu(args.parity_iterations), flush=True)
    for row in (HEAD, ["---"] * len(HEAD), *build_rows(measure(args))):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
