"""A model's class and its weights from a folder, or the reason why they do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from litgrpo.arguments import require
from litgrpo.distributed.messages import rank_zero_info

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NO_LANGUAGE_MODEL = (
    "A model of type {!r} is no language model that can be trained here: "
    "transformers has no class that generates text with it. docs/models.md lists the types."
)
SHOWN = 3  # names of weights in a message
# What weights of a text part are called in a model for images: pattern, name in the text model.
TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(language_model|text_model)\.": "model.",
}


def language_part(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model: the text part of a model for images or sound.

    Args:
        config: of the whole model; one without parts is returned as it is.

    Raises:
        ValueError: it has several text parts, or one of a type that generates no text.
    """
    try:
        text: Any = config.get_text_config()
    except ValueError:
        raise ValueError(NO_LANGUAGE_MODEL.format(config.model_type)) from None
    if config.is_encoder_decoder or text is config:
        return config
    model_class(text)  # refused before it is announced
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's word counts
    rank_zero_info(
        f"{config.model_type} also reads images or sound; its text part ({text.model_type}) is "
        "loaded and trained, and final_model is that part alone."
    )
    return text


def model_class(config: PretrainedConfig) -> Any:
    """The library's class of language models for a config.

    Raises:
        ValueError: it has none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    require(type(config) in kind._model_mapping, NO_LANGUAGE_MODEL.format(config.model_type))
    return kind._model_mapping[type(config)]


def attention_of(config: PretrainedConfig) -> str:
    """The library's attention to compute with.

    Soft-capped scores (Gemma 2) exist in eager attention only, and some models have nothing else.
    """
    capped = config.to_dict().get("attn_logit_softcapping") is not None
    return "eager" if capped or not model_class(config)._supports_sdpa else "sdpa"


def load_weights(
    folder: str, config: PretrainedConfig, dtype: torch.dtype, *, whole: bool = True, **how: Any
) -> PreTrainedModel:
    """The model of a folder, every weight of which is in its files.

    Args:
        folder: or a hub id.
        config: of the language model.
        dtype: of the weights.
        whole: the folder holds nothing else; False where the config is a part of its model.
        how: more for `from_pretrained`.

    Raises:
        ValueError: weights are missing, unexpected or of another shape, or a file is damaged.
    """
    from safetensors import SafetensorError

    try:
        with quiet():
            model, report = model_class(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention_of(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **({} if whole else {"key_mapping": TEXT_NAMES}),
                **how,
            )
    except (SafetensorError, UnpicklingError) as error:
        raise ValueError(
            f"A weight file of {folder!r} is damaged or incomplete: "
            f"{str(error).split('. ')[0]}. Copy or download it again, best as safetensors."
        ) from error
    wrong = {
        "lacks": report["missing_keys"],
        "has too": report["unexpected_keys"] if whole else (),
        "has another shape of": [name for name, *_ in report["mismatched_keys"]],
    }
    found = [f"{problem} {_named(names)}" for problem, names in wrong.items() if names]
    require(
        not found,
        f"The weights of {folder!r} are not those of its config ({type(model).__name__}): it "
        f"{'; it '.join(found)}. What is missing would be random. Save the whole model again with "
        "save_pretrained, or give the config that belongs to these weights.",
    )
    return model


def _named(names: Any) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and tables over ours, which say the same in a line."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding of.

    Special tokens are spared: some models come with one for images that their text part cannot
    read (Gemma 3 1B). A prompt that holds one is refused when it is read.

    Raises:
        ValueError: with the first such token and the remedy.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    special = set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    beyond = {
        number: token
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and number not in special
    }
    first = min(beyond, default=0)
    require(
        not beyond,
        f"The tokenizer of {name!r} has {len(beyond)} tokens beyond the model's embedding of "
        f"{rows}, the first {beyond.get(first)!r} (number {first}). Call "
        "model.resize_token_embeddings(len(tokenizer)) and save model and tokenizer again.",
    )


def other_files(folder: str) -> str:
    """What to do about weights in a format that cannot be read, or nothing if there are none."""
    found = sorted(path.name for path in Path(folder).glob("*.gguf"))
    if not found:
        return ""
    return (
        f" {found[0]} is in GGUF format, which is read when the file itself is given: pretrained: "
        f"{str(Path(folder) / found[0])!r}."
    )
