"""Rows that speak, hear and speak on, in the decoding loop of the local engine.

What a row hears is forced into the loop token by token where it is short and there at once. Where
it is long, or not there yet, the row leaves the batch with its keys and values, reads what it heard
in one pass, and comes back; nobody waits for it. Column t of row n draws with uniform [n, t],
whenever that is, so a row's tokens do not depend on who answers when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.models.leaving import RowsAway
from litgrpo.rollout.engines.base import Listener, RolloutRequest
from litgrpo.rollout.sampling import Drawn
from litgrpo.tensors import compacted
from litgrpo.types import Rollout

READ_AT_ONCE = 32  # more tokens than these are read in one pass, not in as many steps
BACK_EVERY = 4  # steps: rows that come back together read together, which costs less


def said_and_heard(decoding: Any, places: int, buffer: Any) -> Rollout:
    """The rollout of rows that have turns.

    Args:
        decoding: reads prompts and draws tokens for requests with a listener.
        places: rows that decode at the same time at most, those that are away included.
        buffer: for what is drawn.
    """
    asked = decoding.requests
    rows = TurnRows(asked, decoding.is_end)
    buffer.write_steps(Conversation(decoding, rows, places).steps(), decoding.is_end)
    buffer.ids, buffer.mask = rows.ids, rows.real
    buffer.ended = ~rows.cut
    plain = buffer.rollout(asked.prompts, asked.group_size)
    turns = rows.turns[:, : plain.completion_ids.shape[1]]
    return replace(plain, loss_mask=turns >= 0, turns=turns)


class TurnRows:
    """What every row has said and heard, and where its turn is.

    Args:
        requests: of the rollout.
        is_end: [V] True for tokens that end a turn.
    """

    def __init__(self, requests: RolloutRequest, is_end: Tensor) -> None:
        (rows, self.length), device = requests.uniforms.shape, requests.uniforms.device
        assert requests.listener is not None
        self.listener: Listener = requests.listener
        self.stops, self.is_end = requests.stops, is_end
        shape = (rows, self.length)
        self.ids = torch.full(shape, requests.policy.pad_id, dtype=torch.long, device=device)
        self.real = torch.zeros(shape, dtype=torch.bool, device=device)
        self.forced = torch.zeros_like(self.real)  # to be heard, when the row comes there
        self.turns = torch.full(shape, -1, dtype=torch.int16, device=device)
        self.number = torch.zeros(rows, dtype=torch.int16, device=device)
        self.first = torch.arange(rows, device=device) * self.length  # of the turn, in [N * C]
        self.cut = torch.zeros(rows, dtype=torch.bool, device=device)
        self.may_stop = torch.zeros_like(is_end)
        if self.stops is not None:
            self.may_stop = self.stops.may_complete.to(device)

    def next(self, drawn: Drawn, cursor: Tensor) -> Drawn:
        """The next token of each row: what it hears, or else what was drawn, which is noted."""
        forced = self.forced.view(-1)[cursor]
        tokens = torch.where(forced, self.ids.view(-1)[cursor], drawn.tokens)
        places = cursor[~forced]
        self.ids.view(-1)[places] = tokens[~forced]
        self.real.view(-1)[places] = True
        self.turns.view(-1)[places] = self.number[places // self.length]
        candidates = drawn.candidate_ids
        if candidates is not None:
            candidates = candidates.masked_fill(forced[:, None], -1)
        return Drawn(tokens, drawn.logprobs.masked_fill(forced, 0.0), candidates)

    def ended(self, tokens: Tensor, cursor: Tensor) -> dict[int, int]:
        """The rows whose turn ended with this token, told to the listener: {row: its place here}.

        Args:
            tokens: [n] of this step.
            cursor: [n] their places in [N * C].
        """
        speaks = ~self.forced.view(-1)[cursor]
        rows = cursor // self.length
        last = (self.first + self.listener.max_turn_tokens).minimum(
            torch.arange(1, len(self.first) + 1, device=cursor.device) * self.length
        )
        full = cursor + 1 >= last[rows]
        suspects = speaks & (self.is_end[tokens] | full | self.may_stop[tokens])
        found: dict[int, int] = {}
        for place in suspects.nonzero().flatten().tolist():
            row, end = int(rows[place]), int(cursor[place]) + 1
            ids = self.ids.view(-1)[int(self.first[row]) : end].tolist()
            ends = bool(self.is_end[tokens[place]]) or self._stops(ids)
            if ends or bool(full[place]):
                self.cut[row] = not ends
                self.listener.ended(row, ids, cut=not ends)
                found[row] = place
        return found

    def _stops(self, ids: list[int]) -> bool:
        return self.stops is not None and self.stops.completed(ids)

    def hear(self, row: int, place: int, ids: list[int]) -> None:
        """What a row hears stands from a place in [N * C] on; its next turn begins behind it."""
        device, end = self.ids.device, place + len(ids)
        self.ids.view(-1)[place:end] = torch.tensor(ids, device=device)
        self.real.view(-1)[place:end] = True
        self.forced.view(-1)[place:end] = True
        self.first[row], self.cut[row] = end, False
        self.number[row] += 1


@dataclass
class Away:
    """A row that has left the batch.

    Args:
        place: where in [N * C] its next token goes.
        token: the last one that it said, which has not been fed.
        ids: what it heard; None: it waits, or is over.
        over: it will not come back.
    """

    place: int
    token: int
    ids: list[int] | None = None
    over: bool = False


@dataclass
class Conversation:
    """The loop.

    Args:
        decoding: reads prompts and draws tokens.
        rows: what was said and heard.
        places: rows at the same time at most.
        away: {row: what is kept of it}, in the order in which they left.
        long: {row: what it heard at once, and reads in one pass}.
        kept: their keys and values, in the same order; None: rows of this policy cannot leave.
        step: tokens that the rows in the batch have been fed.
    """

    decoding: Any
    rows: TurnRows
    places: int
    away: dict[int, Away] = field(default_factory=dict)
    long: dict[int, list[int]] = field(default_factory=dict)
    kept: RowsAway | None = None
    step: int = 0

    def steps(self) -> Iterator[tuple[Tensor, Tensor, Drawn]]:
        """Sample, feed and hear until every row is over; yields as `LocalEngine._steps`."""
        waiting, batch = self._begun(len(self.decoding.requests.prompts), None)
        while batch is not None:
            drawn = self.rows.next(self.decoding.draw(batch), batch.cursor)
            yield batch.cursor, batch.active, drawn
            self.step += 1
            batch, tokens = self._heard(batch, drawn.tokens)
            if len(tokens):
                logits = self.decoding.requests.policy.step(tokens, batch.state)
                batch = replace(batch, logits=logits)
            batch = self._returned(batch)
            while self.away and not batch:  # all wait
                self._answered({}, batch, wait=True)
                batch = self._returned(batch)
            waiting, batch = self._begun(waiting, batch)

    def _begun(self, waiting: int, batch: Any) -> tuple[int, Any]:
        """Groups that waited begin where there is room; None as batch: all is over."""
        asked = self.decoding.requests
        batch = batch or None  # without rows there is none
        groups = min(waiting, (self.places - len(batch or ()) - len(self.away)) // asked.group_size)
        if groups > 0 and (batch is None or batch.state.can_join):
            newcomers = self.decoding.begin(len(asked.prompts) - waiting, groups)
            waiting -= groups
            if batch is not None:
                return waiting, batch.joined(newcomers)
            batch, self.kept = newcomers, asked.policy.away(newcomers.state)
        return waiting, batch

    def _heard(self, batch: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        """Rows whose turn ended hear, leave or are over; the others move on.

        Returns:
            The rows that are fed next, and [n] what they are fed.
        """
        here = self.rows.ended(tokens, batch.cursor)
        batch = replace(batch, cursor=batch.cursor + 1)
        if not (here or self.away):
            return batch, tokens
        over = self._answered(here, batch)
        while here and self.kept is None:
            over += self._answered(here, batch, wait=True)
        for row, place in here.items():
            self.kept.leave(place)  # type: ignore[union-attr]
            self.away[row] = Away(int(batch.cursor[place]), int(tokens[place]))
        self._told({row: self.long.pop(row) for row in list(self.long)})
        return self._without(batch, tokens, [*over, *here.values()])

    def _answered(self, here: dict[int, int], batch: Any, *, wait: bool = False) -> list[int]:
        """Take what came; rows that hear it in the loop leave `here`.

        Returns:
            Places in the batch of rows that are over.
        """
        answers, over = self.rows.listener.heard(wait=wait), []
        self._told({row: ids for row, ids in answers.items() if row in self.away})
        for row in answers.keys() & here.keys():
            ids = answers[row]
            if ids is None:
                over.append(here.pop(row))
            elif len(ids) > READ_AT_ONCE and self.kept is not None:
                self.long[row] = ids
            else:
                self.rows.hear(row, int(batch.cursor[here.pop(row)]), ids)
        return over

    def _told(self, answers: Mapping[int, list[int] | None]) -> None:
        """Rows that are away have heard."""
        for row, ids in answers.items():
            self.away[row].ids = ids
            self.away[row].over = ids is None

    def _without(self, batch: Any, tokens: Tensor, gone: list[int]) -> tuple[Any, Tensor]:
        """The batch without some rows; what they were fed stays with those that are away."""
        active = torch.ones_like(batch.active)
        active[gone] = False
        kept = compacted(active, len(active) - len(gone))
        if len(kept) or self.away:
            batch = batch.only(kept) if gone else batch
        else:  # all is over
            batch = replace(batch, cursor=batch.cursor[:0])
        return replace(batch, logits=batch.logits[:0]), tokens[kept]

    def _due(self, back: Mapping[int, Away], batch: Any) -> bool:
        """Whether rows that have heard come back now: no row waits for one that has not."""
        every = len(back) == len(self.away) or self.step % BACK_EVERY == 0
        return bool(back) and (every or not batch)

    def _returned(self, batch: Any) -> Any:
        """The batch with the rows that have heard, which read it now."""
        if self.kept is None:
            return batch
        self.kept.forget([n for n, each in enumerate(self.away.values()) if each.over])
        self.away = {row: each for row, each in self.away.items() if not each.over}
        back = {row: each for row, each in self.away.items() if each.ids is not None}
        if not self._due(back, batch):
            return batch
        ids = [[each.token, *(each.ids or ())] for each in back.values()]
        numbers = [n for n, each in enumerate(self.away.values()) if each.ids is not None]
        logits = self.kept.come_back(numbers, ids)
        for row, each in back.items():
            self.rows.hear(row, each.place, each.ids or [])
            del self.away[row]
        number = torch.tensor(list(back), device=batch.cursor.device)
        return replace(
            batch,
            logits=torch.cat([batch.logits, logits.to(batch.logits.dtype)]),
            cursor=torch.cat([batch.cursor, self.rows.first[number]]),
            last=torch.cat([batch.last, (number + 1) * self.rows.length - 1]),
            active=torch.ones(len(batch.cursor) + len(back), dtype=torch.bool).to(number.device),
        )
