"""Sampling: from logits and one uniform number to a token, filters, and random streams."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.tensors import widen


def filter_candidates(
    scores: Tensor, top_k: int, top_p: float, min_p: float, static_shapes: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the candidate tokens that pass the filters.

    Without top_k the most likely 64 tokens are looked at, and more only if they are not enough:
    sorting a whole vocabulary costs more than the model.

    Args:
        scores: [n, V] float32 logits after temperature.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: keep the most likely up to this cumulative probability.
        min_p: keep those at least this fraction as likely as the most likely one.
        static_shapes: S is top_k, or V without it: then the whole vocabulary is sorted.

    Returns:
        [n, S] scores, -inf where fewer than S are left, and [n, S] their ids; most likely first.
    """
    size = scores.shape[1]
    total = None if top_k else scores.logsumexp(-1, keepdim=True)
    most = top_k or (size if static_shapes else 64)
    while True:
        top, ids = scores.topk(min(most, size))
        keep = torch.ones_like(top, dtype=torch.bool)
        if top_p < 1:
            probs = top.softmax(-1) if total is None else (top - total).exp()
            keep = probs.cumsum(-1) - probs < top_p  # more likely tokens do not suffice
        if min_p:
            keep = keep & (top >= top[:, :1] + math.log(min_p))
        if static_shapes:
            return top.masked_fill(~keep, -torch.inf), ids
        width = max(1, int(keep.sum(-1).max()))  # none is kept where no score is a number
        if top_k or width < most or most >= size:
            return top.masked_fill(~keep, -torch.inf)[:, :width], ids[:, :width]
        most = 8 * most if 64 * most < size else size


Purpose = Literal["train", "val", "test", "predict"]
PURPOSES: tuple[Purpose, ...] = ("train", "val", "test", "predict")

LARGE, BLOCK = 4096, 128  # vocabularies of LARGE or more tokens are summed in blocks of BLOCK
# Below 1 by more than float64 rounds: some cumulative sum always exceeds this share of the last.
BELOW_1 = 1 - 2.0**-50


@check_field_types
@dataclass(frozen=True)
class Sampling:
    """Temperature, filters and stop conditions. Filters apply in the order of the arguments.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens, any of those that tie for the last place; 0 keeps all.
        top_p: keep the most likely tokens up to this cumulative probability, the one that
            crosses it included; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        max_candidates: largest set of tokens that is remembered of a token drawn through filters;
            training keeps no more than these, so that its ratios are taken over the same set.
        stop: a completion ends with the token that completes one of these texts. That token is part
            of the completion and trained on like an end token. Also in validation and predict.
        stop_token_ids: a completion ends with one of these tokens, as with the end token.
        include_stop_str_in_output: whether the text that rewards and files get ends with the text
            of `stop`, or before it. What follows it in the same token is never in the text.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95).top_p
        0.95

    Source: top-p, arXiv:1904.09751; min-p, arXiv:2407.01082.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_candidates: int = 256
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        allowed = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "min_p": (0 <= self.min_p < 1, "at least 0 (off) and below 1"),
            "max_candidates": (self.max_candidates >= 1, "1 or more"),
            "stop": (all(self.stops), "texts of one character or more"),
            "stop_token_ids": (min(self.stop_token_ids, default=0) >= 0, "numbers of tokens"),
        }
        for name, (good, rule) in allowed.items():
            if not good:
                raise ValueError(
                    f"model.sampling.{name} is {getattr(self, name)}; it must be {rule}."
                )

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def ending_as(self, other: Sampling) -> Sampling:
        """Return a copy with the stop conditions of another sampling."""
        return replace(
            self,
            stop=other.stop,
            stop_token_ids=other.stop_token_ids,
            include_stop_str_in_output=other.include_stop_str_in_output,
        )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken and the uniforms are ignored."""
        return self.temperature == 0

    def with_candidates(self) -> Sampling:
        """Set top_k so that the candidate set of each token can be stored for the update.

        With filters, probabilities are over the tokens that could be drawn (the candidate set). The
        update needs the same set, so it must not be larger than `max_candidates`.

        Raises:
            ValueError: top_k is larger.
        """
        if not self.has_filters:
            return self
        if self.top_k > self.max_candidates:
            raise ValueError(
                f"model.sampling.top_k is {self.top_k}, but at most model.sampling.max_candidates "
                f"= {self.max_candidates} tokens are stored for the update. Lower top_k, set it to "
                "0 (all tokens), or raise model.sampling.max_candidates (4 bytes per generated "
                "token and candidate)."
            )
        return replace(self, top_k=self.top_k or self.max_candidates)

    def check_groups(self, group_size: int) -> None:
        """Check that the completions of a group can differ.

        Raises:
            ValueError: the temperature is 0 and groups have several completions.
        """
        if group_size > 1 and self.greedy:
            raise ValueError(
                f"model.sampling.temperature is 0, so the {group_size} completions of a group are "
                "equal and have no advantage. Train with 1.0; model.evaluation.temperature is for "
                "validation."
            )

    @property
    def has_filters(self) -> bool:
        """True if filters exclude tokens, so that sampler and policy distributions differ."""
        return self.filters != (0, 1, 0)

    @property
    def filters(self) -> tuple[int, float, float]:
        """top_k, top_p and min_p."""
        return self.top_k, self.top_p, self.min_p

    @property
    def policy_temperature(self) -> float:
        """Temperature of the log-probabilities in the loss: that of sampling, 1 if greedy."""
        return 1.0 if self.greedy else self.temperature


