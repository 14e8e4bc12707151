"""Count launches, waits and bytes of an iteration on CUDA and estimate its time, without a GPU.

    python -m tests.benchmarks.launches [--sizes 0.5b 2b] [--page docs/dev/cuda.md]

GRPO trains on the simulated CUDA device of the tests in a dry run: shapes are those of real models,
large tensors are not computed. Kernels are priced by the roofline of an H100 SXM, the host by an
assumed time per launch; a phase takes the longer of both. No completion ends early. `--page` writes
the table into a page.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning import Trainer
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from litgrpo.data.loader import BatchLoader, BatchOrder
from litgrpo.models.loading import Precision, build_policy
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.training.grpo import GRPO
from litgrpo.training.learner import Learner
from litgrpo.training.steppers import TrainerStepper
from litgrpo.types import PromptBatch, Rollout
from tests.benchmarks.workload import Batches
from tests.cuda_device.run import environment
from tests.support.models import byte_tokenizer

PROMPTS, GROUP, PROMPT_LEN = 8, 8, 128
# Host time per launch, s: eager torch on a fast host. Learning includes the backward pass.
DECODE_LAUNCH_S, LEARN_LAUNCH_S = 6e-6, 8e-6
HALF_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Args:
        kind: model type of transformers.
        config: its sizes.
        checkpointing: recompute activations in the backward pass.
        baseline_s: estimated time of the same iteration with TRL 1.16 and vLLM, s: vLLM's step is
            assumed to take 2.2 ms (0.5B) or 3.6 ms (2B) and TRL's update is priced as here.
    """

    kind: str
    config: dict[str, Any]
    checkpointing: bool = False
    baseline_s: float = float("nan")


SHAPES = {
    "tiny": Shape(
        "qwen2",
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        | dict(intermediate_size=128, vocab_size=512, tie_word_embeddings=True),
    ),
    "0.5b": Shape(
        "qwen2",
        dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
        | dict(intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True),
        baseline_s=1.1,
    ),
    "2b": Shape(
        "gemma2",
        dict(hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4)
        | dict(head_dim=256, intermediate_size=9216, vocab_size=256000, sliding_window=4096)
        | dict(query_pre_attn_scalar=256),
        checkpointing=True,
        baseline_s=3.0,
    ),
}


@dataclass(frozen=True)
class Counts:
    """Work of a phase.

    Args:
        launches: of kernels and graphs by the host.
        waits: of the host for the device.
        num_bytes: that the kernels read and write.
        device_s: least time of the kernels.
    """

    launches: float = 0
    waits: float = 0
    num_bytes: float = 0
    device_s: float = 0

    def __sub__(self, other: Counts) -> Counts:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counts(*(one - two for one, two in pairs))

    def __truediv__(self, number: float) -> Counts:
        return Counts(*(value / number for value in vars(self).values()))

    def seconds(self, launch_s: float) -> float:
        """Return the longer of the device's and the host's time."""
        return max(self.device_s, self.launches * launch_s)


@dataclass
class Iteration:
    """Counts of one iteration.

    Args:
        new: tokens of a completion.
        least_bytes: weights, and keys and values of half the completions, read once in bfloat16.
        prompts: the rollout up to its first token.
        rollout: the whole rollout.
        update: of the policy.
        micro_batches: their number.
        waits: of the host in the micro-batches, without the optimizer's step.
        peak_gib: memory of the update.
    """

    new: int
    least_bytes: float
    prompts: Counts = Counts()
    rollout: Counts = Counts()
    update: Counts = Counts()
    micro_batches: int = 0
    waits: float = 0
    peak_gib: float = 0

    @property
    def decoding(self) -> Counts:
        """Counts of all decoding steps."""
        return self.rollout - self.prompts

    @property
    def token(self) -> Counts:
        """Mean counts of a decoding step."""
        return self.decoding / (self.new - 1)

    @property
    def seconds(self) -> float:
        """Estimated time on an H100: prompts, decoding, update."""
        rollout = self.prompts.seconds(DECODE_LAUNCH_S) + self.decoding.seconds(DECODE_LAUNCH_S)
        return rollout + self.update.seconds(LEARN_LAUNCH_S)


