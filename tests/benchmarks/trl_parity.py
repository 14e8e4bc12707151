"""TRL's side of `tests.benchmarks.parity`: its GRPOTrainer on the same work.

    PYTHON_OF_TRL -m tests.benchmarks.trl_parity WORK OUT

`WORK` is what `tests.benchmarks.parity.Recorder` wrote from litgrpo's run: initial weights, prompts
in order, the first completions and the settings. `OUT` takes the weights as checkpoints and
what each step was. Needs trl 1.16, torch and PyYAML; of this project it imports the functions that
give rewards.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def import_name(path: str) -> Any:
    """Import the object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def reward_of(name: str, entry: dict[str, Any], ends: set[int]) -> Any:
    """One of the recipe's reward functions as TRL calls it."""
    function = import_name(entry["function"])
    taken = inspect.signature(function).parameters
    fixed = entry["kwargs"]

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[Any]:
        given = columns | {"truncated": [ids[-1] not in ends for ids in completion_ids]}
        given = {key: value for key, value in given.items() if key in taken}
        return function(prompts, completions, **given, **fixed)

    reward.__name__ = name
    return reward


def main() -> None:
    """Train, and leave weights and steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--handed", action="store_true", help="train on the completions of litgrpo's run"
    )
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    settings = json.loads((options.work / "settings.json").read_text())
    rows = [json.loads(line) for line in (options.work / "prompts.jsonl").read_text().splitlines()]
    handed = torch.load(options.work / "handed.pt") if options.handed else []
    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(options.work / "start")
    model = AutoModelForCausalLM.from_pretrained(options.work / "start", dtype=torch.float32)
    of_prompt = {row["prompt"]: row["ids"] for row in rows}
    steps: list[dict[str, Any]] = []

    class SameTokens(GRPOTrainer):  # type: ignore[misc]
        """Tokenize prompts as litgrpo does."""

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [of_prompt[text] for text in prompts], None, {}

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Seconds of each step, and the weights after the first ones."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, _: Any, state: Any, *__: Any, **given: Any) -> None:
            wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
            steps.append({"step": state.global_step, "step_s": wall, "cpu_s": cpu})
            if handed:
                weights = {n: p.detach().clone() for n, p in given["model"].named_parameters()}
                torch.save(weights, options.out / f"weights {state.global_step}.pt")

    def our_completions(_: list[str], trainer: Any) -> dict[str, Any]:
        found = handed[trainer.state.global_step]
        return found | {"logprobs": [[0.0] * len(ids) for ids in found["completion_ids"]]}

    optimizer = import_name(settings["optimizer"]["class_path"])(
        model.parameters(), **settings["optimizer"].get("init_args", {})
    )
    schedule = settings["lr_scheduler"]
    if schedule:
        scheduler = import_name(schedule["class_path"])(optimizer, **schedule.get("init_args", {}))
    else:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    options.out.mkdir(parents=True, exist_ok=True)
    columns = [{"prompt": row["prompt"], **row["columns"]} for row in rows]
    group, rewards = settings["group_size"], settings["rewards"]
    ends = set(settings["ends"])
    trainer = SameTokens(
        model=model,
        reward_funcs=[reward_of(name, entry, ends) for name, entry in rewards.items()],
        args=GRPOConfig(
            output_dir=str(options.out),
            per_device_train_batch_size=settings["batch_size"] * group,
            num_generations=group,
            max_completion_length=settings["max_completion_length"],
            max_steps=len(handed) or settings["iterations"],
            temperature=settings["temperature"],
            beta=settings["kl_coef"],
            use_bias_correction_kl=settings["kl_bias_correction"],
            loss_type=settings["loss_type"],
            reward_weights=[entry["weight"] for entry in rewards.values()],
            max_grad_norm=settings["max_grad_norm"],
            shuffle_dataset=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no" if handed else "steps",
            save_steps=settings["every"],
            save_only_model=True,
            use_cpu=True,
            bf16=settings["bf16"],
            seed=settings["seed"],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
        callbacks=[Watch()],
        rollout_func=our_completions if handed else None,
    )
    trainer.train()
    history = {row["step"]: row for row in trainer.state.log_history if "reward" in row}
    known = {"reward": "reward", "length": "completions/mean_length"}
    for row in steps:
        logged = history[row["step"]]
        row |= {litgrpo: logged[theirs] for litgrpo, theirs in known.items()}
        row["cut"] = logged["completions/clipped_ratio"]
    (options.out / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
