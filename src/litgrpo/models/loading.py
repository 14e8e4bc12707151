"""From a name or a folder to a policy, and back to a folder that plain transformers loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.distributed.device import backend, to_host
from litgrpo.distributed.fsdp.units import is_divided
from litgrpo.distributed.messages import rank
from litgrpo.models.adapters import (
    LoRA,
    merged,
    refuse_adapter_folder,
    save_adapter,
    with_adapters,
)
from litgrpo.models.generic import decoder_only
from litgrpo.models.gguf import PACKAGE, SUFFIX, from_gguf, packaged
from litgrpo.models.kernels import linear as linears
from litgrpo.models.policy import Policy
from litgrpo.models.quantized import (
    Quantization,
    is_quantized,
    keep_packing,
    loading_settings,
    merged_into_dequantized,
)
from litgrpo.models.reference import AdapterAtStart, AdapterOff, FrozenModel, Reference
from litgrpo.models.shard_files import adapters_in_memory, exported, write_model
from litgrpo.models.sharded import Divide, left_whole
from litgrpo.models.shared_prefix import same_attention_again
from litgrpo.models.t5 import Seq2SeqPolicy
from litgrpo.models.weights import (
    check_vocabulary,
    language_part,
    load_weights,
    other_files,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ASSETS = Path(__file__).parents[1] / "assets"
BUILTIN = "builtin:"
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Precision:
    """How the weights are held, what computes with them and what is recomputed.

    Args:
        dtype: of the weights; with `trainer.precision: bf16-mixed` keep float32.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        dropout: keep the model's dropout in the update; off, the first ratio is exactly 1.
        kernels: of the linear layers on a CPU: `auto` takes the one that is clearly faster for
            weights of this size, `plain` torch's own, `onednn` the other, for bfloat16 only where
            the processor can.
        share_prompts: in the update, read each prompt once for its whole group, without padding.
        selective_recompute: in the backward pass, compute norms and the MLP's elementwise part
            again instead of keeping them, which halves the activations of Llama, Qwen 2, Qwen 3 and
            Gemma 2 and costs next to no time; other models keep what they keep.
        compute: compute matrix products in this lower precision, in sampling and in learning, with
            weights, moments, log-probabilities and losses as they are; null leaves that to
            `trainer.precision`. For devices whose trainer has no mixed precision (XLA).
        quantize: hold the weights under `lora` in four bits (QLoRA): nf4 or fp4; null does not.
    """

    dtype: Dtype = "float32"
    gradient_checkpointing: bool = False
    dropout: bool = False
    kernels: linears.KernelChoice = "auto"
    share_prompts: bool = True
    selective_recompute: bool = True
    compute: Literal["bfloat16", "float16"] | None = None
    quantize: Quantization | None = None

    def __post_init__(self) -> None:
        """Check that the two number formats go together."""
        require(
            self.compute is None or self.dtype == "float32",
            f"precision.compute is {self.compute}, which lowers the precision of float32 weights, "
            f"but precision.dtype is {self.dtype}. Leave out one of the two.",
        )


def resolve(pretrained: str) -> str:
    """The folder of an embedded model, a GGUF file or a package; any other name as it is.

    Raises:
        ValueError: an unknown embedded model, a path that does not exist, an unreadable file.
    """
    if pretrained.startswith(BUILTIN):
        folder = ASSETS / pretrained.removeprefix(BUILTIN)
        if not folder.is_dir():
            known = sorted(BUILTIN + path.name for path in ASSETS.iterdir() if path.is_dir())
            raise ValueError(f"There is no embedded model {pretrained!r}; there is {known}.")
        return str(folder)
    looks_like_path = pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1
    is_packaged = pretrained.startswith(PACKAGE)
    folder = packaged(pretrained) if is_packaged else Path(pretrained).expanduser()
    if folder.is_file() and folder.suffix == SUFFIX:
        return str(from_gguf(folder))
    require(
        not folder.is_file(),
        f"pretrained: {pretrained!r} is a file, and no GGUF file by its name. Give a .gguf file, "
        "or the folder that holds config.json, the weights as safetensors and the tokenizer, as "
        "save_pretrained writes it.",
    )
    refuse_adapter_folder(folder)
    if looks_like_path and not (folder / "config.json").is_file():
        raise ValueError(
            f"pretrained: {pretrained!r} is no model folder (no config.json in it). Give a folder "
            "written by save_pretrained, a Hugging Face hub id, or an embedded model such as "
            "'builtin:tiny-gemma2'."
        )
    return str(folder) if folder.is_dir() else pretrained


def load_tokenizer(pretrained: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, padding on the left.

    Raises:
        ValueError: nothing can be loaded, or it has no pad or end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(pretrained), padding_side="left")
    except (OSError, ValueError) as error:
        raise ValueError(_not_loadable("tokenizer", pretrained, error)) from error
    check_tokenizer(tokenizer, pretrained)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that cannot read a text, or end or pad a row.

    Raises:
        ValueError: there is no end token, no pad token or no token for text.
    """
    # What transformers makes of a folder without tokenizer files: at most a word boundary besides.
    special = set(tokenizer.all_special_tokens)
    if not any(any(map(str.isalnum, token)) for token in tokenizer.get_vocab().keys() - special):
        raise ValueError(
            f"The tokenizer of {name!r} has special tokens only: its files are missing. Save the "
            "tokenizer into the model's folder, too."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no end token (eos_token), so no completion could end. "
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no pad token (pad_token). Set it in its "
            "tokenizer_config.json; an unused token is best, the end token works too."
        )


