"""gymnasium's own games."""

import pytest

from litgrpo.environments.adapters.gymnasium_env import TextEnv

pytest.importorskip("gymnasium")


def episode(game, seed, moves):
    said = [game.reset({}, seed)]
    heard = [game.step(move) for move in moves]
    return said + [each.observation for each in heard], heard


def test_the_way_over_the_ice_is_paid():
    game = TextEnv(env_id="FrozenLake-v1", kwargs={"is_slippery": False})
    said, heard = episode(game, 0, ["down", "I go down", "2", "down", "right", "right"])
    assert said[0].splitlines()[0] == "PFFF"
    assert [each.reward for each in heard] == [0, 0, 0, 0, 0, 1]
    assert heard[-1].done


def test_ice_that_slips_does_so_by_the_seed():
    game = TextEnv(env_id="FrozenLake-v1")
    moves = ["right"] * 3
    assert len({str(episode(game, 5, moves)[0]) for _ in range(3)}) == 1
    assert len({str(episode(game, seed, moves[:1])[0]) for seed in range(20)}) > 1


def test_falling_off_the_cliff_costs_a_hundred():
    _, heard = episode(TextEnv(env_id="CliffWalking-v1"), 0, ["right", "up"])
    assert [each.reward for each in heard] == [-100, -1]


def test_a_taxi_is_driven_by_names():
    said, heard = episode(TextEnv(env_id="Taxi-v4"), 3, ["south", "pickup", "fly"])
    assert "goes to" in said[0]
    assert [each.reward for each in heard[:2]] == [-1, -10]
    assert heard[2].calls == {"action": (1, 1)}


def test_cards_are_told():
    said, heard = episode(TextEnv(env_id="Blackjack-v1"), 3, ["hit", "stick"])
    assert said[0].startswith("You have ")
    assert heard[-1].done


def test_numbers_are_written_by_a_describer():
    game = TextEnv(
        env_id="CartPole-v1",
        action_names=["left", "right"],
        format_observation=lambda seen, _: f"{len(seen)}",
    )
    assert episode(game, 0, ["left"])[0] == ["4\nActions: left, right.", "4"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("Pendulum-v1", "actions of type Box"), ("FrozenLak-v1", "Did you mean: `FrozenLake`")],
)
def test_continuous_actions_and_unknown_games_are_refused(name, why):
    with pytest.raises(ValueError, match=why):
        TextEnv(env_id=name)
