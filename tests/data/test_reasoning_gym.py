import random
from pathlib import Path

import pytest
import yaml

from litgrpo.data import ReasoningGym
from litgrpo.data.modules import PromptData
from litgrpo.data.sources import Source, read_rows, row_of_entry
from litgrpo.workers.sandbox.wire import loads

ENTRY = {"question": "1 + 1 =", "answer": None, "metadata": {(0, 1): {2, 3}, "n": [1.5, (None,)]}}


def test_an_entry_survives_as_text_with_its_tuples_sets_and_keys():
    row = row_of_entry("sums", ENTRY)
    assert loads(row.pop("metadata")) == ENTRY
    assert row == {"prompt": "1 + 1 =", "answer": None, "task": "sums"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": {}}, r"tasks of ReasoningGym are \{\}"),
        ({"tasks": {"gcd": 0}}, "weight of task 'gcd'"),
        ({"tasks": {"gcd": 1, "lcm": 1}, "size": 1}, "size of ReasoningGym"),
        ({"tasks": {"gcd": 1}, "configs": {"lcm": {}}}, "configs of ReasoningGym name 'lcm'"),
    ],
)
def test_what_can_give_no_rows_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ReasoningGym(**given)


def test_tasks_come_in_their_shares_and_the_same_for_the_same_seed():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    source = ReasoningGym({"gcd": 2, "leg_counting": 1}, size=30, seed=1)
    state = random.getstate()
    rows = source.rows()
    assert random.getstate() == state
    assert rows == source.rows() != ReasoningGym({"gcd": 2, "leg_counting": 1}, 30, 2).rows()
    assert [row["task"] for row in rows].count("gcd") == 20
    assert [row["task"] for row in rows[:3]].count("gcd") == 2
    assert (
        rows[:4]
        != ReasoningGym({"gcd": 1}, size=4, seed=1, configs={"gcd": {"max_numbers": 5}}).rows()
    )


def test_it_is_a_source_alone_and_as_a_named_set():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    source = ReasoningGym({"gcd": 1}, size=4)
    assert next(row.place for row in read_rows(source)) == "ReasoningGym(seed 0), row 1"
    assert {row.set_name for row in read_rows({"easy": source})} == {"easy"}


def test_recipes_name_it_in_one_line():
    from jsonargparse import ArgumentParser

    node = {
        "class_path": "litgrpo.data.ReasoningGym",
        "init_args": {"tasks": {"gcd": 1}, "size": 4},
    }
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PromptData, "data")
    data = {"class_path": "litgrpo.PromptData", "init_args": {"train": node, "val": node}}
    made = parser.instantiate(parser.parse_object({"data": data})).data
    source = ReasoningGym({"gcd": 1}, size=4)
    assert (made.sources["train"], made.sources["val"]) == (source, source)


def test_unknown_tasks_and_settings_are_named():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(ValueError, match=r"no task 'countdwn' .*countdown"):
        ReasoningGym({"countdwn": 1}).rows()
    with pytest.raises(ValueError, match=r"task 'gcd': .*max_size"):
        ReasoningGym({"gcd": 1}, configs={"gcd": {"max_size": 5}}).rows()


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="needs `pip install reasoning-gym==0"):
        ReasoningGym({"gcd": 1}).rows()


def test_the_next_seed_has_nearly_the_same_problems():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    rows, shifted = (ReasoningGym({"gcd": 1}, size=4, seed=seed).rows() for seed in (1, 2))
    assert [row["prompt"] for row in rows[1:]] == [row["prompt"] for row in shifted[:3]]


def test_the_recipes_learn_from_demonstrations_of_other_problems_than_they_practice():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    supervised, practice = (
        yaml.safe_load(Path(f"configs/{name}.yaml").read_text())["data"]["init_args"]["train"]
        for name in ("reasoning_gym_sft", "reasoning_gym")
    )
    source = ReasoningGym(**practice["init_args"])
    rows = source.rows()
    shown = [row.values for row in read_rows(Source(**supervised))]
    assert len(rows) == source.size
    assert len({row["prompt"] for row in shown}) > 5000
    assert not {row["prompt"] for row in shown} & {row["prompt"] for row in rows}
    assert supervised["kwargs"]["settings"] == practice["init_args"]["configs"]["chain_sum"]
    assert supervised["kwargs"]["exclude"] == {"size": source.size, "seed": source.seed}
