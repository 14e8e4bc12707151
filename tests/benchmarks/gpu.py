"""Measure litgrpo on a GPU against TRL, with transformers' and with vLLM's generation.

    python -m venv trl && trl/bin/pip install "trl[vllm]==1.16.0"
    python -m tests.benchmarks.gpu --baseline-python trl/bin/python

First, the quickstart trains for ten iterations on the GPU and on the CPU, in float32: losses and
gradient norms have to agree. Then come steps of random models: whole, rollout and update apart,
peak memory, kernel launches and waits of the host. The work is the same on each side; sides take
turns, each repetition in a separate process. Writes docs/evidence/gpu.json and the table of
docs/evidence/gpu.md.

The command fits into its time (`--minutes`) by fewer repetitions; each row has at least one, and
the page names what was left out. A side that fails, such as a size that does not fit the GPU, costs
its row. vLLM is used if it is installed, in this environment and in that of TRL; without
`--baseline-python` only litgrpo is measured. The rehearsal without a GPU is

    python -m tests.cuda_device -m tests.benchmarks.gpu --sizes tiny --minutes 5 --page PAGE
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from lightning import Callback

from litgrpo.training.learner import Learner
from tests.benchmarks.step import Measures, last_line, medians, steps_of_litgrpo
from tests.benchmarks.workload import SIZES, Work

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
RESULTS, PAGE = EVIDENCE / "gpu.json", EVIDENCE / "gpu.md"
OWN = ("litgrpo", "litgrpo, vLLM")
PEERS: dict[str, list[str]] = {"TRL": [], "TRL, vLLM": ["--vllm"]}
VLLM_MEMORY = 0.3  # share of the GPU, on both sides
PHASES = {
    "step": ("step_s",),
    "rollout": ("rollout_s", "gen_s"),
    "update": ("learn_s", "train_s"),
}
HEAD = (
    *("model", "side", "repetitions", "tokens of a completion", "step, s", "rollout, s"),
    *("update, s", "memory, MiB", "launches, rollout + update", "waits, rollout + update"),
    "times litgrpo's step",
)
# A repetition may take this share of the whole time even if less is left.
LEAST_SHARE = 0.1
# Of the quickstart in float32. Matrix products of a GPU round differently.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3


@dataclass
class Budget:
    """Time of the whole command.

    Args:
        seconds: of it.
        began: time.monotonic at the start.
    """

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def limit(self) -> float:
        """Seconds after which a repetition that starts now is stopped."""
        return max(self.left, LEAST_SHARE * self.seconds)


@dataclass
class Case:
    """A row of the table.

    Args:
        size: of the model, a name in `SIZES`.
        side: a name in `OWN` or `PEERS`.
        turns: numbers of each repetition.
        left_out: repetitions for which no time was left.
        failure: why there are no numbers.
        seconds: of the longest repetition with its start-up.
    """

    size: str
    side: str
    turns: list[Measures] = field(default_factory=list)
    left_out: int = 0
    failure: str = ""
    seconds: float = 0.0

    @property
    def numbers(self) -> Measures:
        """Medians over the repetitions."""
        return medians(self.turns)

    def repeat(self, budget: Budget, measure: Callable[[float], Measures]) -> None:
        """Take one more repetition, unless it does not fit into the time.

        Args:
            budget: of the command.
            measure: takes the limit in seconds; raises SystemExit with the reason of a failure.
        """
        if self.turns and self.seconds > budget.left:
            self.left_out += 1
            return
        began = time.monotonic()
        try:
            self.turns.append(measure(budget.limit))
        except SystemExit as failure:
            self.failure, self.turns = str(failure), []
        self.seconds = max(self.seconds, time.monotonic() - began)


# --- one repetition ---


class CountWork(Callback):
    """Counts launches and waits of rollout and update in one iteration.

    Args:
        iteration: its number.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.found: dict[str, dict[str, float]] = {}
        self.patches = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Count within the engine and the learner."""
        if index == self.iteration:
            self._count("rollout", type(pl_module.engine), "generate")
            self._count("update", Learner, "update")

    def _count(self, phase: str, owner: type, name: str) -> None:
        call = getattr(owner, name)

        def count(*given: Any) -> Any:
            with count_calls() as self.found[phase]:
                return call(*given)

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
    found: dict[str, float] = {}
    if is_simulated():
        from tests.cuda_device.device import count_work

        with count_work() as work:
            yield found
        found |= {"launches": float(work.num_launches), "waits": float(work.num_waits)}
    else:
        with torch.profiler.profile() as profiler:
            yield found
        found |= sum_calls({event.key: event.count for event in profiler.key_averages()})


def sum_calls(calls: Mapping[str, int]) -> dict[str, float]:
    """Sum the launches and waits among {name: calls} of CUDA's runtime and driver."""
    launch, wait = re.compile(r"cu(da)?(Graph)?Launch"), re.compile(r"cu(da)?\w+Synchronize")
    return {
        name: float(sum(number for call, number in calls.items() if pattern.match(call)))
        for name, pattern in {"launches": launch, "waits": wait}.items()
    }


