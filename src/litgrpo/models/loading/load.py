"""Load a policy or its reference from a hub id, a folder, a GGUF file or a model in memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import type_with_article
from litgrpo.models.adapters import (
    LoRA,
    Quantization,
    add_adapters,
    check_not_adapter,
    is_adapter,
    keep_4bit_layout,
    quantization_arguments,
)
from litgrpo.models.generic import build_causal_policy
from litgrpo.models.kernels import linear as linears
from litgrpo.models.loading.gguf import GGUF_SUFFIX, PACKAGE_PREFIX, convert_gguf, find_package_file
from litgrpo.models.loading.sharded_weights import PolicySharding, adapters_in_memory
from litgrpo.models.policy import Policy
from litgrpo.models.reference import (
    AdapterReference,
    BaseModelReference,
    FrozenReference,
    Reference,
)
from litgrpo.models.t5 import Seq2SeqPolicy
from litgrpo.models.transformers_compat import checkpoint_activations, remove_input_hooks
from litgrpo.models.weights import (
    check_finite,
    check_sizes,
    check_vocabulary,
    load_weights,
    select_text_config,
    suggest_gguf,
)
from litgrpo.temporary import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    # What `GRPO` and `SFT` take as `pretrained` in Python.
    Pretrained = str | PreTrainedModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]

ASSETS = Path(__file__).parents[2] / "assets"
BUILTIN = "builtin:"
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@check_field_types
@dataclass(frozen=True)
class Precision:
    """Dtypes, activation memory and kernels of the policy.

    Args:
        dtype: of the weights; with `trainer.precision: bf16-mixed` keep float32.
        gradient_checkpointing: recompute all activations in the backward pass to save memory.
        disable_dropout: set the model's dropout to 0, so that the first importance ratio is
            exactly 1 (TRL: disable_dropout).
        linear_kernels: of the linear layers on a CPU: `plain` is torch's default, `onednn` oneDNN
            (bfloat16 only if the processor supports it); `auto` selects oneDNN if it is clearly
            faster for weights of this size.
        share_prompts: in the update, compute each prompt once for its whole group, without padding.
        autocast_dtype: compute matrix products in this lower precision, in sampling and training;
            weights, optimizer state, log-probabilities and losses stay float32. null uses
            `trainer.precision`. For devices whose trainer has no mixed precision (XLA).
        quantization: hold the weights under `lora` in 4 bits (QLoRA): nf4 or fp4; null disables it.

    Example:
        `Precision(dtype="bfloat16", gradient_checkpointing=True)`, in YAML
        `precision: {dtype: bfloat16, gradient_checkpointing: true}`.
    """

    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    disable_dropout: bool = True
    linear_kernels: linears.KernelChoice = "auto"
    share_prompts: bool = True
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.autocast_dtype is not None and self.dtype != "float32":
            raise ValueError(
                f"model.precision.autocast_dtype is {self.autocast_dtype} and "
                f"model.precision.dtype {self.dtype}; autocast needs float32 weights. Leave out "
                "one of the two."
            )


# --- names ---


def resolve_pretrained(pretrained: str) -> str:
    """Return the folder of a built-in model, a GGUF file or a package; other names unchanged."""
    if pretrained.startswith(BUILTIN):
        folder = ASSETS / pretrained.removeprefix(BUILTIN)
        if not folder.is_dir():
            models = sorted(BUILTIN + path.name for path in ASSETS.iterdir() if path.is_dir())
            raise ValueError(
                f"pretrained: {pretrained!r} is not a built-in model; expected one of {models}."
            )
        return str(folder)
    is_package_file = pretrained.startswith(PACKAGE_PREFIX)
    folder = find_package_file(pretrained) if is_package_file else Path(pretrained).expanduser()
    if folder.is_file() and folder.suffix == GGUF_SUFFIX:
        return str(convert_gguf(folder))
    if folder.is_file():
        raise ValueError(
            f"pretrained: {pretrained!r} is a file without the ending .gguf. Give a GGUF file, or "
            "the folder of config.json, safetensors weights and tokenizer that save_pretrained "
            "writes."
        )
    check_not_adapter(folder)
    looks_like_path = pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1
    if looks_like_path and not (folder / "config.json").is_file():
        raise ValueError(
            f"pretrained: {pretrained!r} is not a model folder (no config.json in it). Give a "
            "folder written by save_pretrained, a Hugging Face hub id, or a built-in model such as "
            "'builtin:tiny-gemma2'."
        )
    return str(folder) if folder.is_dir() else pretrained


_folders: list[TemporaryFolder] = []  # until the process exits
_model_names: dict[str, str] = {}  # {such a folder: name of the model in it, or ""}


def save_in_memory_model(pretrained: Any) -> str:
    """Save a model given as a Python object to a temporary folder; return names unchanged.

    Policy, reference and initial policy are loaded from that folder separately, so the given model
    is not trained and may change later. The folder is deleted when the process exits.

    Args:
        pretrained: hub id or folder; or a `PreTrainedModel` that was loaded from one with a
            tokenizer; or `(model, tokenizer)`.
    """
    if isinstance(pretrained, str | PathLike):
        return str(pretrained)
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    model, tokenizer = pretrained if isinstance(pretrained, tuple) else (pretrained, None)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"pretrained is {type_with_article(model)}; expected a hub id, a folder, a "
            "PreTrainedModel or (model, tokenizer). Merge a PeftModel first: "
            "model.merge_and_unload()."
        )
    if tokenizer is None:
        if not model.name_or_path:
            raise ValueError(
                f"pretrained is {type_with_article(model)} without a tokenizer: give "
                "pretrained=(model, tokenizer)."
            )
        tokenizer = load_tokenizer(model.name_or_path)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"The tokenizer of pretrained is {type_with_article(tokenizer)}; expected a "
            "transformers tokenizer."
        )
    folder = TemporaryFolder("model")
    _folders.append(folder)
    name = model.name_or_path or ""
    _model_names[str(folder.path)] = _model_names.get(name, name)
    model.save_pretrained(folder.path)
    tokenizer.save_pretrained(folder.path)
    return str(folder.path)


def _set_name(loaded: Any, pretrained: str) -> None:
    """Name a model or tokenizer as the user did, since exports and adapters save its name.

    The folder that it was loaded from may be temporary, or exist on this machine only.
    """
    name = _model_names.get(pretrained, pretrained)
    loaded.name_or_path = name
    if hasattr(loaded, "config"):
        loaded.config._name_or_path = name


# --- tokenizer ---


def load_tokenizer(pretrained: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding on the left."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_pretrained(pretrained), padding_side="left", trust_remote_code=False
        )
    except Exception as error:  # of the library, of many types for a damaged file
        raise ValueError(_describe_failure("tokenizer", pretrained, error)) from error
    _set_name(tokenizer, pretrained)
    check_tokenizer(tokenizer, pretrained)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that a tokenizer has tokens for text, an end token and a pad token."""
    # From a folder without tokenizer files transformers builds a tokenizer of special tokens and
    # at most a word boundary, without an error.
    special = set(tokenizer.all_special_tokens)
    if not any(any(map(str.isalnum, token)) for token in tokenizer.get_vocab().keys() - special):
        raise ValueError(
            f"The tokenizer of {name!r} has special tokens only: its files are missing. Save the "
            "tokenizer into the model's folder by save_pretrained."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no end token (eos_token), so completions could not "
            "end. Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no pad token (pad_token). Set pad_token in its "
            "tokenizer_config.json to an unused token, or to the end token."
        )


