import pytest

from litgrpo.rewards.builtin.length import cosine_length
from tests.support.raises import raises_for

RIGHT, WRONG = "<answer>72</answer>", "<answer>73</answer>"


def judge(text: str, length: int, gold: object = "72", **kwargs) -> float | None:
    return cosine_length(["?"], [text], [gold], [length], max_completion_length=100, **kwargs)[0]


def test_the_cosine_by_hand() -> None:
    assert [judge(RIGHT, n) for n in (0, 50, 100, 500)] == [1.0, pytest.approx(0.75), -1.0, -1.0]
    assert [judge(WRONG, n) for n in (0, 50, 100)] == [-1.0, pytest.approx(-0.75), -1.0]
    assert judge(RIGHT, 25) == pytest.approx(0.75 + 0.25 * 2**-0.5)
    assert judge(RIGHT, 10, None) is None
    assert judge("72", 0, require_tags=False) == 1.0


def test_a_wrong_answer_never_beats_a_right_one_below_the_limit() -> None:
    right = [judge(RIGHT, n) for n in range(100)]
    wrong = [judge(WRONG, n) for n in range(100)]
    assert min(right) > max(wrong)
    assert right == sorted(right, reverse=True)
    assert wrong == sorted(wrong)


def test_impossible_settings_are_refused() -> None:
    with raises_for("correct_long", "incorrect_long"):
        judge(RIGHT, 1, correct_long=0.0, incorrect_long=1.0)
