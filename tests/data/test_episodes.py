import pytest

from litgrpo.data import EpisodePrompts
from litgrpo.data.modules import PromptData
from litgrpo.data.rows import RowReader

PLAIN = RowReader(columns={}, extract={}, val_fraction=0.0, train_val_overlap="drop")


def test_rows_carry_a_number_a_prompt_and_the_same_columns():
    source = EpisodePrompts(size=2, prompt="Guess.", first_episode=7, columns={"level": "easy"})
    assert source.rows() == [
        {"prompt": "Guess.", "episode_number": 7, "level": "easy"},
        {"prompt": "Guess.", "episode_number": 8, "level": "easy"},
    ]


def test_the_same_prompt_with_another_number_is_another_row():
    with pytest.warns(UserWarning, match="2 of 10 training prompts are in the validation set"):
        train, val = PLAIN.read_train_and_val(
            EpisodePrompts(size=10), EpisodePrompts(size=5, first_episode=8)
        )
    assert [row.values["episode_number"] for row in train] == list(range(8))
    assert len(val) == 5
    held = RowReader(columns={}, extract={}, val_fraction=0.5, train_val_overlap="drop")
    train, val = held.read_train_and_val(EpisodePrompts(size=100), None)
    assert 30 < len(val) < 70
    assert len(train) + len(val) == 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 0}, "size of EpisodePrompts is 0"),
        ({"first_episode": -1}, "first_episode of EpisodePrompts is -1"),
        ({"prompt": " "}, "prompt of EpisodePrompts is empty"),
        ({"columns": {"prompt": "x"}}, "columns of EpisodePrompts"),
    ],
)
def test_what_can_give_no_rows_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        EpisodePrompts(**given)


def test_a_set_with_a_name_takes_a_class_as_a_recipe_writes_it():
    node = {"class_path": "litgrpo.data.EpisodePrompts", "init_args": {"size": 3}}
    data = PromptData(train="a.jsonl", val={"easy": node, "hard": "b.jsonl"})
    assert data.sources["val"] == {"easy": EpisodePrompts(3), "hard": "b.jsonl"}
    wrong = {"easy": node | {"init_args": {"sise": 3}}}
    with pytest.raises(ValueError, match=r"set 'easy': .* has no argument 'sise' .did you mean"):
        PromptData(train="a.jsonl", val=wrong)
