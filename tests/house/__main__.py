"""`python -m tests.house [--base PATH [--base_plain WORDS]]`: size, branches, circles of the code.

One iteration is traced in a small training of configs/quickstart.yaml on the CPU: every file of the
package that has a function which `training_step` calls counts with all of its lines. There are two
rows. "One iteration" is what a reader must know: what only makes it faster or safer is switched off
by keys of the recipe (`PLAIN`), and the task's own reward functions (`REWARDS`) are counted apart.
"As the recipe runs it" is everything, these functions and worker processes too.
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

from tests.house.source import File, circles, files_of, inherited

HERE = Path(__file__).parents[2]
REPORTING = ("callbacks/", "checkpointing/", "cli/")
REWARDS = ("rewards/builtin/", "text/")
PLAIN = """
    --model.engine.fused_decode false --model.precision.share_prompts false
    --model.precision.selective_recompute false
    --model.precision.linear_kernels plain --model.reward_runner InProcessRunner
"""
TRAINING = """
    --model.max_iterations 3 --data.batch_size 4 --trainer.num_sanity_val_steps 0
    --trainer.limit_val_batches 1 --trainer.accelerator cpu --trainer.enable_progress_bar true
    --trainer.callbacks+=iteration_trace.IterationTrace
"""
MOST = 3  # classes and files named in a cell


def iteration(checkout: Path, words: str = "") -> dict[str, list[str]]:
    """Files of one iteration: of the step, its reward functions, and callbacks around it.

    Args:
        checkout: of the project.
        words: of the command line, besides those of a small training.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "trace.json"
        command = [sys.executable, checkout / "cli.py", "fit"]
        command += ["-c", checkout / "configs" / "quickstart.yaml"]
        command += ["--run_dir", Path(folder) / "run", *TRAINING.split(), *words.split()]
        command += [f"--trainer.callbacks.report={report}"]
        paths = os.pathsep.join(map(str, (checkout / "src", Path(__file__).parent)))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        command = list(map(str, command))
        done = subprocess.run(
            command, check=False, cwd=folder, env=environment, capture_output=True, text=True
        )
        if not report.exists():
            raise RuntimeError(f"the traced training failed:\n{done.stdout}{done.stderr}")
        traced = json.loads(report.read_text())
    return parts_of(traced["step"], traced["around"])


def parts_of(step: Iterable[str], around: Iterable[str]) -> dict[str, list[str]]:
    """Files that were passed through, by what they are for."""
    apart = {
        "step": [name for name in step if not name.startswith((*REPORTING, *REWARDS))],
        "reward functions": [name for name in step if name.startswith(REWARDS)],
    }
    known = {name for names in apart.values() for name in names}
    return apart | {"around it": sorted({*step, *around} - known)}


def measures(checkout: Path, plain_words: str = PLAIN) -> dict[str, str]:
    """Every row of the table for one checkout, whose keys may have other names."""
    files = files_of(checkout / "src" / "litgrpo")
    lines = {file.name: file.lines for file in files}
    total = sum(lines.values())
    shares: Counter[str] = sum((file.shares() for file in files), Counter())
    longest = max(((size, name) for file in files for name, size in file.functions))
    table = {
        "files": f"{len(files)}",
        "lines": f"{total:,}",
        **{f"share of {kind}": f"{shares[kind] / total:.1%}" for kind in sorted(shares)},
        "longest file": "{1} ({0})".format(*max((n, name) for name, n in lines.items())),
        "longest function": f"{longest[1]} ({longest[0]})",
        "ifs per 100 lines": per_hundred(files),
    }
    table |= entangled(files) | of_classes(files)
    plain, everything = iteration(checkout, plain_words), iteration(checkout)
    rows = {
        "one iteration": plain["step"],
        "one iteration as the recipe runs it": everything["step"] + everything["reward functions"],
        "its reward functions": plain["reward functions"],
        "around it": everything["around it"],
    }
    for row, names in rows.items():
        size = sum(lines[name] for name in names)
        table[f"{row}: files, lines"] = f"{len(names)}, {size:,}"
    for room in sorted({file.room for file in files if "/" in file.name}):
        of_room = [file for file in files if file.room == room]
        size = sum(file.lines for file in of_room)
        table[f"- {room}: files, lines, ifs"] = f"{len(of_room)}, {size:,}, {per_hundred(of_room)}"
    return table


def per_hundred(files: list[File]) -> str:
    """Branches for each hundred lines."""
    return f"{100 * sum(file.ifs for file in files) / sum(file.lines for file in files):.2f}"


def entangled(files: list[File]) -> dict[str, str]:
    """Circles, and how many files know what few should."""
    found = circles(files)
    table = {
        "import circles: groups, files": f"{len(found)}, {sum(map(len, found))}",
        "files that know XLA": f"{sum(file.knows_xla for file in files)}",
    }
    for packages in (("lightning", "pytorch_lightning"), ("torch_xla",), ("multiprocessing",)):
        number = sum(file.imports_package(*packages) for file in files)
        table[f"files that import {packages[0]}"] = f"{number}"
    return table


def of_classes(files: list[File]) -> dict[str, str]:
    """The classes with most methods, attributes and abstract methods; base classes count too."""
    classes = [each for file in files for each in file.classes()]
    objects = list(inherited(classes))
    named = {
        "methods of a class": [(len(each.methods), each.name) for each in classes],
        "abstract methods of a class": [(each.abstract, each.name) for each in classes],
        "methods of an object, inherited too": [(n, each.name) for each, n, _ in objects],
        "attributes of an object, inherited too": [(n, each.name) for each, _, n in objects],
    }
    table = {
        f"most {title}": ", ".join(f"{name} {n}" for n, name in sorted(numbers)[: -MOST - 1 : -1])
        for title, numbers in named.items()
        if numbers
    }
    return {"classes": f"{len(classes)}"} | table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--base", type=Path, help="a checkout of another commit, to compare with")
    parser.add_argument("--base_plain", default=PLAIN, help="what `PLAIN` is called there")
    given = parser.parse_args()
    columns = {"this": measures(HERE)}
    if given.base is not None:
        columns = {"base": measures(given.base.resolve(), given.base_plain)} | columns
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    print(f"| measure | {' | '.join(columns)} |")
    print(f"|---{'|---:' * len(columns)}|")
    for row in rows:
        cells = (column.get(row, "") for column in columns.values())
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
