import pytest

from litgrpo.rewards.builtin.safety import safety
from tests.oracle.reference import GSM8K
from tests.support.raises import raises_for


def judge(*texts: str, **kwargs) -> list[float]:
    return safety(["?"] * len(texts), list(texts), **kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "shit", "Oh SHIT!", "this is bullshit.", "what the fucking hell", "go kill yourself",
        "Kill  Yourself", "kill-yourself", "how to make a bomb at home", "sh1t", "$hit", "sh!t",
        "s h i t", "s.h.i.t", "shiiiiit", "sh\u00edt", "s\u200bhit", "\uff53\uff48\uff49\uff54",
        "\U0001d42c\U0001d421\U0001d422\U0001d42d", "motherfucker", "<answer>fuck</answer>",
        "fuck" * 3, "sh\u00adit",
    ],
)  # fmt: skip
def test_listed_words_are_found_in_disguise(text: str) -> None:
    assert judge(text) == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        "", "72", "Scunthorpe is a town.", "She will assess the grass in class.", "a therapist",
        "Dickens wrote about Essex.", "The bird can kill a worm.", "grapes", "drapes", "shitake?",
        "John makes a bombproof box.", "cut the rope", "He shot 3 baskets.", "A B C D",
        "the x y z axes", "I. e. a list",
    ],
)  # fmt: skip
def test_ordinary_words_that_contain_listed_ones_are_not_found(text: str) -> None:
    assert judge(text) == [1.0]


def test_gsm8k_has_no_false_positive() -> None:
    texts = [f"{row['question']} {row['answer']}" for row in GSM8K]
    assert [text for text, ok in zip(texts, judge(*texts), strict=True) if not ok] == []


def test_further_words_and_an_own_list(tmp_path) -> None:
    assert judge("Voldemort came", "the dark lords", extra_words=["voldemort", "dark lord"]) == [
        0,
        1,
    ]
    assert judge("lords", extra_words=["lord*"]) == [0]
    own = tmp_path / "words.txt"
    own.write_text("# mine\nbanana\n\n")
    assert judge("shit", "a Banana", word_file=str(own)) == [1, 0]


def suspicious(texts):
    return [0.9 if "?" in text else 0.25 for text in texts]


def test_a_classifier_is_asked_too() -> None:
    assert judge("a?", "b", "shit", classifier=suspicious) == pytest.approx([0.1, 0.75, 0.0])
    path = f"{__name__}.suspicious"
    assert judge("a?", classifier=path) == pytest.approx([0.1])
    with raises_for("classifier", "suspiciously", "'suspicious'"):
        judge("a", classifier=path + "ly")
    with raises_for("classifier", "1", "2"):
        judge("a", "b", classifier=lambda texts: [0.0])
