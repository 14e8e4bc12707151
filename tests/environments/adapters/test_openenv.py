"""OpenEnv by a stand-in with its signatures."""

from dataclasses import asdict, dataclass

import pytest

from litgrpo.environments.adapters.openenv import OpenEnv


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
    ],
)
def test_what_cannot_be_heard_is_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        echo(**settings)
