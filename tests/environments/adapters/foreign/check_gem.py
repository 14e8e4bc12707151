"""Games of GEM."""

from contextlib import closing

import pytest

from litgrpo.environments.adapters.gymnasium_env import TextEnv
from litgrpo.environments.base import EpisodeStart
from litgrpo.environments.workers import EpisodeWorkers

pytest.importorskip("gem")


def game(name="game:GuessTheNumber-v0-easy"):
    return TextEnv(factory="gem.envs.registration.make", kwargs={"env_id": name})


def test_a_number_is_found_by_halving():
    played = game()
    assert "between 1 and 10" in played.reset({}, 3)
    least, greatest, rewards = 1, 10, []
    while True:
        guess = (least + greatest) // 2
        heard = played.step(f"\\boxed{{{guess}}}")
        rewards.append(heard.reward)
        if heard.done:
            break
        assert heard.observation.endswith("Enter your next guess.")
        low = "higher" in heard.observation
        least, greatest = (guess + 1, greatest) if low else (least, guess - 1)
    assert rewards[-1] == 1.0


def test_a_wrong_format_ends_it_as_gem_does():
    played = game()
    played.reset({}, 3)
    heard = played.step("hm")
    assert (heard.reward, heard.done) == (-0.1, True)


def test_global_seeds_are_apart_in_a_pool():
    def play(*seeds):
        starts = [EpisodeStart({}, seed, (0, 0, n, 0)) for n, seed in enumerate(seeds)]
        environment = game("game:Minesweeper-v0-easy")
        with closing(EpisodeWorkers(environment, num_workers=len(seeds))) as pool:
            opening = pool.reset(starts)[0]
            for number in reversed(range(len(seeds))):
                pool.send(number, f"\\boxed{{reveal {number} {number}}}")
                (result,) = pool.receive(wait=True).values()
        return opening, result

    assert play(3, 4) == play(3)


def test_an_unknown_id_is_refused():
    with pytest.raises(ValueError, match="game:Nope not found in registry"):
        game("game:Nope")
