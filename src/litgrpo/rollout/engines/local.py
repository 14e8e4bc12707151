"""The engine for CPU and CUDA: shared prompts, no work for rows that have ended, refill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from litgrpo.arguments import at_least
from litgrpo.models.policy import DecodeState
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.turns import said_and_heard
from litgrpo.rollout.sampling import Drawn, sample
from litgrpo.tensors import compacted
from litgrpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class LocalEngine(RolloutEngine):
    """Samples with the policy itself, each prompt's keys and values shared by its group.

    Args:
        max_rows: rows that decode at the same time at most, in whole groups; groups that wait
            begin as soon as enough rows have finished. Lower it when keys and values do not fit
            into memory. None decodes all.
        compaction_frac: finished rows leave the batch when they are this fraction of it.
        sync_every_tokens: tokens between looks for finished rows; each look waits for the device,
            which
            costs nothing on a CPU.
        dtype: `bfloat16` decodes in lower precision than the policy's. Its log-probabilities are
            then not the policy's own, and the learner corrects for that. None: as the policy.
        fused_decode: let the policy decode by a step of its own where it knows the model.
    """

    max_rows: int | None = None
    compaction_frac: float = 0.03
    sync_every_tokens: int = 1
    dtype: Literal["bfloat16"] | None = None
    fused_decode: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least("engine.max_rows", self.max_rows, 1)
        at_least("engine.sync_every_tokens", self.sync_every_tokens, 1)

    @property
    def exact_logprobs(self) -> bool:
        """Not in a precision of its own."""
        return self.dtype is None

    @property
    def row_limit(self) -> int | None:
        """As `max_rows` says."""
        return self.max_rows

    @property
    def supports_episodes(self) -> bool:
        """Turns are decoded in the same loop; see `turns`."""
        return True

    @torch.no_grad()
    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        policy, prompts = requests.policy, requests.prompts
        device = prompts.prompt_ids.device
        limits = [rows for rows in (self.max_rows, requests.max_rows) if rows is not None]
        # A group shares the keys and values of its prompt, so it decodes as a whole.
        places = max(min(limits, default=requests.num_rows), requests.group_size)
        buffer = CompletionBuffer.empty(requests.uniforms.shape, policy.pad_id, device)
        decoding = _Decoding(replace(requests, uniforms=requests.uniforms.to(device)))
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        rows = min(places, requests.num_rows)
        with policy.decoding(rows, dtype=dtype, fused=self.fused_decode):
            if requests.listener is not None:
                return said_and_heard(decoding, places, buffer)
            buffer.write_steps(self._steps(decoding, places), decoding.is_end)
        return buffer.rollout(prompts, requests.group_size)

    def _steps(self, decoding: _Decoding, places: int) -> Iterator[tuple[Tensor, Tensor, Drawn]]:
        """Sample and feed until every row of every group has ended or is full.

        Yields:
            For each step: [n] places in [N * C], [n] which of the rows had not ended before, and
            what was drawn for them.
        """
        requests = decoding.requests
        group_size, length = requests.group_size, requests.uniforms.shape[1]
        waiting, batch, step, full = len(requests.prompts), None, 0, 0
        # Finished rows take up room until they are looked for, so short limits look more often.
        pause = min(self.sync_every_tokens, max(1, length // 4))
        stops = requests.stops
        watch = _NoWatch() if stops is None else stops.watch(requests.uniforms)
        while waiting or batch is not None:
            free = places - (0 if batch is None else len(batch.cursor))
            if waiting and free >= group_size and (batch is None or batch.state.can_join):
                groups = min(waiting, free // group_size)
                newcomers = decoding.begin(len(requests.prompts) - waiting, groups)
                batch = newcomers if batch is None else batch.joined(newcomers)
                waiting -= groups
                full = step + length  # after this step every row has reached the length limit
            assert batch is not None
            drawn = decoding.draw(batch)
            yield batch.cursor, batch.active, drawn
            tokens, step = drawn.tokens, step + 1
            watch.note(batch.cursor, batch.active, tokens)
            batch = batch.appended(tokens, decoding.is_end)
            if step % pause == 0 or step == full:
                batch = replace(batch, active=watch.goes_on(batch.cursor, batch.active))
                active = int(batch.active.sum())
                ended = len(tokens) - active
                if active == 0:
                    batch = None
                    continue
                if ended >= self.compaction_frac * len(tokens) or (waiting and ended >= group_size):
                    kept = compacted(batch.active, active)
                    batch, tokens = batch.only(kept), tokens[kept]
            batch = replace(batch, logits=requests.policy.step(tokens, batch.state))


@dataclass(frozen=True)
class _RunningBatch:
    """The rows that decode at the moment.

    Args:
        state: the policy's caches of these rows.
        logits: [n, V] of their next tokens.
        cursor: [n] where in [N * C] each row's next token goes.
        last: [n] where its last one can go.
        active: [n] False: the row has ended and waits to be dropped.
    """

    state: DecodeState
    logits: Tensor
    cursor: Tensor
    last: Tensor
    active: Tensor

    def __len__(self) -> int:
        """How many rows decode."""
        return len(self.cursor)

    def appended(self, tokens: Tensor, is_end: Tensor) -> _RunningBatch:
        """After these tokens: rows that ended are marked, the others move on."""
        done = is_end.index_select(0, tokens).logical_or_(self.cursor == self.last)
        active = self.active & ~done
        return replace(self, active=active, cursor=self.cursor + active)

    def only(self, kept: Tensor) -> _RunningBatch:
        """Only the given rows; their logits have been used."""
        self.state.select(kept)
        return replace(
            self, cursor=self.cursor[kept], last=self.last[kept], active=self.active[kept]
        )

    def joined(self, others: _RunningBatch) -> _RunningBatch:
        """These rows and others."""
        self.state.join(others.state)
        return _RunningBatch(
            state=self.state,
            logits=torch.cat([self.logits, others.logits]),
            cursor=torch.cat([self.cursor, others.cursor]),
            last=torch.cat([self.last, others.last]),
            active=torch.cat([self.active, others.active]),
        )


class _NoWatch:
    """Looks for no stop string while rows decode."""

    def note(self, cursor: Tensor, active: Tensor, tokens: Tensor) -> None:
        """See `Watch.note`."""

    def goes_on(self, cursor: Tensor, active: Tensor) -> Tensor:
        """See `Watch.goes_on`."""
        return active


@dataclass(frozen=True)
class _Decoding:
    """Reading prompts and drawing tokens for one call of the engine."""

    requests: RolloutRequest

    @cached_property
    def is_end(self) -> Tensor:
        """[V] True for tokens that end a completion."""
        tokens = torch.arange(self.requests.policy.vocab_size)
        is_end = torch.isin(tokens, torch.tensor(self.requests.end_ids))
        return is_end.to(self.requests.uniforms.device)

    def begin(self, first: int, groups: int) -> _RunningBatch:
        """Read some prompts, from number `first`."""
        asked = self.requests
        part, length = slice(first, first + groups), asked.uniforms.shape[1]
        ids, mask = asked.prompts.prompt_ids[part], asked.prompts.prompt_mask[part]
        logits, state = asked.policy.prefill(ids, mask, asked.group_size, capacity=length)
        rows = torch.arange(groups * asked.group_size, device=ids.device) + first * asked.group_size
        return _RunningBatch(
            state=state,
            logits=logits.repeat_interleave(asked.group_size, 0),
            cursor=rows * length,
            last=rows * length + length - 1,
            active=torch.ones_like(rows, dtype=torch.bool),
        )

    def draw(self, batch: _RunningBatch) -> Drawn:
        """The next token of each row."""
        numbers = self.requests.uniforms.reshape(-1).index_select(0, batch.cursor)
        return sample(batch.logits, numbers, self.requests.sampling)


@dataclass
class CompletionBuffer:
    """The tokens sampled so far.

    Args:
        ids: [N, C] token ids.
        logprobs: [N, C] float32 log-probabilities at sampling.
        mask: [N, C] True marks a real token.
        ended: [N] True where the end token was sampled.
        candidate_ids: for each step, the columns [n] and rows [n] of its tokens, and the tokens
            that could be sampled there [n, S].
    """

    ids: Tensor
    logprobs: Tensor
    mask: Tensor
    ended: Tensor
    candidate_ids: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def empty(shape: torch.Size, pad_id: int, device: torch.device) -> CompletionBuffer:
        """Room for tokens of `shape`, which is (N, C)."""
        return CompletionBuffer(
            ids=torch.full(shape, pad_id, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, dtype=torch.float32, device=device),
            mask=torch.zeros(shape, dtype=torch.bool, device=device),
            ended=torch.zeros(shape[0], dtype=torch.bool, device=device),
        )

    def write_steps(self, steps: Iterable[tuple[Tensor, Tensor, Drawn]], is_end: Tensor) -> None:
        """Write all decoding steps of a rollout at once, after the last one.

        One indexed write for the whole rollout costs less than one in every step.

        Args:
            steps: for each step, the place in [N * C] of each row's token, which of the rows had
                not ended before, and what was drawn for them.
            is_end: [V] True for tokens that end a completion.
        """
        cursors, actives, draws = zip(*steps, strict=True)
        active, length = torch.cat(actives), self.ids.shape[1]
        place = torch.cat(cursors)[active]
        tokens = torch.cat([drawn.tokens for drawn in draws])[active]
        self.ids.view(-1)[place] = tokens
        logprobs = torch.cat([drawn.logprobs for drawn in draws])[active]
        self.logprobs.view(-1)[place] = logprobs.float()
        self.mask.view(-1)[place] = True
        self.ended[place[is_end[tokens]] // length] = True
        for cursor, row_active, drawn in zip(cursors, actives, draws, strict=True):
            if drawn.candidate_ids is not None:
                rows, columns = cursor[row_active] // length, cursor[row_active] % length
                self.candidate_ids.append((columns, rows, drawn.candidate_ids[row_active]))

    def rollout(self, prompts: PromptBatch, group_size: int) -> Rollout:
        """The finished rollout, without columns that no row uses."""
        used = max(1, int(self.mask.sum(1).max()))
        return Rollout(
            prompts=prompts,
            group_size=group_size,
            completion_ids=self.ids[:, :used],
            completion_mask=self.mask[:, :used],
            sampler_logprobs=self.logprobs[:, :used],
            truncated=~self.ended,
            candidate_ids=self._candidate_ids(used) if self.candidate_ids else None,
        )

    def _candidate_ids(self, used: int) -> Tensor:
        """[N, used, S] what could be sampled, filled up with -1."""
        widest = max(ids.shape[1] for _, _, ids in self.candidate_ids)
        whole = self.ids.new_full((len(self.ids), used, widest), -1, dtype=torch.int32)
        for columns, rows, ids in self.candidate_ids:
            whole[rows, columns, : ids.shape[1]] = ids
        return whole
