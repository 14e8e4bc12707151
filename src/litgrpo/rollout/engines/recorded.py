"""Decoding in a step that the device records (CUDA graphs): one launch for each token.

A recording has fixed shapes. So rows that have ended leave, and attention reads more columns, only
at some of the checks for ended rows; then the step is recorded again. At most one recording exists
at a time, and none between two rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.distributed.device import Backend
from litgrpo.models.decode.fixed import FixedState
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.static import DecodeBuffer, TokenSampler

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


@dataclass
class GridRows:
    """Rows that decode together in a grid [B, G] with n = B * G cells.

    Args:
        numbers: for each cell the number of its row in the rollout; None: the cell has no row.
        active: for each cell whether its row still decodes; None: as of the last check.
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

    def select(self, grid: list[list[int]]) -> GridRows:
        """Return the active rows in the smallest grid that holds them.

        Args:
            grid: result of `grid`.
        """
        width, device = max(map(len, grid)), self.output.tokens.device
        prompts = [prompt for prompt, places in enumerate(grid) if places]
        # Cells without a row repeat the first row of their prompt and sample padding.
        filled = [(grid[b] + grid[b][:1] * width)[:width] for b in prompts]
        is_row = [place < len(grid[b]) for b in prompts for place in range(width)]
        cells = [
            b * self.state.group_size + place
            for b, places in zip(prompts, filled, strict=True)
            for place in places
        ]
        state = self.state.select(
            torch.tensor(prompts, device=device), torch.tensor(filled, device=device)
        )
        index = torch.tensor(cells, device=device)
        output = self.output.select(index)
        ended = output.ended | ~torch.tensor(is_row, device=device)
        return GridRows(
            [self.numbers[cell] if row else None for cell, row in zip(cells, is_row, strict=True)],
            is_row,
            [self.tokens[cell] for cell in cells],
            state,
            self.sampler._replace(uniforms=self.sampler.uniforms.index_select(0, index)),
            output._replace(ended=ended),
        )


class RecordedDecoder:
    """Decodes single-turn rows in recorded steps.

    Args:
        request: without a listener; if filters exclude tokens, `top_k` is one of them.
        is_end: [V] True for tokens that end a completion.
        device: records steps.
        check_every: tokens between two checks for rows that have ended; each check waits for the
            device.
        finish: called with rows that are complete: their numbers in the rollout, their numbers in
            a buffer, and the buffer.

    Example::

        decoder = RecordedDecoder(request, is_end, backend(device), 16, buffer.write_rows)
        decoder.decode(first=0, groups=8)  # the first 8 prompts with their G rows each
    """

    def __init__(
        self,
        request: RolloutRequest,
        is_end: Tensor,
        device: Backend,
        check_every: int,
        finish: Callable[[list[int], list[int], DecodeBuffer], None],
    ) -> None:
        self.request, self.is_end, self.device = request, is_end, device
        self.check_every, self.finish = check_every, finish

    def decode(self, first: int, groups: int) -> None:
        """Decode groups, beginning with number `first`, until every row has ended or is full."""
        length = self.request.uniforms.shape[1]
        rows, step, replay = self._prefill(slice(first, first + groups)), None, None
        for column in range(1, length):
            if column == 1 or column % self.check_every == 0:
                self._check_ends(rows, column)
                if not any(rows.active):
                    break
                grid, needed = rows.grid(), min(column + self.check_every, length) - 1
                cells = sum(map(bool, grid)) * max(map(len, grid))
                more_columns = needed > rows.state.columns
                if more_columns or cells <= SMALLER_GRID * len(rows.numbers):
                    step = replay = None  # frees the recording before other tensors are allocated
                    if cells < len(rows.numbers):
                        self._finish(rows, rows.active)
                        rows = rows.select(grid)
                    rows.state = rows.state.show(bucket_columns(needed))
            if step is None:
                step = self._make_step(rows)
                step()  # libraries select kernels and allocate in the first run of new shapes
            else:
                replay = replay or self.device.record(step)
                replay()
        self._finish(rows, [False] * len(rows.numbers))

    def _prefill(self, groups: slice) -> GridRows:
        """Read prompts and draw the first token of each row."""
        request, policy, group_size = self.request, self.request.policy, self.request.group_size
        rows = range(groups.start * group_size, groups.stop * group_size)
        uniforms = request.uniforms[rows.start : rows.stop]
        ids, mask = request.prompts.prompt_ids[groups], request.prompts.prompt_mask[groups]
        assert policy.recorded_decoder is not None
        logits, state = policy.recorded_decoder.prefill(ids, mask, group_size, uniforms.shape[1])
        state = state.show(0)
        sampler = TokenSampler(uniforms, self.is_end, request.sampling)
        candidates = sampler.num_candidates(policy.vocab_size)
        output = DecodeBuffer.empty(uniforms, policy.pad_id, candidates)
        drawn = sampler.draw(logits, output.column)
        output = output.append(drawn, policy.pad_id, self.is_end)
        tokens: list[list[int]] = [[] for _ in rows]
        return GridRows(list(rows), [True] * len(rows), tokens, state, sampler, output)

    def _make_step(self, rows: GridRows) -> Callable[[], None]:
        """Return a function that feeds the last token of each row and draws the next one."""
        policy, state, sampler, output = self.request.policy, rows.state, rows.sampler, rows.output
        decoder = policy.recorded_decoder
        assert decoder is not None

        def step() -> None:
            logits, _ = decoder.decode_step(output.tokens, state)  # written in place
            drawn = sampler.draw(logits, output.column)
            after = output.append(drawn, policy.pad_id, self.is_end)
            for own, new in zip(output, after, strict=True):
                if new is not own:  # the next replay reads the memory that this one read
                    own.copy_(new)

        return step

    def _check_ends(self, rows: GridRows, column: int) -> None:
        """Update the active rows and, if there are stop strings, the tokens; one wait.

        Args:
            rows: to check.
            column: tokens sampled for each.
        """
        stops, output = self.request.stops, rows.output
        known = 0 if stops is None else len(rows.tokens[0])
        new = output.ids[:, known : column if stops is not None else 0]
        report = torch.cat([output.ended[:, None], new], 1).tolist()
        for cell, (ended, *ids) in enumerate(report):
            rows.active[cell] &= not ended
            rows.tokens[cell] += ids
            if stops is not None and rows.active[cell] and bool(stops.may_complete[ids].any()):
                rows.active[cell] = not stops.found(rows.tokens[cell])

    def _finish(self, rows: GridRows, active: Sequence[bool]) -> None:
        """Hand over the rows that are not active."""
        numbers = {
            cell: number
            for cell, (number, is_active) in enumerate(zip(rows.numbers, active, strict=True))
            if number is not None and not is_active
        }
        if numbers:
            self.finish(list(numbers.values()), list(numbers), rows.output)
