"""One Unicode spelling for texts that people call equal, and no other number for any."""

import unicodedata

import pytest

from litgrpo.rewards.builtin.dialogue import bleu, f1, rouge_l
from litgrpo.rewards.builtin.format import json_fields
from litgrpo.rewards.builtin.math import closeness, correctness, exact, gsm8k
from litgrpo.text.answers import parse_number, same_text
from litgrpo.text.normalization import fold, normalize
from litgrpo.text.overlap import without_articles

SPELLINGS = {
    "caf\u00e9": ["cafe\u0301", "CAF\u00c9", "CAFE\u0301", "\ufeffcaf\u00e9", "ca\u00adf\u00e9",
                  "ca\u200bf\u00e9", "caf\u00e9\ufe0f", "\u2067caf\u00e9\u2069", "ca\u200dfe\u0301",
                  "\uff43\uff41\uff46\u00e9", "\U0001d41c\U0001d41a\U0001d41f\u00e9"],
    "don't know": ["don\u2019t know", "don\u00b4t know", "don't\u00a0know", "don\u2019t\u3000know"],
    "1990-1995": ["1990\u20131995", "1990\u20111995", "1990\u22121995"],
    "Stra\u00dfe": ["STRASSE", "strasse"],
    "five fish": ["\ufb01ve \ufb01sh"],
    "H2O": ["H\u2082O", "\uff28\uff12\uff2f"],
    "x^2 + 1": ["x\u00b2 + 1"],
    "3*4": ["3\u00d74", "3\u22c54"],
    "\ud55c\uad6d": [unicodedata.normalize("NFD", "\ud55c\uad6d")],
    "Paris": ["P\u2060aris"],
}  # fmt: skip
NUMBERS = {
    "72": ["\uff17\uff12", "\u0667\u0662", "\u096d\u0968", "\u200f72", "\ufeff72", "7\u00ad2",
           "72\u00a0clips", "\u3000\uff17\uff12", "\uff0472", "72\uff0e", "72\u3002"],
    "-72": ["\u221272", "\uff0d72", "\u2212\u0667\u0662", "\u201372"],
    "1080": ["1\uff0c080", "\u0661\u066c\u0660\u0668\u0660", "1\u202f080"],
    "2.5": ["2\u066b5", "2\u00bd", "2 \u00bd", "\u0665/\u0662"],
    "1/8": ["\u215b"],
    "100": ["10\u00b2", "1\u00d710\u00b2", "\uff11\uff10^2"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"), [(one, other) for one, others in SPELLINGS.items() for other in others]
)
def test_rewards_that_compare_texts_ignore_their_unicode_spelling(one: str, other: str) -> None:
    for gold, said in ((one, other), (other, one)):
        tagged = f"<answer>{said}</answer>"
        assert correctness(["?"], [tagged], [gold]) == [1.0]
        assert gsm8k(["?"], [f"so\n{said}\n\u200b\n"], [gold]) == [1.0]
        assert json_fields(["?"], [f'{{"a": "{said}"}}'], [{"a": gold}]) == [1.0]
        assert exact(["?"], [tagged], [gold]) == [0.0]
        # Case counts for the words of a dialogue.
        if said.casefold() == said and gold.casefold() == gold and " + " not in gold:
            for reward in (f1, rouge_l, bleu):
                same = reward(["?"], [gold], [gold])
                assert reward(["?"], [said], [gold]) == pytest.approx(same), reward
            assert without_articles(said) == without_articles(gold)


@pytest.mark.parametrize(
    ("gold", "said"), [(gold, said) for gold, texts in NUMBERS.items() for said in texts]
)
def test_numbers_are_read_in_every_script(gold: str, said: str) -> None:
    for one, other in ((gold, said), (said, gold)):
        assert correctness(["?"], [f"<answer>{one}</answer>"], [other]) == [1.0]
        assert closeness(["?"], [f"<answer>{one}</answer>"], [other]) == [1.0]


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("10\u00b2", "10^2"),
        ("10\u207b\u00b2", "10^-2"), ("2\u00bd", "2 1/2"), ("10\u2082", "10_2"),
        ("x\u00b2\u207a\u00b9", "x^(2+1)"), ("log\u20828", "log_28"), ("5\u2460", "5\u2460"),
        ("2\u20623", "2*3"), ("72\u33a1", "72m2"), ("x\u207f", "x^n"), ("5\u2014no", "5\u2014no"),
        ("9\u00ba", "9\u00b0"), ("plain text, 7^2 + 2", "plain text, 7^2 + 2"),
    ],
)  # fmt: skip
def test_no_spelling_is_another_number(text: str, spelling: str) -> None:
    assert normalize(text) == spelling
    assert normalize(spelling) == spelling
    assert parse_number("10\u2082") is None
    assert not same_text("10\u00b2", "102")


def test_a_full_stop_is_an_answer_and_an_empty_one_is_not() -> None:
    assert correctness(["?"] * 3, ["<answer>.</answer>", "<answer></answer>", "<answer>*</answer>"],
                       ["."] * 3) == [1.0, 0.0, 0.0]  # fmt: skip
    assert correctness(["?"], ["<answer>.</answer>"], ["\ufeff \u200b"]) == [None]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", ["\uff9e\u0f73", "\u0301\u0316", "\u00b2", "\u2082", "\u200b"])
def test_many_marks_are_read_in_linear_time(piece: str) -> None:
    fold("a" + piece * (200_000 // len(piece)))