def is_simulated() -> bool:
    """Return True on the simulated device of the tests."""
    return "CUDA_DEVICE_LIBRARY" in os.environ


def turn_of_litgrpo(args: argparse.Namespace) -> Measures:
    """Measure steps in this process, and count the launches of one more."""
    from litgrpo.rollout.engines.local import LocalEngine
    from litgrpo.rollout.engines.vllm import ColocatedEngine

    work = Work(
        SIZES[args.sizes[0]],
        args.group,
        args.max_new,
        args.stop_prob,
        args.bf16,
        args.threads,
    )
    by_vllm = args.turn != OWN[0]
    length = work.size.prompt_len + work.max_new
    counts = CountWork(args.warmup + args.steps)
    measures = steps_of_litgrpo(
        work,
        args.steps,
        args.warmup,
        device="cuda",
        callbacks=[counts],
        engine=ColocatedEngine(VLLM_MEMORY, length) if by_vllm else LocalEngine(),
    )
    return measures | {"counts": counts.found}


def command(args: argparse.Namespace, size: str, side: str) -> list[str]:
    """Return the command that measures one repetition of a side."""
    shared = {"group": args.group, "max-new": args.max_new, "threads": args.threads}
    shared |= {"stop-prob": args.stop_prob, "warmup": args.warmup}
    words = [part for name, value in shared.items() for part in (f"--{name}", str(value))]
    if side in OWN:
        words += ["--float32"] * (not args.bf16)
        words += ["--sizes", size, "--steps", str(args.steps), "--turn", side]
        return [sys.executable, "-m", "tests.benchmarks.gpu", *words]
    shape = {"prompts": SIZES[size].prompts, "prompt-len": SIZES[size].prompt_len}
    words += [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    words += ["--device", "cuda", "--size", size, "--steps", str(args.steps + args.warmup)]
    words += ["--bf16"] * args.bf16 + PEERS[side]
    return [str(args.baseline_python.absolute()), "-m", "tests.benchmarks.trl_steps", *words]


# --- CPU and GPU ---


def compare_with_cpu(args: argparse.Namespace, budget: Budget) -> Measures:
    """Train the quickstart on CPU and GPU, and compare losses and gradient norms."""
    found: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        for device in ("cpu", "cuda"):
            words = ["fit", "-c", "configs/quickstart.yaml", "--data.val", "null"]
            words += ["--model.max_iterations", str(args.parity_iterations)]
            words += ["--trainer.accelerator", device, "--trainer.devices", "1"]
            try:
                run = subprocess.run(
                    [sys.executable, "cli.py", *words, "--run_dir", f"{folder}/{device}"],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=budget.limit,
                )
            except subprocess.TimeoutExpired as late:
                return {"failure": f"{device}: stopped after {late.timeout:.0f} s"}
            if run.returncode:
                return {"failure": f"{device}: {run.stderr[-3000:]}"}
            found[device] = read_metrics(Path(folder) / device / "metrics.csv")
    return compare_metrics(found["cpu"], found["cuda"])


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Read the metrics of each iteration from a run's metrics.csv."""
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def compare_metrics(cpu: list[dict[str, float]], gpu: list[dict[str, float]]) -> Measures:
    """Compare iterations up to the first in which different completions were sampled.

    Rounding can change a sampled token; after it, two runs differ although both are correct.

    Args:
        cpu: metrics of each iteration.
        gpu: the same.

    Returns:
        Iterations, how many were compared, the largest differences of losses and (relative) of
        gradient norms, whether they are within tolerance, and seconds of an iteration.
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
    within = compared > 0 and max(losses) <= LOSS_TOLERANCE and max(norms) <= NORM_TOLERANCE
    seconds = {
        name: sorted(row["time/step_s"] for row in rows)[len(rows) // 2]
        for name, rows in (("cpu", cpu), ("gpu", gpu))
    }
    return {
        "iterations": len(cpu),
        "compared": compared,
        "loss_gap": max(losses, default=0.0),
        "grad_norm_gap": max(norms, default=0.0),
        "within": within,
        "step_s": seconds,
    }


# --- all of it ---


def has_vllm(python: str | Path) -> bool:
    """Return True if an environment has vLLM."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def list_sides(baseline: Path | None) -> list[str]:
    """Names of the sides that can be measured here."""
    sides = list(OWN if has_vllm(sys.executable) else OWN[:1])
    if baseline:
        sides += PEERS if has_vllm(baseline) else list(PEERS)[:1]
    return sides


def measure(args: argparse.Namespace, keep: Callable[[Measures], None]) -> Measures:
    """Measure all rows once, then again as often as the time allows.

    Args:
        args: of the command.
        keep: is given the results after each repetition.

    Returns:
        The results.
    """
    budget = Budget(60 * args.minutes)
    names = ("minutes", "repetitions", "steps", "warmup", "group", "max_new", "stop_prob", "bf16")
    result: Measures = {"machine": describe_machine()}
    result["settings"] = {name: getattr(args, name) for name in names}
    if args.parity_iterations:
        result["parity"] = compare_with_cpu(args, budget)
        print(describe_parity(result["parity"]), flush=True)
    cases = [Case(size, side) for size in args.sizes for side in list_sides(args.baseline_python)]
    for _ in range(args.repetitions):
        for case in cases:
            if case.failure:
                continue
            words = command(args, case.size, case.side)
            case.repeat(budget, lambda limit, words=words: last_line(words, ROOT, timeout=limit))
            ended = f"{case.turns[-1]['step_s']:.3f} s a step" if case.turns else case.failure
            print(f"{case.size}: {case.side}: {ended}", flush=True)
            result["cases"] = [asdict(each) for each in cases if each.turns or each.failure]
            result["seconds"] = budget.seconds - budget.left
            keep(result)
    return result


def describe_machine() -> dict[str, str]:
    """Return the device of the measurement and the versions."""
    import transformers

    code = "import torch; print(torch.cuda.get_device_name(0))"
    # In another process, because a context of CUDA here would take memory from all sides.
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions = {"CUDA": str(torch.version.cuda), "torch": torch.__version__}
    return {"device": run.stdout.strip(), **versions, "transformers": transformers.__version__}


def describe_parity(parity: Measures) -> str:
    """Describe the comparison of CPU and GPU in one sentence."""
    if "failure" in parity:
        return f"Quickstart on GPU and CPU: **failed**, {last_words(parity['failure'])}."
    seconds = parity["step_s"]
    return (
        f"Quickstart on GPU and CPU, float32: {parity['compared']} of {parity['iterations']} "
        f"iterations before a sampled token differed; in these, losses differ by at most "
        f"{parity['loss_gap']:.1e} (tolerance {LOSS_TOLERANCE:.0e}) and gradient norms by "
        f"{parity['grad_norm_gap']:.1e} of their value (tolerance {NORM_TOLERANCE:.0e}): "
        f"{'**within tolerance**' if parity['within'] else '**outside tolerance**'}. Median "
        f"iteration: {seconds['gpu']:.2f} s on the GPU, {seconds['cpu']:.2f} s on the CPU."
    )


def last_words(failure: str) -> str:
    """Return the line of an error for the page."""
    if "out of memory" in failure.lower():
        return "out of memory"
    line = failure.strip().splitlines()[-1] if failure.strip() else "no message"
    return line.replace("|", "/").rstrip(".")[:120]


def build_rows(cases: Iterable[Case]) -> list[list[str]]:
    """Cells of the page's table."""
    given = list(cases)
    own = {case.size: case.numbers for case in given if case.side == OWN[0] and case.turns}
    found = []
    for case in given:
        if case.failure:
            filler = [""] * (len(HEAD) - 4)
            found.append([case.size, case.side, "0", last_words(case.failure), *filler])
            continue
        numbers, ratio = case.numbers, ""
        times = [next(numbers[n] for n in names if n in numbers) for names in PHASES.values()]
        if litgrpo := own.get(case.size):
            # Lengths are drawn, so that one side may have a little more to do.
            fair = litgrpo["mean_completion_len"] / numbers["mean_completion_len"]
            ratio = f"{numbers['step_s'] / litgrpo['step_s'] * fair:.2f}"
        counts = numbers.get("counts", {}).values()
        found.append(
            [
                *(case.size, case.side, str(len(case.turns))),
                f"{numbers['mean_completion_len']:.0f}",
                *(f"{seconds:.3g}" for seconds in times),
                f"{numbers['peak_device_mib']:.0f}",
                " + ".join(f"{count['launches']:,.0f}" for count in counts),
                " + ".join(f"{count['waits']:,.0f}" for count in counts),
                ratio,
            ]
        )
    return found


def build_table(result: Measures) -> str:
    """The page's table, under lines that say where and how it was measured."""
    cases = [Case(**case) for case in result["cases"]]
    where = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    precision = "bf16-mixed" if result["settings"]["bf16"] else "float32"
    lines = [f"Measured on: {where}; {precision}."]
    if "(simulated)" in result["machine"]["device"]:
        lines[0] = f"Simulated, so the times are those of a CPU: {where}; {precision}."
    if "parity" in result:
        lines += ["", describe_parity(result["parity"])]
    table = [list(HEAD), ["---"] * len(HEAD), *build_rows(cases)]
    lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
    left_out = [f"{each.size}, {each.side}: {each.left_out}" for each in cases if each.left_out]
    minutes = result["settings"]["minutes"]
    if left_out:
        lines += ["", f"Repetitions left out after {minutes:g} minutes: {'; '.join(left_out)}."]
    return "\n".join(lines)


def write(result: Measures, results: Path, page: Path) -> None:
    """Keep the numbers, and put the table into the page."""
    results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text, table = page.read_text(encoding="utf-8"), build_table(result)
    region = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
    replaced = region.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
    page.write_text(replaced, encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "0.5b", "1.5b"])
    parser.add_argument("--baseline-python", type=Path, help="of an environment with trl 1.16")
    parser.add_argument("--minutes", type=float, default=20, help="time of the whole command")
    parser.add_argument(
        "--stop-prob", type=float, default=0.02, help="share of words that end a text"
    )
    parser.add_argument("--float32", dest="bf16", action="store_false", help="not bfloat16")
    for name, default in (
        *(("repetitions", 3), ("steps", 6), ("warmup", 3), ("group", 8), ("max-new", 256)),
        *(("parity-iterations", 10), ("threads", os.cpu_count() or 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--turn", choices=OWN, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device. See --help for the rehearsal without one.")
    if args.turn:
        print(json.dumps(turn_of_litgrpo(args)))
        return
    result = measure(args, lambda found: write(found, args.results, args.page))
    print(build_table(result))


if __name__ == "__main__":
    main()
