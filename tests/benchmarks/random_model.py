"""The random models and tokenizers of both sides of a benchmark, without importing this project.

Qwen2 models over a vocabulary of numbered words. A fraction of the vocabulary, the stop
probability per token (`stop_prob`), ends a completion, so that
lengths are geometrically distributed.
"""

from __future__ import annotations

from typing import Any

# {name: hidden size, layers, heads, heads of keys and values, inner size, words}
SIZES: dict[str, tuple[int, ...]] = {
    "tiny": (128, 4, 4, 2, 512, 512),
    "30m": (512, 8, 8, 4, 1536, 8192),
    "100m": (768, 12, 12, 4, 2048, 32000),
    "135m": (576, 30, 9, 3, 1536, 49152),  # SmolLM2's smallest
    "360m": (960, 32, 15, 5, 2560, 49152),
    "0.5b": (896, 24, 14, 2, 4864, 151936),
    "1.5b": (1536, 28, 12, 2, 8960, 151936),
}
QWEN2 = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)
FIRST_END = 3  # after <pad>, <bos>, <unk>


class RandomModel:
    """A random Qwen2 over numbered words, a share of which ends a completion.

    Args:
        sizes: as in `SIZES`.
        stop_prob: stop probability per token.
        positions: that the model can read.
        marks: further words, before the numbered ones.
        seed: of weights and prompts.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        stop_prob: float,
        positions: int,
        marks: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        self.sizes = dict(zip(QWEN2, sizes, strict=True))
        self.positions, self.seed = positions, seed
        vocab = self.sizes["vocab_size"]
        ends = [f"<eos{number}>" for number in range(max(1, round(vocab * stop_prob)))]
        self.end_ids = list(range(FIRST_END, FIRST_END + len(ends)))
        self.words = ["<pad>", "<bos>", "<unk>", *ends, *marks]
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
        """The model, with every end token in its generation config."""
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(self.seed)
        config = Qwen2Config(
            **self.sizes,
            max_position_embeddings=self.positions,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=FIRST_END,
            attention_dropout=0.0,
            use_sliding_window=False,
        )
        model = Qwen2ForCausalLM(config)
        model.generation_config.eos_token_id = self.end_ids
        return model

    def prompts(self, count: int, length: int) -> list[str]:
        """Texts of random words."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(self.first, len(self.words), (count, length), generator=generator)
        return [" ".join(self.words[number] for number in row) for row in ids.tolist()]


def even_words(text: str) -> float:
    """A reward that costs nothing: the share of words of even number."""
    words = text.split()
    even = sum(word[:1] == "w" and int(word[1:]) % 2 == 0 for word in words)
    return even / max(1, len(words))
