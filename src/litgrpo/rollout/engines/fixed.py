"""Decoding in steps of fixed shapes, which a device compiles (XLA) or records (CUDA graphs).

Devices that compile a program for each set of shapes decode all rows to the end. A new recording
takes little time, so rows that have ended leave, and attention reads more columns, at some of the
checks for ended rows. At most one recording exists at a time, and none between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from litgrpo.distributed.device import Backend
from litgrpo.models.decode.fixed import FixedState, index_copy
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.sampling import Drawn, Sampling, draw_tokens
from litgrpo.types import PromptBatch, Rollout

# Attention reads own columns in multiples of this number, or in larger steps once it reads many:
# each step costs a recording, each column that is not used yet costs reading zeros.
COLUMNS = 128
# A smaller grid costs a recording, so rows leave early only if it has at most this share of cells.
SMALLER_GRID = 0.5


def bucket_columns(needed: int) -> int:
    """Return the number of own columns that attention reads if it needs this many.

    Example:
        >>> [bucket_columns(needed) for needed in (1, 128, 129, 1100)]
        [128, 128, 256, 1280]
    """
    columns = COLUMNS
    while columns < needed:
        columns += max(COLUMNS, columns // 4 // COLUMNS * COLUMNS)
    return columns


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
        return draw_tokens(logits, uniforms, self.sampling, static_shapes=True)

    def num_candidates(self, vocab_size: int) -> int:
        """Return S, the size of the candidate set; 0 if every token is a candidate."""
        most = min(self.sampling.top_k or vocab_size, vocab_size)
        return most if self.sampling.has_filters else 0


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
        of_rows = {name: of[rows] for name, of in self._asdict().items() if name != "column"}
        return self._replace(**of_rows)

    def rollout(self, prompts: PromptBatch, group_size: int, columns: int) -> Rollout:
        """Return the first columns as a rollout, on the device of the prompts.

        Copied, because the next rollout may write into the same memory.
        """
        device = prompts.prompt_ids.device
        ids, logprobs, candidate_ids = (
            tensor[:, :columns].to(device, copy=True)
            for tensor in (self.ids, self.logprobs, self.candidate_ids)
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


@dataclass
class FixedRows:
    """Rows that decode together in a grid [B, G] with n = B * G cells.

    Args:
        numbers: for each cell the number of its row in the rollout; None: the cell has no row.
        active: for each cell whether its row still decodes, as of the last check.
        tokens: for each cell the tokens that the last check knows; empty without stop strings.
        state: keys and values.
        sampler: random numbers of the rows.
        output: sampled tokens.

    Example:
        Two prompts with 2 rows and 1 row left: `numbers=[4, 7, 13, None]`.
    """

    numbers: list[int | None]
    active: list[bool]
    tokens: list[list[int]]
    state: FixedState
    sampler: TokenSampler
    output: DecodeBuffer

    def grid(self) -> list[list[int]]:
        """Return for each prompt with active rows their places among the rows of the prompt."""
        width = self.state.group_size
        parts = [self.active[i : i + width] for i in range(0, len(self.active), width)]
        return [[place for place, active in enumerate(part) if active] for part in parts]

    def num_cells(self) -> int:
        """Return the number of cells of the smallest grid that holds the active rows."""
        grid = self.grid()
        return sum(map(bool, grid)) * max(map(len, grid))

    def shrink(self) -> None:
        """Keep the active rows, in the smallest grid that holds them."""
        grid, device = self.grid(), self.output.tokens.device
        width = max(map(len, grid))
        prompts = [prompt for prompt, places in enumerate(grid) if places]
        # Cells without a row repeat the first row of their prompt and sample padding.
        filled = [(grid[b] + grid[b][:1] * width)[:width] for b in prompts]
        is_row = [place < len(grid[b]) for b in prompts for place in range(width)]
        cells = [
            b * self.state.group_size + place
            for b, places in zip(prompts, filled, strict=True)
            for place in places
        ]
        self.state = self.state.select(
            torch.tensor(prompts, device=device), torch.tensor(filled, device=device)
        )
        index = torch.tensor(cells, device=device)
        output = self.output.select(index)
        ended = output.ended | ~torch.tensor(is_row, device=device)
        numbers = zip(cells, is_row, strict=True)
        self.numbers = [self.numbers[cell] if row else None for cell, row in numbers]
        self.active = is_row
        self.tokens = [[*self.tokens[cell]] for cell in cells]
        self.sampler = self.sampler._replace(uniforms=self.sampler.uniforms.index_select(0, index))
        self.output = output._replace(ended=ended)


class FixedShapeLoop:
    """Decodes single-turn rows of some prompts in steps of fixed shapes.

    Args:
        request: without a listener.
        device: compiles or records steps.
        check_every: tokens between two checks for rows that have ended; each check waits for the
            device.
        finish: called with rows that leave early; None: no row leaves, and steps are not recorded.
    """

    def __init__(
        self,
        request: RolloutRequest,
        device: Backend,
        check_every: int,
        finish: Callable[[FixedRows, list[bool]], None] | None = None,
    ) -> None:
        self.request, self.device = request, device
        self.is_end = request.is_end.to(device.device)
        self.check_every, self.finish = check_every, finish
        self.records = finish is not None
        self.step = device.compile(_decode_step)

    def decode(
        self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor, first: int = 0
    ) -> FixedRows:
        """Decode the rows of some prompts until each has ended or is full.

        Args:
            prompt_ids: [b, P] of the prompts.
            prompt_mask: [b, P] True marks a real token.
            uniforms: [n, C] random numbers of their rows.
            first: number of the first of these rows in the rollout.

        Returns:
            The rows that have not left early.
        """
        length = uniforms.shape[1]
        rows, step, replay = self._prefill(prompt_ids, prompt_mask, uniforms, first), None, None
        for column in range(1, length):
            # A recording has the shapes of the rows that are left after the first token.
            if column % self.check_every == 0 or (column == 1 and self.records):
                self._check_ends(rows, column)
                if not any(rows.active):
                    break
                if self.records and self._outgrown(rows, column):
                    step = replay = None  # frees the recording before other tensors are allocated
                    self._resize(rows, column)
            if step is None:
                step = self._make_step(rows)
                step()  # libraries select kernels and allocate in the first run of new shapes
            elif self.records:
                replay = replay or self.device.record(step)
                replay()
            else:
                step()
        return rows

    def _prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor, first: int
    ) -> FixedRows:
        """Read prompts and draw the first token of each row."""
        request = self.request
        sampler = TokenSampler(uniforms, self.is_end, request.sampling)
        prefill = self.device.compile(_prefill)
        output, state = prefill(
            request.policy, prompt_ids, prompt_mask, sampler, request.group_size
        )
        if self.records:
            state = state.show(0)
        numbers = list(range(first, first + len(uniforms)))
        tokens: list[list[int]] = [[] for _ in numbers]
        return FixedRows([*numbers], [True] * len(numbers), tokens, state, sampler, output)

    def _make_step(self, rows: FixedRows) -> Callable[[], None]:
        """Return a function that feeds the last token of each row and draws the next one."""

        def step() -> None:
            before = rows.output
            after, state = self.step(self.request.policy, before, rows.state, rows.sampler)
            if not self.records:
                rows.output, rows.state = after, state
                return
            # The next replay reads the memory that this one read; the state is written in place.
            for tensor, new in zip(before, after, strict=True):
                if new is not tensor:
                    tensor.copy_(new)

        return step

    def _columns_needed(self, rows: FixedRows, column: int) -> int:
        """Return the number of own columns that are written until the next check."""
        return min(column + self.check_every, rows.output.ids.shape[1]) - 1

    def _outgrown(self, rows: FixedRows, column: int) -> bool:
        """Return True if more columns are needed, or far fewer cells."""
        more_columns = self._columns_needed(rows, column) > rows.state.columns
        return more_columns or rows.num_cells() <= SMALLER_GRID * len(rows.numbers)

    def _resize(self, rows: FixedRows, column: int) -> None:
        """Drop the rows that have ended if the grid becomes smaller, and show more columns."""
        if rows.num_cells() < len(rows.numbers):
            assert self.finish is not None
            self.finish(rows, [not active for active in rows.active])
            rows.shrink()
        rows.state = rows.state.show(bucket_columns(self._columns_needed(rows, column)))

    def _check_ends(self, rows: FixedRows, column: int) -> None:
        """Update the active rows and, if there are stop strings, the tokens; one wait.

        Args:
            rows: to check.
            column: tokens sampled for each.
        """
        stops, ended = self.request.stops, rows.output.ended
        if stops is None:
            (report,) = self.device.to_host([ended])
            rows.active = [
                active and not has_ended
                for active, has_ended in zip(rows.active, report.tolist(), strict=True)
            ]
            return
        # All columns, because a device that compiles would compile a program for each number.
        (report,) = self.device.to_host([torch.cat([ended[:, None], rows.output.ids], 1)])
        new = report[:, 1 + len(rows.tokens[0]) : 1 + column]
        reports = zip(report[:, 0].tolist(), new.tolist(), strict=True)
        for cell, (has_ended, ids) in enumerate(reports):
            rows.active[cell] &= not has_ended
            rows.tokens[cell] += ids
            if rows.active[cell] and bool(stops.may_complete[ids].any()):
                rows.active[cell] = not stops.found(rows.tokens[cell])


def _prefill(
    policy: Policy, prompt_ids: Tensor, prompt_mask: Tensor, sampler: TokenSampler, group_size: int
) -> tuple[DecodeBuffer, FixedState]:
    """Read the prompts and draw the first token of each row."""
    capacity = sampler.uniforms.shape[1]
    logits, state = policy.fixed_decoder.prefill(prompt_ids, prompt_mask, group_size, capacity)
    output = DecodeBuffer.empty(
        sampler.uniforms, policy.pad_id, sampler.num_candidates(logits.shape[1])
    )
    drawn = sampler.draw(logits, output.column)
    return output.append(drawn, policy.pad_id, sampler.is_end), state


def _decode_step(
    policy: Policy, output: DecodeBuffer, state: FixedState, sampler: TokenSampler
) -> tuple[DecodeBuffer, FixedState]:
    """Feed the last token of each row and draw the next one."""
    logits, state = policy.fixed_decoder.decode_step(output.tokens, state)
    drawn = sampler.draw(logits, output.column)
    return output.append(drawn, policy.pad_id, sampler.is_end), state
