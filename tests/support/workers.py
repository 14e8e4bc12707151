"""Shared by tests of environments.workers."""

from litgrpo.environments.base import Start, StepResult


def starts(num=4, iteration=0, **row):
    return [
        Start({"prompt": "p", **row}, n // 2, (iteration, 0, n // 2, n % 2)) for n in range(num)
    ]


def answers(pool, said):
    """What each episode hears; {episode: turn}."""
    for episode, turn in said.items():
        pool.say(episode, turn)
    heard = {}
    while len(heard) < len(said):
        heard |= pool.heard(wait=True)
    return {episode: heard[episode] for episode in said}


def texts(heard):
    return {
        n: each.observation if isinstance(each, StepResult) else each for n, each in heard.items()
    }
