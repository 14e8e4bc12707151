"""An environment of SkyRL-Gym."""

import pytest

from litgrpo.environments.adapters.skyrl import SkyRL

pytest.importorskip("skyrl_gym")
ROW = {"prompt": "2+2", "answer": "4"}


def test_a_problem_is_answered_over_turns():
    game = SkyRL(
        env_id="gsm8k_multi_turn",
        extras_from_columns={"reward_spec.ground_truth": "answer"},
        extras={"max_turns": 3},
    )
    assert game.reset(ROW, 0) == ""
    heard = game.step("hm")
    assert "#### ANSWER" in heard.observation
    assert game.step("#### 5").reward == pytest.approx(0.2 / 3)
    heard = game.step("#### 4")
    assert (heard.reward, heard.done) == (1.0, True)


def test_unknown_ids_and_rows_without_a_gold_answer_are_refused():
    with pytest.raises(ValueError, match="env_id: nope cannot be played"):
        SkyRL(env_id="nope")
    with pytest.raises(ValueError, match="ground_truth is required"):
        SkyRL(env_id="gsm8k_multi_turn").reset(ROW, 0)
