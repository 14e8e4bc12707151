import json

import pytest

from litgrpo.rewards import json_fields

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
        return json_fields([None], [json.dumps(said)], [RIGHT], same_fields=True)[0]

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


@pytest.mark.parametrize("answer", ["", "29", "{}", "not JSON", None, [], [{"a": 1}, "b"]])
def test_an_answer_that_is_no_object_is_refused(answer):
    with pytest.raises(ValueError, match="is no JSON object with a field"):
        score("{}", answer)
