"""TRL's side of `tests.benchmarks.step` and `.gpu`: GRPOTrainer in its environment.

    PYTHON_OF_TRL -m tests.benchmarks.trl_steps --size 30m --stop-prob 0.02 [--device cuda] [--vllm]

Model sizes, prompts, stop probability, reward and optimizer equal litgrpo's; all else is TRL's.
Generation by transformers, or by vLLM in the same process (`--vllm`). Prints a line of JSON:
medians over the steps after the warm-up. Needs trl 1.16 and torch (and vllm), and nothing of the
package.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.random_model import SIZES, RandomModel, even_words


def arguments() -> argparse.Namespace:
    """Parse the arguments of the runner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--sizes", type=int, nargs="+", help="instead, numbers as in `SIZES`")
    for name, default in (
        ("prompts", 8),
        ("group", 8),
        ("prompt-len", 64),
        ("max-new", 128),
        ("steps", 6),
        ("warmup", 2),
        ("threads", 2),
        ("accumulate", 1),  # micro-batches of a step
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stop-prob", type=float, help="share of words that end a text")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vllm", action="store_true", help="generate by vLLM, in this process")
    return parser.parse_args()


def main() -> None:
    """Train a few steps and print what they cost."""
    with ExitStack() as stack:
        print(json.dumps(measure(arguments(), stack)))


def measure(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Train a few steps; return medians. Temporary folders go with the stack."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    on_gpu = args.device == "cuda"
    finished = torch.cuda.synchronize if on_gpu else time.perf_counter
    stop_prob = 1 / args.max_new if args.stop_prob is None else args.stop_prob
    made = RandomModel(
        tuple(args.sizes or SIZES[args.size]), stop_prob, args.prompt_len + args.max_new + 8
    )
    folder = stack.enter_context(TemporaryDirectory())
    made.model().save_pretrained(folder)  # vLLM reads it from there
    made.tokenizer().save_pretrained(folder)
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = dict.fromkeys(("gen_s", "train_s", "generated"), 0.0)

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            finished()
            began = time.perf_counter()
            found = super()._generate_single_turn(*given, **named)
            finished()
            seen["gen_s"] += time.perf_counter() - began
            seen["generated"] += sum(map(len, found[0]))
            return found

    rows: list[dict[str, float]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        before: tuple[float, float, dict[str, float]]

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            finished()
            self.before = time.perf_counter(), time.process_time(), dict(seen)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            finished()
            wall, cpu, then = self.before
            row = {name: seen[name] - then[name] for name in seen}
            row |= {"step_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            rows.append(row | {"train_s": row["step_s"] - row["gen_s"]})

    by_vllm = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3)
    settings = GRPOConfig(
        output_dir=stack.enter_context(TemporaryDirectory()),
        per_device_train_batch_size=args.prompts * args.group // args.accumulate,
        gradient_accumulation_steps=args.accumulate,
        num_generations=args.group,
        max_completion_length=args.max_new,
        max_steps=args.steps,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="dapo",
        bf16=args.bf16,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        use_cpu=not on_gpu,
        seed=0,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(by_vllm if args.vllm else {}),
    )
    texts = made.prompts(args.prompts * (args.steps + 1), args.prompt_len)
    Timed(
        model=model,
        reward_funcs=lambda completions, **_: [even_words(text) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=made.tokenizer(),
        callbacks=[Watch()],
    ).train()
    measured = rows[args.warmup :]
    measures: dict[str, Any] = {
        name: statistics.median(row[name] for row in measured) for name in measured[0]
    }
    measures |= {
        "mean_completion_len": statistics.mean(row["generated"] for row in measured)
        / (args.prompts * args.group),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_device_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0,
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
    }
    return measures


if __name__ == "__main__":
    main()
