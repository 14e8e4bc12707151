"""Load a transformers model; check that config, weights and tokenizer fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from litgrpo.arguments import find_page
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.models.transformers_compat import supports_sdpa
from litgrpo.tensor_files import find_not_finite

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NO_LANGUAGE_MODEL = (
    "Models of type {!r} cannot be trained: transformers has no text generation class for them. "
    f"{find_page('docs/reference/models.md')} lists the supported types."
)
MAX_SHOWN = 3  # weight names in an error message
# {part of a name: largest number in a config}: lists of modules, widths of tensors, other numbers.
MAX_SIZES = {
    **dict.fromkeys(("layers", "n_layer", "experts", "depth"), 10_000),
    **dict.fromkeys(("_size", "_dim", "heads", "n_head", "n_embd", "d_model", "d_ff"), 2**23),
    "": 2**31,
}
# {pattern of a weight name in a vision-language model: name in its text model}
TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.(language_model|text_model)\.": "model.",
}


def select_text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model: the text part of a vision or audio model.

    One without parts is returned unchanged. Several text parts, or one of a type that does not
    generate text, are a ValueError.
    """
    try:
        text: Any = config.get_text_config()
    except ValueError:
        raise ValueError(NO_LANGUAGE_MODEL.format(config.model_type)) from None
    if config.is_encoder_decoder or text is config:
        return config
    find_model_class(text)  # raises before the message below is printed
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole model's setting counts
    rank_zero_info(
        f"{config.model_type} is multimodal; only its text part ({text.model_type}) is loaded, "
        "trained and exported."
    )
    return text


def choose_auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' auto class of language models for a config."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def find_model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' language model class for a config; a ValueError if there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        classes = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise ValueError(NO_LANGUAGE_MODEL.format(config.model_type))
    return classes[type(config)]


def choose_attention(config: PretrainedConfig) -> str:
    """Return the attention implementation to load a model with.

    Soft-capped scores (Gemma 2) exist in eager attention only, and some models have no other.
    """
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if has_softcap or not supports_sdpa(find_model_class(config)) else "sdpa"


def check_sizes(config: PretrainedConfig, pretrained: str) -> None:
    """Reject sizes beyond any model, which would take hours or all memory to build."""
    nodes = [config.to_dict()]
    while nodes:
        node = nodes.pop()
        nodes += [inner for inner in node.values() if isinstance(inner, dict)]
        for name, value in node.items():
            limit = next(limit for part, limit in MAX_SIZES.items() if part in str(name))
            if isinstance(value, int) and value > limit:
                raise ValueError(
                    f"The config of {pretrained!r} has {name} {value:.3g}, more than {limit:,}: "
                    "the file is damaged or not of a language model."
                )


def load_weights(
    folder: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    is_text_part: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load the model of a folder or hub id; every weight must be in its files, and finite.

    Files are read on the CPU, then the model moves to the default device, weight by weight:
    transformers needs accelerate to load within `torch.device("cuda")`, as Lightning does. If
    `is_text_part`, the folder's model has more parts, whose weights are ignored.
    """
    from safetensors import SafetensorError

    if is_text_part:
        options["key_mapping"] = TEXT_NAMES
    model_class: Any = find_model_class(config)
    device = torch.get_default_device()
    try:
        with silence_transformers(), torch.device("cpu"):
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=choose_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                **options,
            )
    except (SafetensorError, UnpicklingError) as error:
        raise ValueError(
            f"A weight file of {folder!r} is damaged or incomplete: "
            f"{str(error).split('. ')[0]}. Copy or download it again, preferably as safetensors."
        ) from error
    except (OSError, ValueError):
        raise
    except Exception as error:  # of the library, for sizes that do not fit together
        reason = " ".join(str(error).split())
        raise ValueError(
            f"Could not build the model of {folder!r} from its config.json: "
            f"{type(error).__name__}: {reason:.200}"
        ) from error
    problems = {
        "missing": report["missing_keys"],
        "unexpected": () if is_text_part else report["unexpected_keys"],
        "of another shape": [name for name, *_ in report["mismatched_keys"]],
    }
    lines = [f"{problem} {_join_names(names)}" for problem, names in problems.items() if names]
    if lines:
        raise ValueError(
            f"The weights of {folder!r} do not match its config ({type(model).__name__}): "
            f"{'; '.join(lines)}. Missing weights would be random. Save the whole model again by "
            "save_pretrained, or use the config that belongs to these weights."
        )
    check_finite(model.state_dict().items(), f"The weights of {folder!r} are damaged")
    return move_tied(model, device)


def check_finite(weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Raise for weights that are NaN or infinite; `source` begins the message."""
    if problem := find_not_finite(weights):
        raise ValueError(
            f"{source}: {problem}. Save or download the weights again, or load them in a dtype "
            "that holds them, such as float32 or bfloat16."
        )


def move_tied(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model from the CPU to a device, with tied weights still tied.

    XLA gives each name of a tied weight a separate tensor.
    """
    if device.type != "cpu":
        model.to(device)  # type: ignore[arg-type]
        model.tie_weights()
    return model


def _join_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    suffix = f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    return ", ".join(ordered[:MAX_SHOWN]) + suffix


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and tables, which repeat litgrpo's messages."""
    from transformers.utils import logging

    has_progress_bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_progress_bar:
            logging.enable_progress_bar()


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that every token of a tokenizer has an embedding.

    Special tokens are ignored: some text models come with the image token of a multimodal one
    (Gemma 3 1B). Prompts that contain one are rejected by `limits.check_tokens`.
    """
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    special_ids = set(tokenizer.all_special_ids) | {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    missing = {
        token_id: token
        for token, token_id in tokenizer.get_vocab().items()
        if token_id >= rows and token_id not in special_ids
    }
    if missing:
        first_id = min(missing)
        raise ValueError(
            f"The tokenizer of {name!r} has {len(missing)} tokens beyond the model's embedding of "
            f"{rows} rows, first {missing[first_id]!r} (id {first_id}). Call "
            "model.resize_token_embeddings(len(tokenizer)) and save model and tokenizer again."
        )


def suggest_gguf(folder: str) -> str:
    """Return advice for a folder that contains GGUF files only, or an empty string."""
    files = sorted(Path(folder).glob("*.gguf"))
    if not files:
        return ""
    return f" To load {files[0].name} (GGUF), give the file itself: pretrained: {str(files[0])!r}."
