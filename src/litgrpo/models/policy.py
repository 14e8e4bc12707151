"""Interface of the policy: what rollout engines and training steps call on a language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from litgrpo.distributed.device import backend
from litgrpo.models.decode.fixed import FixedDecoder
from litgrpo.models.decode.shared_prefix import DecodeState, RowOffloader
from litgrpo.models.decode.static import StaticDecoder
from litgrpo.models.kernels import linear as linears
from litgrpo.models.transformers_compat import AttentionFunction, MaskFunction, register_attention
from litgrpo.tensors import FEW_LOGITS, ComparedModel, head_chunk, token_logprobs
from litgrpo.types import TokenLogprobs, TokenRows, move_to_positions, to_device


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Return a context that computes matrix products in `dtype`; None changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class Policy(nn.Module, ABC):
    """A language model with the operations that rollout and training need.

    Args:
        model: a Hugging Face model, possibly with adapters.
        tokenizer: its tokenizer, with a pad and an end token.
        eos_ids: tokens that end a completion.
        original_dropout: dropout settings of the model's config that were set to 0 at load; export
            restores them.

    Example:
        >>> from litgrpo.models.loading.load import load_policy
        >>> policy = load_policy("builtin:tiny-gemma2")
        >>> prompt = policy.tokenizer(["12+7="], return_tensors="pt")
        >>> with policy.decoding(rows=2):
        ...     logits, state = policy.prefill(
        ...         prompt.input_ids, prompt.attention_mask.bool(), group_size=2, capacity=8
        ...     )
        ...     tokens = logits.argmax(-1).repeat_interleave(2)  # both rows of the group
        ...     policy.decode_step(tokens, state).shape == (2, policy.vocab_size)
        True
    """

    few_logits = FEW_LOGITS  # logits that may exist at once
    share_prompts = True  # `precision.share_prompts`; in effect: `computes_prompts_once`
    autocast_dtype: torch.dtype | None = None  # `precision.autocast_dtype`
    linear_kernels = linears.LinearKernels()
    static_decoder_class: ClassVar[type[StaticDecoder] | None] = None
    # {name: attention function, mask function} that this kind of policy runs the model with.
    attention_functions: ClassVar[Mapping[str, tuple[AttentionFunction, MaskFunction | None]]] = {}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: tuple[int, ...],
        original_dropout: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        for name, (attend, mask) in self.attention_functions.items():
            register_attention(name, attend, mask)
        self._static_shapes: bool | None = None
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.original_dropout = original_dropout or {}
        self.pad_id = int(tokenizer.pad_token_id)

    def completion_texts(
        self, rows: Sequence[list[int]], stop_token_ids: Sequence[int] = ()
    ) -> list[str]:
        """Decode completions with the special tokens that the policy generated.

        Only the token that ends a completion is left out, an end or stop token, if it is special. A
        full stop as end token is part of the text.

        Args:
            rows: token ids of the completions.
            stop_token_ids: further tokens that end a completion.
        """
        added_tokens = self.tokenizer.added_tokens_decoder.items()
        special_ids = {
            *self.tokenizer.all_special_ids,
            *(token_id for token_id, token in added_tokens if token.special),
        }
        end_ids = special_ids & {*self.eos_ids, *stop_token_ids}
        texts: list[str] = self.tokenizer.batch_decode(
            [ids[:-1] if ids and ids[-1] in end_ids else ids for ids in rows]
        )
        return texts

    @property
    def bare_model(self) -> PreTrainedModel:
        """The transformers model without PEFT's wrapper; adapter layers stay in place."""
        return self.model.get_base_model() if self.has_adapter else self.model  # type: ignore[operator]

    @property
    def has_adapter(self) -> bool:
        """True if LoRA adapters are trained instead of the weights."""
        return not isinstance(self.model, PreTrainedModel)

    @property
    def static_shapes(self) -> bool:
        """Compute every position of every row including padding, so that shapes are constant.

        The default is True on devices that compile a program for each set of shapes (XLA).
        """
        if self._static_shapes is None:
            return backend(self.model.device).static_shapes
        return self._static_shapes

    @static_shapes.setter
    def static_shapes(self, value: bool | None) -> None:
        self._static_shapes = value

    @property
    def static_decoder(self) -> StaticDecoder:
        """The same model computed in static shapes.

        Raises:
            ValueError: this kind of policy has no static decoder.
        """
        if self.static_decoder_class is None:
            raise ValueError(
                f"model type {self.model.config.model_type!r} runs transformers' own forward pass, "
                "which has no static shapes. Use litgrpo.rollout.engines.local.LocalEngine on a "
                "CPU or GPU."
            )
        return self.static_decoder_class(self)

    @property
    def computes_prompts_once(self) -> bool:
        """True if `logprobs` computes a prompt once for all of its completions."""
        return False

    @property
    def vocab_size(self) -> int:
        """Number of logits, V; can exceed the tokenizer's number of tokens."""
        return self.model.get_output_embeddings().weight.shape[0]

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of sampling and training: `precision.autocast_dtype`."""
        return autocast_to(self.model.device, self.autocast_dtype)

    def set_linear_kernels(self, kernels: linears.LinearKernels) -> None:
        """Compute the linear layers with these kernels."""
        self.linear_kernels = kernels
        linears.set_kernels(self.model, kernels)

    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> AbstractContextManager[None]:
        """Return the context of a rollout: the policy may copy weights, which must not change.

        Args:
            rows: maximum number of rows that decode at the same time.
            dtype: lower precision to compute in; None: the policy's.
            fused: use the policy's fused decoding step if it has one.
        """
        return autocast_to(self.model.device, dtype)

    # --- what a kind of model must define ---

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., E], including logit scale and soft-cap."""

    @abstractmethod
    def hidden(self, rows: TokenRows) -> Tensor:
        """Compute the hidden states [K, E] that predict the K completion tokens, in row order."""

    @abstractmethod
    def target_hidden_states(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Compute the hidden states that predict marked tokens, for supervised fine-tuning.

        Args:
            ids: [M, T] rows of tokens, padded on the right.
            mask: [M, T] True marks a real token.
            target_mask: [M, T] True marks the K tokens to predict, in any number of spans; each is
                predicted by all real tokens before it in its row.

        Returns:
            [K, E] in row order, with gradient.

        Raises:
            ValueError: an encoder-decoder model, and a row has several spans.
        """

    @abstractmethod
    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Compute the prompts, each once, and allocate `group_size` completions of each.

        Args:
            prompt_ids: [B, P] token ids, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            group_size: G.
            capacity: maximum number of tokens that a completion is fed, C.

        Returns:
            [B, V] logits of the first completion token, and the state of the N = B * G rows.
        """

    @abstractmethod
    def decode_step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Feed one token to every live row.

        Args:
            tokens: [n] the tokens just sampled.
            state: the state of these rows; it advances by one position.

        Returns:
            [n, V] logits of the next token.
        """

    @abstractmethod
    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Compute logits by the plain transformers forward pass: slow, the reference of all checks.

        Args:
            prompt_ids: [M, P] one prompt for each row.
            prompt_mask: [M, P] True marks a real token.
            completion_ids: [M, C] completion tokens so far; C may be 0.

        Returns:
            [M, C + 1, V] logits; entry t predicts completion token t.
        """

    @property
    def fixed_decoder(self) -> FixedDecoder:
        """Decoder in fixed shapes.

        Raises:
            ValueError: this kind of policy has none.
        """
        return self.static_decoder

    @property
    def can_record(self) -> bool:
        """True within `decoding` if a device can record the steps of `fixed_decoder`."""
        return False

    def make_row_offloader(self, state: DecodeState) -> RowOffloader | None:
        """Return the store of rows that leave the batch between turns; None if unsupported."""
        return None

    # --- what follows from it ---

    def hidden_states(self, rows: TokenRows) -> Tensor:
        """Compute [M, C, E] hidden states that predict the generated tokens; see `logprobs`.

        Args:
            rows: M completions and their prompts.
        """
        if rows.segments is not None:
            split, positions = rows.split_segments()
            shape = rows.completion_ids.shape
            return move_to_positions(self.hidden_states(split), positions, shape)
        if self.static_shapes:
            return self.static_decoder.hidden(rows)
        hidden, positions = self._compute_generated_states(rows)
        shape = rows.completion_ids.shape
        padded = hidden.new_zeros(shape.numel(), hidden.shape[-1])
        return padded.index_copy(0, positions, hidden).view(*shape, -1)

    def _compute_generated_states(self, rows: TokenRows) -> tuple[Tensor, Tensor]:
        """Return [K, E] hidden states of the generated tokens, and [K] their positions in M * C."""
        masks, hidden = rows.on_host, self.hidden(rows)
        indices = [masks.predicted.flatten().nonzero().squeeze(1)]
        if len(indices[0]) < len(hidden):  # observations need no logits
            indices.append(masks.predicted[masks.completion_mask].nonzero().squeeze(1))
        # Indices from the host: a mask as index would wait for the device.
        positions, *observation_filter = to_device(indices, hidden.device)
        for generated in observation_filter:
            hidden = hidden.index_select(0, generated)
        return hidden, positions

    def logprobs(
        self,
        rows: TokenRows,
        *,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        compared: ComparedModel | None = None,
        score_norms: bool = False,
    ) -> TokenLogprobs:
        """Compute log-probabilities of given completions, with gradient.

        Args:
            rows: M completions and their prompts; if `predicted` is given, only its tokens are
                computed.
            temperature: divides the logits, as it did at sampling.
            entropy_grad: let the gradient flow through the entropy too.
            compared: another model whose distributions are compared with the policy's; its hidden
                states are [M, C, E].
            score_norms: return squared norms of the gradients by the logits as well.

        Returns:
            [M, C] log-probabilities and entropies, and divergences with `compared`; 0 on padding.
        """
        settings: dict[str, Any] = {"temperature": temperature, "entropy_grad": entropy_grad}
        settings["score_norms"] = score_norms
        if rows.segments is not None:
            split, positions = rows.split_segments()
            if compared is not None:
                hidden = compared.hidden.flatten(0, 1)[positions.clamp(min=0)]
                compared = replace(compared, hidden=hidden)
            logprobs = self.logprobs(split, compared=compared, **settings)
            return logprobs.to_positions(positions, rows.completion_ids.shape)
        if self.static_shapes:
            return self.static_decoder.logprobs(rows, compared=compared, **settings)
        candidates = rows.candidate_ids
        hidden, positions = self._compute_generated_states(rows)
        if compared is not None:
            compared_hidden = compared.hidden.flatten(0, 1).index_select(0, positions)
            compared = replace(compared, hidden=compared_hidden)
        if candidates is not None:
            candidates = candidates.flatten(0, 1).index_select(0, positions)
        columns = token_logprobs(
            hidden,
            rows.completion_ids.flatten().index_select(0, positions),
            self.head,
            candidate_ids=candidates,
            chunk_size=self.chunk_size(len(hidden), 1 if compared is None else 2),
            compared=compared,
            **settings,
        )
        shape = rows.completion_ids.shape
        padded = columns[0].new_zeros(shape.numel())
        grids = [padded.index_copy(0, positions, column).view(shape) for column in columns]
        return TokenLogprobs.from_columns(
            grids, compared=compared is not None, score_norms=score_norms
        )

    def chunk_size(self, num_tokens: int, num_models: int = 1) -> int:
        """Return the number of tokens whose logits exist at once, those of `num_models` models."""
        num_logits = num_models * self.vocab_size
        return head_chunk(num_tokens, num_logits, self.few_logits)
