"""Time supervised steps against transformers' Trainer on the same batches of GSM8K.

    python -m tests.benchmarks.sft --data PATH/train.jsonl --size 30m --threads 2

Both sides train the same random model on the same batches of random pairs, question and worked
answer in bytes of a small vocabulary, answers learned only. The Trainer pads each batch to its
longest row and computes all logits; litgrpo leaves out padding and computes only the answers'
logits. Steps alternate; medians after a warm-up, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer as LightningTrainer
from torch import Tensor
from torch.utils.data import DataLoader

from litgrpo.data.pairs import PairBatch, PairSet
from litgrpo.training.sft import SFT
from tests.benchmarks.workload import SIZES, Work

Timed = list[tuple[float, float]]


def batches(path: Path, vocab: int, rows: int, number: int) -> list[PairBatch]:
    """Random pairs; four characters make a token, which is about what a trained tokenizer does."""
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(pairs), generator=generator)[: rows * number].tolist()

    def ids(text: str) -> list[int]:
        parts = [text[start : start + 4] for start in range(0, len(text), 4)]
        return [3 + sum(map(ord, part)) % (vocab - 3) for part in parts]

    questions = [ids(pairs[row]["question"]) for row in chosen]
    answers = [ids(pairs[row]["answer"]) for row in chosen]
    whole = [question + answer for question, answer in zip(questions, answers, strict=True)]
    lengths = zip(map(len, questions), map(len, whole), strict=True)
    data = PairSet(whole, [[span] for span in lengths], 0, 1)
    return [data[list(range(first, first + rows))] for first in range(0, rows * number, rows)]


class Clock:
    """Wall and CPU seconds from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.steps: Timed = []

    def start(self) -> None:
        """A step begins."""
        self.begun = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """It is done."""
        wall, cpu = self.begun
        self.steps.append((time.perf_counter() - wall, time.process_time() - cpu))


def litgrpo(work: Work, data: list[PairBatch]) -> Timed:
    """Time steps of litgrpo's SFT in Lightning's trainer."""
    clock = Clock()

    class Timed(SFT):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            clock.start()

        def on_train_batch_end(self, *args: Any) -> None:
            if args:  # without them it is called once before the first step
                clock.stop()
            super().on_train_batch_end(*args)

    sft = Timed(
        "", optimizer=lambda params: torch.optim.AdamW(params, 1e-4, weight_decay=0.0, fused=True)
    )
    sft.policy = work.policy().train()
    trainer = LightningTrainer(
        accelerator="cpu",
        precision="bf16-mixed" if work.bf16 else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(sft, DataLoader(data, batch_size=None))
    return clock.steps


def train_baseline(work: Work, data: list[PairBatch]) -> Timed:
    """Steps of transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # takes seconds to import

    clock = Clock()

    class Timed(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader([_add_labels(batch) for batch in data], batch_size=None)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            clock.start()
            return super().training_step(*args, **kwargs)

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.stop()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=len(data),
            learning_rate=1e-4,
            bf16=work.bf16,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = replace(work, kernels="plain").policy().model.train()
        Timed(model, settings, train_dataset=data, callbacks=[Ends()]).train()
    return clock.steps


def _add_labels(batch: PairBatch) -> dict[str, Tensor]:
    labels = batch.input_ids.masked_fill(~batch.loss_mask, -100)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask.long(),
        "labels": labels,
    }


def main() -> None:
    """Time both and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's training file")
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--rows", type=int, default=16, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=3, help="of a turn, after one to warm up")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = Work(SIZES[args.size], bf16=args.bf16, max_new=1024, threads=args.threads)
    data = batches(args.data, work.size.vocab, args.rows, args.steps + 1)
    times: dict[str, Timed] = {"litgrpo": [], "baseline": []}
    for _ in range(args.turns):
        times["litgrpo"] += litgrpo(work, data)[1:]
        times["baseline"] += train_baseline(work, data)[1:]
    walls, cpus = (
        {side: statistics.median(step[clock] for step in steps) for side, steps in times.items()}
        for clock in (0, 1)
    )
    real = sum(int(batch.attention_mask.sum()) for batch in data)
    result = {
        "size": args.size,
        "bf16": args.bf16,
        "threads": args.threads,
        "rows": args.rows,
        "padding_frac": 1 - real / sum(batch.input_ids.numel() for batch in data),
        "tokens": real / len(data),
        "litgrpo_s": walls["litgrpo"],
        "baseline_s": walls["baseline"],
        "ratio_wall": walls["baseline"] / walls["litgrpo"],
        "ratio_cpu": cpus["baseline"] / cpus["litgrpo"],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{args.rows} pairs, {result['tokens']:.0f} tokens, {result['padding_frac']:.0%} padding: "
        f"litgrpo {result['litgrpo_s']:.2f} s, Trainer {result['baseline_s']:.2f} s; ratio "
        f"{result['ratio_wall']:.2f} of wall time, {result['ratio_cpu']:.2f} of CPU time"
    )


if __name__ == "__main__":
    main()