class Drawn(NamedTuple):
    """One token of each of n rows.

    Args:
        tokens: [n] token ids.
        logprobs: [n] float32 log-probabilities under the filtered distribution.
        candidate_ids: [n, S] int32 ids of the tokens that could be drawn, filled up with -1; None
            if every token could.
    """

    tokens: Tensor
    logprobs: Tensor
    candidate_ids: Tensor | None = None


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, *, static_shapes: bool = False
) -> Drawn:
    """Draw one token per row: the first, in vocabulary order, whose cumulative sum exceeds u.

    One random number per row instead of one per vocabulary entry; cumulative sums are float64, so
    that large vocabularies keep their tails.

    Args:
        logits: [n, V].
        uniforms: [n] float64 in [0, 1); greedy sampling ignores them.
        sampling: temperature and filters.
        static_shapes: no shape depends on values and none is looked at, for compilers; the tokens
            are the same. `candidate_ids` is then always as wide as filters may leave it.

    Returns:
        Tokens, their log-probabilities, and what else could have been drawn.

    Example:
        >>> probs = torch.tensor([[0.2, 0.5, 0.3]])
        >>> draw_tokens(probs.log(), torch.tensor([0.6], dtype=torch.float64), Sampling()).tokens
        tensor([1])
    """
    uniforms = uniforms.clamp(max=BELOW_1)[:, None]
    temperature = sampling.policy_temperature
    scores = logits if temperature == 1 else widen(logits) / temperature
    if not sampling.has_filters:
        # One kernel for both on a GPU, where the logits are most of what sampling reads.
        probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        if sampling.greedy:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            tokens = _first_beyond(probs, uniforms, static_shapes)
        return Drawn(tokens.squeeze(1), probs.gather(1, tokens).log_().squeeze(1))
    scores, ids = filter_candidates(widen(scores), *sampling.filters, static_shapes)
    probs = scores.softmax(-1)
    if sampling.greedy:
        places = scores.argmax(-1, keepdim=True)
    else:
        order = ids.argsort(-1)  # a token is the first in vocabulary order
        places = order.gather(1, _first_beyond(probs.gather(1, order), uniforms, static_shapes))
    candidate_ids = ids.masked_fill(scores == -torch.inf, -1).int()
    tokens, logprobs = ids.gather(1, places), probs.gather(1, places).log_()
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), candidate_ids)


