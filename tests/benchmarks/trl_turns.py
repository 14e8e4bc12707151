"""TRL's side of `tests.benchmarks.turns`: GRPOTrainer with a tool, in its environment.

    PYTHON_OF_TRL -m tests.benchmarks.trl_turns --size tiny --turns 3 --tool-s 0.05

Model sizes, prompts, stop probability and tool equal litgrpo's. A random model calls no tool, so
that every turn is taken for a call; all else is TRL's: its loop, its template,
its generation. Prints a line of JSON. Needs trl 1.16 and torch; imports nothing of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from typing import Any

from tests.benchmarks.random_model import SIZES, RandomModel, even_words

ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "call"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ ' call ' + c['function']['name'] + ' ' + "
    "c['function']['arguments'] | tojson }}{% endfor %}{{ ' <eos0> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def arguments() -> argparse.Namespace:
    """Parse the arguments of the runner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    for name, default in (
        ("prompts", 4),
        ("group", 8),
        ("prompt-len", 64),
        ("max-new", 256),
        ("turns", 3),
        ("observed", 16),
        ("steps", 3),
        ("warmup", 1),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stop-prob", type=float, default=0.05)
    parser.add_argument("--tool-s", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    """Train a few steps and print what they cost."""
    args = arguments()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch
    import transformers
    import trl.trainer.grpo_trainer as baseline
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    positions = args.prompt_len + args.max_new + 64
    made = RandomModel(SIZES[args.size], args.stop_prob, positions, marks=tuple(ROLES))
    tokenizer = made.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = "taken for a call below"
    answer = " ".join(
        made.words[made.first :][: args.observed - 3]
    )  # and the marks of the template
    seen: dict[str, float] = dict.fromkeys(("gen_s", "fed", "generated", "observed", "calls"), 0.0)

    def look(place: int) -> str:
        """Look something up.

        Args:
            place: where.
        """
        time.sleep(args.tool_s)
        seen["calls"] += 1
        return answer

    def call_tool(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "look", "arguments": {"place": 1}}}
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    baseline.parse_response = call_tool

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [even_words(messages[-1].get("content", "")) for messages in completions]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_single_turn(prompt_ids, *rest, **named)
            seen["gen_s"] += time.perf_counter() - began
            seen["fed"] += sum(map(len, prompt_ids)) + sum(map(len, found[0]))
            seen["generated"] += sum(map(len, found[0]))
            return found

    rows: list[dict[str, Any]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        before: tuple[float, float, dict[str, float]] | None = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.before = time.perf_counter(), time.process_time(), dict(seen)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert self.before is not None
            wall, cpu, then = self.before
            row = {name: seen[name] - then[name] for name in seen}
            row |= {"step_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            rows.append(row)

    texts = made.prompts(args.prompts * (args.steps + args.warmup + 1), args.prompt_len - 3)
    prompts = [[{"role": "user", "content": text}] for text in texts]
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=args.max_new,
        max_tool_calling_iterations=args.turns - 1,
        max_steps=args.steps + args.warmup,
        learning_rate=1e-6,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Timed(
        model=made.model(),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        tools=[look],
        callbacks=[Watch()],
    ).train()
    kept, count = rows[args.warmup :], args.prompts * args.group
    measures = {name: statistics.median(row[name] for row in kept) for name in kept[0]}
    generated = statistics.mean(row["generated"] for row in kept)
    measures |= {
        "mean_completion_len": generated / count,
        "fed_per_token": statistics.mean(row["fed"] for row in kept) / generated,
        "turns": 1 + statistics.mean(row["calls"] for row in kept) / count,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(measures))


if __name__ == "__main__":
    main()
