import pytest

from litgrpo.rollout.episodes import EpisodeSettings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_turns": 0}, "episode.max_turns is 0"),
        ({"max_turn_tokens": 0}, "episode.max_turn_tokens is 0"),
        ({"max_observation_tokens": 7}, "episode.max_observation_tokens is 7"),
        ({"turn_format": "xml"}, "episode.turn_format .*template.*inline"),
        ({"on_timeout": "wait"}, "episode.on_timeout .*fail.*reply"),
        ({"timeout_s": 0}, "episode.timeout_s is 0; it must be above 0"),
        ({"workers": -1}, "episode.workers is -1"),
    ],
)
def test_what_is_not_allowed_is_said(given, said):
    with pytest.raises(ValueError, match=said):
        EpisodeSettings(**given)