def _not_loadable(what: str, pretrained: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip()
    if reason.endswith(":"):  # a list of conditions follows, of which none is the user's
        reason = f"It has no {what} files that transformers can read."
    said = f"No {what} could be loaded from pretrained: {pretrained!r}. {reason}"
    return said + other_files(resolve(pretrained))


def load_policy(
    pretrained: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    precision: Precision | None = None,
    lora: LoRA | None = None,
    frozen: bool = False,
    divide: Divide = left_whole,
) -> Policy:
    """Load a model and its tokenizer as a policy: decoder-only, or encoder-decoder (T5).

    Args:
        pretrained: hub id, folder, GGUF file, `builtin:<name>` or `package:<name>/<path>`.
        tokenizer: the tokenizer, if it is loaded already.
        precision: dtype, checkpointing and dropout.
        lora: train adapters instead of the weights.
        frozen: it will not be trained.
        divide: divides the policy over processes before its weights are read.

    Raises:
        ValueError: nothing can be loaded from there.
    """
    from transformers import AutoConfig

    precision = precision or Precision()
    require(
        precision.quantize is None or lora is not None or frozen,
        f"precision.quantize is {precision.quantize}, but weights in four bits cannot be trained "
        "themselves. Give --model.lora.rank 16, or leave it out.",
    )
    divide.check(precision.quantize, lora)
    folder = resolve(pretrained)
    tokenizer = tokenizer or load_tokenizer(pretrained)
    try:
        whole = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(_not_loadable("config", pretrained, error)) from error
    config = language_part(whole)
    original_dropout = {} if precision.dropout else _switch_dropout_off(config)
    try:
        dtype = getattr(torch, precision.dtype)
        how = loading_settings(precision.quantize, dtype)
        simple = config is whole and not how
        empty = divide.empty_model(folder, config, dtype) if simple else None
        model = empty or load_weights(folder, config, dtype, whole=config is whole, **how)
    except OSError as error:
        raise ValueError(_not_loadable("model", pretrained, error)) from error
    check_vocabulary(model, tokenizer, pretrained)
    described: Any = {"lora": lora, "original_dropout": original_dropout}
    with adapters_in_memory() if empty is not None else nullcontext():
        policy = as_policy(model, tokenizer, precision=precision, **described)
    policy.requires_grad_(not frozen) if frozen else policy
    divide(policy)
    if empty is not None:
        divide.read(policy, folder)
    return policy


def as_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    precision: Precision | None = None,
    lora: LoRA | None = None,
    original_dropout: dict[str, float] | None = None,
) -> Policy:
    """A policy around a model at hand; see `load_policy`."""
    precision = precision or Precision()
    keep_packing(model)
    if precision.gradient_checkpointing:
        again = partial(same_attention_again, model)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": again})
    if lora is not None:
        model = with_adapters(model, lora)
    kind = Seq2SeqPolicy if model.config.is_encoder_decoder else decoder_only
    policy = kind(model, tokenizer, end_tokens(model, tokenizer), original_dropout)
    policy.share_prompts = precision.share_prompts
    policy.selective_recompute = precision.selective_recompute
    policy.compute_dtype = getattr(torch, precision.compute) if precision.compute else None
    policy.use_kernels(linears.choose(model, precision.kernels))
    return policy


