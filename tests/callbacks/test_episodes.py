from litgrpo.callbacks import episodes
from litgrpo.callbacks.completions import cells, markdown_table
from tests.support.episodes import SAID, rows_of_episodes
from tests.support.standin import prompts, rollout_of


def test_a_row_of_samples_has_what_was_spoken_and_what_was_heard():
    one, other = rows_of_episodes()
    assert one["messages"] == SAID
    assert one["turn_rewards"] == [0.0, 1.0]
    assert one["calls"] == {"multiply": [1, 0]}
    assert (other["turn_rewards"], other["failed"], other["observation_tokens_cut"]) == (
        [None],
        "timed out",
        7,
    )


def test_a_row_of_single_turns_has_no_more_than_before():
    rollout = rollout_of(prompts("A"))
    assert episodes.of_row(rollout, 0) == {}
    shown = episodes.readable({"prompt": "A", "completion": "b\nc"})
    assert shown.splitlines() == ["prompt     | A", "policy     | b", "           | c"]


def test_an_episode_is_read_turn_by_turn():
    one, other = (episodes.readable(row).splitlines() for row in rows_of_episodes())
    assert one == [
        "prompt     | 2*3=?",
        "policy 1   | <call>2*3</call>   (reward 0)",
        "tool multiply | 6 | *six*",
        "policy 2   | 6   (reward 1)",
        "reward:      1  (correct 1, format none)",
        "advantage:   0.5",
        "calls:       multiply 1 (0 failed)",
    ]
    assert other[1].endswith("(reward none)")
    assert other[-2:] == ["failed:      timed out", "left out:    7 heard tokens"]


def test_a_table_of_episodes_shows_every_message_as_it_is():
    shown = markdown_table(episodes.table(rows_of_episodes())).splitlines()
    assert shown[0] == "| episode | who | text | reward of the turn | reward | advantage |"
    assert shown[2] == "| 0 | prompt | 2&#42;3=? |  | 1 | 0.5 |"
    assert shown[4] == "| 0 | tool multiply | 6 &#124; &#42;six&#42; |  |  |  |"
    assert shown[6].startswith("| 1 | prompt")
    assert len(shown) == 2 + 4 + 2
    assert cells(rows_of_episodes())[0][:2] == ["prompt", "completion"]
