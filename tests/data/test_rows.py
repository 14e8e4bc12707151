import hashlib
import random

import pytest

from litgrpo.data.rows import RowReader, columns_of
from litgrpo.data.sources import read_rows


def table(columns=None, extract=None, val_fraction=0.0, train_val_overlap="drop"):
    return RowReader(columns or {}, extract or {}, val_fraction, train_val_overlap)


def prompts(rows):
    return [row.values["prompt"] for row in rows]


SUMS = [{"prompt": f"{a}+{b}?", "answer": a + b} for a in range(20) for b in range(20)]


def test_a_renamed_column_keeps_its_own_name_too_and_others_stay():
    rows = table({"prompt": "question", "gold": "answer"}).read(
        [{"question": "1+1?", "answer": "2", "level": 3}]
    )
    both = {"prompt": "1+1?", "question": "1+1?", "gold": "2", "level": 3}
    assert rows[0].values == both  # litgrpo gives `answer` a meaning, so it cannot keep its own


def test_a_column_of_our_name_that_means_something_else_is_not_taken_for_ours():
    with pytest.raises(ValueError, match="no field 'prompt'"):
        table({"answer": "prompt"}).read([{"prompt": "42", "question": "6 * 7?"}], {"prompt"})


def test_one_column_can_have_two_names():
    columns = {"prompt": "q", "answer": "a", "completion": "a"}
    rows = table(columns, {"answer": r"####\s*(.+)"}).read([{"q": "1+1?", "a": "one more\n#### 2"}])
    ours = {"prompt": "1+1?", "answer": "2", "completion": "one more\n#### 2"}
    assert rows[0].values == {"q": "1+1?", "a": "one more\n#### 2", **ours}


NESTED = {"q": "1+1?", "reward_model": {"style": "rule", "ground_truth": "2"}}


def test_a_field_within_a_column_is_named_by_a_dot():
    columns = {"prompt": "q", "gold": "reward_model.ground_truth", "deep": "a.b.c"}
    (row,) = table(columns).read([NESTED | {"a": {"b": {"c": [1]}}}])
    assert (row.values["gold"], row.values["deep"]) == ("2", [1])
    assert row.values["reward_model"] == NESTED["reward_model"]
    # A column that has the whole name comes first.
    (row,) = table({"gold": "reward_model.ground_truth"}).read(
        [NESTED | {"reward_model.ground_truth": "3"}]
    )
    assert row.values["gold"] == "3"
    # A null is a value, as in any column.
    (row,) = table({"gold": "a.b"}).read([{"a": {"b": None}}])
    assert row.values["gold"] is None
    worked = {"reward_model": {"ground_truth": "so #### 2"}}
    (row,) = table({"answer": "reward_model.ground_truth"}, {"answer": "####(.+)"}).read([worked])
    assert row.values["answer"] == "2"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"reward_model": {"style": "rule"}}, r"'reward_model' has: style"),
        ({"reward_model": None}, "'reward_model' has: no fields, but None"),
        ({"reward_model": "7"}, "'reward_model' has: no fields, but '7'"),
        ({"reward": {"ground_truth": "7"}}, "it has: reward;"),
    ],
)
def test_a_field_that_a_column_lacks_is_named_with_those_it_has(values, said):
    with pytest.raises(ValueError, match=rf"row 1: no field 'reward_model\.ground_truth' \({said}"):
        table({"gold": "reward_model.ground_truth"}).read([values])


def test_a_row_that_already_has_our_name_is_taken_as_it_is():
    assert prompts(table({"prompt": "question"}).read(["1+1?"])) == ["1+1?"]


