"""Measure everything that docs/evidence/benchmarks.md reports, and write its tables and its plot.

    python -m tests.benchmarks.page --processor zen4 --measure steps profile sweeps head sft \
        kernels --baseline-python PATH/bin/python --data PATH/train.jsonl
    python -m tests.benchmarks.page --processor zen4 --measure before --checkout ANOTHER_VERSION
    python -m tests.benchmarks.page

Results are kept in docs/benchmarks_PROCESSOR.json, one entry for each command, as soon as it is
done; what is there is not measured again (--again does). A table's place on the page is a comment
with its name and its processor's. The last command only rewrites the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"
PAGE, PLOT = EVIDENCE / "benchmarks.md", EVIDENCE / "benchmarks.png"
Results = dict[str, Any]

FASTER, THAN_BEFORE = "times TRL", "times 7f06854"
ROLLOUT, MEMORY = "share of its least time the rollout has", "memory, share of TRL's"
# {arguments of `step`: what was aimed at}.
AIMS: dict[str, dict[str, float]] = {
    "--size tiny --stop-prob 0.02": {
        FASTER: 4,
        THAN_BEFORE: 1.4,
        ROLLOUT: 0.25,
        MEMORY: 0.45,
    },
    "--size tiny": {FASTER: 3, THAN_BEFORE: 1.4},
    "--size tiny --stop-prob 0.02 --bf16": {},
    "--size 30m --stop-prob 0.02 --turns 2": {
        FASTER: 6.5,
        THAN_BEFORE: 1.2,
        ROLLOUT: 0.45,
        MEMORY: 0.40,
    },
    "--size 30m --turns 2": {FASTER: 4.5, THAN_BEFORE: 1.25},
    "--size 30m --stop-prob 0.02 --bf16 --turns 2": {
        FASTER: 6,
        THAN_BEFORE: 1.2,
        MEMORY: 0.45,
    },
    "--size 100m --stop-prob 0.02 --turns 2": {FASTER: 6.5, THAN_BEFORE: 1.1},
    # TRL does not fit into 24 GiB at once.
    "--size 135m --stop-prob 0.045 --max-new 48 --bf16 --turns 1 --baseline-accumulate 4": {
        FASTER: 8,
        THAN_BEFORE: 1.2,
    },
}
STEPS = list(AIMS)
SWEPT = "--turns 1 --steps 3 --warmup 1 --baseline-steps 1 --baseline-optional"
TINY = "--size tiny --stop-prob 0.02"
# {what changes: its values, and the arguments for VALUE}. With longer completions allowed the end
# comes later in proportion (STOP_PROB).
SWEEPS: dict[str, tuple[list[int], str]] = {
    "completions of a prompt": ([4, 8, 16, 32, 64], f"{TINY} --group VALUE"),
    "tokens of a prompt": ([16, 64, 256, 1024, 4096], f'{TINY} --change {{"prompt_len":VALUE}}'),
    "tokens of a completion at most": (
        [32, 128, 512, 2048],
        "--size tiny --max-new VALUE --stop-prob STOP_PROB",
    ),
    "vocabulary": ([512, 4096, 32768, 256000], f'{TINY} --change {{"vocab":VALUE}}'),
    "prompts of a step": ([2, 4, 8, 16], f'{TINY} --change {{"prompts":VALUE}}'),
    "million parameters": ([1, 30, 100, 360], "--size VALUEm --stop-prob 0.02"),
}
HEAD = "--tokens 8192 --vocab 256000 --hidden 64"
SFT = ["--size 30m", "--size 30m --bf16"]
PROFILES = [f"--size {size} --stop-prob 0.02" for size in ("tiny", "30m", "100m")]
PROFILES += ["--size tiny", "--size 30m", "--size 30m --stop-prob 0.02 --bf16"]
PROFILES += ["--size 135m --stop-prob 0.045 --max-new 48 --bf16"]


def swept(name: str, value: int) -> str:
    """The arguments of one point of a sweep."""
    words = SWEEPS[name][1].replace("STOP_PROB", str(round(2.56 / value, 4)))
    words = words.replace("VALUE", str(value)).replace("--size 1m", "--size tiny")
    return f"{words} {SWEPT}"


def commands(part: str, args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Name and arguments of everything to measure in a part of the page."""
    baseline = ["--against", args.against, "--baseline-python", str(args.baseline_python)]
    other = ["--against", "before", "--baseline-checkout", str(args.checkout)]
    threads = ["--threads", str(args.threads)]
    points = [swept(name, value) for name in args.sweep for value in SWEEPS[name][0]]
    lists = {
        "steps": [(f"step {line}", line.split() + threads + baseline) for line in STEPS],
        "before": [(before(line), line.split() + threads + other) for line in STEPS],
        "profile": [(f"profile {line}", line.split() + threads) for line in PROFILES],
        "sweeps": [
            (f"step {line}", [*line.split(), "--threads", "1", *baseline]) for line in points
        ],
        "head": [(f"head {HEAD}", HEAD.split())],
        "sft": [
            (f"sft {line}", [*line.split(), *threads, "--data", str(args.data)]) for line in SFT
        ],
        "kernels": [("roofline --kernels", ["--kernels", "--threads", "1"])],
    }
    return lists[part]


