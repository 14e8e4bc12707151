"""Profile a rollout and an update by kind of operator.

    python -m tests.benchmarks.profile --size 30m --stop-prob 0.02 --threads 2

The work of `step`, in this process, under torch's profiler: once unseen to warm up, then measured.
What an operator's own time does not cover is Python and the calls themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.packing import bucket_by_parent
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import Rollout, TokenRows
from tests.benchmarks.workload import SIZES, Work

KINDS = {
    "products": ("aten::mm", "aten::addmm", "mkldnn::"),
    "attention": ("aten::_scaled_dot", "aten::bmm", "aten::baddbmm"),
    "moving": ("aten::copy_", "aten::index", "aten::cat", "aten::fill_", "aten::gather"),
}


def shares(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of a run, and which share of them operators of each kind took."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
    found: Counter[str] = Counter()
    for event in seen.key_averages():
        kinds = [kind for kind, names in KINDS.items() if event.key.startswith(names)]
        found[kinds[0] if kinds else "element by element"] += event.self_cpu_time_total / 1e6
    parts = {kind: found[kind] / seconds for kind in (*KINDS, "element by element")}
    return {"seconds": seconds, **parts, "Python": max(0.0, 1 - sum(parts.values()))}


class Phases(NamedTuple):
    """The two phases of a step, to be run again and again; `learn` takes the last rollout."""

    sample: Callable[[], None]
    learn: Callable[[], None]
    kernels: LinearKernels


def phases(work: Work) -> Phases:
    """A policy, its prompts, and what is done with them."""
    torch.set_num_threads(work.threads)
    policy = work.policy().eval()
    policy.set_linear_kernels(linears.choose_kernels(policy.model, "auto"))
    (prompts,) = work.batches(1)
    numbers = draw_uniforms(0, "train", 0, prompts.index, work.group, work.max_new)
    rollouts: list[Rollout] = []

    requests = RolloutRequest(policy, prompts, work.group, numbers, Sampling())

    def precision() -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if work.bf16 else nullcontext()

    def sample() -> None:
        with precision():
            rollouts.append(LocalEngine().generate(requests))

    of_prompts = prompts.prompt_mask.sum(1)
    limits = {
        "max_tokens": UpdateConfig().fitted(linears.count_linear_outputs(policy.model)).max_tokens
    }

    def learn() -> None:
        rollout = rollouts[-1]
        prompt_of = torch.arange(len(rollout.lengths)) // work.group
        for rows in bucket_by_parent(rollout.lengths, of_prompts, prompt_of, **limits):
            used = int(rollout.lengths[rows].max())
            asked, own = prompt_of[rows].unique(return_inverse=True)
            taken = TokenRows(
                prompts.prompt_ids[asked],
                prompts.prompt_mask[asked],
                own,
                rollout.completion_ids[rows, :used],
                rollout.completion_mask[rows, :used],
            )
            with precision():
                mean = policy.logprobs(taken).logprobs.mean()
            mean.backward()

    return Phases(sample, learn, policy.linear_kernels)


def profile_work(work: Work) -> dict[str, dict[str, float]]:
    """The shares of both phases of a step."""
    found = phases(work)
    parts = {"rollout": shares(found.sample), "learning": shares(found.learn)}
    return parts | {"kernels": asdict(found.kernels)}


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--stop-prob", type=float)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size, of_ends = SIZES[args.size], (args.max_new, args.stop_prob)
    found = profile_work(Work(size, 8, *of_ends, bf16=args.bf16, threads=args.threads))
    if args.json:
        print(json.dumps(found))
        return
    for phase in ("rollout", "learning"):
        parts = dict(found[phase])
        print(f"{phase}: {parts.pop('seconds'):.2f} s under the profiler")
        print("  " + ", ".join(f"{kind} {share:.0%}" for kind, share in parts.items()))


if __name__ == "__main__":
    main()
