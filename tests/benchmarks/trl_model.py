"""The peer's random models and tokenizers: those of `workload`, without importing this project."""

from __future__ import annotations

from typing import Any

# {size: arguments of Qwen2Config}; tests/benchmarks/test_gpu.py holds them to those of `workload`.
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=512,
    ),
    "30m": dict(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        vocab_size=8192,
    ),
    "100m": dict(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        vocab_size=32000,
    ),
    "500m": dict(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
    ),
}


class RandomModel:
    """A random Qwen2 over numbered words, a share of which ends a completion.

    Args:
        size: of `SIZES`.
        hazard: the share that ends one.
        positions: that the model can read.
        marks: further words, before the numbered ones.
    """

    def __init__(
        self, size: str, hazard: float, positions: int, marks: tuple[str, ...] = ()
    ) -> None:
        self.sizes, self.positions = SIZES[size], positions
        vocab = self.sizes["vocab_size"]
        self.ends = [f"<eos{number}>" for number in range(max(1, round(vocab * hazard)))]
        self.words = ["<pad>", "<bos>", "<unk>", *self.ends, *marks]
        self.first = len(self.words)
        self.words += [f"w{number}" for number in range(vocab - self.first)]

    def tokenizer(self) -> Any:
        """One token for each word."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocab = {word: number for number, word in enumerate(self.words)}
        fast = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos0>", unk_token="<unk>")
        return PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **special)

    def model(self) -> Any:
        """Weights of seed 0."""
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        config = Qwen2Config(
            **self.sizes,
            max_position_embeddings=self.positions,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=3,
            attention_dropout=0.0,
            use_sliding_window=False,
        )
        model = Qwen2ForCausalLM(config)
        model.generation_config.eos_token_id = list(range(3, 3 + len(self.ends)))
        return model

    def prompts(self, count: int, length: int) -> list[str]:
        """Texts of random words."""
        import torch

        generator = torch.Generator().manual_seed(0)
        vocab = self.sizes["vocab_size"]
        ids = torch.randint(self.first, vocab, (count, length), generator=generator)
        return [" ".join(self.words[number] for number in row) for row in ids.tolist()]


def even_words(text: str) -> float:
    """A reward that costs nothing: the share of words of even number."""
    words = text.split()
    even = sum(word[:1] == "w" and int(word[1:]) % 2 == 0 for word in words)
    return even / max(1, len(words))