def _describe_failure(file_type: str, pretrained: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    reason = lines[0].rstrip()
    if not isinstance(error, OSError | ValueError):
        reason = f"{type(error).__name__}: {' '.join(' '.join(lines).split()):.200}"
    if reason.endswith(":"):  # a list of causes follows, none of which a user can change
        reason = f"It has no {file_type} files that transformers can read."
    hint = suggest_gguf(resolve_pretrained(pretrained))
    return f"Could not load a {file_type} from pretrained: {pretrained!r}. {reason}{hint}"


# --- policy and reference ---


def load_policy(
    pretrained: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    precision: Precision | None = None,
    lora: LoRA | None = None,
    frozen: bool = False,
    sharding: PolicySharding | None = None,
) -> Policy:
    """Load a model and its tokenizer as a policy: decoder-only, or encoder-decoder (T5).

    Args:
        pretrained: hub id, folder, GGUF file, `builtin:<name>` or `package:<name>/<path>`.
        tokenizer: the tokenizer, if it is loaded already.
        precision: dtypes, checkpointing, dropout.
        lora: train adapters instead of the weights.
        frozen: it will not be trained.
        sharding: shard the weights over ranks; None loads all of them.

    Raises:
        ValueError: loading fails, or the settings do not fit together.

    Example:
        >>> policy = load_policy("builtin:tiny-gemma2")
        >>> policy.model.config.model_type, policy.vocab_size
        ('gemma2', 436)
    """
    from transformers import AutoConfig

    precision = precision or Precision()
    if precision.quantization is not None and lora is None and not frozen:
        raise ValueError(
            f"model.precision.quantization is {precision.quantization}, but 4-bit weights can only "
            "be trained by adapters. Set --model.lora.rank 16, or leave it out."
        )
    if sharding is not None:
        sharding.check(precision.quantization, lora)
    folder = resolve_pretrained(pretrained)
    tokenizer = tokenizer or load_tokenizer(pretrained)
    try:
        full_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of the library, of many types for a damaged file
        raise ValueError(_describe_failure("config", pretrained, error)) from error
    check_sizes(full_config, pretrained)
    config = select_text_config(full_config)
    original_dropout = _disable_dropout(config) if precision.disable_dropout else {}
    dtype = getattr(torch, precision.dtype)
    is_text_part = config is not full_config
    empty_model = None
    try:
        if sharding is not None and not is_text_part and precision.quantization is None:
            empty_model = sharding.build_empty_model(folder, config, dtype)
        if empty_model is not None:
            model = empty_model
        else:
            options: dict[str, Any] = {}
            if precision.quantization is not None:
                options = quantization_arguments(precision.quantization, dtype)
            model = load_weights(folder, config, dtype, is_text_part=is_text_part, **options)
    except OSError as error:
        raise ValueError(_describe_failure("model", pretrained, error)) from error
    _set_name(model, pretrained)
    check_vocabulary(model, tokenizer, pretrained)
    with adapters_in_memory() if empty_model is not None else nullcontext():
        policy = build_policy(
            model,
            tokenizer,
            precision=precision,
            lora=lora,
            original_dropout=original_dropout,
        )
    if frozen:
        policy.requires_grad_(False)
    if sharding is not None:
        sharding.shard(policy)
        if empty_model is not None:
            sharding.load_shards(policy, folder)
            shards = policy.model.named_parameters()
            check_finite(shards, f"The weights of {folder!r} are damaged")
    return policy


def build_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    precision: Precision | None = None,
    lora: LoRA | None = None,
    original_dropout: dict[str, float] | None = None,
) -> Policy:
    """Build a policy around a model in memory; see `load_policy`."""
    precision = precision or Precision()
    keep_4bit_layout(model)
    if precision.gradient_checkpointing:
        checkpoint_activations(model)
    if lora is not None:
        model = add_adapters(model, lora)
        remove_input_hooks(model)
    build = Seq2SeqPolicy if model.config.is_encoder_decoder else build_causal_policy
    policy = build(model, tokenizer, collect_end_tokens(model, tokenizer), original_dropout)
    policy.share_prompts = precision.share_prompts
    if precision.autocast_dtype is not None:
        policy.autocast_dtype = getattr(torch, precision.autocast_dtype)
    policy.set_linear_kernels(linears.choose_kernels(model, precision.linear_kernels))
    return policy


