"""Formats of completions."""

import json

import pytest

from litgrpo.rewards import (
    json_fields,
    length,
    reasoning_answer,
    repetition,
    soft_overlong,
    think_format,
)
from tests.support.raises import raises_for

GOOD = "<reasoning>40 + 32</reasoning>\n<answer>72</answer>\n"
BAD = [
    "", "72", "<answer>72</answer>", "<reasoning>a</reasoning>",
    "<answer>72</answer><reasoning>a</reasoning>", "Sure! " + GOOD, GOOD + "Bye",
    GOOD + GOOD, "<reasoning>a</reasoning> so <answer>72</answer>",
    "<reasoning></reasoning><answer>72</answer>", "<reasoning>a</reasoning><answer> </answer>",
    "<reasoning><answer>72</answer></reasoning>", "<reasoning>a<answer>72</reasoning></answer>",
    "<reasoning>a</reasoning><answer>72", "</reasoning>a<reasoning><answer>72</answer>",
    "<reasoning>a</reasoning></answer>72<answer>", GOOD.upper(),
    "<reasoning></reasoning><answer></answer>",
]  # fmt: skip


def test_only_both_tags_once_in_order_and_alone_earn_one() -> None:
    assert reasoning_answer(["?"], [GOOD]) == [1.0]
    assert reasoning_answer(["?"], ["\n " + GOOD]) == [1.0]
    assert dict(zip(BAD, reasoning_answer(["?"] * len(BAD), BAD), strict=True)) == dict.fromkeys(
        BAD, 0.0
    )


def test_partial_credit_counts_tags_and_never_reaches_half() -> None:
    rewards = reasoning_answer(["?"] * 3, [GOOD, "<answer>72</answer>", "x"], partial_credit=True)
    assert rewards == pytest.approx([1.0, 0.2, 0.0])
    assert max(reasoning_answer(["?"] * len(BAD), BAD, partial_credit=True)) < 0.5


def test_tag_names_and_chat_messages_are_accepted() -> None:
    message = [{"role": "assistant", "content": "<think>a</think><final>b</final>"}]
    assert reasoning_answer(["?"], [message], reasoning_tag="think", answer_tag="final") == [1.0]


def test_think_format_agrees_with_trl() -> None:
    texts = [
        "<think>\na\n</think>\nb", "<think>a", "a</think>", "<think><think>a</think>b",
        "<think></think>", " <think>a</think>b",
    ]  # fmt: skip
    assert think_format(["?"] * 6, texts) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_length_is_full_inside_the_range_and_falls_linearly_outside() -> None:
    lengths = [0, 5, 10, 15, 20, 25, 40, 100]
    rewards = length([], [], lengths, min_tokens=10, max_tokens=20)
    assert rewards == [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.0, 0.0]
    assert length([], [], [0, 20, 25, 30], max_tokens=20, zero_tokens=30) == [1.0, 1.0, 0.5, 0.0]
    with raises_for("min_tokens", "max_tokens", "zero_tokens"):
        length([], [], [1], min_tokens=9, max_tokens=5)


def test_soft_overlong_agrees_with_trl() -> None:
    lengths = [10, 80, 81, 90, 100, 101, 5, 6, 1, 0]
    rewards = soft_overlong([], [], lengths, max_completion_length=100, soft_punish_cache=20)
    assert rewards == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    with raises_for("soft_punish_cache"):
        soft_overlong([], [], [1], max_completion_length=10, soft_punish_cache=11)


def test_repetition_agrees_with_trl() -> None:
    ids = [[1] * 10, [1] * 80, [1] * 81, [1] * 90, [1] * 100, [1] * 101]
    ids += [[1, 2, 3, 4, 5], [1, 2, 1, 2, 1, 2], [7], []]
    expected = [-8 / 9, -78 / 79, -79 / 80, -88 / 89, -98 / 99, -99 / 100, 0.0, -0.6, 0.0, 0.0]
    assert repetition([], [], ids, ngram_size=2) == pytest.approx(expected, abs=1e-15)
    assert repetition([], [], [[1, 1, 1]], ngram_size=1, max_penalty=-3.0) == pytest.approx([-2.0])
    with raises_for("max_penalty"):
        repetition([], [], [[1]], max_penalty=1.0)


RIGHT = {"name": "Ines Novak", "age": 29, "city": "Prague", "left": False}


def score(completion, answer=RIGHT):
    return json_fields([None], [completion], [answer])[0]


def test_all_fields_right_earn_all_however_they_are_written():
    assert score(json.dumps(RIGHT)) == 1
    assert score("\n" + json.dumps(dict(reversed(RIGHT.items())), indent=4) + " \n") == 1
    assert score('{"name": " ines novak", "age": 29.0, "city": "PRAGUE", "left": false}') == 1
    assert score(json.dumps(RIGHT), json.dumps(RIGHT)) == 1


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        ({"age": "29"}, 3 / 4),  # a text
        ({"age": 30}, 3 / 4),
        ({"left": 0}, 3 / 4),
        ({"age": True}, 3 / 4),
        ({"name": None}, 3 / 4),
        ({"job": "teacher"}, 4 / 5),  # too many
        (dict.fromkeys(RIGHT, "?"), 0),
    ],
)
def test_each_field_that_is_wrong_or_too_many_costs_its_share(changed, share):
    assert score(json.dumps(RIGHT | changed)) == pytest.approx(share)


def test_any_of_several_answers_is_right():
    assert score('{"age": 30}', [{"age": 29}, '{"age": 30}']) == 1
    assert score('{"age": 31, "b": 1}', [{"age": 29}, {"age": 30, "b": 1}]) == pytest.approx(1 / 2)


def test_a_missing_field_costs_its_share():
    assert score('{"age": 29}') == pytest.approx(1 / 4)


def test_other_fields_may_earn_nothing():
    def strict(said):
        return json_fields([None], [json.dumps(said)], [RIGHT], require_same_fields=True)[0]

    assert strict(RIGHT) == 1
    assert strict(RIGHT | {"age": 30}) == 3 / 4
    assert strict({name: RIGHT[name] for name in ("name", "age", "city")}) == 0
    assert strict(RIGHT | {"job": "teacher"}) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "29",
        '["Ines Novak", 29]',
        json.dumps(RIGHT)[:-1],  # cut off
        json.dumps(RIGHT) + " That is all.",
        "```json\n" + json.dumps(RIGHT) + "\n```",
        str(RIGHT),  # Python, not JSON
        '{"age": 29, "age": 29, "name": "Ines Novak"}',
        '{"age": NaN}',
        "[" * 100_000,
    ],
)
def test_what_a_program_cannot_read_earns_nothing(text):
    assert score(text) == 0


def test_lists_and_objects_are_compared_part_by_part():
    right = {"tags": ["a", {"b": 1}]}
    assert score('{"tags": ["A", {"b": 1}]}', right) == 1
    assert score('{"tags": ["a", {"b": true}]}', right) == 0
    assert score('{"tags": ["a"]}', right) == 0
    assert score('{"tags": ["a", {"c": 1}]}', right) == 0


@pytest.mark.parametrize("answer", ["29", "{}", "not JSON", [{"a": 1}, "b"]])
def test_an_answer_that_is_no_object_is_refused(answer):
    with raises_for("json_fields", "answer"):
        score("{}", answer)


def test_names_of_fields_are_compared_in_one_spelling() -> None:
    assert json_fields(
        [None], ['{"cafe\u0301": {"\u00e9": 1}}'], [{"caf\u00e9": {"e\u0301": 1}}]
    ) == [1.0]
