"""What travels between the training process and a worker."""

import pickle

import pytest

from litgrpo.rewards.runner import worker
from litgrpo.rewards.runner.calls import MalformedResult, WorkerError
from litgrpo.rewards.runner.worker import Message, Question
from tests.rewards import faulty

FUNCTIONS = {"r": (faulty.odd_values, {"value": 2.0}), "raises": (faulty.raises, {})}


def answer(name, *texts):
    question = Question(name, {"completions": list(texts)}, len(texts))
    travelled = pickle.loads(pickle.dumps(Message([question], False, 1.0, True)))
    return pickle.loads(pickle.dumps(worker._answer(travelled.questions[0], FUNCTIONS)))


def test_a_question_is_answered_with_the_settings_that_were_sent_before():
    assert answer("r", "a", "bad").values == [1.0, 2.0]


def test_an_exception_travels_as_the_text_of_its_traceback():
    scores = answer("raises", "bad")
    assert scores.failures == {0: "KeyError"}
    assert isinstance(scores.error, WorkerError)
    assert 'raise KeyError("bad")' in str(scores.error)


def test_a_result_of_the_wrong_length_keeps_its_kind():
    question = Question("r", {"completions": ["a"]}, 2)
    scores = worker._answer(question, FUNCTIONS)
    assert scores.failures == {0: "wrong length", 1: "wrong length"}
    assert isinstance(pickle.loads(pickle.dumps(scores)).error, MalformedResult)


@pytest.mark.parametrize("text", [b"no pickle", pickle.dumps(len)[:-3]])
def test_a_function_that_cannot_be_loaded_is_named(text):
    functions, troubles = worker._load({"r": text, "fine": pickle.dumps((len, {}))})
    assert list(functions) == ["fine"]
    assert list(troubles) == ["r"]
