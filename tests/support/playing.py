"""Environments and pools for tests of episodes."""

from __future__ import annotations

import random

from litgrpo.environments.base import EpisodePool
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.rollout.episodes import Episodes, EpisodeSettings
from litgrpo.rollout.turn_format import InlineFormat
from tests.support.echo import Echo
from tests.support.models import byte_tokenizer

__all__ = ["Echo"]


class SlowPool(InProcessEpisodes):
    """Answers come some looks later, in another order every time."""

    def __init__(self, environment, seed=0, share=0.3):
        super().__init__(environment)
        self.random, self.share = random.Random(seed), share

    def reset(self, starts):
        share, self.share = self.share, 2.0
        opened = super().reset(starts)
        self.share = share
        return opened

    def receive(self, *, wait):
        ready = {n: each for n, each in self.ready.items() if self.random.random() < self.share}
        if wait and not ready and self.ready:
            last = max(self.ready)
            ready = {last: self.ready[last]}
        for number in ready:
            del self.ready[number]
        return ready


def plain_opener(prompts, row, added):
    """Prompts without a chat format."""
    return byte_tokenizer()(f"{prompts.prompts[row]}{added}").input_ids


def episodes_of(pool, **settings):
    """Episodes of a pool, or of an environment in this process; turns of four tokens."""
    pool = pool if isinstance(pool, EpisodePool) else InProcessEpisodes(pool)
    given = {
        "max_turns": 3,
        "max_turn_tokens": 4,
        "turn_format": "inline",
        "close_truncated_turns": True,
    }
    limits = EpisodeSettings(**(given | settings))
    return Episodes(pool, InlineFormat(byte_tokenizer()), limits, plain_opener, ["echo"])
