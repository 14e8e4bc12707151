"""Measure steps on a GPU against TRL, with transformers' generation and with vLLM's: one command.

    python -m venv trl && trl/bin/pip install "trl[vllm]==1.16.0"
    python -m tests.benchmarks.gpu --baseline-python trl/bin/python

Whole steps, rollout and learning apart, and memory of the device; random models, the same work on
each side, sides in turns, a process for each turn. Writes docs/gpu.json and the table of
docs/gpu.md. Without TRL only litgrpo is measured; without vLLM in its environment, add --no-vllm.
`--device cpu --sizes tiny` runs the same code where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.step import Measures, last_line, medians, steps_of_litgrpo
from tests.benchmarks.workload import SIZES, Work

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "gpu.json", ROOT / "docs" / "gpu.md"
ENGINES = {"litgrpo": "LocalEngine", "litgrpo, recorded steps": "StaticEngine"}
PEERS: dict[str, list[str]] = {"TRL": [], "TRL, vLLM": ["--vllm"]}
PHASES = {
    "step": ("step_s",),
    "rollout": ("rollout_s", "gen_s"),
    "learning": ("learn_s", "train_s"),
}
HEAD = (
    *("model", "precision", "side", "tokens of a completion", "step, s", "rollout, s"),
    *("learning, s", "memory, MiB", "times litgrpo's step"),
)


def turn_of_litgrpo(args: argparse.Namespace) -> Measures:
    """Steps in this process."""
    from litgrpo.rollout.engines.local import LocalEngine
    from litgrpo.rollout.engines.static import StaticEngine

    engine = {"LocalEngine": LocalEngine, "StaticEngine": StaticEngine}[args.turn]()
    work = Work(
        SIZES[args.sizes[0]],
        args.group,
        args.max_new,
        args.stop_prob,
        args.bf16,
        args.threads,
    )
    return steps_of_litgrpo(work, args.steps, args.warmup, device=args.device, engine=engine)


def command(args: argparse.Namespace, size: str, side: str) -> list[str]:
    """Return the command that measures one repetition of a side."""
    shared = {"group": args.group, "max-new": args.max_new, "threads": args.threads}
    shared |= {
        "stop-prob": args.stop_prob,
        "device": args.device,
        "warmup": args.warmup,
    }
    words = [part for name, value in shared.items() for part in (f"--{name}", str(value))]
    if side in ENGINES:
        words += ["--float32"] * (not args.bf16)
        words += ["--sizes", size, "--steps", str(args.steps), "--turn", ENGINES[side]]
        return [sys.executable, "-m", "tests.benchmarks.gpu", *words]
    shape = {"prompts": SIZES[size].prompts, "prompt-len": SIZES[size].prompt_len}
    words += [part for name, value in shape.items() for part in (f"--{name}", str(value))]
    words += ["--size", size, "--steps", str(args.steps + args.warmup), *PEERS[side]]
    words += ["--bf16"] * args.bf16
    return [str(args.baseline_python.absolute()), "-m", "tests.benchmarks.trl_steps", *words]


def turn(args: argparse.Namespace, size: str, side: str) -> Measures:
    """Return the numbers of one repetition, in a separate process."""
    try:
        return last_line(command(args, size, side), ROOT)
    except SystemExit as failure:
        raise SystemExit(f"{side}, {size}: {failure}") from None


def measure_size(args: argparse.Namespace, size: str) -> dict[str, Measures]:
    """{side: medians over its turns}, sides one after the other in each turn."""
    sides = [*ENGINES]
    if args.baseline_python:
        sides += ["TRL"] if args.no_vllm else PEERS
    turns: dict[str, list[Measures]] = {side: [] for side in sides}
    for _ in range(args.turns):
        for side in sides:
            turns[side].append(turn(args, size, side))
            print(f"{size}: {side}: {turns[side][-1]['step_s']:.3f} s a step", flush=True)
    return {side: medians(found) for side, found in turns.items()}


def machine(device: str) -> dict[str, str]:
    """Return the device of the measurement."""
    import torch
    import transformers

    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the page's table."""
    found = []
    for case in result["cases"]:
        litgrpo = case["sides"]["litgrpo"]
        for side, numbers in case["sides"].items():
            times = [next(numbers[n] for n in names if n in numbers) for names in PHASES.values()]
            # Lengths are drawn, so that one side may have a little more to do.
            fair = litgrpo["mean_completion_len"] / numbers["mean_completion_len"]
            ratio = numbers["step_s"] / litgrpo["step_s"] * fair
            found.append(
                [
                    *(case["size"], "bf16" if case["bf16"] else "float32", side),
                    f"{numbers['mean_completion_len']:.0f}",
                    *(f"{seconds:.3g}" for seconds in times),
                    f"{numbers['peak_device_mib'] or numbers['peak_rss_mib']:.0f}",
                    f"{ratio:.2f}",
                ]
            )
    return found


def table(result: Mapping[str, Any]) -> str:
    """The page's table, under a line that says where it was measured."""
    where = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD), *rows(result)]
    return "\n".join([f"Measured on: {where}.", "", *(f"| {' | '.join(row)} |" for row in lines)])


def write(result: Mapping[str, Any], results: Path, page: Path) -> None:
    """Keep the numbers, and put the table into the page."""
    results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    region = re.compile(r"(<!-- gpu -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(region.sub(rf"\g<1>{table(result)}\n\g<2>", text), encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["30m", "500m"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--baseline-python", type=Path, help="of an environment with trl 1.16")
    parser.add_argument("--no-vllm", action="store_true", help="TRL has no vLLM")
    parser.add_argument(
        "--stop-prob", type=float, default=0.02, help="share of words that end a text"
    )
    parser.add_argument("--float32", dest="bf16", action="store_false", help="not bfloat16")
    for name, default in (
        *(("turns", 2), ("steps", 6), ("warmup", 3), ("group", 8), ("max-new", 256)),
        ("threads", os.cpu_count() or 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--turn", choices=ENGINES.values(), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = arguments()
    if args.turn:
        print(json.dumps(turn_of_litgrpo(args)))
        return
    result: Measures = {"machine": machine(args.device), "cases": []}
    for size in args.sizes:
        case = {"size": size, "bf16": args.bf16, "sides": measure_size(args, size)}
        result["cases"].append(case)
        write(result, args.results, args.page)
    print(table(result))


if __name__ == "__main__":
    main()
