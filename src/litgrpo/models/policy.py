"""The policy that every engine and every learning step is handed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from litgrpo.distributed.device import backend
from litgrpo.models.kernels import linear as linears
from litgrpo.models.leaving import RowsAway
from litgrpo.models.packing import pack_left
from litgrpo.models.static_decoder import StaticDecoder
from litgrpo.tensors import head_chunk, token_logprobs
from litgrpo.types import TokenLogprobs, TokenRows


def lower_precision(
    device: torch.device, dtype: torch.dtype | None
) -> AbstractContextManager[None]:
    """Compute matrix products in `dtype`; None leaves things as they are."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class DecodeState(ABC):
    """What a policy remembers of the rows it is decoding: cached keys and values, positions.

    `can_join`: whether rows of another state of the same rollout can be taken in by `join`.
    Engines refill free slots only then.
    """

    can_join: bool = False

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep only the given live rows.

        Args:
            rows: [m] numbers of the rows to keep, in their new order. Engines let the last rows
                fill the places of those that leave, so that few of them move.
        """

    def join(self, newcomers: DecodeState) -> None:
        """Take in rows after the own ones.

        Args:
            newcomers: a state fresh from `Policy.prefill`, of the same capacity.
        """
        raise AssertionError("can_join is False")


class Policy(nn.Module, ABC):
    """A language model as the rollout and the learning step see it.

    Args:
        model: a Hugging Face model, possibly with adapters.
        tokenizer: its tokenizer, with a pad and an end token.
        eos_ids: tokens that end a completion.
        original_dropout: dropout settings of the model's config that were set to 0 at load; export
            writes them back.
    """

    head_chunk: int | None = None  # tokens whose logits exist at once; None: by their number
    share_prompts = True  # what the recipe allows; `shares_prompts` is what is done
    selective_recompute = True  # what the recipe allows
    kernels = linears.Kernels()
    static_decoder: type[StaticDecoder]  # of this kind of model
    compute_dtype: torch.dtype | None = None  # lower than the weights'; see `arithmetic`

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: tuple[int, ...],
        original_dropout: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        self._static_shapes: bool | None = None
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.original_dropout = original_dropout or {}
        self.pad_id = int(tokenizer.pad_token_id)

    @property
    def bare_model(self) -> PreTrainedModel:
        """The library's model, with adapter layers in place but without the adapter wrapper."""
        return self.model.get_base_model() if self.has_adapter else self.model  # type: ignore[operator]

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA layers are trained instead of the weights."""
        return not isinstance(self.model, PreTrainedModel)

    @property
    def static_shapes(self) -> bool:
        """Compute every position of every row, padding too, so that no shape depends on a value.

        Where a device compiles a program for each set of shapes, unless it is set.
        """
        if self._static_shapes is None:
            return backend(self.model.device).static_shapes
        return self._static_shapes

    @static_shapes.setter
    def static_shapes(self, value: bool | None) -> None:
        self._static_shapes = value

    @property
    def static(self) -> StaticDecoder:
        """The policy in shapes that never change."""
        return self.static_decoder(self)

    @property
    def shares_prompts(self) -> bool:
        """Whether `logprobs` reads a prompt once for all of its completions."""
        return False

    @property
    def vocab_size(self) -> int:
        """Number of logits, V; a model may have more than its tokenizer has tokens."""
        return self.model.get_output_embeddings().weight.shape[0]

    def arithmetic(self) -> AbstractContextManager[None]:
        """What to sample and to learn within: matrix products in the recipe's lower precision."""
        return lower_precision(self.model.device, self.compute_dtype)

    def use_kernels(self, kernels: linears.Kernels) -> None:
        """Compute the linear layers with these kernels from now on."""
        self.kernels = kernels
        linears.use(self.model, kernels)

    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> AbstractContextManager[None]:
        """What to decode within: the policy may prepare itself, its weights will not change.

        Args:
            rows: rows that decode at the same time at most.
            dtype: lower precision to compute in; None: as the policy does.
            fused: let the policy take a faster decoding step of its own, if it has one.
        """
        return lower_precision(self.model.device, dtype)

    # --- what a kind of model must define ---

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> logits [..., V], with all that the model does to logits."""

    @abstractmethod
    def hidden(self, rows: TokenRows) -> Tensor:
        """[K, E] hidden states that predict the K completion tokens, in row order."""

    @abstractmethod
    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Read the prompts, each once, and make room for `group_size` completions of each.

        Args:
            prompt_ids: [B, P] token ids, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            group_size: G.
            capacity: most tokens that a completion will be fed, C.

        Returns:
            [B, V] logits of the first completion token, and the state of the N = B * G rows.
        """

    @abstractmethod
    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
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
        """Logits by the library's own forward pass: slow, and what everything is compared with.

        Args:
            prompt_ids: [M, P] one prompt for each row.
            prompt_mask: [M, P] True marks a real token.
            completion_ids: [M, C] completion tokens so far; C may be 0.

        Returns:
            [M, C + 1, V] logits; entry t predicts completion token t.
        """

    def away(self, state: DecodeState) -> RowsAway | None:
        """How rows of this state leave a batch for a while; None where they cannot."""
        return None

    # --- what follows from it ---

    def predictors(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Hidden states that predict marked tokens, for supervised training.

        Args:
            ids: [M, T] a prompt and its completion one after the other, padded on the right.
            mask: [M, T] True marks a real token.
            target_mask: [M, T] True marks the K tokens to predict: those of the completion.

        Returns:
            [K, E] in row order, with gradient.
        """
        prompts = pack_left(ids, mask & ~target_mask)
        completions = pack_left(ids, target_mask)
        prompt_of = torch.arange(len(ids), device=ids.device)
        return self.hidden(TokenRows(*prompts, prompt_of, *completions))

    def logprobs(
        self, rows: TokenRows, *, temperature: float = 1.0, entropy_grad: bool = False
    ) -> TokenLogprobs:
        """Log-probabilities of given completions, with gradient.

        Args:
            rows: M completions and their prompts; where `loss_mask` is given, of its tokens alone.
            temperature: divides the logits, as it did at sampling.
            entropy_grad: let the gradient flow through the entropy too.

        Returns:
            [M, C] log-probabilities and entropies; 0 on padding.
        """
        settings: dict[str, Any] = {"temperature": temperature, "entropy_grad": entropy_grad}
        if self.static_shapes:
            return self.static.logprobs(rows, **settings)
        mask, candidates = rows.completion_mask, rows.candidate_ids
        hidden = self.hidden(rows)
        spoken = mask if rows.loss_mask is None else rows.loss_mask
        if int(spoken.sum()) < len(hidden):  # what was heard has no distribution
            hidden, mask = hidden[spoken[mask]], spoken
        found = token_logprobs(
            hidden,
            rows.completion_ids[mask],
            self.head,
            candidate_ids=None if candidates is None else candidates[mask],
            chunk_size=self.chunk_size(len(hidden)),
            **settings,
        )
        padded = found[0].new_zeros(mask.shape)
        return TokenLogprobs(*(padded.masked_scatter(mask, each) for each in found))

    def chunk_size(self, num_tokens: int) -> int:
        """Tokens whose logits exist at once."""
        return self.head_chunk or head_chunk(num_tokens, self.vocab_size)
