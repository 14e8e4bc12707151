"""The faults, each a function of the bench: {point: what was wrong, or nothing}."""

import ctypes
import random
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.faults import damage, episodes, processes, servers
from tests.faults.running import (
    EVERY,
    ITERATIONS,
    RECIPE,
    SUPERVISED,
    Run,
    calls,
    differences,
    merge_runs,
    weights_of,
)

Found = dict[str, str]
SFT = "configs/quickstart_sft.yaml"
# Three inner epochs of two steps, four micro-batches each.
INNER = {"update": {"epochs_per_rollout": 3, "num_mini_batches": 2, "micro_batch_size": 4}}


@dataclass
class Bench:
    """Folder of the runs, and the uninterrupted ones that others are compared with.

    Args:
        folder: of all runs.
        points: how many random points.
        rng: chooses them.
    """

    folder: Path
    points: int
    rng: random.Random
    wholes: dict[str, Run] = field(default_factory=dict)

    def whole(self, name: str, recipe: dict[str, Any], **run: Any) -> Run:
        """The uninterrupted run of a recipe, once."""
        if name not in self.wholes:
            self.wholes[name] = Run(self.folder / f"whole-{name}", recipe, **run)
            code = self.wholes[name].go()
            assert code == 0, self.wholes[name].said
        return self.wholes[name]

    @cached_property
    def plain(self) -> Run:
        return self.whole("plain", RECIPE)

    def copy_run(self, name: str, source: Run) -> Run:
        """A copy of a finished run, to damage."""
        run = Run(self.folder / name, source.recipe, source.base)
        shutil.copytree(source.run, run.run, symlinks=True)
        return run


def kill_run(run: Run, **point: Any) -> str:
    """Run with a kill at a point, check how it ended; what was wrong, or nothing."""
    signum = point.setdefault("signum", int(signal.SIGKILL))
    original = run.recipe
    run.recipe = merge_runs(original, calls("Kill", marker=str(run.marker), **point))
    code = run.go("--auto_resume", "true")
    run.recipe = original
    if not run.marker.exists():
        return f"was not hit (exit code {code}): {run.said[-500:]}"
    return "" if code == 128 + signum else f"exit code {code}: {run.said[-500:]}"


def resume_run(run: Run, whole: Run) -> str:
    """Give the same command again and compare with the whole run."""
    code = run.resume()
    if code != 0:
        return f"resume ended with {code}: {run.said[-500:]}"
    lost = int(run.marker.read_text()) - run.iteration_of_resume()
    if lost > EVERY:
        return f"{lost} iterations lost"
    return ", ".join(differences(run, whole))


def stop_and_resume(run: Run, whole: Run, **point: Any) -> str:
    return kill_run(run, **point) or resume_run(run, whole)


def strike_in_reward(run: Run, whole: Run, at: int, signum: int) -> str:
    """The same from inside a reward function, in whichever process it runs."""
    original, pid = run.recipe, str(run.folder / "pid")
    words = RECIPE["model"]["init_args"]["rewards"]["words"]
    kwargs = {"at": at, "marker": str(run.marker), "pid": pid, "signum": signum}
    armed = {"model": {"init_args": {"rewards": {"words": {**words, "kwargs": kwargs}}}}}
    run.recipe = merge_runs(original, armed, calls("Armed", pid=pid))
    code = run.go("--auto_resume", "true")
    run.recipe = original
    if code != 128 + signum:
        return f"exit code {code}: {run.said[-500:]}"
    return resume_run(run, whole)


def random_points(bench: Bench, num: int) -> dict[str, dict[str, Any]]:
    """Points of every kind in turn, each at a random place."""
    rng, points = bench.rng, {}
    kinds = ("generate", "reward", "backward", "step", "checkpoint", "validation", "end", "start")
    for n in range(num):
        kind = kinds[n % len(kinds)]
        point: dict[str, Any] = {"at": kind, "count": rng.randint(1, ITERATIONS)}
        if kind == "generate":
            point["delay_s"] = rng.uniform(0.0, 0.4)
        elif kind == "validation":
            point["count"] = rng.randint(1, 4)
        elif kind == "checkpoint":
            point = {"at": kind, "count": 1, "size": rng.randint(0, 7_000_000)}
        points[f"{n + 1} {kind} {point.get('count')}"] = point
    return points


def f1(bench: Bench) -> Found:
    """SIGKILL, then the same command again: the same weights, optimizer state, metrics, curves"""
    found = {}
    for name, point in random_points(bench, bench.points).items():
        run = Run(bench.folder / f"f1-{name.replace(' ', '-')}", RECIPE)
        run.new_process = name.split()[0] in ("1", "8", "15")
        if point["at"] == "reward":
            at = point["count"] - 1
            found[name] = strike_in_reward(run, bench.plain, at, int(signal.SIGKILL))
        else:
            found[name] = stop_and_resume(run, bench.plain, **point)
    return found


