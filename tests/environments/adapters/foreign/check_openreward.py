"""Environments of a real OpenReward server."""

import pickle
from pathlib import Path

import pytest

from litgrpo.data import OpenRewardTasks
from litgrpo.environments import EpisodeError, OpenReward
from tests.environments.adapters.foreign.serving import serve

pytest.importorskip("openreward")
SERVER = str(Path(__file__).parent / "openreward_server.py")


@pytest.fixture
def url():
    with serve(SERVER) as url:
        yield url


def environment(url, **settings):
    made = OpenReward(url=url, environment="sums", call_format="python", **settings)
    return pickle.loads(pickle.dumps(made))


def test_tools_give_rewards_and_end_the_episode(url):
    rows = OpenRewardTasks(url, "sums", limit=2).rows()
    assert [row["prompt"] for row in rows] == ["0+1?", "1+1?"]
    game = environment(url, call_cost=0.25)
    assert game.reset(rows[0], seed=0) == ""
    for turn, heard, reward, done in (
        ("[answer(answer='1')]", ["error: answer: 'answer' must be an integer"], 0, 0),
        ("[answer(answer=7, name='me')]", ["wrong"], 0.0, 0),
        ("[answer(answer=1), answer(answer=1)]", ["right", "error: the episode is over"], 1.0, 1),
    ):
        result = game.step(turn)
        assert [message["content"] for message in result.observation] == heard
        assert result.reward == reward - 0.25 * len(heard)
        assert result.done == bool(done)
    game.reset(rows[1], seed=0)
    assert game.step("[answer(answer=2)]").reward == 0.75
    game.reset(rows[1], seed=0)
    result = game.step("I give up.")
    assert (result.reward, result.done) == (0.0, True)
    game.close()


def test_a_terminal_tool_gets_the_last_turn(url):
    (row,) = OpenRewardTasks(url, "talks", limit=1, variant="talks").rows()
    game = environment(url, variant="talks")
    for turn, reward in (("1", 1.0), ("2", 0.0)):
        game.reset(row, seed=0)
        result = game.step(turn)
        assert (result.reward, result.done, result.observation) == (reward, True, "")
    game.close()


def test_a_lost_server_fails_the_episode(url):
    rows = OpenRewardTasks(url, "sums", limit=1).rows()
    game = environment(url)
    game.reset(rows[0], seed=0)
    assert game.step("[answer(answer=7)]").reward == 0.0
    with pytest.raises(EpisodeError, match="OpenReward: "):
        game.step("[answer(answer=-1)]")
    with pytest.raises(ValueError, match="no column 'task_data'"):
        game.reset({"prompt": "1+1?"}, seed=0)


def test_what_cannot_be_played_is_found_at_the_start(url):
    with pytest.raises(ValueError, match="Invalid split"):
        OpenRewardTasks(url, "sums", split="tain").rows()
    with pytest.raises(ValueError, match="cannot be played: MaxRetriesError"):
        environment("http://127.0.0.1:9")
