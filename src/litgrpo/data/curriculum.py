"""A curriculum by measured success: prompts without an advantage are sampled less often."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from typing import Any

import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require
from litgrpo.data.loader import BatchOrder, BatchPlan, select_rank_rows
from litgrpo.types import Stats

LEAST_PROB = 0.01  # with 0 there might be no prompt left


@check_field_types
@dataclass(frozen=True)
class Curriculum:
    """Samples prompts less often that the policy always or never solves.

    Groups whose completions are all right, or all wrong, have no advantage in GRPO. The success of
    a prompt is the fraction of correct completions in its last group; `model.evaluation` says when
    a completion is correct. Prompts that have no group yet are always sampled.

    Args:
        easy_threshold: a prompt is easy if its success is at least this.
        hard_threshold: a prompt is hard if its success is at most this.
        easy_prob: probability that an easy prompt is used when it is its turn.
        hard_prob: probability that a hard prompt is used when it is its turn.

    Example:
        >>> curriculum = Curriculum(easy_prob=0.1)
        >>> curriculum.prob(1.0), curriculum.prob(0.5), curriculum.prob(0.0), curriculum.prob(None)
        (0.1, 1.0, 0.5, 1.0)
    """

    easy_threshold: float = 1.0
    hard_threshold: float = 0.0
    easy_prob: float = 0.25
    hard_prob: float = 0.5

    def __post_init__(self) -> None:
        require(
            0 <= self.hard_threshold < self.easy_threshold <= 1,
            f"hard_threshold is {self.hard_threshold} and easy_threshold {self.easy_threshold}; "
            "they must be from 0 to 1, the hard one below the easy one",
        )
        for name in ("easy_prob", "hard_prob"):
            prob = getattr(self, name)
            require(LEAST_PROB <= prob <= 1, f"{name} is {prob}; it must be from {LEAST_PROB} to 1")

    def is_easy(self, success: float) -> bool:
        """True for a prompt that is solved (nearly) always."""
        return success >= self.easy_threshold

    def is_hard(self, success: float) -> bool:
        """True for a prompt that is solved (nearly) never."""
        return success <= self.hard_threshold

    def prob(self, success: float | None) -> float:
        """Return the probability that a prompt is used when it is its turn; None: no group yet."""
        if success is not None and self.is_easy(success):
            return self.easy_prob
        return self.hard_prob if success is not None and self.is_hard(success) else 1.0


class CurriculumOrder(BatchOrder):
    """Batches of a curriculum: the rows of the usual order, without those that are skipped."""

    # The usual order of all epochs is one sequence of rows. Each batch takes the next rows of it,
    # and a number that depends on seed and place in the sequence decides whether an easy or hard
    # row is skipped. So the batches are a function of the seed and of the successes, which are part
    # of the checkpoint: a resumed run has the same batches. An epoch has as many batches as without
    # a curriculum, and reaches further in the sequence.

    def __init__(
        self,
        plan: BatchPlan,
        curriculum: Curriculum,
        *,
        index_of: Callable[[int], int],
        num_indices: int,
        num_prompts: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(lru_cache(maxsize=2)(plan), rank, world_size)
        self.curriculum, self.seed = curriculum, seed
        self.index_of, self.num_indices, self.num_prompts = index_of, num_indices, num_prompts
        self.success: dict[int, float] = {}  # {position in the data: success of the last group}
        self.position = 0  # rows of the sequence that were used or skipped
        self.chosen_ahead: list[list[int]] = []  # the next batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.start, self.num_batches):
            self._choose(1)
            yield select_rank_rows(self.chosen_ahead.pop(0), self.rank, self.world_size)

    def peek(self, epoch: int, done: int, ahead: int) -> list[int]:
        # The batches are one sequence, whatever the epoch. `record` does not change a returned one.
        self._choose(ahead)
        return self.chosen_ahead[ahead - 1]

    def _choose(self, count: int) -> None:
        """Choose the rows of the next batches, so that `count` of them are known."""
        size = len(self.plan(0)[0])
        while len(self.chosen_ahead) < count:
            batch, self.position = self._take(size, self.position, 1)
            self.chosen_ahead.append(batch)

    def draw(self, count: int, start: int) -> tuple[list[int], int]:
        # In the order of the epochs below 0.
        return self._take(count, start, -1)

    def _take(self, count: int, position: int, sign: int) -> tuple[list[int], int]:
        """Return rows from a position on, and the next position; sign -1: of epochs -1, -2, ..."""
        rows: list[int] = []
        size = len(self.plan(0)[0])
        while len(rows) < count:
            epoch, offset = divmod(position, size * self.num_batches)
            row = self.plan(epoch if sign > 0 else -1 - epoch)[offset // size][offset % size]
            prob = self.curriculum.prob(self.success.get(self.index_of(row)))
            # A seed for each place: nothing has to be stored to continue.
            if prob == 1 or random.Random(f"{self.seed} {sign * position}").random() < prob:
                rows.append(row)
            position += 1
        return rows, position

    def record(self, index: Tensor, success: Tensor) -> None:
        """Remember the success of the groups of all ranks: [B] fractions; NaN is left out."""
        for number, fraction in zip(index.tolist(), success.tolist(), strict=True):
            if not isnan(fraction):
                self.success[int(number) % self.num_indices] = fraction

    def stats(self) -> Stats:
        """Return the fractions of the prompts that have a group, and that are easy and hard."""
        values = self.success.values()
        counts = {
            "measured": len(values),
            "easy": sum(map(self.curriculum.is_easy, values)),
            "hard": sum(map(self.curriculum.is_hard, values)),
        }
        return {
            f"curriculum/{name}_frac": torch.tensor(count / self.num_prompts)
            for name, count in counts.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "success": dict(self.success),
            "rows_passed": self.position,
            "chosen_ahead": list(self.chosen_ahead),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.success, self.position = dict(state["success"]), state["rows_passed"]
        self.chosen_ahead = [*state["chosen_ahead"]]
