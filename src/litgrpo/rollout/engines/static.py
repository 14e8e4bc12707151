"""Fixed shapes, compiled once: for devices that compile a program for each shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.models.policy import Policy, StaticState
from litgrpo.parallel.cuda_graphs import Replayed
from litgrpo.parallel.device import (
    can_record,
    compile_step,
    compiles_shapes,
    record,
    rows_to,
    to_host,
)
from litgrpo.rollout.engines.interface import RolloutEngine
from litgrpo.rollout.sampling import Drawn, Sampling, sample
from litgrpo.tensors import written
from litgrpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class StaticEngine(RolloutEngine):
    """Decodes all rows at once in tensors whose shapes never change.

    One program reads the prompts and another feeds one token to every row; each is compiled at
    the first rollout of its shapes (prompts, group size, bucket, completion length, sampling).

    Args:
        prompt_buckets: widths that prompts are padded to. One number: its multiples; several:
            these, and longer prompts are refused. Each width costs a compilation.
        look_every: tokens between looks whether every row has ended; each look waits for the
            device.
        record: on CUDA, record the step that feeds a token and replay it: one launch instead of
            hundreds. A model that looks at values on the way cannot be recorded.
    """

    prompt_buckets: int | tuple[int, ...] = 64
    look_every: int = 16
    record: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        widths = self.prompt_buckets
        for width in (widths,) if isinstance(widths, int) else widths or (0,):
            if width < 1:
                raise ValueError(
                    f"engine.prompt_buckets is {widths}; it must be a number of tokens, or several."
                )
        if self.look_every < 1:
            raise ValueError(f"engine.look_every is {self.look_every}; it must be at least 1.")

    @property
    def fixed_shapes(self) -> bool:
        """See `RolloutEngine.fixed_shapes`."""
        return True

    def padded(self, prompts: PromptBatch) -> PromptBatch:
        """The prompts, padded on the left to the smallest bucket; see `RolloutEngine.padded`."""
        missing = self.bucket(prompts.prompt_ids.shape[1]) - prompts.prompt_ids.shape[1]
        if missing == 0:
            return prompts
        return replace(
            prompts,
            prompt_ids=pad(prompts.prompt_ids, (missing, 0)),  # what the mask hides is not read
            prompt_mask=pad(prompts.prompt_mask, (missing, 0)),
        )

    def bucket(self, length: int) -> int:
        """The smallest bucket for prompts of this length.

        Raises:
            ValueError: there is none.
        """
        if isinstance(self.prompt_buckets, int):
            return -(-length // self.prompt_buckets) * self.prompt_buckets
        fitting = [width for width in self.prompt_buckets if width >= length]
        if not fitting:
            raise ValueError(
                f"A prompt has {length} tokens, but the largest of engine.prompt_buckets is "
                f"{max(self.prompt_buckets)}. Give a larger one, or a lower data.max_prompt_len."
            )
        return min(fitting)

    def generate(
        self,
        policy: Policy,
        prompts: PromptBatch,
        group_size: int,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        Prompts may lie on the host, so that nothing of them need be fetched from the device.
        """
        device = policy.model.device
        host = torch.device("cpu") if compiles_shapes(device) else device
        begin, go_on = compile_step(_begin, device), compile_step(_go_on, device)
        if self.record and can_record(device):
            go_on = _replayed
        # Graphs are traced for plain tensors; validation runs in inference mode.
        with torch.inference_mode(False), torch.no_grad(), policy.static_decoding():
            prompts = self.padded(prompts)
            ids, mask = _plain(prompts.prompt_ids, device), _plain(prompts.prompt_mask, device)
            draw = Draw(_plain(uniforms, device), _is_end(policy).to(device), sampling)
            said, state = begin(policy, ids, mask, draw, group_size)
            for column in range(1, uniforms.shape[1]):
                if column % self.look_every == 0 and bool(said.ended.all()):
                    break
                said, state = go_on(policy, said, state, draw)
            return said.rollout(prompts.to(host), group_size, host)


class Draw(NamedTuple):
    """What tokens are drawn with.

    Args:
        uniforms: [N, C] float64.
        is_end: [V] True for tokens that end a completion.
        sampling: temperature and filters.
    """

    uniforms: Tensor
    is_end: Tensor
    sampling: Sampling

    def drawn(self, logits: Tensor, column: Tensor) -> Drawn:
        """The tokens of a column [1] from their logits [N, V]."""
        uniforms = self.uniforms.index_select(1, column).squeeze(1)
        return sample(logits, uniforms, self.sampling, fixed_shapes=True)


