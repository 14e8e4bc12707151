"""The environment's own reward."""

from __future__ import annotations

from collections.abc import Sequence


def environment(
    prompts: Sequence[object],
    completions: Sequence[object],
    turn_rewards: Sequence[list[float | None]],
) -> list[float | None]:
    """The sum of the rewards of an episode's turns; abstains where all of them do.

    Args:
        prompts: N prompts.
        completions: N completions.
        turn_rewards: of each episode, one for each turn; None where the environment abstained.
    """
    known = [[reward for reward in row if reward is not None] for row in turn_rewards]
    return [sum(row) if row else None for row in known]
