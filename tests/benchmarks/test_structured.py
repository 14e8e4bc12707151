import json

import pytest

from tests.benchmarks.structured import shares

RIGHT = {"name": "Ines Novak", "age": 29, "job": "cook", "city": "Prague"}


def row(*completions):
    samples = [
        {
            "completion": text,
            "truncated": text.endswith("[cut]"),
            "correct": text == json.dumps(RIGHT),
        }
        for text in completions
    ]
    return {"columns": {"answer": json.dumps(RIGHT)}, "samples": samples}


def test_shares_are_of_all_completions_and_fields_count_one_by_one():
    wrong = json.dumps(RIGHT | {"age": "29", "job": " Cook"})
    found = shares([row(json.dumps(RIGHT), wrong), row("{} and so on [cut]", "[1]")])
    ended, objects, name, age, job, city, right = found
    assert ended == pytest.approx(3 / 4)
    assert objects == name == job == city == pytest.approx(1 / 2)
    assert age == right == pytest.approx(1 / 4)
