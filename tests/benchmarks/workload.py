"""Litgrpo's side of the benchmark work: `random_model` as policy and batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset

from litgrpo.data.loader import BatchLoader, BatchOrder
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.loading.load import build_policy
from litgrpo.types import PromptBatch
from tests.benchmarks import random_model


@dataclass(frozen=True)
class Size:
    """A Qwen2 model's sizes, and how many prompts of which length a step has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    prompts: int = 4
    prompt_len: int = 128

    @property
    def numbers(self) -> tuple[int, ...]:
        """Size by name, see `random_model.SIZES`."""
        return (self.hidden, self.layers, self.heads, self.kv_heads, self.inner, self.vocab)


PROMPTS = {"tiny": {"prompts": 8, "prompt_len": 64}, "135m": {"prompts": 16, "prompt_len": 64}}
SIZES = {name: Size(*sizes, **PROMPTS.get(name, {})) for name, sizes in random_model.SIZES.items()}


@dataclass(frozen=True)
class Work:
    """One training step's work.

    Args:
        size: the model and the prompts.
        group: completions of each prompt.
        max_new: maximum tokens of a completion.
        stop_prob: stop probability per token; None: 1 / max_new.
        bf16: compute in bfloat16 where autocast does.
        threads: of the processor.
        seed: of weights and prompts.
    """

    size: Size = field(default_factory=lambda: SIZES["tiny"])
    group: int = 8
    max_new: int = 128
    stop_prob: float | None = None
    bf16: bool = False
    threads: int = 1
    seed: int = 0

    def random(self) -> random_model.RandomModel:
        """The model's weights and words."""
        size = self.size
        stop_prob = 1 / self.max_new if self.stop_prob is None else self.stop_prob
        positions = size.prompt_len + self.max_new + 8
        return random_model.RandomModel(size.numbers, stop_prob, positions, seed=self.seed)

    def policy(self) -> CausalPolicy:
        """The model, random."""
        made = self.random()
        policy = build_policy(made.model(), made.tokenizer())
        policy.eos_ids = tuple(made.end_ids)
        return policy

    def batches(self, steps: int) -> list[PromptBatch]:
        """Return prompts of random words for a number of steps."""
        made, (rows, length) = self.random(), (self.size.prompts, self.size.prompt_len)
        texts, read = made.prompts(steps * rows, length), made.tokenizer()
        batches = []
        for first in range(0, len(texts), rows):
            prompts = texts[first : first + rows]
            ids = torch.tensor(read(prompts)["input_ids"])
            index = torch.arange(first, first + rows)
            batches.append(PromptBatch(ids, torch.ones_like(ids).bool(), prompts, {}, index))
        return batches

    def loader(self, steps: int) -> BatchLoader[PromptBatch]:
        """The same, so that the next batch is known ahead."""
        numbers = [[step] for step in range(steps)]
        return BatchLoader(Batches(self.batches(steps)), BatchOrder(lambda _: numbers))


class Batches(Dataset[PromptBatch]):
    """Batches by their number.

    Args:
        batches: all of them.
    """

    def __init__(self, batches: list[PromptBatch]) -> None:
        self.batches = batches

    def __getitem__(self, numbers: list[int]) -> PromptBatch:
        """The only one that is asked for."""
        (number,) = numbers
        return self.batches[number]


def even_words(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that costs nothing: the share of words of even number."""
    return [random_model.even_words(text) for text in completions]
