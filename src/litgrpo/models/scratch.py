"""A new model and its tokenizer, from sizes and texts instead of a download."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from litgrpo.arguments import did_you_mean, require
from litgrpo.models.architectures import ENCODER_DECODER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Words keep the space before them; digits stand alone, so that numbers are read digit by digit.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Scratch:
    """A model that starts from random weights, with a tokenizer fitted to the training texts.

    The tokenizer is byte-level byte-pair encoding: frequent words are one token, digits always
    stand alone, and decoding gives any text back exactly.

    Args:
        architecture: `model_type` as transformers names it (gemma2, qwen2, llama, gpt2, t5, ...)
            and the sizes that differ from its defaults. Vocabulary size and special tokens come
            from the tokenizer.
        vocab_size: number of tokens, special ones and tags included; fewer where the texts do not
            have as many words.
        tags: one token each, and visible in decoded text.
        sentinels: one token each, left out of decoded text, such as T5's `<extra_id_0>`.
        add_bos: put the begin token before every encoded text.
    """

    architecture: dict[str, Any]
    vocab_size: int = 4096
    tags: list[str] = field(
        default_factory=lambda: ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    )
    sentinels: list[str] = field(default_factory=list)
    add_bos: bool = True

    def __post_init__(self) -> None:
        """Check what can be checked without transformers."""
        if "model_type" not in self.architecture:
            raise ValueError(
                f"scratch.architecture has {sorted(self.architecture)} but no model_type; "
                "add one, such as gemma2"
            )
        for name in FROM_TOKENIZER:
            if name in self.architecture:
                raise ValueError(
                    f"scratch.architecture sets {name}; it comes from the tokenizer, leave it out"
                )
        least = 256 + len(self.tags) + len(self.sentinels) + len((PAD, BOS, EOS))
        require(
            self.vocab_size >= least,
            f"scratch.vocab_size is {self.vocab_size}; bytes, tags and special tokens alone are "
            f"{least}",
        )

    def build_tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """A tokenizer fitted to texts; the same texts give the same tokenizer.

        Args:
            texts: prompts and completions of the training set.
        """
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            pre_tokenizers,
            processors,
            trainers,
        )
        from transformers import PreTrainedTokenizerFast

        pieces = [
            # Tags never become a part of another token.
            *(pre_tokenizers.Split(tag, "isolated") for tag in self.tags + self.sentinels),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - len(self.tags) - len(self.sentinels),
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        fast.train_from_iterator(texts, trainer)
        # Not special, so that text decoded with skip_special_tokens shows them to the rewards.
        fast.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in self.tags])
        fast.add_special_tokens([AddedToken(tag, normalized=False) for tag in self.sentinels])
        if self.add_bos:
            fast.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, fast.token_to_id(BOS))],
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=fast,
            pad_token=PAD,
            bos_token=BOS,
            eos_token=EOS,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    def build_model(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
        """A language model with random float32 weights.

        An encoder-decoder model's decoder is fed the pad token first, as T5's is.

        Args:
            tokenizer: gives the vocabulary size and the special tokens.
            seed: of the weights; the global random state stays as it is.

        Raises:
            ValueError: a model_type or a size that transformers does not know.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        self._check_architecture()
        ids = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        config = AutoConfig.for_model(**self.architecture, vocab_size=len(tokenizer), **ids)
        kind: Any = AutoModelForCausalLM
        if config.is_encoder_decoder:
            kind, config.decoder_start_token_id = AutoModelForSeq2SeqLM, ids["pad_token_id"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kind.from_config(config, dtype=torch.float32)

    def _check_architecture(self) -> None:
        """Configs take any keyword silently, so a misspelled size would be ignored."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model_type = self.architecture["model_type"]
        models = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODER_DECODER]
        require(
            model_type in models,
            f"scratch.architecture.model_type is {model_type!r}, and there is no such language "
            "model" + did_you_mean(str(model_type), models),
        )
        config = AutoConfig.for_model(model_type)
        known = {*config.to_dict(), *config.attribute_map}
        for name in self.architecture:
            require(
                name in known,
                f"scratch.architecture has {name!r}, which a {model_type} config does not have"
                + did_you_mean(name, known),
            )


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{file name: text} of what a tokenizer writes into a model's folder, for a checkpoint."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}


def tokenizer_from(files: dict[str, str]) -> PreTrainedTokenizerBase:
    """The tokenizer that `tokenizer_files` was given."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder, padding_side="left")
