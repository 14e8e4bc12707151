"""Options of scoring: the format of completions, limits and worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import above, at_least, at_most, one_of

RewardFormat = Literal["text", "chat"]


@check_field_types
@dataclass(frozen=True)
class Scoring:
    """How completions are scored, whatever the reward functions.

    Args:
        format: `text`, or `chat` for functions that expect lists of messages.
        timeout_s: seconds that one function may take per iteration: half of them for all rows
            together; if that fails, the other half for the rows one by one.
        num_workers: number of worker processes; default: one per core, at most 4. 0 runs everything
            in the training process: a function that hangs is not interrupted, and one that crashes
            ends the run.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
        overlong_buffer_frac: fraction of max_completion_length, at its end, over which a completion
            loses up to 1 point of reward (DAPO's soft overlong punishment); 0: off.
    """

    format: RewardFormat = "text"
    timeout_s: float = 60.0
    num_workers: int | None = None
    max_failed_frac: float = 0.5
    overlong_buffer_frac: float = 0.0

    def __post_init__(self) -> None:
        one_of("model.scoring.format", self.format, get_args(RewardFormat))
        above("model.scoring.timeout_s", self.timeout_s, 0)
        at_least("model.scoring.num_workers", self.num_workers, 0)
        at_least("model.scoring.max_failed_frac", self.max_failed_frac, 0)
        at_most("model.scoring.max_failed_frac", self.max_failed_frac, 1)
        at_least("model.scoring.overlong_buffer_frac", self.overlong_buffer_frac, 0)
        at_most("model.scoring.overlong_buffer_frac", self.overlong_buffer_frac, 1)
