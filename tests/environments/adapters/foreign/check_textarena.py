"""Games of TextArena."""

from contextlib import closing

import pytest

from litgrpo.environments.adapters.textarena import TextArena
from litgrpo.environments.base import EpisodeStart
from litgrpo.environments.workers import EpisodeWorkers

pytest.importorskip("textarena")
MOVES = ["[up]", "[left]", "down", "[left]", "[up]"]


def test_a_number_is_found_by_halving():
    game = TextArena("GuessTheNumber-v0")
    assert "between 1 and 20" in game.reset({}, 3)
    least, greatest = 1, 20
    while True:
        guess = (least + greatest) // 2
        heard = game.step(f"I guess [{guess}]")
        if heard.done:
            break
        assert heard.observation.startswith("[GAME] The target number is ")
        low = "higher" in heard.observation
        least, greatest = (guess + 1, greatest) if low else (least, guess - 1)
    assert heard.reward == 1.0


def test_invalid_moves_are_answered_and_end_the_game_after_some():
    game = TextArena("GuessTheNumber-v0")
    game.reset({}, 3)
    heard = game.step("hm")
    assert "invalid move" in heard.observation
    assert (heard.calls, heard.done) == ({"action": (1, 1)}, False)
    assert game.step("[3]").calls == {"action": (1, 0)}
    game.step("hm")
    heard = game.step("hm")
    assert (heard.calls, heard.done) == ({"action": (1, 1)}, True)


def boards(seeds):
    starts = [EpisodeStart({}, seed, (0, 0, n, 0)) for n, seed in enumerate(seeds)]
    with closing(EpisodeWorkers(TextArena("2048-v0"), num_workers=len(seeds))) as pool:
        observations = [pool.reset(starts)[0]]
        for move in MOVES:
            for episode in range(len(seeds)):
                pool.send(episode, move)
            results = {}
            while len(results) < len(seeds):
                results |= pool.receive(wait=True)
            observations.append(results[0].observation)
    return observations


def test_global_seeds_are_apart_in_a_pool():
    alone = boards([7])
    assert boards([7, 8, 9]) == alone
    assert all("[Player]" not in each for each in alone)


@pytest.mark.parametrize("name", ["Mastermind-v0", "TowerOfHanoi-v0", "Minesweeper-v0"])
def test_other_games_begin_by_their_seed(name):
    game = TextArena(name)
    assert game.reset({}, 3) == game.reset({}, 3)
    assert game.step("hm").calls == {"action": (1, 1)}


@pytest.mark.parametrize(
    ("name", "why"), [("TicTacToe-v0", "for one player cannot"), ("Nope-v0", "not found")]
)
def test_games_for_two_and_unknown_ones_are_refused(name, why):
    with pytest.raises(ValueError, match=why):
        TextArena(name)