def load_reference(
    policy: Policy,
    path: str | None,
    pretrained: str,
    precision: Precision,
    lora: LoRA | None = None,
    divide: Divide = left_whole,
) -> Reference:
    """The model that the KL term refers to.

    Args:
        policy: the policy that learns.
        path: the reference's folder or hub id; None takes the start of training.
        pretrained: where the policy was loaded from; a resumed run finds its start there.
        precision: as the policy's.
        lora: the policy's adapters.
        divide: divides a model of its own over processes.

    Raises:
        ValueError: its vocabulary differs from the policy's.
    """
    if path is None and policy.has_adapter:
        return (
            AdapterOff(policy)
            if lora is None or not lora.start
            else AdapterAtStart(policy, lora.start)
        )
    how: Any = {"precision": precision, "frozen": True, "divide": divide}
    reference = load_policy(path or pretrained, tokenizer=policy.tokenizer, **how)
    sizes = [each.bare_model.config.vocab_size for each in (reference, policy)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"reference: {path!r} has a vocabulary of {sizes[0]} tokens, the policy one of "
            f"{sizes[1]}; their log-probabilities cannot be compared. Give a reference of the same "
            "model family, or null for the start of training."
        )
    return FrozenModel(reference)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's and the generation config's."""
    listed: Any = None if model.generation_config is None else model.generation_config.eos_token_id
    ids = [listed] if isinstance(listed, int) else list(listed or [])
    return tuple(sorted({int(tokenizer.eos_token_id), *ids}))


def _switch_dropout_off(config: PretrainedConfig) -> dict[str, float]:
    """Set to 0 what makes learning differ from sampling; what was there before.

    Dropout, noise on the routers of experts, and RWKV's `rescale_every`, which changes the weights
    themselves between the two.
    """
    settings = config.to_dict().items()
    noise = ("drop", "jitter")
    own = {
        name: value
        for name, value in settings
        if isinstance(value, float) and any(word in name for word in noise)
    }
    own |= {name: value for name, value in settings if name == "rescale_every"}
    for name, value in own.items():
        setattr(config, name, type(value)(0))
    return own


def check_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of another model.

    Args:
        found: {name: tensor} of the checkpoint.
        expected: {name: tensor} of what is trained.

    Raises:
        ValueError: names or shapes differ.
    """
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    shared = sorted(expected.keys() & found.keys())
    reshaped = [name for name in shared if found[name].shape != expected[name].shape]
    for problem, names in {"lacks": missing, "adds": unknown, "reshapes": reshaped}.items():
        if names:
            raise ValueError(
                f"The checkpoint is of another model: it {problem} {names[0]} (and {len(names) - 1}"
                " more). Give the same `pretrained` and `lora` as when it was written."
            )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over ours; a small model is read in no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def export(policy: Policy, folder: str | Path, dtype: Dtype | None = None) -> None:
    """Write the policy as a folder that `from_pretrained` of plain transformers loads.

    Adapters are merged into the weights; the policy itself is left as it is.

    Args:
        policy: the policy.
        folder: where to write config, weights (safetensors) and tokenizer.
        dtype: of the weights in the folder; None leaves them.

    Raises:
        OSError: the disk refuses.
    """
    if is_divided(policy):
        export_shards(policy, Path(folder), dtype)
        return
    model: Any = policy.model
    if policy.has_adapter:
        model = merged_into_dequantized(model) if is_quantized(model) else merged(model)
    if dtype is not None:
        model = copy.deepcopy(model).to(getattr(torch, dtype))
    config = _exported_config(policy, model)
    original, model.config = model.config, config
    try:
        with _no_progress_bars():
            weights = _on_host(model) if backend(model.device).static_shapes else None
            model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    finally:
        model.config = original
    policy.tokenizer.save_pretrained(folder)
    _name_tokenizer_class(Path(folder))
    _open_to_whom_the_rest_is(Path(folder))


def _exported_config(policy: Policy, model: Any) -> Any:
    """The model's config, with what was changed at load put back."""
    config = copy.deepcopy(model.config)
    for name, value in policy.original_dropout.items():
        setattr(config, name, value)
    if config.is_encoder_decoder:
        # Transformers 5 calls T5's head tied in any case; older versions believe it.
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        config.tie_word_embeddings = tied
    return config


def export_shards(policy: Policy, folder: Path, dtype: Dtype | None = None) -> None:
    """Write a divided policy as `export` does, without putting it together anywhere.

    Every process must take part.
    """
    write_model(exported(policy.model, dtype and getattr(torch, dtype)), folder)
    if rank():
        return
    config = _exported_config(policy, policy.bare_model)
    config.dtype = dtype or config.dtype
    config.architectures = [type(policy.bare_model).__name__]
    config.save_pretrained(folder)
    if policy.bare_model.generation_config is not None:
        policy.bare_model.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder)
    _open_to_whom_the_rest_is(folder)


def _open_to_whom_the_rest_is(folder: Path) -> None:
    """Give the weights the permissions of the files beside them; safetensors keeps them private."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def export_adapter(policy: Policy, folder: str | Path) -> None:
    """Write the trained adapter in PEFT's format, with the tokenizer.

    Raises:
        ValueError: the policy has none.
    """
    require(
        policy.has_adapter,
        "There is no adapter to export: this run trains the weights themselves (no model.lora).",
    )
    save_adapter(policy.model, folder)
    if rank():
        return
    policy.tokenizer.save_pretrained(folder)
    _name_tokenizer_class(Path(folder))


def _on_host(model: Any) -> dict[str, Tensor]:
    """The state of a model in the host's memory; tied weights are one tensor again."""
    state = model.state_dict(keep_vars=True)
    once = {id(tensor): tensor for tensor in state.values()}
    copies = dict(zip(once, to_host(list(once.values())), strict=True))
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def _name_tokenizer_class(folder: Path) -> None:
    """Give the tokenizer the name that older transformers know: 5 calls it TokenizersBackend."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2) + "\n")
