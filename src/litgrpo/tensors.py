"""Masked arithmetic, log-probabilities of tokens, and the shift by one, which lives here only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

Head = Callable[[Tensor], Tensor]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
# Logits that may exist at once: 256 MiB in float32, about three times that in the backward pass.
# More on devices with more memory, see `litgrpo.learning.update_config.DeviceSizes`.
FEW_LOGITS = 2**26


def widen(values: Tensor) -> Tensor:
    """Convert to float32; float64 stays float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def safe_exp(x: Tensor, limit: float = 20.0) -> Tensor:
    """e^x, continued past `limit` by its tangent: value and gradient stay finite."""
    return torch.where(x <= limit, x, limit).exp() * (1 + (x - limit).relu())


def query_scale(scaling: float, softcap: float | None) -> float:
    """Scale of the queries, which includes the division by the soft-cap for `apply_softcap`."""
    return scaling if softcap is None else scaling / softcap


def apply_softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that have been divided by the soft-cap already -> softcap * tanh(scores)."""
    return scores if softcap is None else scores.tanh() * softcap


def within(back: Tensor, window: int | None) -> Tensor:
    """Return True where a token may attend to another one `back` positions before it.

    Args:
        back: [...] position of the query less that of the key; negative: the key is later.
        window: positions that a token attends to, itself included; None: all.
    """
    return back >= 0 if window is None else (back >= 0) & (back < window)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[M, 1] mean over the marked tokens of each row of [M, C]; 0 where there are none."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def padding_mask(mask: Tensor) -> Tensor | None:
    """Mask in the form of transformers; None without padding, which makes attention faster."""
    return None if bool(mask.all()) else mask.long()


def positions(mask: Tensor) -> Tensor:
    """[M, T] position of each real token in its row, counted from 0; 0 on left padding.

    Models with absolute positions (GPT-2) are silently wrong on left-padded rows without this.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def predicting(hidden: Tensor, target_mask: Tensor) -> Tensor:
    """The hidden states that predict the marked tokens: the token before each of them.

    Args:
        hidden: [M, T, E] hidden states.
        target_mask: [M, T] True marks the K tokens to predict; never the first of a row.

    Returns:
        [K, E] in row order.
    """
    return hidden[:, :-1][target_mask[:, 1:]]


