"""Decode in tensors of fixed shapes, for devices that compile a program for each shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, require
from litgrpo.distributed.device import Backend, backend
from litgrpo.models.decode.fixed import FixedState, index_copy
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.sampling import Drawn, Sampling, sample
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import PromptBatch, Rollout, stack_rows


@check_field_types
@dataclass(frozen=True)
class StaticEngine(RolloutEngine):
    """Decodes all rows at once in tensors whose shapes never change.

    One program reads the prompts and another feeds one token to every row; each is compiled at
    the first rollout of its shapes (prompts, group size, bucket, completion length, sampling).

    Args:
        prompt_buckets: widths that prompts are padded to. One number: its multiples; several:
            these, and longer prompts are rejected. Each width costs a compilation.
        sync_every_tokens: tokens between checks for finished rollouts; each check synchronizes with
            the device.

    Example:
        >>> StaticEngine(prompt_buckets=(128, 512)).sync_every_tokens
        16
    """

    allows = frozenset({"static shapes"})

    prompt_buckets: int | tuple[int, ...] = 64
    sync_every_tokens: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            min(self._widths, default=0) >= 1,
            f"model.engine.prompt_buckets is {self.prompt_buckets}; it must be one number "
            "of tokens or several, each at least 1.",
        )
        at_least("model.engine.sync_every_tokens", self.sync_every_tokens, 1)

    @property
    def _widths(self) -> tuple[int, ...]:
        several = self.prompt_buckets
        return (several,) if isinstance(several, int) else several

    def pad_prompts(self, prompts: PromptBatch) -> PromptBatch:
        """Pad prompts on the left to the smallest bucket that fits, [B, bucket]."""
        missing = self.bucket(prompts.prompt_ids.shape[1]) - prompts.prompt_ids.shape[1]
        return replace(
            prompts,
            prompt_ids=pad(prompts.prompt_ids, (missing, 0)),  # what the mask hides is not read
            prompt_mask=pad(prompts.prompt_mask, (missing, 0)),
        )

    def bucket(self, length: int) -> int:
        """Return the smallest bucket for prompts of this length.

        Raises:
            ValueError: no bucket is large enough.
        """
        if isinstance(self.prompt_buckets, int):
            return -(-length // self.prompt_buckets) * self.prompt_buckets
        fitting = [width for width in self.prompt_buckets if width >= length]
        require(
            bool(fitting),
            f"A prompt has {length} tokens, but the largest of model.engine.prompt_buckets is "
            f"{max(self._widths)}. Add a larger one, or lower data.max_prompt_length.",
        )
        return min(fitting)

    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        On devices with static shapes the rollout is on the host, unused columns and padded prompts
        included; the prompts may also be on the host. On other devices it is on the device of the
        prompts, without unused columns. After an out-of-memory error groups decode in several
        parts, each with separate shapes.
        """
        parts = _split(requests)
        if len(parts) > 1:
            return _concatenate([self.generate(part) for part in parts], requests)
        policy, prompts, uniforms = requests.policy, requests.prompts, requests.uniforms
        group_size, sampling = requests.group_size, requests.sampling
        device = backend(policy.model.device)
        prefill = device.compile(_prefill)
        step = device.compile(_decode_step)
        padded = self.pad_prompts(prompts)
        # Graphs are traced for plain tensors; validation runs in inference mode.
        with torch.inference_mode(False), torch.no_grad(), policy.static_decoder.attention():
            ids, mask = _plain(padded.prompt_ids, device), _plain(padded.prompt_mask, device)
            is_end = _is_end(requests).to(device.device)
            sampler = TokenSampler(_plain(uniforms, device), is_end, sampling)
            output, state = prefill(policy, ids, mask, sampler, group_size)
            for column in range(1, uniforms.shape[1]):
                if column % self.sync_every_tokens == 0 and _all_ended(output, requests.stops):
                    break
                output, state = step(policy, output, state, sampler)
            if device.static_shapes:
                # Shapes of the learning step follow from the rollout's, so unused columns are kept.
                output, prompts = DecodeBuffer(*device.to_host(list(output))), padded.to("cpu")
                return output.rollout(prompts, group_size, columns=uniforms.shape[1])
            used = max(1, int(output.lengths.max()))
            return output.rollout(prompts, group_size, columns=used)


