"""Descriptions of gymnasium's text-like games."""

from types import SimpleNamespace

from litgrpo.environments.adapters.gymnasium_env import blackjack, cliff_walking, frozen_lake, taxi


def test_games_are_drawn_with_the_player_in_its_place():
    lake = SimpleNamespace(desc=[[b"S", b"F"], [b"H", b"G"]])
    assert frozen_lake(1, lake).startswith("SP\nHG\n")
    rows = cliff_walking(36, None).splitlines()
    assert rows[3] == "P" + "C" * 10 + "G"
    assert cliff_walking(13, None).splitlines()[1] == ".P.........."


def test_a_taxi_and_cards_are_told():
    desc = [[b"+", b"-", b"-", b"-", b"+"], [b"|", b"R", b":", b" ", b"|"]]
    cab = SimpleNamespace(desc=desc, decode=lambda _: (0, 1, 4, 0))
    assert taxi(0, cab) == (
        "+---+\n|R:T|\nT is the taxi. The passenger is in the taxi and goes to red."
    )
    assert blackjack((14, 10, 1), None) == "You have 14 with a usable ace. The dealer shows 10."
