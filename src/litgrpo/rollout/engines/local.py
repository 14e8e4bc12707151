"""Engine for CPU and CUDA: groups share their prompt's cache, finished rows leave the batch.

On devices that record steps as CUDA graphs, `fixed` decodes single-turn rows if the model can.

Multi-turn rows are decoded in the same loop. A short observation that arrives in time is fed
token by token in place of sampled ones. If it is long, or still missing, the row leaves the batch
with its keys and values, reads the observation in one pass, and rejoins; no other row waits for it.
Column t of row n always uses uniform [n, t], so a row's tokens do not depend on arrival order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least
from litgrpo.distributed.device import backend
from litgrpo.models.decode.shared_prefix import RowOffloader
from litgrpo.models.policy import DecodeState
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.fixed import FixedRows, FixedShapeLoop
from litgrpo.rollout.sampling import Drawn, draw_tokens
from litgrpo.tensors import compact_rows
from litgrpo.types import PromptBatch, Rollout

# Tokens between checks for finished rows if the device records steps: a check interrupts it.
CHECK_RECORDED_EVERY = 16
# Observations of more tokens are read in one pass instead of token by token.
MAX_FED_OBSERVATION = 32
# Rows rejoin the batch together every few steps: one pass for several rows costs less.
REJOIN_EVERY = 4
# [n] positions in [N * C], [n] rows that had not ended before, and the tokens drawn for them.
DecodeStep = tuple[Tensor, Tensor, Drawn]


@check_field_types
@dataclass(frozen=True)
class LocalEngine(RolloutEngine):
    """Samples with the policy itself; each prompt's keys and values are shared by its group.

    Args:
        max_rows: decode at most this many rows at once, in whole groups; waiting groups start as
            soon as enough rows have finished. Lower it if the KV cache does not fit into memory.
            None: all rows.
        compaction_frac: finished rows leave the batch once they are this fraction of it.
        sync_every_tokens: tokens between checks for finished rows; each check synchronizes with
            the device. None: 16 if the device records steps (CUDA graphs), else 1, as on a CPU.
        dtype: `bfloat16` decodes in lower precision than the policy's. Its log-probs then differ
            from the policy's, and the learner corrects for that. None: the policy's precision.
        fused_decode: use the policy's fused decoding step if there is one for the model.

    Example:
        >>> LocalEngine(max_rows=64).max_rows  # 8 groups of 8 at a time
        64
    """

    allows = frozenset({"episodes"})  # see `TurnDecoder`

    max_rows: int | None = None
    compaction_frac: float = 0.03
    sync_every_tokens: int | None = None
    dtype: Literal["bfloat16"] | None = None
    fused_decode: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least("model.engine.max_rows", self.max_rows, 1)
        at_least("model.engine.sync_every_tokens", self.sync_every_tokens, 1)

    @property
    def exact_logprobs(self) -> bool:
        """True unless it decodes in lower precision."""
        return self.dtype is None

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        policy, prompts = request.policy, request.prompts
        device = prompts.prompt_ids.device
        limits = [rows for rows in (self.max_rows, request.max_rows) if rows is not None]
        # A group shares the keys and values of its prompt, so it decodes as a whole.
        slots = max(min(limits, default=request.num_rows), request.group_size)
        request = replace(request, uniforms=request.uniforms.to(device))
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        rows = min(slots, request.num_rows)
        with policy.decoding(rows, dtype=dtype, fused=self.fused_decode):
            if request.listener is not None:
                return TurnDecoder(request, slots).decode()
            if self._can_record(request):
                return self._decode_recorded(request, slots)
            # Ended rows hold slots until the next check, so short completions check more often.
            check_every = min(self._sync_every(request), max(1, request.uniforms.shape[1] // 4))
            return SingleTurnDecoder(request, slots, check_every, self.compaction_frac).decode()

    def _sync_every(self, request: RolloutRequest) -> int:
        """Return the number of tokens between checks for finished rows."""
        records = backend(request.uniforms.device).records_steps
        return self.sync_every_tokens or (CHECK_RECORDED_EVERY if records else 1)

    def _can_record(self, request: RolloutRequest) -> bool:
        """Return True if the device, the model and the filters allow recorded steps.

        Without top_k the number of candidates depends on the logits, and so do shapes.
        """
        sampling, policy = request.sampling, request.policy
        has_fixed_shapes = bool(sampling.top_k) or not sampling.has_filters
        return backend(policy.model.device).records_steps and policy.can_record and has_fixed_shapes

    def _decode_recorded(self, request: RolloutRequest, slots: int) -> Rollout:
        """Decode in recorded steps; groups that do not fit start when all others have ended."""
        buffer = CompletionBuffer.for_rows_of(request)
        at_once = slots // request.group_size
        device, check_every = backend(request.policy.model.device), self._sync_every(request)
        loop = FixedShapeLoop(request, device, check_every, buffer.write_rows)
        for first in range(0, len(request.prompts), at_once):
            part = slice(first, first + at_once)
            prompts, row = request.prompts, first * request.group_size
            uniforms = request.uniforms[row : row + at_once * request.group_size]
            rows = loop.decode(prompts.prompt_ids[part], prompts.prompt_mask[part], uniforms, row)
            buffer.write_rows(rows, [True] * len(rows.numbers))
        return buffer.rollout(request.prompts, request.group_size)


@dataclass(frozen=True)
class DecodingBatch:
    """Rows that are being decoded.

    Args:
        state: the policy's caches of these rows.
        logits: [n, V] of their next tokens.
        cursor: [n] position in [N * C] of each row's next token.
        last_cursor: [n] position of its last possible token.
        active: [n] False: the row has ended and waits to be dropped.
    """

    state: DecodeState
    logits: Tensor
    cursor: Tensor
    last_cursor: Tensor
    active: Tensor

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.cursor)

    def advance(self, tokens: Tensor, is_end: Tensor) -> DecodingBatch:
        """Mark the rows that end with these tokens and move the others on by one column."""
        done = is_end.index_select(0, tokens).logical_or_(self.cursor == self.last_cursor)
        active = self.active & ~done
        return replace(self, active=active, cursor=self.cursor + active)

    def select(self, rows: Tensor) -> DecodingBatch:
        """Keep the given rows; their logits have already been used."""
        self.state.select(rows)
        return replace(
            self,
            cursor=self.cursor[rows],
            last_cursor=self.last_cursor[rows],
            active=self.active[rows],
        )

    def join(self, newcomers: DecodingBatch) -> DecodingBatch:
        """Append other rows."""
        self.state.join(newcomers.state)
        return DecodingBatch(
            state=self.state,
            logits=torch.cat([self.logits, newcomers.logits]),
            cursor=torch.cat([self.cursor, newcomers.cursor]),
            last_cursor=torch.cat([self.last_cursor, newcomers.last_cursor]),
            active=torch.cat([self.active, newcomers.active]),
        )


def prefill(request: RolloutRequest, first: int, groups: int) -> DecodingBatch:
    """Read the prompts of some groups, starting with number `first`."""
    part, length = slice(first, first + groups), request.uniforms.shape[1]
    ids, mask = request.prompts.prompt_ids[part], request.prompts.prompt_mask[part]
    logits, state = request.policy.prefill(ids, mask, request.group_size, capacity=length)
    rows = torch.arange(groups * request.group_size, device=ids.device)
    rows += first * request.group_size
    limits = torch.full_like(rows, length)
    if request.row_limits is not None:
        limits = torch.tensor(request.row_limits, device=ids.device)[rows]
    return DecodingBatch(
        state=state,
        logits=logits.repeat_interleave(request.group_size, 0),
        cursor=rows * length,
        last_cursor=rows * length + limits - 1,
        active=torch.ones_like(rows, dtype=torch.bool),
    )


class RowDecoder(ABC):
    """The decoding loop: rows leave the batch when they end, and waiting groups fill their slots.

    Args:
        request: what to sample.
        slots: maximal number of rows that hold keys and values.
    """

    def __init__(self, request: RolloutRequest, slots: int) -> None:
        self.request, self.slots, self.policy = request, slots, request.policy
        self.buffer = CompletionBuffer.for_rows_of(request)
        self.waiting = len(self.request.prompts)  # groups that have not begun
        self.step = 0

    def decode(self) -> Rollout:
        """Decode all rows."""
        steps = list(self._decode_steps())  # runs the decoding loop
        self.buffer.write_steps(steps, self.request.is_end)
        return self.buffer.rollout(self.request.prompts, self.request.group_size)

    def _decode_steps(self) -> Iterator[DecodeStep]:
        """Sample and feed tokens until every row of every group is complete."""
        batch = self._start_groups(None)
        while batch is not None:
            drawn = self._draw(batch)
            yield batch.cursor, batch.active, drawn
            self.step += 1
            batch, tokens = self._finish_rows(batch, drawn.tokens)
            if len(tokens):
                batch = replace(batch, logits=self.policy.decode_step(tokens, batch.state))
            batch = self._start_groups(self._rejoin(batch))

    def _start_groups(self, batch: DecodingBatch | None) -> DecodingBatch | None:
        """Start waiting groups if slots are free.

        Returns:
            The batch; None if no row is left.
        """
        if batch is not None and not len(batch):
            batch = None
        groups = min(self.waiting, (self.slots - self._num_rows(batch)) // self.request.group_size)
        if groups <= 0 or (batch is not None and not batch.state.can_join):
            return batch
        newcomers = prefill(self.request, len(self.request.prompts) - self.waiting, groups)
        self.waiting -= groups
        return newcomers if batch is None else batch.join(newcomers)

    def _num_rows(self, batch: DecodingBatch | None) -> int:
        """Count the rows that hold keys and values."""
        return 0 if batch is None else len(batch)

    def _draw(self, batch: DecodingBatch) -> Drawn:
        """Draw the next token of each row."""
        uniforms = self.request.uniforms.reshape(-1).index_select(0, batch.cursor)
        return draw_tokens(batch.logits, uniforms, self.request.sampling)

    @abstractmethod
    def _finish_rows(self, batch: DecodingBatch, tokens: Tensor) -> tuple[DecodingBatch, Tensor]:
        """Handle rows that end with these tokens [n].

        Returns:
            The rows to feed next, and [m] their tokens.
        """

    def _rejoin(self, batch: DecodingBatch) -> DecodingBatch:
        """Return rows to the batch that have left it for a while."""
        return batch


class SingleTurnDecoder(RowDecoder):
    """Decodes single-turn rows.

    Args:
        request: what to sample.
        slots: maximal number of rows that hold keys and values.
        check_every: tokens between checks for rows that have ended.
        compaction_frac: rows that have ended leave once they are this fraction of the batch.
    """

    def __init__(
        self, request: RolloutRequest, slots: int, check_every: int, compaction_frac: float
    ) -> None:
        super().__init__(request, slots)
        self.check_every, self.compaction_frac = check_every, compaction_frac
        stops, uniforms = self.request.stops, self.request.uniforms
        self.watch = None if stops is None else stops.watch(uniforms)
        self.full = 0  # after this step every row has reached the length limit

    def _start_groups(self, batch: DecodingBatch | None) -> DecodingBatch | None:
        waiting = self.waiting
        batch = super()._start_groups(batch)
        if self.waiting < waiting:
            self.full = self.step + self.request.uniforms.shape[1]  # of the groups just started
        return batch

    def _finish_rows(self, batch: DecodingBatch, tokens: Tensor) -> tuple[DecodingBatch, Tensor]:
        """Mark the rows that end with these tokens; at a check they leave."""
        if self.watch is not None:
            self.watch.note(batch.cursor, batch.active, tokens)
        batch = batch.advance(tokens, self.request.is_end)
        if self.step % self.check_every and self.step != self.full:
            return batch, tokens
        if self.watch is not None:
            batch = replace(batch, active=self.watch.still_active(batch.cursor, batch.active))
        active = int(batch.active.sum())
        ended = len(tokens) - active
        if active == 0:  # the keys and values of no row are needed any more
            return replace(batch, cursor=batch.cursor[:0]), tokens[:0]
        many = ended >= self.compaction_frac * len(tokens)
        if many or (self.waiting and ended >= self.request.group_size):
            remaining = compact_rows(batch.active, active)
            batch, tokens = batch.select(remaining), tokens[remaining]
        return batch, tokens


class TurnRows:
    """Where the turns of multi-turn rows are.

    Args:
        request: a request with a listener.
        buffer: the tokens of all rows.
    """

    def __init__(self, request: RolloutRequest, buffer: CompletionBuffer) -> None:
        (rows, self.length), device = request.uniforms.shape, request.uniforms.device
        assert request.listener is not None
        self.listener = request.listener
        self.stops, self.is_end = request.stops, request.is_end
        self.ids, self.mask = buffer.ids, buffer.mask
        # Observation tokens ahead of the cursor, fed instead of sampled tokens.
        self.forced = torch.zeros_like(self.mask)
        self.turns = torch.full_like(self.ids, -1, dtype=torch.int16)
        self.turn = torch.zeros(rows, dtype=torch.int16, device=device)
        self.turn_start = torch.arange(rows, device=device) * self.length  # in [N * C]
        self.truncated = torch.zeros(rows, dtype=torch.bool, device=device)
        self.may_stop = torch.zeros_like(self.is_end)
        if self.stops is not None:
            self.may_stop = self.stops.may_complete.to(device)

    def next_tokens(self, drawn: Drawn, cursor: Tensor) -> Drawn:
        """Replace drawn tokens by observation tokens where there are any; write the others."""
        forced = self.forced.view(-1)[cursor]
        tokens = torch.where(forced, self.ids.view(-1)[cursor], drawn.tokens)
        places = cursor[~forced]
        self.ids.view(-1)[places] = tokens[~forced]
        self.mask.view(-1)[places] = True
        self.turns.view(-1)[places] = self.turn[places // self.length]
        candidates = drawn.candidate_ids
        if candidates is not None:
            candidates = candidates.masked_fill(forced[:, None], -1)
        return Drawn(tokens, drawn.logprobs.masked_fill(forced, 0.0), candidates)

    def end_turns(self, tokens: Tensor, cursor: Tensor) -> dict[int, int]:
        """Pass the turns that end with these tokens to the listener.

        Args:
            tokens: [n] of this step.
            cursor: [n] their positions in [N * C].

        Returns:
            {row whose turn ended: its index in the batch}.
        """
        generated = ~self.forced.view(-1)[cursor]
        rows = cursor // self.length
        row_end = torch.arange(1, len(self.turn_start) + 1, device=cursor.device) * self.length
        turn_end = (self.turn_start + self.listener.max_turn_tokens).minimum(row_end)
        full = cursor + 1 >= turn_end[rows]
        # One transfer to the host per step; the exact test below runs for few rows.
        suspects = generated & (self.is_end[tokens] | full | self.may_stop[tokens])
        ended_at: dict[int, int] = {}
        for index in suspects.nonzero().flatten().tolist():
            row, end = int(rows[index]), int(cursor[index]) + 1
            ids = self.ids.view(-1)[int(self.turn_start[row]) : end].tolist()
            ends = bool(self.is_end[tokens[index]])
            if self.stops is not None:
                ends = ends or self.stops.completes(ids)
            if ends or bool(full[index]):
                self.truncated[row] = not ends
                self.listener.on_turn_end(row, ids, truncated=not ends)
                ended_at[row] = index
        return ended_at

    def write_observation(self, row: int, position: int, ids: list[int]) -> None:
        """Write an observation at a position in [N * C]; the row's next turn begins behind it."""
        end = position + len(ids)
        self.ids.view(-1)[position:end] = torch.tensor(ids, device=self.ids.device)
        self.mask.view(-1)[position:end] = True
        self.forced.view(-1)[position:end] = True
        self.turn_start[row], self.truncated[row] = end, False
        self.turn[row] += 1


