"""`python -m tests.misuse [--only TOPIC] [--name TEXT] [--quick] [--show]`: the misuses, replayed.

Prints a table: exit code, lines printed, seconds, verdict. Exit code 1 if one is met badly.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.misuse.probe import Probe, play

NOT_TOPICS = {"__init__", "__main__", "probe", "test_misuse"}


def topics() -> list[str]:
    """Names of the files with probes."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_TOPICS)


def probes(topic: str) -> list[Probe]:
    """The probes of a topic."""
    return importlib.import_module(f"tests.misuse.{topic}").PROBES


def warm() -> None:
    """Import what every child needs, once."""
    from litgrpo.cli import help, lightning_cli  # noqa: F401
    from litgrpo.tools.audit import command as audit  # noqa: F401
    from litgrpo.tools.plan import command as plan  # noqa: F401
    from litgrpo.tools.report import command as report  # noqa: F401


def main() -> int:
    """Replay and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.misuse", description=__doc__)
    parser.add_argument("--only", choices=topics(), help="one topic")
    parser.add_argument("--name", default="", help="probes whose name contains this")
    parser.add_argument("--quick", action="store_true", help="those that the test suite runs")
    parser.add_argument("--show", action="store_true", help="print what each printed")
    given = parser.parse_args()
    chosen = [
        (topic, probe)
        for topic in ([given.only] if given.only else topics())
        for probe in probes(topic)
        if given.name in probe.name and (probe.quick or not given.quick)
    ]
    warm()
    print("| topic | misuse | exit code | lines | s | verdict |\n|---|---|---|---|---|---|")
    bad = 0
    for topic, probe in chosen:
        seen = play(probe)
        verdict = "; ".join(seen.faults) or "met well"
        lines = len(seen.text.splitlines())
        row = f"{topic} | {probe.name} | {seen.code} | {lines} | {seen.seconds:.1f} | {verdict}"
        print(f"| {row} |", flush=True)
        bad += bool(seen.faults)
        if given.show:
            print(seen.text)
    print(f"\n{len(chosen)} misuses, {bad} met badly")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
