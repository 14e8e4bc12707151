"""`python -m tests.house [--base PATH]`: how large, how branched and how entangled the code is.

One iteration is traced in a small training of configs/quickstart.yaml on the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.house.source import File, circles, files_of, inherited

HERE = Path(__file__).parents[2]
REPORTING = ("callbacks/", "checkpointing/")
TRAINING = """
    --model.max_iterations 3 --data.batch_size 4 --trainer.num_sanity_val_steps 0
    --trainer.limit_val_batches 1 --trainer.accelerator cpu --trainer.enable_progress_bar true
    --trainer.callbacks+=iteration_trace.IterationTrace
"""
MOST = 3  # classes and files named in a cell


def iteration(checkout: Path) -> dict[str, list[str]]:
    """Files of one iteration: of the core, and of callbacks and what else surrounds the step."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "trace.json"
        words = [sys.executable, checkout / "cli.py", "fit"]
        words += ["-c", checkout / "configs" / "quickstart.yaml", "--run_dir", Path(folder) / "run"]
        words += [*TRAINING.split(), f"--trainer.callbacks.report={report}"]
        paths = os.pathsep.join(map(str, (checkout / "src", Path(__file__).parent)))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        words = list(map(str, words))
        done = subprocess.run(
            words, check=False, cwd=folder, env=environment, capture_output=True, text=True
        )
        if not report.exists():
            raise RuntimeError(f"the traced training failed:\n{done.stdout}{done.stderr}")
        traced = json.loads(report.read_text())
    core = [name for name in traced["step"] if not name.startswith(REPORTING)]
    around = sorted({*traced["step"], *traced["around"]} - {*core})
    return {"core": core, "around": around}


def measures(checkout: Path) -> dict[str, str]:
    """Every row of the table for one checkout."""
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
    for part, names in iteration(checkout).items():
        size = sum(lines[name] for name in names)
        table[f"one iteration, {part}: files, lines"] = f"{len(names)}, {size:,}"
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
    given = parser.parse_args()
    columns = {"this": measures(HERE)}
    if given.base is not None:
        columns = {"base": measures(given.base.resolve())} | columns
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    print(f"| measure | {' | '.join(columns)} |")
    print(f"|---{'|---:' * len(columns)}|")
    for row in rows:
        cells = (column.get(row, "") for column in columns.values())
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