def before(line: str) -> str:
    """Under which name a comparison with another version is kept."""
    return f"step {line} --against before"


def measure(args: argparse.Namespace) -> None:
    """Run what is missing, one command after the other."""
    for part in args.measure:
        for name, arguments in commands(part, args):
            if name in load(args.processor) and not args.again:
                continue
            print(name, flush=True)
            command = [sys.executable, "-m", f"tests.benchmarks.{name.split()[0]}", "--json"]
            run = subprocess.run(
                [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if run.returncode:
                raise SystemExit(f"{name} failed:\n{run.stderr[-3000:]}")
            last = [line for line in run.stdout.splitlines() if line.startswith("{")][-1]
            found = load(args.processor) | {name: json.loads(last)}
            results_of(args.processor).write_text(json.dumps(found, indent=1) + "\n")


def results_of(processor: str) -> Path:
    """The file of what was measured on a processor."""
    return EVIDENCE / f"benchmarks_{processor}.json"


def load(processor: str) -> Results:
    """Read the results measured on a processor so far."""
    file = results_of(processor)
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    return results


def steps_table(results: Results) -> str:
    """A row for each comparison of whole steps."""
    lines = [
        "| size | stop probability | precision | tokens of litgrpo and baseline | litgrpo, s "
        "| baseline, s | ratio, wall | CPU | rollout | learning | memory | roofline |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in STEPS:
        found = results.get(f"step {line}")
        if found is None:
            continue
        litgrpo, baseline = found["litgrpo"], found["baseline"]
        ratios = " | ".join(f"{found[f'ratio_{name}']:.1f}" for name in ("cpu", "rollout", "learn"))
        said = ", ".join(f"{side['mean_completion_len']:.0f}" for side in (litgrpo, baseline))
        memory = f"{litgrpo['peak_rss_mib']:.0f} of {baseline['peak_rss_mib']:.0f} MiB"
        lines.append(
            f"| {case(found)} | {said} | {litgrpo['step_s']:.2f} "
            f"| {baseline['step_s']:.2f} | **{found['ratio_wall']:.1f}** | {ratios} "
            f"| {memory} ({found['memory_frac']:.0%}) | {litgrpo['roofline_frac']:.0%} |"
        )
    return "\n".join(lines)


def before_table(results: Results) -> str:
    """A row for each comparison with another version."""
    lines = [
        "| size | stop probability | precision | before, s | now, s | ratio, wall "
        "| CPU | rollout | learning | memory, before and now |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in STEPS:
        found = results.get(before(line))
        if found is None:
            continue
        litgrpo, baseline = found["litgrpo"], found["baseline"]
        ratios = " | ".join(f"{found[f'ratio_{name}']:.2f}" for name in ("cpu", "rollout", "learn"))
        memory = f"{baseline['peak_rss_mib']:,.0f}, {litgrpo['peak_rss_mib']:,.0f} MiB"
        lines.append(
            f"| {case(found)} | {baseline['step_s']:.2f} | {litgrpo['step_s']:.2f} "
            f"| **{found['ratio_wall']:.2f}** | {ratios} | {memory} |"
        )
    return "\n".join(lines)


def case(found: Results) -> str:
    """Name a comparison in the tables of steps: size, stop probability and precision."""
    stop_prob = "1/128" if found["stop_prob"] is None else found["stop_prob"]
    return f"{found['size']} | {stop_prob} | {'bf16' if found['bf16'] else 'float32'}"


def aims_table(results: Results) -> str:
    """List targets and results; for a missed one, the necessary time."""
    lines = [
        "| size | stop probability | precision | what | aimed at | reached "
        "| products and attention, s | the rest, s | it would have to be |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line, aims in AIMS.items():
        profile = results.get(
            f"profile {re.sub(' --(turns|baseline-accumulate) [0-9]+', '', line)}"
        )
        for what, aimed in aims.items():
            found = results.get(before(line) if what == THAN_BEFORE else f"step {line}")
            if found is not None:
                cells = aim(what, aimed, found, profile)
                lines.append(f"| {case(found)} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def aim(what: str, aimed: float, found: Results, profile: Results | None) -> list[str]:
    """Aimed at, reached; if not, the time that products and attention take, what is left of it,
    and what would be left if the aim were reached and they took as long as they do.
    """
    litgrpo = found["litgrpo"]
    reached: float = found["memory_frac"] if what == MEMORY else found["ratio_wall"]
    if what == ROLLOUT:
        reached = litgrpo["floor"]["rollout_s"] / litgrpo["rollout_s"]
    shown = "{:.0%}" if what in (ROLLOUT, MEMORY) else "{:.2f}"
    cells = [shown.format(aimed), shown.format(reached)]
    missed = cells[0] != cells[1] and (reached > aimed if what == MEMORY else reached < aimed)
    if missed:
        cells[1] = f"**{cells[1]}**"
    if not missed or what == MEMORY or profile is None:
        return [*cells, "", "", ""]
    phases = {"rollout": "rollout_s"} | ({} if what == ROLLOUT else {"learning": "learn_s"})
    seconds = litgrpo["rollout_s" if what == ROLLOUT else "step_s"]
    kept = sum(
        (profile[phase]["products"] + profile[phase]["attention"]) * litgrpo[name]
        for phase, name in phases.items()
    )
    left = seconds * reached / aimed - kept
    allowed = f"{left:.2f}" if left > 0 else "below 0"
    return [*cells, f"{kept:.2f}", f"{seconds - kept:.2f}", allowed]


def phases_table(results: Results) -> str:
    """Tabulate the time of litgrpo's steps and the minimum that the arithmetic needs."""
    lines = [
        "| size | stop probability | precision | completion, tokens | rollout, s (least) "
        "| learning, s (least) | tokens/s, rollout | learning | peak GFLOP/s | read GB/s "
        "| most is lost in |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in STEPS:
        found = results.get(f"step {line}")
        if found is None:
            continue
        litgrpo = found["litgrpo"]
        machine, least = litgrpo["machine"], litgrpo["floor"]
        peak = machine["bfloat16_gflops" if found["bf16"] else "float32_gflops"]
        lines.append(
            f"| {case(found)} "
            f"| {litgrpo['mean_completion_len']:.0f} "
            f"| {litgrpo['rollout_s']:.2f} ({least['rollout_s']:.2f}) "
            f"| {litgrpo['learn_s']:.2f} ({least['learn_s']:.2f}) "
            f"| {litgrpo['rollout_tok_per_s']:.0f} | {litgrpo['learn_tok_per_s']:.0f} | {peak:.0f} "
            f"| {machine['read_gb_s']:.0f} | {litgrpo['largest_loss'].removesuffix('_s')} |"
        )
    return "\n".join(lines)


def profile_table(results: Results) -> str:
    """Which kinds of operators take the time of a phase."""
    lines: list[str] = []
    for line in PROFILES:
        found = results.get(f"profile {line}", {})
        for phase in ("rollout", "learning") if found else ():
            parts = {name: share for name, share in found[phase].items() if name != "seconds"}
            if not lines:
                lines += [
                    f"| size | phase | {' | '.join(parts)} |",
                    "|---" * (len(parts) + 2) + "|",
                ]
            cells = " | ".join(f"{share:.0%}" for share in parts.values())
            size = line.split()[1] + ", longest" * ("--stop-prob" not in line)
            size += ", bf16" * ("--bf16" in line)
            lines.append(f"| {size} | {phase} | {cells} |")
    return "\n".join(lines)


def head_table(results: Results) -> str:
    """Memory of the head."""
    found = results.get(f"head {HEAD}")
    if found is None:
        return ""
    return (
        f"{found['tokens']:,} tokens x {found['vocab']:,} logits, {found['chunk']} tokens at a "
        f"time: the process grew by **{found['grew_mib']:,.0f} MiB** in forward and backward; all "
        f"logits in float32, once, would be {found['logits_mib']:,.0f} MiB."
    )


def sft_table(results: Results) -> str:
    """Supervised steps."""
    lines = ["| precision | pairs | padding | litgrpo, s | Trainer, s | ratio, wall | CPU |"]
    lines.append("|---|---|---|---|---|---|---|")
    for line in SFT:
        found = results.get(f"sft {line}")
        if found is not None:
            lines.append(
                f"| {'bf16' if found['bf16'] else 'float32'} | {found['rows']} "
                f"| {found['padding_frac']:.0%} | {found['litgrpo_s']:.2f} "
                f"| {found['baseline_s']:.2f} | **{found['ratio_wall']:.1f}** "
                f"| {found['ratio_cpu']:.1f} |"
            )
    return "\n".join(lines)


def kernels_table(results: Results) -> str:
    """GFLOP/s of each kernel for some products."""
    lines = ["| rows, in, out | float32: plain | oneDNN | packed | bf16: plain | packed |"]
    lines.append("|---|---|---|---|---|---|")
    for shape, rates in results.get("roofline --kernels", {}).items():
        cells = [f"{rate:.0f}" for rate in rates] + [""] * (5 - len(rates))
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sweeps_table(results: Results) -> str:
    """A row for each point of each sweep."""
    lines = [
        "| | | rollout + learning, s | baseline, s | ratio | litgrpo, MiB | baseline, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, points in sweeps(results).items():
        for value, found in points.items():
            litgrpo, baseline = found["litgrpo"], found.get("baseline")
            cells = [name, f"{value:,}", f"{litgrpo['rollout_s']:.2f} + {litgrpo['learn_s']:.2f}"]
            if baseline:
                cells += [f"{baseline['step_s']:.2f}", f"{found['ratio_wall']:.1f}"]
            else:
                failure = found.get("baseline_failed", "")
                cells += ["does not fit" if "memory" in failure else failure, ""]
            memory = [
                f"{side['peak_rss_mib']:,.0f}" if side else "" for side in (litgrpo, baseline)
            ]
            lines.append(f"| {' | '.join(cells + memory)} |")
    return "\n".join(lines)


def sweeps(results: Results) -> dict[str, dict[int, Results]]:
    """{sweep: {value: what was measured there}}."""
    return {
        name: {
            value: results[f"step {swept(name, value)}"]
            for value in values
            if f"step {swept(name, value)}" in results
        }
        for name, (values, _) in SWEEPS.items()
    }


def plot(results: Results) -> None:
    """Tabulate the growth of time and memory per step, a column for each sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = dict(figsize=(16, 5), sharey="row", sharex="col", constrained_layout=True)
    figure, axes = pyplot.subplots(2, len(SWEEPS), **settings)
    for (above, below), (name, points) in zip(axes.T, sweeps(results).items(), strict=True):
        sides = {"litgrpo": {at: found["litgrpo"] for at, found in points.items()}}
        sides["TRL 1.16"] = {
            at: found["baseline"] for at, found in points.items() if "baseline" in found
        }
        for label, found in sides.items():
            look = dict(marker="o", label=label, linestyle="-" if label == "litgrpo" else "--")
            for axis, number in ((above, "step_s"), (below, "peak_rss_mib")):
                axis.loglog(list(found), [each[number] for each in found.values()], **look)
        below.set(xlabel=name, xticks=list(points), xticklabels=list(points))
        below.minorticks_off()
    axes[0, 0].set(ylabel="seconds of a step")
    axes[1, 0].set(ylabel="memory, MiB")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(PLOT, dpi=110)
    pyplot.close(figure)


TABLES = {
    "steps": steps_table,
    "phases": phases_table,
    "aims": aims_table,
    "before": before_table,
    "profile": profile_table,
    "head": head_table,
    "sft": sft_table,
    "kernels": kernels_table,
    "sweeps": sweeps_table,
}


MARKS = re.compile(r"(<!-- (\w+) of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write() -> None:
    """Put the tables between their marks on the page, and draw the sweeps that are on it."""

    def fill_table(mark: re.Match[str]) -> str:
        table, processor = mark[2], mark[3]
        if table not in TABLES:
            raise SystemExit(f"{PAGE.name} has a place for {table!r}; tables are {list(TABLES)}")
        results = load(processor)
        if table == "sweeps" and any(sweeps(results).values()):
            plot(results)
        return f"{mark[1]}{TABLES[table](results).rstrip()}\n{mark[4]}"

    PAGE.write_text(MARKS.sub(fill_table, PAGE.read_text()))


def main() -> None:
    """Measure if asked to, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["steps", "before", "profile", "sweeps", "head", "sft", "kernels"]
    parser.add_argument("--measure", nargs="*", default=[], choices=parts)
    parser.add_argument("--processor", help="where this is measured: zen4")
    parser.add_argument("--sweep", nargs="*", default=list(SWEEPS), choices=SWEEPS, help="these")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--against", default="trl")
    parser.add_argument("--baseline-python", type=Path)
    parser.add_argument("--checkout", type=Path, help="a clone of another version, for before")
    parser.add_argument("--data", type=Path, help="GSM8K's training file, for sft")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.measure and not args.processor:
        parser.error("--measure needs --processor, which names the file of the results")
    measure(args)
    write()


if __name__ == "__main__":
    main()
