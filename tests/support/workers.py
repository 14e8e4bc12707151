"""Shared by tests of environments.workers."""

from litgrpo.environments.base import EpisodeStart, StepResult


def starts(num=4, iteration=0, **row):
    return [
        EpisodeStart({"prompt": "p", **row}, n // 2, (iteration, 0, n // 2, n % 2))
        for n in range(num)
    ]


def step_all(pool, actions):
    """Send {episode: turn} and return {episode: result}."""
    for episode, action in actions.items():
        pool.send(episode, action)
    results = {}
    while len(results) < len(actions):
        results |= pool.receive(wait=True)
    return {episode: results[episode] for episode in actions}


def texts(results):
    return {
        n: each.observation if isinstance(each, StepResult) else each for n, each in results.items()
    }