def test_a_missing_field_is_named_with_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "1?", "answer": "1"}\n{"question": "2?"}\n')
    columns = {"prompt": "question", "gold": "answer"}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no field 'answer' \(it has: question"):
        table(columns).read(str(path))
    assert prompts(table(columns).read(str(path), required={"prompt"})) == ["1?", "2?"]


def test_an_answer_that_the_pattern_does_not_find_is_named():
    rows = [{"prompt": "1?", "answer": "#### 1"}, {"prompt": "2?", "answer": "two"}]
    with pytest.raises(
        ValueError, match=r"row 2, field 'answer': '#### \(.*\)' not found in 'two'"
    ):
        table(extract={"answer": "#### (.*)"}).read(rows)


def test_the_split_is_a_hash_of_the_prompt():
    def share_of(text):
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64

    first, second = share_of(b"1+1?"), share_of(b"1+2?")
    rows = [{"prompt": " 1+1?\n"}, {"prompt": "1+2?"}]
    between = (first + second) / 2
    _, held_out = table(val_fraction=between).read_train_and_val(rows, None)
    assert (prompts(held_out) == [" 1+1?\n"]) == (first < second)
    least = min(first, second)
    _, held_out = table(val_fraction=least + 1e-9).read_train_and_val(rows, None)
    assert len(held_out) == 1
    with pytest.raises(ValueError, match="holds out none"):
        table(val_fraction=least - 1e-9).read_train_and_val(rows, None)


def test_rows_that_agree_in_another_column_stay_together():
    rows = [{"prompt": f"{who} {n}", "persona": who} for who in "abcdefghij" for n in range(5)]
    together = RowReader({}, {}, 0.4, "drop", split_by="persona")
    train, val = together.read_train_and_val(rows, None)
    assert len(train) + len(val) == 50
    sides = [{row.values["persona"] for row in part} for part in (train, val)]
    assert all(sides)
    assert not sides[0] & sides[1]
    with pytest.raises(ValueError, match="row 1: no field 'persona', which split_by names"):
        together.read_train_and_val([{"prompt": "a"}], None)


def test_the_split_does_not_move():
    train, val = table(val_fraction=0.25).read_train_and_val(SUMS, None)
    assert 60 < len(val) < 140
    assert len(train) + len(val) == 400
    mixed = random.Random(0).sample(SUMS, 200)
    _, fewer = table(val_fraction=0.25).read_train_and_val(mixed, None)
    assert set(prompts(fewer)) == set(prompts(val)) & {row["prompt"] for row in mixed}
    _, more = table(val_fraction=0.5).read_train_and_val(SUMS, None)
    assert set(prompts(val)) < set(prompts(more))


def test_positions_in_the_source_survive_the_split():
    train, val = table(val_fraction=0.25).read_train_and_val(SUMS, None)
    assert sorted(row.index for row in [*train, *val]) == list(range(400))


def test_repeats_fall_on_one_side():
    train, val = table(val_fraction=0.25).read_train_and_val(SUMS + SUMS[:2], None)
    assert len(train) + len(val) == 402
    assert not set(prompts(train)) & set(prompts(val))


def test_training_prompts_that_are_in_validation_are_removed_and_counted():
    with pytest.warns(
        UserWarning, match=r"1 of 2 .* \(the given list, row 2 = .* row 1\): removed"
    ):
        train, val = table().read_train_and_val(["a", "b "], ["b"])
    assert (prompts(train), prompts(val)) == (["a"], ["b"])


def test_overlap_stops_or_stays_as_asked():
    with pytest.raises(ValueError, match=r"1 of 2 training prompts .*train_val_overlap: drop"):
        table(train_val_overlap="error").read_train_and_val(["a", "b"], ["b"])
    with pytest.warns(UserWarning, match="kept"):
        train, _ = table(train_val_overlap="keep").read_train_and_val(["a", "b"], ["b"])
    assert prompts(train) == ["a", "b"]


def test_an_empty_side_is_an_error():
    with pytest.raises(ValueError, match="holds out none"):
        table(val_fraction=1e-9).read_train_and_val(["a"], None)
    with (
        pytest.warns(UserWarning, match="removed"),
        pytest.raises(ValueError, match="no training row is left"),
    ):
        table().read_train_and_val(["a"], ["a"])


def test_columns_are_lists_with_none_where_a_row_has_no_value():
    rows = read_rows([{"prompt": "a", "hint": "x"}, {"prompt": "b", "level": 2}])
    assert columns_of(rows) == {"hint": ["x", None], "level": [None, 2]}


def test_a_column_that_rewards_are_given_anyway_is_refused():
    with pytest.raises(ValueError, match=r"row 1: field 'completions'"):
        columns_of(read_rows([{"prompt": "a", "completions": "b"}]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_val_overlap": "ignore"}, "train_val_overlap is 'ignore'; it must be one of: drop"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"extract": {"answer": "("}}, r"extract.answer"),
        ({"extract": {"answer": "a"}}, "has 0 groups, expected one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        table(**settings)


def test_two_rows_of_one_id_are_named(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text(
        '{"id": 7, "prompt": "a"}\n{"id": 8, "prompt": "b"}\n{"id": 7, "prompt": "c"}\n'
    )
    said = rf"{path}, line 3: field 'id' is 7, as in {path}, line 1; remove one of them, or"
    with pytest.raises(ValueError, match=said):
        table().read(str(path))
    assert len(table(columns={"number": "id"}).read(str(path))) == 3
