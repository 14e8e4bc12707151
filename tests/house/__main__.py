"""Report the size and structure of the code: `python -m tests.house [--base PATH]`.

One iteration is traced in a short training of configs/quickstart.yaml on the CPU. Two variants are
reported: "one iteration" with default implementations, without optional optimizations (`DEFAULTS`)
and without the reward functions of the task (`REWARDS`); "as the recipe runs it" with everything.
Nothing is limited: the numbers are for comparison with another checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.house import glossary
from tests.house.source import LIBRARIES, File, files_of, import_cycles, with_bases

ROOT = Path(__file__).parents[2]
REPORTING = ("callbacks/", "checkpointing/", "cli/")
REWARDS = ("rewards/builtin/", "text/")
DEFAULTS = """
    --model.engine.fused_decode false --model.precision.share_prompts false
    --model.precision.selective_recompute false
    --model.precision.linear_kernels plain --model.reward_runner InProcessRunner
"""
TRAINING = """
    --model.max_iterations 3 --data.batch_size 4 --trainer.num_sanity_val_steps 0
    --trainer.limit_val_batches 1 --trainer.accelerator cpu --trainer.enable_progress_bar true
    --trainer.callbacks+=iteration_trace.IterationTrace
"""
SHORT_FUNCTION = 3  # lines, without its docstring
MAX_NAMES = 3  # classes and files named in a cell


class Iteration(NamedTuple):
    """Files, functions and depth of one traced iteration."""

    step: list[str]
    rewards: list[str]
    around: list[str]
    functions: int
    depth: int


def trace_iteration(checkout: Path, options: str = "") -> Iteration:
    """Run a short training and trace its second iteration.

    Args:
        checkout: folder of the project.
        options: command-line options, in addition to those of the short training.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "trace.json"
        command = [sys.executable, checkout / "cli.py", "fit"]
        command += ["-c", checkout / "configs" / "quickstart.yaml"]
        command += ["--run_dir", Path(folder) / "run", *TRAINING.split(), *options.split()]
        command += [f"--trainer.callbacks.report={report}"]
        paths = os.pathsep.join(map(str, (checkout / "src", Path(__file__).parent)))
        done = subprocess.run(
            list(map(str, command)),
            check=False,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"the traced training failed:\n{done.stdout}{done.stderr}")
        traced = json.loads(report.read_text())
    step, rewards, around = split_files(traced["step"], traced["around"])
    functions = sum(len(traced["step"][name]) for name in step)
    return Iteration(step, rewards, around, functions, traced["depth"])


def split_files(
    step: Iterable[str], around: Iterable[str]
) -> tuple[list[str], list[str], list[str]]:
    """Split traced files into those of the step, of reward functions, and around the step."""
    of_step = [name for name in step if not name.startswith((*REPORTING, *REWARDS))]
    of_rewards = [name for name in step if name.startswith(REWARDS)]
    return of_step, of_rewards, sorted({*step, *around} - {*of_step, *of_rewards})


def measure_checkout(checkout: Path, options: str = DEFAULTS) -> dict[str, str]:
    """Return every row of the report for one checkout.

    Args:
        checkout: folder of the project.
        options: `DEFAULTS` by the names of that checkout.
    """
    files = files_of(checkout / "src" / "litgrpo")
    sizes = {file.name: file.lines for file in files}
    table = count_lines(files) | count_dependencies(files) | count_classes(files)
    words = [hit for file in files for hit in glossary.hits(file.path)]
    table["home-made words (tests.house.glossary)"] = f"{len(words)}"
    simple, everything = trace_iteration(checkout, options), trace_iteration(checkout)
    rows = {
        "one iteration": simple.step,
        "one iteration as the recipe runs it": everything.step + everything.rewards,
        "its reward functions": simple.rewards,
        "around it": everything.around,
    }
    for row, names in rows.items():
        table[f"{row}: files, lines"] = f"{len(names)}, {sum(sizes[name] for name in names):,}"
    table["one iteration: functions, depth in frames"] = f"{simple.functions}, {simple.depth}"
    table["one iteration as the recipe runs it: functions, depth in frames"] = (
        f"{everything.functions}, {everything.depth}"
    )
    for package in sorted({file.package for file in files if "/" in file.name}):
        inside = [file for file in files if file.package == package]
        lines = sum(file.lines for file in inside)
        table[f"- {package}: files, lines"] = f"{len(inside)}, {lines:,}"
    return table


