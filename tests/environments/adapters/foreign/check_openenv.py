"""An environment of OpenEnv, in process and behind a server."""

import socket
import threading
import time

import pytest

openenv = pytest.importorskip("openenv.core.env_server")
import uvicorn  # noqa: E402 - comes with openenv

from litgrpo.environments.adapters.openenv import OpenEnv  # noqa: E402


class Say(openenv.Action):
    message: str


class Seen(openenv.Observation):
    text: str


class Echo(openenv.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Seen(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Seen(
            text=f"{self.turns} {action.message}", reward=0.5, done=action.message == "stop"
        )

    @property
    def state(self):
        return openenv.State(step_count=self.turns)


@pytest.fixture(scope="module")
def url():
    app = openenv.create_fastapi_app(Echo, Say, Seen, max_concurrent_envs=4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


def play(game):
    heard = [game.reset({}, 3), game.step("hello"), game.step("stop")]
    game.close()
    return heard


def test_a_server_and_a_class_say_the_same(url):
    here = play(OpenEnv(factory=Echo, action_class=Say, observation_field="text"))
    assert here[0] == "seed 3"
    assert (here[1].observation, here[1].reward, here[1].done) == ("1 hello", 0.5, False)
    assert here[2].done
    assert play(OpenEnv(url=url, observation_field="text")) == here


def test_sessions_of_a_server_are_apart_and_given_back(url):
    for _ in range(3):  # at most four sessions
        games = [OpenEnv(url=url, observation_field="text") for _ in range(2)]
        for game in games:
            game.reset({}, 1)
        assert [game.step("a").observation for game in games] == ["1 a", "1 a"]
        for game in games:
            game.close()


def test_wrong_actions_are_failed_calls():
    game = OpenEnv(factory=Echo, action_class=Say, action_field="")
    game.reset({}, 3)
    assert game.step('{"message": "hi"}').observation == '{"text": "1 hi"}'
    for wrong in ("hi", '{"message": 1}', '{"other": "a"}'):
        assert game.step(wrong).calls == {"action": (1, 1)}


def test_no_server_is_one_line():
    with pytest.raises(ValueError, match=r"OpenEnv http://127\.0\.0\.1:9 cannot be played"):
        OpenEnv(url="http://127.0.0.1:9")
