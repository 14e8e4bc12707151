import json
from itertools import combinations

import pytest

from litgrpo.data.examples.records import FRESH, SETTINGS, TRAIN, _apart, fresh, settings, train


def test_the_lists_have_nothing_in_common():
    for one, other in combinations((TRAIN, SETTINGS, FRESH), 2):
        assert not set(one.forms) & set(other.forms)
        for name in ("first", "last", "jobs", "cities"):
            words, others = (_apart(vars(each)[name]) for each in (one, other))
            assert not set(words) & set(others)
            assert len(set(words)) == len(words)


@pytest.mark.parametrize(("rows", "count"), [(train, 400), (settings, 100), (fresh, 300)])
def test_a_sentence_says_each_field_and_the_rows_are_always_the_same(rows, count):
    found = rows()
    assert found == rows()
    assert len({row["prompt"] for row in found}) == count
    for row in found:
        answer = json.loads(row["answer"])
        assert list(answer) == ["name", "age", "job", "city"]
        assert all(str(value) in row["prompt"] for value in answer.values())
        assert "{" not in row["prompt"]