@dataclass(frozen=True)
class ComparedModel:
    """Another model whose distributions are compared with the policy's, for `token_logprobs`.

    Args:
        hidden: [K, E] its hidden states that predict the same targets; E may differ.
        head: its hidden [k, E] -> logits [k, V], over the same tokens.
        divergence: logits [k, V] of policy and other model -> [k] (nats).

    Example:
        `ComparedModel(teacher_hidden, teacher.head, ReverseKL())`
    """

    hidden: Tensor
    head: Head
    divergence: Callable[[Tensor, Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    candidate_ids: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_grad: bool = False,
    compared: ComparedModel | None = None,
    score_norms: bool = False,
    context_fn: Contexts = noop_context_fn,
) -> tuple[Tensor, ...]:
    """Log-probability of each target and entropy of its distribution, without keeping the logits.

    The logits of one chunk of tokens exist at a time, in the forward pass and again in the
    backward pass, where they are recomputed; those of a single chunk are computed once.

    Args:
        hidden: [K, E] hidden states that predict the targets.
        targets: [K] token ids.
        head: hidden [k, E] -> logits [k, V], after logit scale and soft-cap.
        candidate_ids: [K, S] ids of the tokens that the distribution is over, and -1; None: all
            tokens.
        temperature: divides the logits, as it did at sampling.
        chunk_size: tokens per chunk; see `head_chunk`.
        entropy_grad: let the gradient flow through the entropy too.
        compared: another model, whose distributions are compared with these.
        score_norms: also return |d l / d z|^2 = 1 - 2 p + sum_v p_v^2, the squared norm of the
            gradient of a log-probability l = log p by the logits z, without gradient.
        context_fn: contexts of the first and second computation; see torch's checkpoint.

    Returns:
        [K] float32 log-probabilities (nats), [K] float32 entropies (nats), with `compared` [K]
        float32 divergences (nats), and with `score_norms` [K] float32 squared norms.
    """

    def chunk_logprobs(
        hidden: Tensor, targets: Tensor, candidate_ids: Tensor | None, other: Tensor | None
    ) -> tuple[Tensor, ...]:
        logits = head(hidden)
        logits = logits if temperature == 1 else widen(logits) / temperature
        columns: tuple[Tensor, ...] = _of_logits(
            logits, targets, candidate_ids, entropy_grad, is_repeated
        )
        if compared is None and not score_norms:
            return columns
        logits = widen(logits)
        if candidate_ids is not None:
            logits = _of_candidates(logits, candidate_ids)
        if compared is not None and other is not None:
            with torch.no_grad():
                other = widen(compared.head(other)) / temperature
            if candidate_ids is not None:
                other = _of_candidates(other, candidate_ids)
            # Models of one family may pad the vocabulary differently.
            common = min(logits.shape[-1], other.shape[-1])
            columns = *columns, compared.divergence(logits[:, :common], other[:, :common])
        if score_norms:
            squares = logits.detach().softmax(-1).square().sum(-1)
            columns = *columns, (1 - 2 * columns[0].detach().exp() + squares).clamp(min=0)
        return columns

    is_repeated = False

    @contextmanager
    def repeat(context: AbstractContextManager[Any]) -> Iterator[None]:
        nonlocal is_repeated
        is_repeated = True  # all chunks have been computed once
        with context:
            yield

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = context_fn()
        return first, repeat(second)

    def chunks() -> Iterator[tuple[Tensor, ...]]:
        tensors = (hidden, targets, candidate_ids, None if compared is None else compared.hidden)
        for start in range(0, max(1, len(hidden)), chunk_size):
            rows = slice(start, start + chunk_size)
            part: list[Any] = [None if tensor is None else tensor[rows] for tensor in tensors]
            if torch.is_grad_enabled() and len(hidden) > chunk_size:
                yield checkpoint(chunk_logprobs, *part, use_reentrant=False, context_fn=contexts)
            else:
                yield chunk_logprobs(*part)

    return tuple(torch.cat(parts) for parts in zip(*chunks(), strict=True))


def _of_logits(
    logits: Tensor,
    targets: Tensor,
    candidate_ids: Tensor | None,
    entropy_grad: bool,
    is_repeated: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets [k] and entropies [k] from logits [k, V].

    `is_repeated` is True in the backward pass, where only what the gradient needs is computed.
    """
    if candidate_ids is None and not entropy_grad:
        apply: Callable[..., tuple[Tensor, Tensor]] = _Chosen.apply
        return apply(logits, targets, is_repeated)
    logits = widen(logits)
    target_logits = logits.gather(-1, targets[:, None]).squeeze(-1)
    factor = logits
    if candidate_ids is not None:
        # Places without a candidate have p = 0. Their logit in p * z is 0: 0 * -inf is NaN, and the
        # gradient of p * -1e38 overflows if that of the entropy is above 1 (fp16 scales the loss).
        logits = _of_candidates(logits, candidate_ids)
        factor = logits.masked_fill(candidate_ids < 0, 0.0)
    log_z = logits.logsumexp(-1)
    # H = log Z - sum_v p_v z_v
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = log_z - (torch.exp(logits - log_z[:, None]) * factor).sum(-1)
    return target_logits - log_z, entropy


def _of_candidates(logits: Tensor, candidate_ids: Tensor) -> Tensor:
    """Logits [k, S] of the candidates; the lowest number where there is none."""
    candidates = logits.gather(-1, candidate_ids.long().clamp(min=0))
    return candidates.masked_fill(candidate_ids < 0, torch.finfo(logits.dtype).min)


def head_chunk(num_tokens: int, vocab_size: int, few_logits: int = FEW_LOGITS) -> int:
    """All tokens if their logits are few, else as many as make the product of a chunk efficient."""
    if num_tokens * vocab_size <= few_logits:
        return max(1, num_tokens)
    return max(1, few_logits // 2 // vocab_size)


class _Chosen(torch.autograd.Function):
    """Log-probability of each target under softmax, and the entropy, which has no gradient here.

    The same as logsumexp and gather, with one [k, V] tensor kept instead of three. Logits of lower
    precision are converted here, so that their gradient is written in it at once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, is_repeated: bool
    ) -> tuple[Tensor, Tensor]:
        wide = widen(logits)
        probs = wide.softmax(-1)
        ctx.save_for_backward(probs, targets)
        ctx.dtype = logits.dtype
        if is_repeated:  # only what is saved is used
            logprobs, entropy = (wide.new_empty(len(targets)) for _ in range(2))
        else:
            largest, place = logits.max(-1)
            # log Z = z - log p of any token; the likeliest is the most exact.
            log_z = widen(largest) - probs.gather(-1, place[:, None]).squeeze(-1).log()
            logprobs = wide.gather(-1, targets[:, None]).squeeze(-1) - log_z
            with torch.autocast(logits.device.type, enabled=False):  # it would round both
                # sum_v p_v z_v
                entropy = log_z - (probs[:, None] @ wide[:, :, None]).flatten()
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probs, targets = ctx.saved_tensors
        # d l / d z_v = [v is the target] - p_v
        factor, places = -grad[:, None], targets[:, None]
        of_target = probs.gather(-1, places) * factor + grad[:, None]
        if probs.device.type in ("cpu", "cuda"):  # others cannot write another precision
            of_logits = probs.new_empty(probs.shape, dtype=ctx.dtype)
            torch.mul(probs, factor, out=of_logits)
        else:
            of_logits = (probs * factor).to(ctx.dtype)
        of_logits.scatter_(-1, places, of_target.to(ctx.dtype))
        return of_logits, None, None


def length_buckets(
    lengths: Tensor, *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Rows gathered by length, longest first, so that a micro-batch holds little padding.

    Args:
        lengths: [M] tokens of each row.
        max_rows: largest number of rows of a bucket; None sets no limit.
        max_tokens: largest number of padded tokens of a bucket; a longer row gets a separate one.

    Returns:
        Lists of row numbers; together every row once.

    Example:
        >>> length_buckets(torch.tensor([2, 9, 3, 8]), max_tokens=18)
        [tensor([1, 3]), tensor([2, 0])]
    """
    order = lengths.argsort(descending=True, stable=True)
    sizes = lengths[order].tolist()
    buckets, start = [], 0
    while start < len(sizes):
        rows = len(sizes) - start
        if max_rows is not None:
            rows = min(rows, max_rows)
        if max_tokens is not None:
            rows = min(rows, max(1, max_tokens // max(1, sizes[start])))
        buckets.append(order[start : start + rows])
        start += rows
    return buckets


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards (`DTensor.full_tensor`); every rank must take part.

    Norms of sharded gradients are sharded as well.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compact_rows(active: Tensor, number: int) -> Tensor:
    """Return [number] active rows; the last ones fill the places of rows that ended.

    Moving only these rows keeps copies of the key-value cache small.
    """
    rows = torch.arange(number, device=active.device)
    rows[~active[:number]] = active[number:].nonzero().squeeze(1) + number
    return rows


def local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
