"""Prompts read once per group, finished rows dropped, free places refilled: for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from litgrpo.models.policy import DecodeState, Policy
from litgrpo.rollout.engines.interface import RolloutEngine, Transcript
from litgrpo.rollout.sampling import Drawn, Sampling, sample
from litgrpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class LocalEngine(RolloutEngine):
    """Decodes all rows at once, each prompt's keys and values shared by its group.

    Args:
        max_rows: rows that decode at the same time at most, in whole groups; groups that wait
            begin as soon as enough rows have finished. Lower it when keys and values do not fit
            into memory. None decodes all.
        drop_frac: finished rows leave the batch when they are this fraction of it.
        look_every: tokens between looks for finished rows; each look waits for the device, which
            costs nothing on a CPU.
        dtype: `bfloat16` decodes in lower precision than the policy's. Its log-probabilities are
            then not the policy's own: set `objective.sampler_correction`. None: as the policy.
        fused: let the policy decode by a step of its own where it knows the model.
    """

    max_rows: int | None = None
    drop_frac: float = 0.03
    look_every: int = 1
    dtype: Literal["bfloat16"] | None = None
    fused: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, least in (("max_rows", self.max_rows), ("look_every", self.look_every)):
            if least is not None and least < 1:
                raise ValueError(f"engine.{name} is {least}; it must be at least 1.")

    @property
    def lower_precision(self) -> torch.dtype | None:
        """See `RolloutEngine.lower_precision`."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    @torch.no_grad()
    def generate(
        self,
        policy: Policy,
        prompts: PromptBatch,
        group_size: int,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        device = prompts.prompt_ids.device
        said = Transcript.empty(uniforms.shape, policy.pad_id, device)
        task = _Task(policy, prompts, group_size, uniforms.to(device), sampling)
        places = len(uniforms) if self.max_rows is None else max(self.max_rows, group_size)
        rows, lower = min(places, len(uniforms)), self.lower_precision
        with policy.decoding(rows, dtype=lower, fused=self.fused):
            said.add_all(self._spoken(task, places), task.is_end)
        return said.rollout(prompts, group_size)

    def _spoken(self, task: _Task, places: int) -> Iterator[tuple[Tensor, Tensor, Drawn]]:
        """Sample and feed until every row of every group has ended or is full.

        Yields:
            For each step: [n] places in [N * C], [n] which of the rows still speak, and what was
            drawn for them.
        """
        waiting, crew, step, full = len(task.prompts), None, 0, 0
        length = task.uniforms.shape[1]
        pause = min(self.look_every, max(1, length // 4))  # finished rows take up room meanwhile
        while waiting or crew is not None:
            free = places - (0 if crew is None else len(crew.cursor))
            if waiting and free >= task.group_size and (crew is None or crew.state.can_join):
                groups = min(waiting, free // task.group_size)
                begun = task.begin(len(task.prompts) - waiting, groups)
                crew = begun if crew is None else crew.joined(begun)
                waiting, full = waiting - groups, step + length  # by then nobody has more to say
            assert crew is not None
            drawn = task.draw(crew)
            yield crew.cursor, crew.speaking, drawn
            crew, tokens, step = crew.heard(drawn.tokens, task.is_end), drawn.tokens, step + 1
            if step % pause == 0 or step == full:
                speaking = int(crew.speaking.sum())
                gone = len(tokens) - speaking
                if speaking == 0:
                    crew = None
                    continue
                if gone >= self.drop_frac * len(tokens) or (waiting and gone >= task.group_size):
                    kept = _kept(crew.speaking, speaking)
                    crew, tokens = crew.only(kept), tokens[kept]
            crew = replace(crew, logits=task.policy.step(tokens, crew.state))


@dataclass(frozen=True)
class _Crew:
    """The rows that decode at the moment.

    Args:
        state: what the policy remembers of them.
        logits: [n, V] of their next tokens.
        cursor: [n] where in [N * C] each row's next token goes.
        last: [n] where its last one can go.
        speaking: [n] False: the row has ended and waits to be dropped.
    """

    state: DecodeState
    logits: Tensor
    cursor: Tensor
    last: Tensor
    speaking: Tensor

    def heard(self, tokens: Tensor, is_end: Tensor) -> _Crew:
        """After these tokens: rows that ended are marked, the others move on."""
        done = is_end.index_select(0, tokens).logical_or_(self.cursor == self.last)
        speaking = self.speaking & ~done
        return replace(self, speaking=speaking, cursor=self.cursor + speaking)

    def only(self, kept: Tensor) -> _Crew:
        """Only the given rows; their logits have been used."""
        self.state.select(kept)
        return replace(
            self, cursor=self.cursor[kept], last=self.last[kept], speaking=self.speaking[kept]
        )

    def joined(self, others: _Crew) -> _Crew:
        """These rows and others."""
        self.state.join(others.state)
        return _Crew(
            state=self.state,
            logits=torch.cat([self.logits, others.logits]),
            cursor=torch.cat([self.cursor, others.cursor]),
            last=torch.cat([self.last, others.last]),
            speaking=torch.cat([self.speaking, others.speaking]),
        )


@dataclass(frozen=True)
class _Task:
    """What is asked of the engine."""

    policy: Policy
    prompts: PromptBatch
    group_size: int
    uniforms: Tensor
    sampling: Sampling

    @cached_property
    def is_end(self) -> Tensor:
        """[V] True for tokens that end a completion."""
        tokens = torch.arange(self.policy.vocab_size)
        return torch.isin(tokens, torch.tensor(self.policy.eos_ids)).to(self.uniforms.device)

    def begin(self, first: int, groups: int) -> _Crew:
        """Read some prompts, from number `first`."""
        part, length = slice(first, first + groups), self.uniforms.shape[1]
        ids, mask = self.prompts.prompt_ids[part], self.prompts.prompt_mask[part]
        logits, state = self.policy.prefill(ids, mask, self.group_size, capacity=length)
        rows = torch.arange(groups * self.group_size, device=ids.device) + first * self.group_size
        return _Crew(
            state=state,
            logits=logits.repeat_interleave(self.group_size, 0),
            cursor=rows * length,
            last=rows * length + length - 1,
            speaking=torch.ones_like(rows, dtype=torch.bool),
        )

    def draw(self, crew: _Crew) -> Drawn:
        """The next token of each row."""
        numbers = self.uniforms.view(-1).index_select(0, crew.cursor)
        return sample(crew.logits, numbers, self.sampling)


def _kept(speaking: Tensor, number: int) -> Tensor:
    """[number] the rows that speak; the last of them fill the places of those that do not."""
    kept = torch.arange(number, device=speaking.device)
    kept[~speaking[:number]] = speaking[number:].nonzero().squeeze(1) + number
    return kept
