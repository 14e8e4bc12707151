import json
from itertools import combinations

import pytest

from litgrpo.data.examples import records
from litgrpo.data.examples.records import split_words


def test_the_sets_share_no_pattern_and_no_word():
    for one, other in combinations((records.TRAIN, records.VALIDATION, records.TEST), 2):
        assert not set(one.patterns) & set(other.patterns)
        for name in ("first", "last", "jobs", "cities"):
            words, others = (split_words(getattr(each, name)) for each in (one, other))
            assert not set(words) & set(others)
            assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("generate", "count"),
    [(records.train, 400), (records.validation, 100), (records.test, 300)],
)
def test_rows_are_reproducible_and_sentences_contain_every_field(generate, count):
    found = generate()
    assert found == generate()
    assert len({row["prompt"] for row in found}) == count
    for row in found:
        answer = json.loads(row["answer"])
        assert list(answer) == ["name", "age", "job", "city"]
        assert all(str(value) in row["prompt"] for value in answer.values())
        assert "{" not in row["prompt"]
