"""Build a randomly initialized model, and train its tokenizer, without a download."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import did_you_mean, require
from litgrpo.distributed.random_state import seeded_on_cpu
from litgrpo.models.architectures import ENCODER_DECODER
from litgrpo.temporary import TemporaryFolder
from litgrpo.tensor_files import DamagedCheckpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# Words include the space before them; every digit is a separate token.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@check_field_types
@dataclass(frozen=True)
class Scratch:
    """A randomly initialized model, with a tokenizer trained on the training texts.

    The tokenizer is byte-level byte-pair encoding: frequent words are one token, every digit is a
    separate token, and decoding returns any text exactly.

    Args:
        architecture: `model_type` as transformers names it (gemma2, qwen2, llama, gpt2, t5, ...)
            and the sizes that differ from its defaults. Vocabulary size and special tokens are set
            from the tokenizer.
        vocab_size: maximum number of tokens, including special ones and tags; fewer if the texts
            have fewer words.
        tags: texts that become one token each and are visible in decoded text.
        sentinels: texts that become special tokens, such as T5's `<extra_id_0>`.
        add_bos: put the begin token before every encoded text.

    Example:
        >>> scratch = Scratch({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}, 300)
        >>> tokenizer = scratch.build_tokenizer(["3+4=7"] * 3)
        >>> tokenizer.decode(tokenizer("12+30").input_ids)
        '<bos>12+30'
        >>> scratch.build_model(tokenizer).config.n_embd
        8
    """

    architecture: dict[str, Any]
    vocab_size: int = 4096
    tags: list[str] = field(
        default_factory=lambda: ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    )
    sentinels: list[str] = field(default_factory=list)
    add_bos: bool = True

    def __post_init__(self) -> None:
        if "model_type" not in self.architecture:
            raise ValueError(
                f"model.scratch.architecture has {sorted(self.architecture)} but no model_type; "
                "add one, such as gemma2."
            )
        for name in FROM_TOKENIZER:
            if name in self.architecture:
                raise ValueError(
                    f"model.scratch.architecture.{name} comes from the tokenizer; leave it out."
                )
        minimum = 256 + len(self.tags) + len(self.sentinels) + len((PAD, BOS, EOS))
        if self.vocab_size < minimum:
            raise ValueError(
                f"model.scratch.vocab_size is {self.vocab_size}; it must be at least {minimum} "
                "(bytes, tags and special tokens)."
            )

    def build_tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """Train a tokenizer on texts; the same texts give the same tokenizer."""
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
            # Tags are split off first, so that no other token contains a part of one.
            *(pre_tokenizers.Split(tag, "isolated") for tag in self.tags + self.sentinels),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size - len(self.tags) - len(self.sentinels),
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        # Not special, so that text decoded with skip_special_tokens shows them to the rewards.
        tokenizer.add_tokens(
            [AddedToken(tag, special=False, normalized=False) for tag in self.tags]
        )
        tokenizer.add_special_tokens([AddedToken(tag, normalized=False) for tag in self.sentinels])
        if self.add_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            bos_token=BOS,
            eos_token=EOS,
            padding_side="left",
            clean_up_tokenization_spaces=False,
        )

    def build_model(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
        """Build a language model with random float32 weights.

        The tokenizer sets the vocabulary size and the special tokens; the decoder start token of an
        encoder-decoder model is the pad token, as in T5. The global random state is unchanged.

        Raises:
            ValueError: a size is not possible, or the weights exceed this machine's memory.
        """
        from litgrpo.models.weights import choose_auto_class, move_tied

        self._check_architecture()
        config = self._build_config(tokenizer)
        device = torch.get_default_device()
        with seeded_on_cpu(seed):
            model = choose_auto_class(config).from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
        return move_tied(model, device)

    def _build_config(self, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        """Build the config, and from it a model without memory, to check the sizes."""
        from transformers import AutoConfig
        from transformers.initialization import no_init_weights

        from litgrpo.models.weights import check_sizes, choose_auto_class

        ids = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        try:
            config: PretrainedConfig = AutoConfig.for_model(
                **self.architecture, vocab_size=len(tokenizer), **ids
            )
            if config.is_encoder_decoder:
                config.decoder_start_token_id = ids["pad_token_id"]
            check_sizes(config, "model.scratch.architecture")
            with torch.device("meta"), no_init_weights():
                model = choose_auto_class(config).from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
        except Exception as error:  # of the library, of many types for sizes that are not possible
            reason = " ".join(str(error).split())
            raise ValueError(
                "No model can be built from model.scratch.architecture: "
                f"{type(error).__name__}: {reason:.200}"
            ) from error
        num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        require(
            num_bytes <= memory,
            f"model.scratch.architecture has {num_bytes / 2**30:,.0f} GiB of weights, but this "
            f"machine has {memory / 2**30:,.0f} GiB. Choose smaller sizes.",
        )
        return config

    def _check_architecture(self) -> None:
        """Check names; transformers' configs accept any keyword, so a typo would be ignored."""
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model_type = self.architecture["model_type"]
        models = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODER_DECODER]
        if model_type not in models:
            raise ValueError(
                f"model.scratch.architecture.model_type is {model_type!r}, which is not a language "
                "model of transformers" + did_you_mean(str(model_type), models)
            )
        config = AutoConfig.for_model(model_type)
        options = {*config.to_dict(), *config.attribute_map}
        for name in self.architecture:
            if name not in options:
                raise ValueError(
                    f"model.scratch.architecture.{name} is not an option of {model_type} configs"
                    + did_you_mean(name, options)
                )


def serialize_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a tokenizer's files as {file name: text}, for a checkpoint."""
    with TemporaryFolder("tokenizer") as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def deserialize_tokenizer(files: Any) -> PreTrainedTokenizerBase:
    """Rebuild a tokenizer from `serialize_tokenizer`'s result, which a file of anybody holds."""
    from transformers import AutoTokenizer

    require(isinstance(files, dict), "the checkpoint has no tokenizer; expected {file name: text}.")
    with TemporaryFolder("tokenizer") as folder:
        for name, text in files.items():
            require(
                isinstance(name, str)
                and isinstance(text, str)
                and re.fullmatch(r"\w[\w.-]*", name) is not None,
                f"the tokenizer of a checkpoint has a file {name!r}; expected a plain file name.",
            )
        try:
            for name, text in files.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=False
            )
        except Exception as error:  # of the library, of many types for a damaged file
            reason = " ".join(str(error).split())
            raise DamagedCheckpoint(
                f"the tokenizer of a checkpoint cannot be read: {reason:.200}"
            ) from error
    tokenizer.name_or_path = ""  # the folder is gone
    return tokenizer
