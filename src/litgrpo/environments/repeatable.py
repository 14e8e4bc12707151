"""Whether an environment is a function of row, seed and what was said."""

from __future__ import annotations

from collections.abc import Sequence

from litgrpo.environments.base import EpisodePool, Failed, Message, Start, StepResult

Played = list[str | list[Message] | StepResult | Failed]  # what an episode heard, its opening first


def deviations(pool: EpisodePool, starts: Sequence[Start], said: Sequence[str]) -> list[str]:
    """Play one episode alone, once more, and beside others; what it heard differently.

    All are played by one pool, which should play them in one process: state that outlives an
    episode (an attribute of a class, a module's list) or is drawn from elsewhere (a clock, a
    network, the system's random numbers) then shows. The global random generators do not: pools
    keep them apart.

    Args:
        pool: of one process, such as `EpisodeWorkers(environment, workers=1)`.
        starts: the first is compared; the others are played beside it.
        said: the turns of every episode.

    Returns:
        A line for each answer that differs.
    """
    alone, again = (played(pool, starts[:1], said)[0] for _ in range(2))
    beside = played(pool, starts, said)[0]
    found = _differences(alone, again, "played once more")
    return found + _differences(alone, beside, "played beside others")


def played(pool: EpisodePool, starts: Sequence[Start], said: Sequence[str]) -> list[Played]:
    """What each of some episodes heard, from its opening to its end."""
    told: list[Played] = [[opening] for opening in pool.begin(starts)]
    for turn in said:
        going = {n for n, episode in enumerate(told) if not _is_over(episode[-1])}
        for n in sorted(going):
            pool.say(n, turn)
        while going:
            heard = pool.heard(wait=True)
            for n, answer in heard.items():
                told[n].append(answer)
            going -= heard.keys()
    return told


def _is_over(answer: object) -> bool:
    return isinstance(answer, Failed) or (isinstance(answer, StepResult) and answer.done)


def _differences(first: Played, second: Played, how: str) -> list[str]:
    """Numbers of calls and texts of differing answers; one that is missing differs, too."""
    missing = Failed("nothing")
    longer = max(len(first), len(second))
    padded = [[*each, *[missing] * (longer - len(each))] for each in (first, second)]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {how}: {two!r:.80} in place of {one!r:.80}"
        for turn, (one, two) in enumerate(zip(*padded, strict=True))
        if one != two
    ]
