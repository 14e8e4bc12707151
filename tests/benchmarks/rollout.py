"""Time the rollout alone, against transformers' generate on the same model and prompts.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout --size tiny 30m --stop-prob 0.02

Random Qwen2 models (or the embedded one) whose end tokens are a share of the vocabulary, so that
completions end at different lengths. Engine and baseline alternate; medians of CPU seconds. Both
are warmed up once. `generate` gets each prompt group_size times, as TRL calls it, and samples other
tokens from the same distribution.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from litgrpo.models.causal import CausalPolicy
from litgrpo.models.loading import load_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.types import PromptBatch, Rollout
from tests.benchmarks.workload import SIZES, Work


def build(size: str, stop_prob: float, longest: int) -> tuple[CausalPolicy, PromptBatch]:
    """A policy and its prompts; `quickstart` is the embedded model with its own end token."""
    if size != "quickstart":
        work = Work(SIZES[size], max_new=longest, stop_prob=stop_prob)
        return work.policy().eval(), work.batches(1)[0]
    policy, prompts = load_policy("builtin:tiny-gemma2").eval(), 16
    vocab = policy.bare_model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab // 2, vocab, (prompts, 32), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return policy, PromptBatch(ids, mask, [""] * prompts, {}, torch.arange(prompts))


def litgrpo(policy: CausalPolicy, prompts: PromptBatch, longest: int, engine: Any) -> Rollout:
    """Run one rollout of litgrpo's engine with groups of eight."""
    uniforms = draw_uniforms(0, "train", 0, prompts.index, 8, longest)
    return engine.generate(RolloutRequest(policy, prompts, 8, uniforms, Sampling()))


@torch.no_grad()
def baseline(policy: CausalPolicy, prompts: PromptBatch, longest: int) -> torch.Tensor:
    """The same by transformers: [N, T] token ids."""
    ids = prompts.prompt_ids.repeat_interleave(8, 0)
    return policy.model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=longest,
        eos_token_id=list(policy.eos_ids),
        pad_token_id=0,
    )


def said(policy: CausalPolicy, ids: torch.Tensor, prompt_len: int) -> int:
    """Number of real tokens of completions made by `generate`."""
    ended = torch.isin(ids[:, prompt_len:], torch.tensor(policy.eos_ids)).long()
    return int((ended.cumsum(1) - ended == 0).sum())


def time_call(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """CPU seconds, wall seconds, result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.process_time() - cpu, time.perf_counter() - wall, result


class Dispatches(TorchDispatchMode):
    """Counts operators; each costs a few microseconds of Python and C++ beside its work."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure(size: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Medians of one size, for each engine and for `generate`; they alternate."""
    policy, prompts = build(size, args.stop_prob, args.longest)
    works: dict[str, Callable[[], Any]] = {
        engine: partial(litgrpo, policy, prompts, args.longest, LocalEngine(**json.loads(engine)))
        for engine in args.engine
    }
    if args.baseline:
        works["generate"] = partial(baseline, policy, prompts, args.longest)
    results: dict[str, list[tuple[float, float, Any]]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(args.repeats):
        for name, work in works.items():
            results[name].append(time_call(work))
    for name, runs in results.items():
        with Dispatches() as dispatches:
            example = works[name]()
        tokens = [
            int(each.lengths.sum())
            if isinstance(each, Rollout)
            else said(policy, each, prompts.prompt_ids.shape[1])
            for _, _, each in runs
        ]
        if isinstance(example, Rollout):
            steps = example.completion_ids.shape[1]
        else:
            steps = example.shape[1] - prompts.prompt_ids.shape[1]
        cpu = statistics.median(cpu for cpu, _, _ in runs)
        yield {
            "size": size,
            "engine": name,
            "kernel": policy.linear_kernels.decode,
            "threads": torch.get_num_threads(),
            "cpu_s": round(cpu, 4),
            "cpu_min_s": round(min(cpu for cpu, _, _ in runs), 4),
            "wall_s": round(statistics.median(wall for _, wall, _ in runs), 4),
            "tokens": statistics.median(tokens),
            "tokens_per_cpu_s": round(statistics.median(tokens) / cpu),
            "dispatches_per_step": round(dispatches.count / steps),
        }


def profile(size: str, args: argparse.Namespace) -> str:
    """Profile one rollout by operator."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    policy, prompts = build(size, args.stop_prob, args.longest)
    engine = LocalEngine(**json.loads(args.engine[0]))
    litgrpo(policy, prompts, args.longest, engine)
    with watch(activities=[ProfilerActivity.CPU]) as prof:
        litgrpo(policy, prompts, args.longest, engine)
    return prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)


def main() -> None:
    """Print one JSON line per size, or a profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", default=["tiny", "30m"])
    parser.add_argument("--stop-prob", type=float, default=0.02)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baseline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--engine", nargs="+", default=["{}"], help="arguments, as JSON")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for size in args.size:
        if args.profile:
            print(profile(size, args))
            continue
        for line in measure(size, args):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
