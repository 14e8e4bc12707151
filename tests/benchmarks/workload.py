"""The work that both sides of a benchmark are given: models, prompts, end tokens, reward.

Random Qwen2 models over a vocabulary of numbered words. A share of the vocabulary, the hazard, ends
a completion, so that lengths vary as geometric ones do, whatever the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from litgrpo.data.sampler import BatchLoader, BatchOrder
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.loading import Precision, as_policy
from litgrpo.types import PromptBatch

FIRST_END = 3  # after <pad>, <bos>, <unk>


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
    def linear_weights(self) -> int:
        """Weights of all linear layers of the body."""
        size = self.hidden // self.heads
        attention = self.hidden * size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


SIZES = {
    "tiny": Size(128, 4, 4, 2, 512, 512, prompts=8, prompt_len=64),
    "30m": Size(512, 8, 8, 4, 1536, 8192),
    "100m": Size(768, 12, 12, 4, 2048, 32000),
    "500m": Size(896, 24, 14, 2, 4864, 151936),
}


@dataclass(frozen=True)
class Work:
    """One training step's work.

    Args:
        size: the model and the prompts.
        group: completions of each prompt.
        max_new: tokens of a completion at most.
        hazard: share of the vocabulary that ends a completion; None: 1 / max_new.
        bf16: compute in bfloat16 where autocast does.
        threads: of the processor.
        seed: of weights and prompts.
    """

    size: Size = field(default_factory=lambda: SIZES["tiny"])
    group: int = 8
    max_new: int = 128
    hazard: float | None = None
    bf16: bool = False
    threads: int = 1
    seed: int = 0

    @property
    def num_ends(self) -> int:
        """Tokens that end a completion."""
        hazard = 1 / self.max_new if self.hazard is None else self.hazard
        return max(1, round(self.size.vocab * hazard))

    def words(self) -> list[str]:
        """The vocabulary."""
        ends = [f"<eos{number}>" for number in range(self.num_ends)]
        words = ["<pad>", "<bos>", "<unk>", *ends]
        return words + [f"w{number}" for number in range(self.size.vocab - len(words))]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token for each word."""
        vocab = {word: number for number, word in enumerate(self.words())}
        fast = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos0>", unk_token="<unk>")
        return PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **special)

    def policy(self, **precision: Any) -> CausalPolicy:
        """The model, random."""
        size = self.size
        config = Qwen2Config(
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            intermediate_size=size.inner,
            vocab_size=size.vocab,
            max_position_embeddings=size.prompt_len + self.max_new + 8,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=FIRST_END,
            attention_dropout=0.0,
            use_sliding_window=False,
        )
        torch.manual_seed(self.seed)
        policy = as_policy(
            Qwen2ForCausalLM(config), self.tokenizer(), precision=Precision(**precision)
        )
        policy.eos_ids = tuple(range(FIRST_END, FIRST_END + self.num_ends))
        return policy

    def batches(self, steps: int) -> list[PromptBatch]:
        """Prompts of random words, for so many steps."""
        generator = torch.Generator().manual_seed(self.seed)
        words, batches = self.words(), []
        for step in range(steps):
            shape = (self.size.prompts, self.size.prompt_len)
            low = FIRST_END + self.num_ends
            ids = torch.randint(low, self.size.vocab, shape, generator=generator)
            texts = [" ".join(words[number] for number in row) for row in ids.tolist()]
            index = torch.arange(len(ids)) + step * len(ids)
            batches.append(PromptBatch(ids, torch.ones_like(ids).bool(), texts, {}, index))
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
    rewards = []
    for text in completions:
        words = text.split()
        even = sum(word[:1] == "w" and int(word[1:]) % 2 == 0 for word in words)
        rewards.append(even / max(1, len(words)))
    return rewards