def count(call: Callable[[], Any]) -> tuple[Any, Counts]:
    """Return the result of a call, and its work."""
    from tests.cuda_device.device import count_work

    with count_work() as work:
        result = call()
    return result, Counts(work.num_launches, work.num_waits, work.num_bytes, work.seconds)


@contextmanager
def count_second_iteration(grpo: GRPO, counts: Iteration) -> Iterator[None]:
    """Count the calls of engine and learner in iteration 2; the first one compiles and records."""
    from tests.cuda_device.library import native

    engine = type(grpo.engine)
    generate, update = engine.generate, Learner.update
    backward, step = TrainerStepper.backward, TrainerStepper.step

    def count_generate(self: RolloutEngine, request: RolloutRequest) -> Rollout:
        if grpo.iteration == 0:
            return generate(self, request)
        first = replace(request, uniforms=request.uniforms[:, :1])
        counts.prompts = count(lambda: generate(self, first))[1]
        rollout, counts.rollout = count(lambda: generate(self, request))
        return rollout

    def count_update(*args: Any) -> Any:
        if grpo.iteration == 0:
            return update(*args)
        torch.cuda.reset_peak_memory_stats()
        reports, counts.update = count(lambda: update(*args))
        counts.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        return reports

    def count_backward(self: TrainerStepper, loss: Tensor, *, last: bool) -> None:
        counts.micro_batches += grpo.iteration > 0
        backward(self, loss, last=last)

    def count_step(*args: Any) -> Any:
        counts.waits = sum(native.counters()[1].values())
        return step(*args)

    with (
        patch.object(engine, "generate", count_generate),
        patch.object(Learner, "update", count_update),
        patch.object(TrainerStepper, "backward", count_backward),
        patch.object(TrainerStepper, "step", count_step),
        # There are no values, so none of them may stop the iteration.
        patch.object(Tensor, "isfinite", lambda x: torch.ones_like(x, dtype=torch.bool)),
    ):
        yield


def alternate(prompts: list[str], completions: list[str]) -> list[float]:
    """Reward every other completion, so that each row has an advantage."""
    return [float(number % 2) for number in range(len(completions))]


def count_iteration(shape: Shape, new: int) -> Iteration:
    """Train a random model of this shape for two iterations, and count the second one.

    Args:
        shape: of the model.
        new: tokens of a completion.
    """
    from tests.cuda_device.device import dry_run

    gc.collect()  # the model that was counted before
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(shape.kind, **shape.config, **special)
    precision = Precision(gradient_checkpointing=shape.checkpointing)
    grpo = GRPO(
        "",
        {"alternate": Reward(alternate)},
        group_size=GROUP,
        max_completion_length=new,
        max_iterations=2,
        precision=precision,
        reward_runner=InProcessRunner(),
        check_invariants=False,  # they compare values
    )
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        precision="bf16-mixed",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with dry_run(), fuse_attention():
        attention = "eager" if shape.kind == "gemma2" else "sdpa"  # as transformers loads them
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
        grpo.policy = build_policy(model, byte_tokenizer(), precision=precision)
        grpo.policy.eos_ids = ()
        grpo.policy.can_fuse = True  # its check compares values
        counts = Iteration(new, count_least_bytes(model, config, new))
        # The teardown would move weights and optimizer states to the host, 31 GB with 2B.
        no_teardown = patch.object(trainer.strategy, "teardown")
        with count_second_iteration(grpo, counts), no_teardown:
            trainer.fit(grpo, make_loader())
    return counts


def make_loader() -> BatchLoader[PromptBatch]:
    """Return random prompts for two iterations."""
    ids = torch.randint(3, 250, (PROMPTS, PROMPT_LEN))
    mask, index = torch.ones_like(ids, dtype=torch.bool), torch.arange(PROMPTS)
    prompts = PromptBatch(ids, mask, [""] * PROMPTS, {}, index)
    return BatchLoader(Batches([prompts] * 2), BatchOrder(lambda _: [[0], [1]]))