class Said(NamedTuple):
    """The tokens said so far.

    Args:
        tokens: [N] those of the last column.
        column: [1] the next one.
        ids: [N, C] token ids, padded.
        logprobs: [N, C] float32 log-probabilities at sampling; 0 on padding.
        support: [N, C, S] int32 what could be drawn, filled up with -1; S is 0 where that is every
            token.
        lengths: [N] number of real tokens.
        ended: [N] True where the end token was said.
    """

    tokens: Tensor
    column: Tensor
    ids: Tensor
    logprobs: Tensor
    support: Tensor
    lengths: Tensor
    ended: Tensor

    @staticmethod
    def empty(uniforms: Tensor, pad_id: int, width: int) -> Said:
        """Nothing said yet: [N, C] as the uniforms, and so many tokens that could be drawn."""
        rows, device = uniforms.shape[0], uniforms.device
        return Said(
            tokens=torch.zeros(rows, dtype=torch.long, device=device),
            column=torch.zeros(1, dtype=torch.long, device=device),
            ids=torch.full_like(uniforms, pad_id, dtype=torch.long),
            logprobs=torch.zeros_like(uniforms, dtype=torch.float32),
            support=torch.full((*uniforms.shape, width), -1, dtype=torch.int32, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def heard(self, drawn: Drawn, pad_id: int, is_end: Tensor) -> Said:
        """After one more token of each row; rows that have ended stay as they are."""
        speaking, support = ~self.ended, self.support
        tokens = torch.where(speaking, drawn.tokens, pad_id)
        logprobs = torch.where(speaking, drawn.logprobs, 0.0)
        if drawn.support is not None:
            could = torch.where(speaking[:, None], drawn.support, -1)
            support = written(support, 1, self.column, could[:, None])
        return Said(
            tokens=tokens,
            column=self.column + 1,
            ids=written(self.ids, 1, self.column, tokens[:, None]),
            logprobs=written(self.logprobs, 1, self.column, logprobs[:, None]),
            support=support,
            lengths=self.lengths + speaking,
            ended=self.ended | is_end.index_select(0, drawn.tokens),
        )

    def rollout(self, prompts: PromptBatch, group_size: int, host: torch.device) -> Rollout:
        """The finished rollout, by one transfer to the host."""
        rows, length = self.ids.shape
        # float32 holds token ids exactly, as long as there are fewer than 2^24.
        columns = torch.cat(
            [self.ids[..., None].float(), self.logprobs[..., None], self.support.float()], -1
        )
        ends = torch.stack([self.lengths, self.ended], 1).float()
        whole = torch.cat([columns.flatten(1), ends], 1)
        whole = whole if whole.device == host else to_host([whole])[0]
        columns, ends = whole[:, :-2].view(rows, length, -1), whole[:, -2:].long()
        support = columns[..., 2:].int()
        return Rollout(
            prompts=prompts,
            group_size=group_size,
            completion_ids=columns[..., 0].long(),
            completion_mask=torch.arange(length, device=host) < ends[:, :1],
            sampler_logprobs=columns[..., 1].contiguous(),
            truncated=ends[:, 1] == 0,
            support=support if support.shape[-1] else None,
        )


def _plain(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on a device, as a tensor that was not made in inference mode."""
    there = rows_to(tensor, device)
    return there.clone() if there.is_inference() else there


def _is_end(policy: Policy) -> Tensor:
    """[V] True for tokens that end a completion; on the host."""
    return torch.isin(torch.arange(policy.vocab_size), torch.tensor(policy.eos_ids))


def _begin(
    policy: Policy, prompt_ids: Tensor, prompt_mask: Tensor, draw: Draw, group_size: int
) -> tuple[Said, StaticState]:
    """Read the prompts and draw the first token of each row."""
    capacity = draw.uniforms.shape[1]
    logits, state = policy.static_prefill(prompt_ids, prompt_mask, group_size, capacity)
    width = min(draw.sampling.top_k or logits.shape[1], logits.shape[1])
    said = Said.empty(draw.uniforms, policy.pad_id, width if draw.sampling.truncated else 0)
    return said.heard(draw.drawn(logits, said.column), policy.pad_id, draw.is_end), state


def _go_on(policy: Policy, said: Said, state: StaticState, draw: Draw) -> tuple[Said, StaticState]:
    """Feed the last token of each row and draw the next one."""
    logits, state = policy.static_step(said.tokens, state)
    return said.heard(draw.drawn(logits, said.column), policy.pad_id, draw.is_end), state


_replayed = Replayed(_go_on, record)
