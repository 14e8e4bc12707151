import random

import pytest

from litgrpo.data.examples import calculator
from litgrpo.environments.examples import calculate
from litgrpo.environments.tools import Tools


def is_product(row):
    return "*" in row["prompt"]


@pytest.fixture(scope="module")
def demonstrations():
    return calculator.demonstrations(4_000)


def test_the_sets_are_reproducible_and_share_no_product(demonstrations):
    assert demonstrations == calculator.demonstrations(4_000)
    sets = [demonstrations, calculator.train(4_000), calculator.products()]
    first, second, third = ({row["prompt"] for row in rows if is_product(row)} for rows in sets)
    assert not first & second
    assert not first & third
    assert not second & third
    assert len(calculator.products()) == 500
    assert len(calculator.sums()) == 100


def test_the_split_does_not_depend_on_digits():
    last = [row["prompt"].partition("*")[0][-1] for row in calculator.products()]
    assert {*last} == {*"0123456789"}


def test_reference_answers_are_correct():
    for row in calculator.train(200) + calculator.sums():
        assert row["answer"] == str(eval(row["prompt"][:-2]))


def test_observations_in_demonstrations_are_those_of_the_tool(demonstrations):
    with_call = [row["completion"] for row in demonstrations if len(row["completion"]) > 1]
    tools = Tools(functions=[calculate], call_format="tags", error_text=calculator.ERROR)
    for call, observation, _ in with_call[:300]:
        tools.reset({}, 0)
        assert tools.step(call["content"]).observation == observation["content"]
    assert any(calculator.ERROR in observation["content"] for _, observation, _ in with_call)


def test_demonstrations_rarely_call_the_tool_and_contain_mistakes(demonstrations):
    has_call = [len(row["completion"]) > 1 for row in demonstrations]
    assert 0.18 < sum(has_call) / len(has_call) < 0.26
    correct = {True: [], False: []}
    for row in demonstrations:
        answer = row["completion"][-1]["content"]
        correct[is_product(row)].append(answer == f"<answer>{row['answer']}</answer>")
    assert 0.05 < sum(correct[True]) / len(correct[True]) < 0.15
    assert 0.5 < sum(correct[False]) / len(correct[False]) < 0.75


def test_a_demonstration_begins_and_ends_with_an_assistant_message():
    messages = calculator.demonstrate(calculator.Calculation(347, "*", 82), random.Random(3))
    assert messages[0]["role"] == messages[-1]["role"] == "assistant"
