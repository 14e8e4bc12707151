"""The policy that every engine and every learning step is handed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from litgrpo.models.attention.static import StaticState
from litgrpo.models.kernels import linear as linears
from litgrpo.parallel.device import kept_apart
from litgrpo.tensors import Head, head_chunk, token_logprobs
from litgrpo.types import TokenLogprobs


def lower_precision(
    device: torch.device, dtype: torch.dtype | None
) -> AbstractContextManager[None]:
    """Compute matrix products in `dtype`; None leaves things as they are."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class SecondTime:
    """A head that is computed twice to save memory, also where a compiler merges what is equal.

    Args:
        right: hidden states -> logits.
    """

    def __init__(self, right: Head) -> None:
        """The first time."""
        self.right, self.now = right, False

    def head(self, hidden: Tensor) -> Tensor:
        """The same logits, the second time from something that a compiler cannot merge."""
        return self.right(kept_apart(hidden) if self.now else hidden)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of the first time and of the second."""
        return nullcontext(), self._second()

    @contextmanager
    def _second(self) -> Iterator[None]:
        self.now = True
        try:
            yield
        finally:
            self.now = False


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
        own_dropout: dropout settings of the model's config that were set to 0 at load; export
            writes them back.
    """

    head_chunk: int | None = None  # tokens whose logits exist at once; None: by their number
    share_prompts = True  # what the recipe allows; `shares_prompts` is what is done
    kernels = linears.Kernels()
    # Compute every position of every row, padding too: no shape then depends on what is said.
    fixed_shapes = False
    compute_dtype: torch.dtype | None = None  # lower than the weights'; see `arithmetic`

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: tuple[int, ...],
        own_dropout: dict[str, float] | None = None,
    ) -> None:
        """Hold the model; nothing is computed."""
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.own_dropout = own_dropout or {}
        self.pad_id = int(tokenizer.pad_token_id)

    @property
    def bare_model(self) -> PreTrainedModel:
        """The library's model, with adapter layers in place but without the adapter wrapper."""
        return self.model.get_base_model() if self.has_adapter else self.model  # type: ignore[operator]

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA layers are trained instead of the weights."""
        return not isinstance(self.model, PreTrainedModel)

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> logits [..., V], with all that the model does to logits."""

    @abstractmethod
    def predictors(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Hidden states that predict marked tokens, for supervised training.

        Args:
            ids: [M, T] a prompt and its completion one after the other, padded on the right.
            mask: [M, T] True marks a real token.
            target_mask: [M, T] True marks the K tokens to predict: those of the completion.

        Returns:
            [K, E] in row order, with gradient.
        """

    @property
    def shares_prompts(self) -> bool:
        """Whether `logprobs` reads a prompt once for all of its completions."""
        return False

    @property
    def vocab_size(self) -> int:
        """Number of logits, V; a model may have more than its tokenizer has tokens."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def linear_outputs(self) -> int:
        """Numbers that the linear layers compute for each token, the head not counted."""
        head = self.model.get_output_embeddings()
        layers = [layer for layer in linears.fast_linears(self.model) if layer is not head]
        return max(1, sum(len(layer.matrix) for layer in layers))

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
    def static_decoding(self) -> AbstractContextManager[None]:
        """What to call `static_prefill` and `static_step` within.

        Raises:
            ValueError: the model cannot decode in fixed shapes.
        """

    @abstractmethod
    def static_prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Like `prefill`, for a compiler: shapes depend on shapes, and no value is looked at.

        Args:
            prompt_ids: [B, P] token ids, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            group_size: G.
            capacity: most tokens that a completion will be fed, C.

        Returns:
            [N, V] logits of the first completion token of each row, and the state of the rows.
        """

    @abstractmethod
    def static_step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Like `step`, for a compiler: the same graph for every step.

        Args:
            tokens: [N] the tokens just sampled.
            state: the state of these rows, which is used up.

        Returns:
            [N, V] logits of the next token, and the state one position further.
        """

    @abstractmethod
    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Logits of every completion position by one plain forward pass: slow, plainly right.

        Args:
            prompt_ids: [M, P] one prompt for each row.
            prompt_mask: [M, P] True marks a real token.
            completion_ids: [M, C] completion tokens so far; C may be 0.

        Returns:
            [M, C + 1, V] logits; entry t predicts completion token t.
        """

    @abstractmethod
    def logprobs(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt_of: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        support: Tensor | None = None,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> TokenLogprobs:
        """Log-probabilities of given completions, with gradient.

        Args:
            prompt_ids: [B, P] prompts, each once, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            prompt_of: [M] the prompt that each completion continues.
            completion_ids: [M, C] padded on the right.
            completion_mask: [M, C] True marks a real token.
            support: [M, C, S] ids of the tokens that could be drawn (-1: none), which the
                distributions are over; None: all tokens.
            temperature: divides the logits, as it did at sampling.
            entropy_grad: let the gradient flow through the entropy too.

        Returns:
            [M, C] log-probabilities and entropies; 0 on padding.
        """

    @abstractmethod
    def hidden_of_places(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt_of: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> Tensor:
        """Hidden states that predict every place of given completions, padding too.

        No shape depends on values and none is looked at.

        Args:
            prompt_ids: [B, P]; and the others: as for `logprobs`.
            prompt_mask: see there.
            prompt_of: see there.
            completion_ids: see there.
            completion_mask: see there.

        Returns:
            [M, C, E], with gradient.
        """

    def logprobs_of_places(
        self,
        hidden: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        support: Tensor | None,
        temperature: float,
        entropy_grad: bool,
    ) -> TokenLogprobs:
        """Log-probabilities from hidden states, computed for padding, too, and masked afterwards.

        Args:
            hidden: [M, C, E] hidden states that predict each completion token.
            completion_ids: [M, C]; and the others: as for `logprobs`.
            completion_mask: see there.
            support: see there.
            temperature: see there.
            entropy_grad: see there.
        """
        again = SecondTime(self.head)
        found = token_logprobs(
            hidden.flatten(0, 1),
            completion_ids.flatten(),
            again.head,
            support=None if support is None else support.flatten(0, 1),
            temperature=temperature,
            chunk_size=self.head_chunk or head_chunk(completion_ids.numel(), self.vocab_size),
            entropy_grad=entropy_grad,
            context_fn=again.contexts,
        )
        return TokenLogprobs(
            *(torch.where(completion_mask, each.view_as(completion_mask), 0.0) for each in found)
        )