def count_least_bytes(model: torch.nn.Module, config: PretrainedConfig, new: int) -> float:
    """Return what a decoding step reads at least in bfloat16, prompts once per group."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    tokens = PROMPTS * PROMPT_LEN + PROMPTS * GROUP * new / 2
    weights = sum(parameter.numel() for parameter in model.parameters())
    return HALF_BYTES * (weights + tokens * per_token)


# --- attention ---


class FusedAttention(torch.autograd.Function):
    """Attention without values, priced as one kernel: torch's CPU build has none for CUDA."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask_bytes: int) -> Tensor:
        """Launch one kernel."""
        from tests.cuda_device.device import add_kernel

        rows, heads, length, size = query.shape
        ctx.flops = 4.0 * rows * heads * length * keys.shape[2] * size
        numbers = 2 * query.numel() + keys.numel() + values.numel()
        ctx.bytes, ctx.half = numbers * query.element_size() + mask_bytes, query.itemsize < 4
        ctx.save_for_backward(query, keys, values)
        add_kernel("attention", ctx.bytes, ctx.flops, half=ctx.half)
        return query.new_empty(*query.shape[:-1], values.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Launch three kernels, as flash attention: a sum, the gradients, a conversion."""
        from tests.cuda_device.device import add_kernel

        for flops in (0.0, 2.5 * ctx.flops, 0.0):
            add_kernel("attention (backward)", 2 * ctx.bytes, flops, half=ctx.half)
        query, keys, values = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values), None


@contextmanager
def fuse_attention() -> Iterator[None]:
    """Replace `scaled_dot_product_attention` on CUDA by `FusedAttention`."""

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Tensor | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        mask_bytes = 0 if attn_mask is None else attn_mask.numel() * attn_mask.element_size()
        apply: Callable[..., Tensor] = FusedAttention.apply
        return apply(query, keys, values, mask_bytes)

    registered = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        registered.impl("scaled_dot_product_attention", attend, key)
    yield
    registered._destroy()


# --- the table ---


def build_table(found: dict[str, Iteration]) -> str:
    """Return the page's table: a column for each size."""
    baselines = [SHAPES[name].baseline_s for name in found]
    rows: dict[str, list[str]] = {
        "host launches for a decoded token": [
            f"{each.token.launches:,.0f}" for each in found.values()
        ],
        "host waits for 16 decoded tokens": [
            f"{16 * each.token.waits:.1f}" for each in found.values()
        ],
        "bytes moved for a decoded token, in those of weights and cache read once in bf16": [
            f"{each.token.num_bytes / each.least_bytes:.2f}" for each in found.values()
        ],
        "host launches of an update": [f"{each.update.launches:,.0f}" for each in found.values()],
        "host waits for a micro-batch": [
            f"{each.waits / each.micro_batches:.1f}" for each in found.values()
        ],
        "micro-batches": [f"{each.micro_batches}" for each in found.values()],
        "bytes moved by an update, TB": [
            f"{each.update.num_bytes / 1e12:.2f}" for each in found.values()
        ],
        "peak memory of an update, GiB": [f"{each.peak_gib:.1f}" for each in found.values()],
        "estimated iteration, s": [f"{each.seconds:.2f}" for each in found.values()],
        "estimate for TRL 1.16 with vLLM, s": [f"{seconds:.1f}" for seconds in baselines],
    }
    head = [["", *found], ["---"] * (len(found) + 1)]
    lines = [*head, *([name, *cells] for name, cells in rows.items())]
    return "\n".join(
        [
            "Simulated: no time was measured on a GPU. "
            "Command: `python -m tests.benchmarks.launches --page docs/dev/cuda.md`.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def write_table(table: str, page: Path) -> None:
    """Put the table between its marks on a page."""
    text = page.read_text(encoding="utf-8")
    region = re.compile(r"(<!-- launches -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(region.sub(rf"\g<1>{table}\n\g<2>", text), encoding="utf-8")


def main() -> None:
    """Count and print, in a process that has the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5b", "2b"])
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    args = parser.parse_args()
    if "CUDA_DEVICE_LIBRARY" not in os.environ:
        command = [sys.executable, "-m", "tests.benchmarks.launches", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | environment())
    table = build_table({name: count_iteration(SHAPES[name], args.new) for name in args.sizes})
    print(table)
    if args.page is not None:
        write_table(table, args.page)


if __name__ == "__main__":
    main()
