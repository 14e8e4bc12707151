"""OpenEnv by a stand-in with its signatures."""

from dataclasses import asdict, dataclass

import numpy as np
import pytest

from litgrpo.environments.adapters.openenv import OpenEnv
from litgrpo.environments.base import EpisodeStart, FailedEpisode
from litgrpo.environments.episode import EpisodePlayer


@dataclass
class Say:
    message: str

    def __post_init__(self):
        if not self.message:
            raise ValueError("empty")


@dataclass
class Seen:
    text: str
    done: bool = False
    reward: float | None = None

    def model_dump(self):
        return asdict(self)


class Echo:
    def reset(self, seed):
        return Seen(f"seed {seed}")

    def step(self, action):
        return Seen(action.message, action.message == "stop", 0.5)


def echo(**settings):
    return OpenEnv(**{"factory": Echo, "action_class": Say, "observation_field": "text"} | settings)


def test_a_turn_becomes_the_field_of_an_action():
    game = echo()
    assert game.reset({"prompt": "Talk."}, seed=3) == "\n\nseed 3"
    heard = game.step("hello")
    assert (heard.observation, heard.reward, heard.done) == ("hello", 0.5, False)
    assert game.step("stop").done


def test_all_fields_are_heard_as_json_and_said_as_json():
    game = echo(observation_field=None, action_field="")
    assert game.reset({}, seed=3) == '{"text": "seed 3"}'
    assert game.step('I say {"message": "hi"}.').observation == '{"text": "hi"}'
    for wrong in ("hi", '{"message": ""}', '{"other": 1}', "{1}"):
        heard = game.step(wrong)
        assert (heard.observation, heard.calls) == ("That is no action.", {"action": (1, 1)})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"factory": None}, "either factory: an.import.path, or url"),
        ({"url": "http://localhost:1"}, "either factory: an.import.path, or url"),
        ({"action_class": None}, "action_class is required with factory"),
        ({"observation_field": "nope"}, "no 'nope'; it has: text, done, reward"),
        ({"kwargs": {"nope": 1}}, "cannot be played: TypeError"),
        (
            {"url": "http://me:secret@localhost:1", "factory": None, "action_class": None},
            "must not contain a user name",
        ),
    ],
)
def test_what_cannot_be_heard_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        echo(**settings)


@dataclass
class Answer:
    """A server's response, as OpenEnv's client returns it."""

    observation: object
    reward: object = 0.5
    done: object = False


class Server(Echo):
    """Answers the first step by `answer`."""

    answer: object = None

    def step(self, action):
        return self.answer


MALFORMED = {
    "an observation that is null": Answer(None),
    "an observation that is a list": Answer([1]),
    "an observation that is a text": Answer("text"),
    "an observation without the field": Answer({}),
    "an observation with half a character": Answer({"text": "a\ud800"}),
    "a reward that is a text": Answer({"text": "a"}, "1.0"),
    "a reward that is NaN": Answer({"text": "a"}, float("nan")),
    "a reward that is infinite": Answer({"text": "a"}, float("-inf")),
    "a reward that is huge": Answer({"text": "a"}, 10**400),
    "a reward that is a list": Answer({"text": "a"}, [1.0]),
    "done as a text": Answer({"text": "a"}, 0.0, "false"),
    "done as a number": Answer({"text": "a"}, 0.0, 7),
    "done as a list": Answer({"text": "a"}, 0.0, []),
    "null": None,
    "a text": "text",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_fails_its_episode(name, monkeypatch):
    monkeypatch.setattr(Server, "answer", MALFORMED[name])
    player = EpisodePlayer(echo(factory=Server))
    start = EpisodeStart({}, 3, (0, 0, 0, 0))
    assert player.play(start, ()) == "seed 3"
    assert isinstance(player.play(None, ("hello",)), FailedEpisode)


@pytest.mark.parametrize("reward", [None, 1, np.float32(0.5), True])
def test_numbers_and_bools_of_numpy_are_valid(reward, monkeypatch):
    monkeypatch.setattr(Server, "answer", Answer({"text": "a"}, reward, np.bool_(True)))
    game = echo(factory=Server)
    game.reset({}, 3)
    found = game.step("hello")
    assert (found.reward, found.done) == (float(reward or 0), True)
