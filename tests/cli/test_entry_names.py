import pytest

from litgrpo.cli.entry_names import with_entry

SENTENCE = "there is no key 'model.rewards.wait' (of Reward): did you mean 'model.rewards.weight'?"
NAMED = SENTENCE.replace("rewards.", "rewards.right.")


@pytest.mark.parametrize(
    "given",
    [
        "NestedArg(key='rewards.right.wait', val='5')",
        "{'rewards': {'right': {'function': 'a.b', 'wait': 5}, 'other': {'function': 'a.b'}}}",
        "{'class_path': 'litgrpo.GRPO', 'init_args': {'rewards': {'right': {'wait': 5}}}}",
    ],
)
def test_the_entry_is_named(given):
    assert with_entry(SENTENCE, f"  Errors:\n  Given value: 3\n  Given value: {given}") == NAMED


@pytest.mark.parametrize(
    "given",
    [
        "NestedArg(key='rewards.wait', val='5')",
        "NestedArg(key='wait', val='5')",
        "{'rewards': {'wait': 5}}",
        "{'rewards': {'wait': 5, 'right': {'wait': 5}}}",
        "{'rewards': {'right': {'wait': 5}, 'other': {'wait': 5}}}",
        "{'rewards': <object at 0x1>}",
        "{'rewards': [1]}",
        "5",
    ],
)
def test_where_it_is_not_known_the_sentence_stays(given):
    assert with_entry(SENTENCE, f"Given value: {given}") == SENTENCE
    assert with_entry(SENTENCE, "nothing was given") == SENTENCE


def test_of_several_entries_that_with_the_quoted_value_is_meant():
    given = "{'rewards': {'right': {'weight': 1.0}, 'other': {'weight': 'abc'}}}"
    said = with_entry("model.rewards.weight is 'abc', expected float", f"Given value: {given}")
    assert said == "model.rewards.other.weight is 'abc', expected float"
