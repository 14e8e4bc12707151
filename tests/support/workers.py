"""Shared by tests of environments.workers."""

from litgrpo.environments.base import EpisodeStart, StepResult


def starts(num=4, iteration=0, **row):
    return [
        EpisodeStart({"prompt": "p", **row}, n // 2, (iteration, 0, n // 2, n % 2))
        for n in range(num)
    ]


def answers(pool, said):
    """What each episode hears; {episode: turn}."""
    for episode, turn in said.items():
        pool.send(episode, turn)
    heard = {}
    while len(heard) < len(said):
        heard |= pool.receive(wait=True)
    return {episode: heard[episode] for episode in said}


def texts(heard):
    return {
        n: each.observation if isinstance(each, StepResult) else each for n, each in heard.items()
    }