def f2(bench: Bench) -> Found:
    """SIGTERM or SIGINT: exit code 143 or 130, a checkpoint, and the same after resuming"""
    found = {}
    for n, (name, point) in enumerate(random_points(bench, max(2, bench.points // 2)).items()):
        signum = int(signal.SIGINT if n % 3 == 2 else signal.SIGTERM)
        run = Run(bench.folder / f"f2-{name.replace(' ', '-')}", RECIPE)
        if point["at"] == "reward":
            found[name] = strike_in_reward(run, bench.plain, point["count"] - 1, signum)
        else:
            found[name] = stop_and_resume(run, bench.plain, **point, signum=signum)
    return found


def f3(bench: Bench) -> Found:
    """SIGKILL in the middle of inner epochs and micro-batches: the same after resuming"""
    recipe = merge_runs(RECIPE, {"model": {"init_args": INNER}})
    whole = bench.whole("inner", recipe)
    points = {"step 9": ("step", 9), "micro-batch 30": ("backward", 30), "step 22": ("step", 22)}
    return {
        name: stop_and_resume(
            Run(bench.folder / f"f3-{at}-{count}", recipe), whole, at=at, count=count
        )
        for name, (at, count) in points.items()
    }


def f4(bench: Bench) -> Found:
    """2 processes, resumed on 2: the same; on 1: the same prompts; other batch size: rejected"""
    two = {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}}
    recipe = merge_runs(RECIPE, two, {"data": {"init_args": {"num_workers": 0}}})
    whole = bench.whole("two", recipe, new_process=True)
    run = Run(bench.folder / "f4-two", recipe, new_process=True)
    found = {"2 on 2": stop_and_resume(run, whole, at="start", count=5, signum=15)}
    one = Run(bench.folder / "f4-one", recipe, new_process=True)
    wrong = kill_run(one, at="start", count=5, signum=15)
    one.recipe = RECIPE
    code = one.resume() if not wrong else 1
    found["2 on 1"] = wrong or (one.said[-300:] if code else _same_prompts(one, bench.plain))
    other = bench.copy_run("f4-batch", bench.plain)
    other.recipe = merge_runs(RECIPE, {"data": {"init_args": {"batch_size": 4}}})
    code = other.go("--ckpt_path", "last")
    line = other.said.splitlines()[-1]
    good = code == 2 and "batch_size" in line and "8" in line and "4" in line
    found["batch size"] = "" if good else f"exit code {code}: {other.said[-300:]}"
    return found


def f5(bench: Bench) -> Found:
    """12 kinds of damage: named before the first step; auto-resume takes the one before"""
    found = {}
    for name, (change, named) in damage.KINDS.items():
        run = bench.copy_run(f"f5-{name.replace(' ', '-')}", bench.plain)
        change(run)
        code = run.go("--ckpt_path", "last")
        if missing := [word for word in named if word not in run.said] or code != 2:
            found[name] = f"exit code {code}, not {missing}: {run.said[-300:]}"
            continue
        found[name] = ""
        if name in damage.OTHER_RUN:
            continue  # every checkpoint is of the other run
        (run.run / "final_model/model.safetensors").unlink()
        code = run.resume()
        if code != 0 or run.iteration_of_resume() != ITERATIONS - EVERY:
            found[name] = (
                f"fell back to {run.iteration_of_resume()}, code {code}: {run.said[-300:]}"
            )
        elif wrong := differences(run, bench.plain):
            found[name] = f"after falling back: {wrong}"
    return found


def f6(bench: Bench) -> Found:
    """full disk, read-only folder, kill while saving: the last good checkpoint stays"""
    found = {}
    full = bench.copy_run("f6-full", bench.whole("short", _iterations(4)))
    full.recipe = RECIPE
    most = 3_000_000  # bytes of a file; a checkpoint has more

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    code = full.go("--ckpt_path", "last", prepare=small_files)
    found["full disk"] = _check_rejection(full, code, "File too large")
    readonly = bench.copy_run("f6-readonly", bench.whole("short", _iterations(4)))
    readonly.recipe = RECIPE
    readonly.new_process = True  # rights are given up for what a process starts
    found["read-only folder"] = _read_only(readonly)
    run = Run(bench.folder / "f6-kill", RECIPE)
    found["kill while saving"] = stop_and_resume(
        run, bench.plain, at="checkpoint", count=1, size=5_000_000
    )
    return found


def _iterations(num: int) -> dict[str, Any]:
    return merge_runs(RECIPE, {"model": {"init_args": {"max_iterations": num}}})


def _same_prompts(run: Run, whole: Run) -> str:
    """Requests after the resume, and before it by the first of the processes."""
    mine, theirs, after = (
        run.rows_by_iteration(),
        whole.rows_by_iteration(),
        run.iteration_of_resume(),
    )
    for n in range(1, ITERATIONS + 1):
        if not (mine[n] == theirs[n] if n > after else mine[n] < theirs[n]):
            return f"iteration {n} asked {mine[n]}, not {theirs[n]}"
    return "" if after else "nothing was resumed"


def _read_only(run: Run) -> str:
    """Root may write anywhere, unless the process gives that right up."""

    def give_up_override() -> None:
        drop_from_bounding_set, override_permissions = 24, 1
        ctypes.CDLL(None).prctl(drop_from_bounding_set, override_permissions, 0, 0, 0)

    run.checkpoints.chmod(0o555)
    code = run.go("--ckpt_path", "last", prepare=give_up_override)
    run.checkpoints.chmod(0o755)
    return _check_rejection(run, code, "Permission denied")


def _check_rejection(run: Run, code: int, said: str) -> str:
    """Nothing could be saved: that is said, an error at the end, and the old one still good."""
    if code in (0, 2) or said not in run.said or "training continues" not in run.said:
        return f"exit code {code}: {run.said[-300:]}"
    last = run.checkpoints / "last.ckpt"
    if last.readlink().name != "iteration=000004.ckpt":
        return f"last.ckpt is {last.readlink()}"
    code = run.go("--ckpt_path", "last")
    return "" if code == 0 and run.iteration_of_resume() == 4 else run.said[-300:]


def f13(bench: Bench) -> Found:
    """the disk of the loggers is full: training continues with a warning, with the same weights"""
    run = Run(bench.folder / "f13", merge_runs(RECIPE, calls("FullLoggers")))
    code = run.go()
    wrong = "" if code == 0 and "training continues" in run.said else run.said[-300:]
    return {"loggers": wrong or _same_weights(run, bench.plain)}


def f14(bench: Bench) -> Found:
    """the same seed: again, with 2 workers, and with 2 workers after SIGKILL: the same"""
    variants: dict[str, dict[str, Any]] = {
        "again": {},
        "2 workers": {"data": {"init_args": {"num_workers": 2}}},
        "2 workers, killed": {"data": {"init_args": {"num_workers": 2}}},
    }
    found = {}
    for name, change in variants.items():
        run = Run(bench.folder / f"f14-{name.replace(' ', '-')}", merge_runs(RECIPE, change))
        if name.endswith("killed"):
            found[name] = stop_and_resume(run, bench.plain, at="start", count=6)
        else:
            code = run.go()
            found[name] = ", ".join(differences(run, bench.plain)) if code == 0 else run.said[-300:]
    return found


def f16(bench: Bench) -> Found:
    """one of 2 processes hangs: stacks of both, exit code not 0, within the time"""
    two = {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}}
    recipe = merge_runs(RECIPE, two, {"watchdog": {"timeout_s": 10.0}})
    run = Run(bench.folder / "f16", recipe, new_process=True)
    run.recipe = merge_runs(
        run.recipe,
        calls("Kill", at="start", count=3, marker=str(run.marker), signum=0, rank=1),
    )
    code = run.go(timeout_s=200)
    # The first to end closes the connection; where the other stood is then its error's traceback.
    stacks = run.said.count("made no progress for 10 s") + ("Connection closed by" in run.said)
    good = code not in (0, 128 + signal.SIGKILL) and stacks >= 2 and "in __call__" in run.said
    return {"rank 1": "" if good else f"exit code {code}, {stacks} stacks: {run.said[-800:]}"}


def variants(bench: Bench) -> Found:
    """SIGKILL with LoRA, reference, inner epochs, dynamic sampling, dropout, supervised"""
    recipes: dict[str, tuple[dict[str, Any], str]] = {
        "LoRA": ({"lora": {"rank": 4, "dropout": 0.1}}, ""),
        "reference": ({"objective": {"kl_coef": 0.05}}, ""),
        "inner epochs, dynamic sampling": ({**INNER, "dynamic_sampling_attempts": 2}, ""),
        "reference that follows": (
            {"objective": {"kl_coef": 0.05}, "controllers": {"reference": {"every": 2}}},
            "",
        ),
        "supervised, dropout": ({}, SFT),
    }
    found = {}
    for name, (change, base) in recipes.items():
        recipe = merge_runs(SUPERVISED if base else RECIPE, {"model": {"init_args": change}})
        key, options = name.replace(" ", "-").replace(",", ""), {"base": base} if base else {}
        whole = bench.whole(key, recipe, **options)
        run = Run(bench.folder / f"variant-{key}", recipe, **options)
        found[name] = stop_and_resume(run, whole, at="start", count=4)
    return found


def _same_weights(run: Run, whole: Run) -> str:
    return "" if weights_of(run) == weights_of(whole) else "other weights"


CASES: dict[str, Callable[[Bench], Found]] = {
    "F1": f1,
    "F2": f2,
    "F3": f3,
    "F4": f4,
    "F5": f5,
    "F6": f6,
    "F13": f13,
    "F14": f14,
    "F16": f16,
    "F17": episodes.f17,
    "F18": episodes.f18,
    "F19": episodes.f19,
    "F20": episodes.f20,
    "F21": processes.f21,
    "F22": processes.f22,
    "F23": processes.f23,
    "F24": servers.f24,
    "F25": servers.f25,
    "F26": servers.f26,
    "F27": servers.f27,
    "F28": episodes.f28,
    "variants": variants,
}
