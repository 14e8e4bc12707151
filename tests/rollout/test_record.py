import math

from litgrpo.environments.base import StepResult
from litgrpo.rollout.episodes import Record


def test_a_record_becomes_an_episode_with_spans_calls_and_logs():
    record = Record()
    record.add([{"role": "assistant", "content": "a"}], 3)
    record.answered(
        StepResult("", reward=None, calls={"add": (2, 1)}, log={"moves": 1.0}, state="s")
    )
    record.add([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}], 6)
    record.add([{"role": "assistant", "content": "b"}], 1)
    record.answered(StepResult("", reward=2, calls={"add": (1, 0)}, log={"moves": 2.0}))
    assert math.isnan(record.rewards[0])
    assert record.rewards[1:] == [2.0]
    assert record.states == ["s", None]
    episode = record.episode
    assert episode.spoken == ["a", "b"]
    assert episode.spans == [(0, 3), (3, 9), (3, 9), (9, 10)]
    assert episode.calls == {"add": (3, 1)}
    assert episode.log == {"moves": (3.0, 2)}
    assert record.used == 10