@dataclass
class PausedRow:
    """A row that has left the batch with its keys and values.

    Args:
        position: position in [N * C] of its next token.
        token: last generated token, not yet fed to the policy.
        observation: tokens to read when it rejoins; None: not arrived yet.
        ended: the episode has ended; the row will not rejoin.
    """

    position: int
    token: int
    observation: list[int] | None = None
    ended: bool = False


class TurnDecoder(RowDecoder):
    """Decodes multi-turn rows.

    A row is decoding in the batch, or offloaded and waiting for its observation, or offloaded with
    an observation (it rejoins), or its episode has ended. Rows of policies whose rows cannot leave
    a batch wait in it instead, and all others with them.

    Args:
        request: a request with a listener, which supplies observations.
        slots: maximal number of rows that hold keys and values, including offloaded ones.
    """

    def __init__(self, request: RolloutRequest, slots: int) -> None:
        super().__init__(request, slots)
        assert request.listener is not None
        self.listener = request.listener
        self.rows = TurnRows(request, self.buffer)
        self.offloaded: dict[int, PausedRow] = {}  # in the order in which the rows left
        self.store: RowOffloader | None = None  # their keys and values, in the same order

    def decode(self) -> Rollout:
        """Decode all rows."""
        rollout = super().decode()
        columns = rollout.completion_ids.shape[1]
        turns, truncated = self.rows.turns[:, :columns], self.rows.truncated
        return replace(rollout, truncated=truncated, turns=turns)

    def _start_groups(self, batch: DecodingBatch | None) -> DecodingBatch | None:
        started = super()._start_groups(batch)
        if started is not None and (batch is None or started.state is not batch.state):
            self.store = self.policy.make_row_offloader(started.state)
        return started

    def _num_rows(self, batch: DecodingBatch | None) -> int:
        return len(self.offloaded) + super()._num_rows(batch)

    def _draw(self, batch: DecodingBatch) -> Drawn:
        return self.rows.next_tokens(super()._draw(batch), batch.cursor)

    def _finish_rows(self, batch: DecodingBatch, tokens: Tensor) -> tuple[DecodingBatch, Tensor]:
        """Write short observations of rows whose turn has ended, and remove all others of them."""
        turn_ended = self.rows.end_turns(tokens, batch.cursor)
        batch = replace(batch, cursor=batch.cursor + 1)
        if not (turn_ended or self.offloaded):
            return batch, tokens
        episode_ended, long_observations = self._take_observations(turn_ended, batch, wait=False)
        if self.store is None:
            while turn_ended:  # rows cannot leave: wait for all observations
                episode_ended += self._take_observations(turn_ended, batch, wait=True)[0]
        else:
            for row, index in turn_ended.items():
                self.store.offload(index)
                position, token = int(batch.cursor[index]), int(tokens[index])
                self.offloaded[row] = PausedRow(position, token, long_observations.get(row))
        return self._drop(batch, tokens, [*episode_ended, *turn_ended.values()])

    def _take_observations(
        self, turn_ended: dict[int, int], batch: DecodingBatch, *, wait: bool
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Take the observations that have arrived.

        Args:
            turn_ended: {row whose turn ended in this step: its index in the batch}; rows whose
                episode has ended, or that continue in the batch, are removed from it.
            batch: the rows that are decoded.
            wait: block until one arrives.

        Returns:
            Indices of rows whose episode has ended, and {row of `turn_ended`: observation to read
            in one pass}.
        """
        episode_ended: list[int] = []
        long_observations: dict[int, list[int]] = {}
        for row, ids in self.listener.take_observations(wait=wait).items():
            if row in self.offloaded:
                self.offloaded[row].observation = ids
                self.offloaded[row].ended = ids is None
            elif row not in turn_ended:
                continue
            elif ids is None:
                episode_ended.append(turn_ended.pop(row))
            elif len(ids) > MAX_FED_OBSERVATION and self.store is not None:
                long_observations[row] = ids
            else:
                self.rows.write_observation(row, int(batch.cursor[turn_ended.pop(row)]), ids)
        return episode_ended, long_observations

    def _drop(
        self, batch: DecodingBatch, tokens: Tensor, leaving: list[int]
    ) -> tuple[DecodingBatch, Tensor]:
        """Remove rows from the batch; the prompts' cache stays while offloaded rows need it."""
        active = torch.ones_like(batch.active)
        active[leaving] = False
        remaining = compact_rows(active, len(active) - len(leaving))
        if not len(remaining) and not self.offloaded:  # all episodes have ended
            batch = replace(batch, cursor=batch.cursor[:0])
        elif leaving:
            batch = batch.select(remaining)
        return replace(batch, logits=batch.logits[:0]), tokens[remaining]

    def _rejoin(self, batch: DecodingBatch) -> DecodingBatch:
        """Return offloaded rows with an observation; wait for one if no other row decodes."""
        batch = self._restore(batch)
        while self.offloaded and not len(batch):
            self._take_observations({}, batch, wait=True)
            batch = self._restore(batch)
        return batch

    def _restore(self, batch: DecodingBatch) -> DecodingBatch:
        """Append offloaded rows with an observation to the batch, which they read on the way."""
        if self.store is None:
            return batch
        rows = list(self.offloaded.items())
        self.store.discard([number for number, (_, paused) in enumerate(rows) if paused.ended])
        self.offloaded = {row: paused for row, paused in rows if not paused.ended}
        rows = list(self.offloaded.items())
        ready = [n for n, (_, paused) in enumerate(rows) if paused.observation is not None]
        due = len(ready) == len(rows) or self.step % REJOIN_EVERY == 0 or not len(batch)
        if not ready or not due:
            return batch
        ids = [[rows[n][1].token, *(rows[n][1].observation or ())] for n in ready]
        logits = self.store.restore(ready, ids)
        for n in ready:
            row, paused = rows[n]
            self.rows.write_observation(row, paused.position, paused.observation or [])
            del self.offloaded[row]
        number = torch.tensor([rows[n][0] for n in ready], device=batch.cursor.device)
        active = torch.ones(len(batch.cursor) + len(ready), dtype=torch.bool)
        return replace(
            batch,
            logits=torch.cat([batch.logits, logits.to(batch.logits.dtype)]),
            cursor=torch.cat([batch.cursor, self.rows.turn_start[number]]),
            last_cursor=torch.cat([batch.last_cursor, (number + 1) * self.rows.length - 1]),
            active=active.to(number.device),
        )


@dataclass
class CompletionBuffer:
    """Tokens sampled so far.

    Args:
        ids: [N, C] token ids, padded.
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
        """Allocate a buffer of `shape` (N, C)."""
        return CompletionBuffer(
            ids=torch.full(shape, pad_id, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, dtype=torch.float32, device=device),
            mask=torch.zeros(shape, dtype=torch.bool, device=device),
            ended=torch.zeros(shape[0], dtype=torch.bool, device=device),
        )

    @staticmethod
    def for_rows_of(request: RolloutRequest) -> CompletionBuffer:
        """Allocate a buffer for the tokens of a rollout."""
        uniforms = request.uniforms
        return CompletionBuffer.empty(uniforms.shape, request.policy.pad_id, uniforms.device)

    def write_steps(self, steps: Iterable[tuple[Tensor, Tensor, Drawn]], is_end: Tensor) -> None:
        """Write all decoding steps of a rollout at once, after the last one.

        One indexed write for the whole rollout costs less than one in every step.

        Args:
            steps: for each step, each row's position in [N * C], which rows had not ended before,
                and the drawn tokens.
            is_end: [V] True for tokens that end a completion.
        """
        cursors, actives, draws = zip(*steps, strict=True)
        active, length = torch.cat(actives), self.ids.shape[1]
        positions = torch.cat(cursors)[active]
        tokens = torch.cat([drawn.tokens for drawn in draws])[active]
        self.ids.view(-1)[positions] = tokens
        logprobs = torch.cat([drawn.logprobs for drawn in draws])[active]
        self.logprobs.view(-1)[positions] = logprobs.float()
        self.mask.view(-1)[positions] = True
        self.ended[positions[is_end[tokens]] // length] = True
        for cursor, row_active, drawn in zip(cursors, actives, draws, strict=True):
            if drawn.candidate_ids is not None:
                rows, columns = cursor[row_active] // length, cursor[row_active] % length
                self.candidate_ids.append((columns, rows, drawn.candidate_ids[row_active]))

    def write_rows(self, rows: FixedRows, complete: list[bool]) -> None:
        """Write the rows whose cells are complete."""
        numbers = {
            cell: number
            for cell, (number, is_complete) in enumerate(zip(rows.numbers, complete, strict=True))
            if number is not None and is_complete
        }
        if not numbers:
            return
        device = self.ids.device
        cell = torch.tensor(list(numbers), device=device)
        row = torch.tensor(list(numbers.values()), device=device)
        output = rows.output.select(cell)
        mask = torch.arange(self.ids.shape[1], device=row.device) < output.lengths[:, None]
        self.ids[row], self.logprobs[row], self.mask[row] = output.ids, output.logprobs, mask
        self.ended[row] = output.ended
        if output.candidate_ids.shape[2]:
            width = int((output.candidate_ids >= 0).sum(2).max())  # likely ones come first
            places, columns = mask.nonzero(as_tuple=True)
            candidates = output.candidate_ids[places, columns, :width]
            self.candidate_ids.append((columns, row[places], candidates))

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
        """Return [N, used, S] tokens that could be sampled, padded with -1."""
        widest = max(ids.shape[1] for _, _, ids in self.candidate_ids)
        candidate_ids = self.ids.new_full((len(self.ids), used, widest), -1, dtype=torch.int32)
        for columns, rows, ids in self.candidate_ids:
            candidate_ids[rows, columns, : ids.shape[1]] = ids
        return candidate_ids