def reads_with_encoder(pretrained: str) -> bool:
    """Return True for an encoder-decoder model, whose encoder reads the prompts.

    A config that cannot be read gives False: `load_policy` raises the error.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve_pretrained(pretrained), trust_remote_code=False)
    except Exception:  # of the library; `load_policy` raises it
        return False
    return bool(config.is_encoder_decoder)


def load_reference(
    policy: Policy,
    path: str | None,
    pretrained: str,
    precision: Precision,
    lora: LoRA | None = None,
    sharding: PolicySharding | None = None,
) -> Reference:
    """Load the reference model of the KL term.

    Args:
        policy: the policy that is trained.
        path: folder or hub id of the reference; None: the initial policy.
        pretrained: source of the policy's initial weights.
        precision: as the policy's.
        lora: the policy's adapters.
        sharding: shards a separate model over ranks.
    """
    if path is None and policy.has_adapter:
        if lora is not None and lora.adapter_path:
            return AdapterReference(policy, lora.adapter_path)
        return BaseModelReference(policy)
    if path is not None and policy.has_adapter and is_adapter(Path(path).expanduser()):
        return AdapterReference(policy, path)
    if path is not None:
        check_same_tokens(policy.tokenizer, path)
    reference = load_policy(
        path or pretrained,
        tokenizer=policy.tokenizer,
        precision=precision,
        frozen=True,
        sharding=sharding,
    )
    size, policy_size = (model.bare_model.config.vocab_size for model in (reference, policy))
    if size < policy_size:  # families pad the vocabularies of their larger models further
        raise ValueError(
            f"reference: {path!r} has a vocabulary of {size} tokens, the policy one of "
            f"{policy_size}, so their log-probabilities cannot be compared. Set reference to a "
            "model of the same family, or to null for the initial policy."
        )
    return FrozenReference(reference)


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Check that the reference reads the policy's token ids as the same tokens.

    One of the two may have further tokens. A model without a tokenizer is not checked.
    """
    try:
        reference_tokenizer = load_tokenizer(path)
    except ValueError:
        return
    vocabularies = tokenizer.get_vocab(), reference_tokenizer.get_vocab()
    smaller, larger = sorted(vocabularies, key=len)
    different = [token for token, token_id in smaller.items() if larger.get(token) != token_id]
    if different:
        raise ValueError(
            f"reference: {path!r} has another tokenizer than the policy ({len(different)} tokens "
            f"differ, such as {different[0]!r}), so their log-probabilities cannot be compared. "
            "Set reference to a model of the same family, or to null for the initial policy."
        )