class TokenSampler(NamedTuple):
    """Random numbers and settings for drawing tokens.

    Args:
        uniforms: [N, C] float64.
        is_end: [V] True for tokens that end a completion.
        sampling: temperature and filters.
    """

    uniforms: Tensor
    is_end: Tensor
    sampling: Sampling

    def draw(self, logits: Tensor, column: Tensor) -> Drawn:
        """Draw the tokens of a column [1] from their logits [N, V]."""
        uniforms = self.uniforms.index_select(1, column).squeeze(1)
        return sample(logits, uniforms, self.sampling, static_shapes=True)

    def num_candidates(self, vocab_size: int) -> int:
        """Return S, the size of the candidate set; 0 if every token is a candidate."""
        most = min(self.sampling.top_k or vocab_size, vocab_size)
        return most if self.sampling.truncated else 0


class DecodeBuffer(NamedTuple):
    """The tokens sampled so far.

    Args:
        tokens: [N] those of the last column.
        column: [1] the next one.
        ids: [N, C] token ids, padded.
        logprobs: [N, C] float32 log-probabilities at sampling; 0 on padding.
        candidate_ids: [N, C, S] int32 tokens that could be sampled, filled up with -1; S is 0
            if every token is.
        lengths: [N] number of real tokens.
        ended: [N] True if the end token was sampled.
    """

    tokens: Tensor
    column: Tensor
    ids: Tensor
    logprobs: Tensor
    candidate_ids: Tensor
    lengths: Tensor
    ended: Tensor

    @staticmethod
    def empty(uniforms: Tensor, pad_id: int, num_candidates: int) -> DecodeBuffer:
        """Allocate a buffer without tokens, with the shape [N, C] of the uniforms."""
        rows, device = uniforms.shape[0], uniforms.device
        candidate_ids = (*uniforms.shape, num_candidates)
        return DecodeBuffer(
            tokens=torch.zeros(rows, dtype=torch.long, device=device),
            column=torch.zeros(1, dtype=torch.long, device=device),
            ids=torch.full_like(uniforms, pad_id, dtype=torch.long),
            logprobs=torch.zeros_like(uniforms, dtype=torch.float32),
            candidate_ids=torch.full(candidate_ids, -1, dtype=torch.int32, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def append(self, drawn: Drawn, pad_id: int, is_end: Tensor) -> DecodeBuffer:
        """Return the buffer with one more token per row; rows that have ended get padding."""
        live, candidate_ids = ~self.ended, self.candidate_ids
        tokens = torch.where(live, drawn.tokens, pad_id)
        logprobs = torch.where(live, drawn.logprobs, 0.0)
        if drawn.candidate_ids is not None:
            candidates = torch.where(live[:, None], drawn.candidate_ids, -1)
            candidate_ids = index_copy(candidate_ids, 1, self.column, candidates[:, None])
        return DecodeBuffer(
            tokens=tokens,
            column=self.column + 1,
            ids=index_copy(self.ids, 1, self.column, tokens[:, None]),
            logprobs=index_copy(self.logprobs, 1, self.column, logprobs[:, None]),
            candidate_ids=candidate_ids,
            lengths=self.lengths + live,
            ended=self.ended | is_end.index_select(0, drawn.tokens),
        )

    def select(self, rows: Tensor) -> DecodeBuffer:
        """Return a copy of some rows [m]."""
        of_rows = {name: each[rows] for name, each in self._asdict().items() if name != "column"}
        return self._replace(**of_rows)

    def rollout(self, prompts: PromptBatch, group_size: int, columns: int) -> Rollout:
        """Return the first columns as a rollout, on the device of the prompts.

        Copied, because the next rollout may write into the same memory.
        """
        device = prompts.prompt_ids.device
        ids, logprobs, candidate_ids = (
            each[:, :columns].to(device, copy=True)
            for each in (self.ids, self.logprobs, self.candidate_ids)
        )
        places = torch.arange(columns, device=device)
        return Rollout(
            prompts=prompts,
            group_size=group_size,
            completion_ids=ids,
            completion_mask=places < self.lengths[:, None].to(device),
            sampler_logprobs=logprobs,
            truncated=~self.ended.to(device),
            candidate_ids=candidate_ids if candidate_ids.shape[-1] else None,
        )


def _plain(tensor: Tensor, device: Backend) -> Tensor:
    """Move a tensor of rows to the device; clone it if it was created in inference mode."""
    there = device.rows_to(tensor)
    return there.clone() if there.is_inference() else there


def _is_end(requests: RolloutRequest) -> Tensor:
    """Return [V] True for tokens that end a completion, on the host."""
    return torch.isin(torch.arange(requests.policy.vocab_size), torch.tensor(requests.end_ids))


def _all_ended(output: DecodeBuffer, stops: StopStrings | None) -> bool:
    """Return True if every row has an end token, or a stop string if the request has some."""
    if stops is None:
        return bool(output.ended.all())
    waiting, ids = output.ended.logical_not().tolist(), output.ids.tolist()
    lengths = output.lengths.tolist()
    rows = zip(waiting, ids, lengths, strict=True)
    return all(stops.found(row[:length]) for waits, row, length in rows if waits)


def _prefill(
    policy: Policy, prompt_ids: Tensor, prompt_mask: Tensor, sampler: TokenSampler, group_size: int
) -> tuple[DecodeBuffer, FixedState]:
    """Read the prompts and draw the first token of each row."""
    capacity = sampler.uniforms.shape[1]
    logits, state = policy.static_decoder.prefill(prompt_ids, prompt_mask, group_size, capacity)
    output = DecodeBuffer.empty(
        sampler.uniforms, policy.pad_id, sampler.num_candidates(logits.shape[1])
    )
    drawn = sampler.draw(logits, output.column)
    return output.append(drawn, policy.pad_id, sampler.is_end), state


def _decode_step(
    policy: Policy, output: DecodeBuffer, state: FixedState, sampler: TokenSampler
) -> tuple[DecodeBuffer, FixedState]:
    """Feed the last token of each row and draw the next one."""
    logits, state = policy.static_decoder.decode_step(output.tokens, state)
    drawn = sampler.draw(logits, output.column)
    return output.append(drawn, policy.pad_id, sampler.is_end), state


def _split(requests: RolloutRequest) -> list[RolloutRequest]:
    """Split a request into parts of whole groups, with at most `max_rows` rows each."""
    prompts, group_size = requests.prompts, requests.group_size
    groups = max(1, (requests.max_rows or requests.num_rows) // group_size)

    def part(rows: slice) -> RolloutRequest:
        own = PromptBatch(
            prompts.prompt_ids[rows],
            prompts.prompt_mask[rows],
            prompts.prompts[rows],
            {name: values[rows] for name, values in prompts.columns.items()},
            prompts.index[rows],
        )
        uniforms = requests.uniforms[rows.start * group_size : rows.stop * group_size]
        return replace(requests, prompts=own, uniforms=uniforms, max_rows=None)

    return [part(slice(start, start + groups)) for start in range(0, len(prompts), groups)]


def _concatenate(parts: list[Rollout], requests: RolloutRequest) -> Rollout:
    """Return one rollout of all groups, padded to the widest part."""

    def cat(name: str, fill: int = 0) -> Tensor:
        return stack_rows([getattr(part, name) for part in parts], fill)

    first = parts[0]
    prompts: dict[str, Any] = {
        name: torch.cat([getattr(part.prompts, name) for part in parts])
        for name in ("prompt_ids", "prompt_mask", "index")
    }
    return replace(
        first,
        prompts=replace(requests.prompts, **prompts),
        completion_ids=cat("completion_ids", requests.policy.pad_id),
        completion_mask=cat("completion_mask"),
        sampler_logprobs=cat("sampler_logprobs"),
        truncated=torch.cat([part.truncated for part in parts]),
        candidate_ids=None if first.candidate_ids is None else cat("candidate_ids", -1),
    )
