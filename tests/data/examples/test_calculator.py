import random

import pytest

from litgrpo.data.examples import calculator
from litgrpo.environments.examples import calculate
from litgrpo.environments.tools import Tools


def product(row):
    return "*" in row["prompt"]


@pytest.fixture(scope="module")
def demonstrations():
    return calculator.supervised(4_000)


def test_the_sets_are_made_the_same_every_time_and_share_no_product(demonstrations):
    assert demonstrations == calculator.supervised(4_000)
    sets = [demonstrations, calculator.train(4_000), calculator.products()]
    asked = [{row["prompt"] for row in rows if product(row)} for rows in sets]
    assert not (asked[0] & asked[1]) | (asked[0] & asked[2]) | (asked[1] & asked[2])
    assert [len(sets[2]), len(calculator.sums())] == [500, 100]


def test_digits_of_all_sets_are_alike():
    last = [row["prompt"].partition("*")[0][-1] for row in calculator.products()]
    assert {*last} == {*"0123456789"}


def test_answers_are_right():
    for row in calculator.train(200) + calculator.sums():
        assert row["answer"] == str(eval(row["prompt"][:-2]))


def test_the_teacher_hears_what_the_tool_would_say(demonstrations):
    heard = [row["completion"] for row in demonstrations if len(row["completion"]) > 1]
    tools = Tools(functions=[calculate], call_format="tags", error_text=calculator.ERROR)
    for call, answer, _ in heard[:300]:
        tools.reset({}, 0)
        assert tools.step(call["content"]).observation == answer["content"]
    assert any(calculator.ERROR in answer["content"] for _, answer, _ in heard)


def test_the_teacher_calls_seldom_and_is_careless(demonstrations):
    called = [len(row["completion"]) > 1 for row in demonstrations]
    assert 0.18 < sum(called) / len(called) < 0.26
    right = {True: [], False: []}
    for row in demonstrations:
        said = row["completion"][-1]["content"]
        right[product(row)].append(said == f"<answer>{row['answer']}</answer>")
    assert 0.05 < sum(right[True]) / len(right[True]) < 0.15
    assert 0.5 < sum(right[False]) / len(right[False]) < 0.75


def test_a_demonstration_begins_and_ends_with_the_teacher():
    said = calculator.demonstrated(calculator.Problem(347, "*", 82), random.Random(3))
    assert said[0]["role"] == said[-1]["role"] == "assistant"