def count_lines(files: list[File]) -> dict[str, str]:
    """Count files, lines, functions, comments and `Any`."""
    total = sum(file.lines for file in files)
    kinds: Counter[str] = sum((file.shares() for file in files), Counter())
    functions = [(size, name) for file in files for name, size in file.functions]
    longest, name = max(functions)
    num_short = sum(size <= SHORT_FUNCTION for size, _ in functions)
    trailing = sum(file.trailing_comments for file in files)
    longest_file = max(files, key=lambda file: file.lines)
    return {
        "files": f"{len(files)}",
        "lines": f"{total:,}",
        **{f"share of {kind} lines": f"{kinds[kind] / total:.1%}" for kind in sorted(kinds)},
        "comments: whole lines, trailing": f"{kinds['comment']}, {trailing}",
        "lines with a comment": f"{(kinds['comment'] + trailing) / total:.1%}",
        "functions": f"{len(functions):,}",
        f"functions of at most {SHORT_FUNCTION} lines": f"{num_short:,}",
        "longest file": f"{longest_file.name} ({longest_file.lines})",
        "longest function": f"{name} ({longest})",
        "uses of Any": f"{sum(file.num_any for file in files)}",
    }


def count_dependencies(files: list[File]) -> dict[str, str]:
    """Count import cycles, users of large libraries, and private names of libraries."""
    cycles = import_cycles(files)
    table = {
        "import cycles: groups, files": f"{len(cycles)}, {sum(map(len, cycles))}",
        "files with names of XLA": f"{sum(file.knows_xla for file in files)}",
    }
    for packages in (("lightning", "pytorch_lightning"), ("torch_xla",), ("multiprocessing",)):
        number = sum(file.imports_package(*packages) for file in files)
        table[f"files that import {packages[0]}"] = f"{number}"
    own = set().union(*(file.own_private_names for file in files))
    private = Counter(library for file in files for library, _ in file.foreign_private_uses(own))
    for library in LIBRARIES:
        table[f"private uses of {library}"] = f"{private[library]}"
    return table


def count_classes(files: list[File]) -> dict[str, str]:
    """Name the classes with most methods, attributes and abstract methods."""
    classes = [each for file in files for each in file.classes()]
    objects = list(with_bases(classes))
    numbers = {
        "methods of a class": [(len(each.methods), each.name) for each in classes],
        "abstract methods of a class": [(each.abstract, each.name) for each in classes],
        "methods with inherited ones": [(n, each.name) for each, n, _ in objects],
        "attributes with inherited ones": [(n, each.name) for each, _, n in objects],
    }
    names = Counter(each.name for each in classes)
    table = {
        "classes": f"{len(classes)}",
        "class names that are used more than once": f"{sum(n > 1 for n in names.values())}",
    }
    for title, counts in numbers.items():
        largest = sorted(counts, reverse=True)[:MAX_NAMES]
        table[f"most {title}"] = ", ".join(f"{name} {n}" for n, name in largest)
    return table


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--base", type=Path, help="a checkout of another commit, to compare with")
    parser.add_argument(
        "--base_options", default=DEFAULTS, help="`DEFAULTS` by the names of that checkout"
    )
    given = parser.parse_args()
    columns = {"this": measure_checkout(ROOT)}
    if given.base is not None:
        base = measure_checkout(given.base.resolve(), given.base_options)
        columns = {"base": base} | columns
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    print(f"| measure | {' | '.join(columns)} |")
    print(f"|---{'|---:' * len(columns)}|")
    for row in rows:
        cells = (column.get(row, "") for column in columns.values())
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