def _first_beyond(probs: Tensor, uniforms: Tensor, static_shapes: bool) -> Tensor:
    """[n, 1] index of the first of [n, V] probabilities whose cumulative sum exceeds u [n, 1].

    Large vocabularies are summed in two levels: first the sums of blocks (float32 within a block,
    float64 over them), then the entries of one block.
    """
    rows, size = probs.shape
    if size < LARGE:
        return _beyond(probs.cumsum(-1, dtype=torch.float64), uniforms, static_shapes)
    blocks = torch.nn.functional.pad(probs, (0, -size % BLOCK)).view(rows, -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    block = _beyond(cumulative, uniforms, static_shapes)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    # Position of u within its block as a fraction, kept below 1 despite rounding of the sums.
    within = (uniforms * cumulative[:, -1:] - before) / (cumulative.gather(1, block) - before)
    entries = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1)
    entry = _beyond(
        entries.cumsum(-1, dtype=torch.float64), within.clamp(0, BELOW_1), static_shapes
    )
    return (block * BLOCK + entry).clamp(max=size - 1)


def _beyond(cumulative: Tensor, share: Tensor, by_counting: bool) -> Tensor:
    """[n, 1] index of the first entry of [n, K] float64 that exceeds a share [n, 1] of the last.

    It is found by search, or by counting the entries up to the limit if a device cannot search.
    """
    limit = share * cumulative[:, -1:]
    if by_counting:
        index = (cumulative <= limit).sum(-1, keepdim=True)
    else:
        index = torch.searchsorted(cumulative, limit, right=True)
    # With NaN sums any entry may be returned: the NaN log-probability reports the problem.
    return index.clamp(max=cumulative.shape[1] - 1)


def draw_uniforms(
    seed: int,
    purpose: Purpose,
    iteration: int,
    index: Tensor,
    group_size: int,
    length: int,
    *,
    attempt: int = 0,
) -> Tensor:
    """Draw the random numbers of a rollout, one per token that it may sample.

    Each completion has its own counter-based stream (Philox), keyed by purpose, iteration and
    prompt. No completion depends on batch size, order, number of ranks, or earlier draws.

    Args:
        seed: of the run.
        purpose: train, val, test or predict.
        iteration: number of finished iterations; all but training draw the same in each.
        index: [B] position of each prompt in its data set.
        group_size: G completions of each prompt.
        length: maximal tokens of a completion, C.
        attempt: number of the attempt of dynamic sampling.

    Returns:
        [N, C] float64 in [0, 1), on the CPU.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    key = np.array([seed, PURPOSES.index(purpose)], dtype=np.uint64)
    number = iteration if purpose == "train" else 0

    def stream(prompt: int, sample_index: int) -> np.ndarray:
        # The lowest word counts within the stream.
        counter = np.array([0, prompt, number, (attempt << 32) + sample_index], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(length)

    prompts = index.tolist()
    rows = [
        stream(prompt, sample_index) for prompt in prompts for sample_index in range(group_size)
    ]
    return torch.from_numpy(np.stack(rows))


def draw_call_uniforms(
    rollout_key: Sequence[int | str],
    row: Sequence[int],
    context: Sequence[int],
    repetition: int,
    length: int,
) -> Tensor:
    """Draw the random numbers of one reply to an agent, one per token that it may have.

    The stream depends on the row and on the tokens that the reply follows, and not on the order in
    which an agent's parallel calls arrive.

    Args:
        rollout_key: `RolloutKey` of the rollout.
        row: key of the episode.
        context: tokens that the reply follows.
        repetition: number of earlier replies to the same tokens in this row.
        length: maximal tokens of the reply.

    Returns:
        [length] float64 in [0, 1), on the CPU.
    """
    seed, purpose, iteration, attempt = rollout_key
    number = iteration if purpose == "train" else 0  # as in `draw_uniforms`
    # A row's key begins with iteration and attempt, as the rollout's.
    text = repr((seed, purpose, number, attempt, *row[2:], list(context), repetition))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(length))
