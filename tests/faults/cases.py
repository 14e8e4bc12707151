"""The faults, each a function of the bench: {point: what was wrong, or nothing}."""

import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.faults import processes, servers
from tests.faults.running import (
    EVERY,
    ITERATIONS,
    RECIPE,
    SUPERVISED,
    Run,
    calls,
    differences,
    merge_runs,
)

Found = dict[str, str]
SFT = "configs/quickstart_sft.yaml"
EPISODES = {
    "environment": {"class_path": "tests.support.echo.Echo"},
    "episode": {
        "turn_format": "inline",
        "max_turns": 2,
        "max_turn_tokens": 8,
        "max_observation_tokens": 8,
        "close_truncated_turns": True,
        "num_workers": 0,
    },
    "rewards": {"environment": {"weight": 1.0}},
}
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
    # The arguments stay: a run whose rewards changed compares no rewards. The marker is there.
    run.recipe = merge_runs(original, armed)
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


def cut(checkpoint: Path) -> None:
    """Keep the first half of a file."""
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])


def flip_bit(checkpoint: Path) -> None:
    """Flip a bit of the largest weight, in the file itself."""
    weights = torch.load(checkpoint, weights_only=True)["state_dict"].values()
    largest = max(weights, key=torch.Tensor.numel).contiguous()
    known = largest.view(-1).view(torch.uint8).numpy().tobytes()
    content = bytearray(checkpoint.read_bytes())
    content[content.index(known) + len(known) // 2] ^= 4
    checkpoint.write_bytes(bytes(content))


def f5(bench: Bench) -> Found:
    """a cut file, a flipped bit: named before the first step; auto-resume takes the one before"""
    found = {}
    for name, (change, part) in {"cut": (cut, ""), "bit": (flip_bit, "CRC")}.items():
        run = bench.copy_run(f"f5-{name}", bench.plain)
        change(run.checkpoints / f"iteration={ITERATIONS:06d}.ckpt")
        code = run.go("--ckpt_path", "last")
        if code != 2 or "last.ckpt" not in run.said or part not in run.said:
            found[name] = f"exit code {code}: {run.said[-300:]}"
            continue
        (run.run / "final_model/model.safetensors").unlink()
        code = run.resume()
        if code != 0 or run.iteration_of_resume() != ITERATIONS - EVERY:
            found[name] = f"fell back to {run.iteration_of_resume()}, {code}: {run.said[-300:]}"
        else:
            found[name] = ", ".join(differences(run, bench.plain))
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
    # Both write at once, so that a line can be torn; three of the stack are of this file.
    good = code not in (0, 128 + signal.SIGKILL) and stacks >= 2 and "killer.py" in run.said
    return {"rank 1": "" if good else f"exit code {code}, {stacks} stacks: {run.said[-800:]}"}


def variants(bench: Bench) -> Found:
    """SIGKILL in a backward pass with LoRA, reference, inner epochs, episodes, supervised, ..."""
    recipes: dict[str, dict[str, Any]] = {
        "LoRA": {"lora": {"rank": 4, "dropout": 0.1}},
        "reference": {"objective": {"kl_coef": 0.05}},
        "inner epochs, dynamic sampling": {**INNER, "dynamic_sampling_attempts": 2},
        "reference that follows": {"objective": {"kl_coef": 0.05}},
        "episodes": EPISODES,
        "supervised, dropout": {},
    }
    found = {}
    for name, change in recipes.items():
        key = name.replace(" ", "-").replace(",", "")
        options = {"base": SFT} if key.startswith("supervised") else {}
        recipe = merge_runs(SUPERVISED if options else RECIPE, {"model": {"init_args": change}})
        if "follows" in key:
            sync = {"class_path": "ReferenceSync", "init_args": {"every": 2}}
            recipe = merge_runs(recipe, {"trainer": {"callbacks": [sync]}})
        whole = bench.whole(key, recipe, **options)
        run = Run(bench.folder / f"variant-{key}", recipe, **options)
        # With inner epochs: in the middle of an iteration, which the resumed run repeats.
        count = 60 if "inner" in key else 4
        found[name] = stop_and_resume(run, whole, at="backward", count=count)
    return found


CASES: dict[str, Callable[[Bench], Found]] = {
    "F1": f1,
    "F2": f2,
    "F5": f5,
    "F16": f16,
    "F21": processes.f21,
    "F22": processes.f22,
    "F24": servers.f24,
    "F26": servers.f26,
    "F27": servers.f27,
    "variants": variants,
}