def collect_end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return every token that ends a completion: the tokenizer's and the generation config's."""
    generation_config: Any = model.generation_config
    eos: Any = None if generation_config is None else generation_config.eos_token_id
    ids = [eos] if isinstance(eos, int) else list(eos or [])
    return tuple(sorted({int(tokenizer.eos_token_id), *ids}))


def _disable_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Set to 0 what makes training differ from sampling; return the original settings.

    These are dropout, noise of mixture-of-experts routers ("jitter"), and RWKV's `rescale_every`,
    which changes the weights between eval and training mode.
    """
    original = {
        name: value
        for name, value in config.to_dict().items()
        if name == "rescale_every"
        or (isinstance(value, float) and ("drop" in name or "jitter" in name))
    }
    for name, value in original.items():
        setattr(config, name, type(value)(0))
    return original


# --- checkpoints ---


def check_weights(saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that a checkpoint has the weights of the model that is trained, by names and shapes."""
    common = saved.keys() & expected.keys()
    problems = {
        "missing": sorted(expected.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - expected.keys()),
        "of another shape": sorted(n for n in common if saved[n].shape != expected[n].shape),
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(
                f"The checkpoint is of another model: {problem} {names[0]} (and {len(names) - 1} "
                "more). Set `pretrained` and `lora` as in the run that wrote it."
            )
