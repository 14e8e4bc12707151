"""What travels between the training process and a worker."""

import pickle

import pytest

from litgrpo.rewards.runner import worker
from litgrpo.rewards.runner.failures import MalformedResult, WorkerError
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


class Control:
    """The launcher's end of its connection."""

    def __init__(self, functions):
        self.functions, self.sent = functions, []

    def recv(self):
        return self.functions

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("text", [b"no pickle", pickle.dumps(len)[:-3]])
def test_a_function_that_cannot_be_loaded_is_named(text):
    control = Control({"r": text, "fine": pickle.dumps((len, {}))})
    assert list(worker._load(control)) == ["fine"]
    assert control.sent[:2] == ["r", "fine"]  # each before it is loaded
    assert list(control.sent[2]) == ["r"]


def test_what_a_function_logs_travels_with_its_scores():
    def logs(completions, log_metric, log_extra):
        log_metric("words", 3)
        log_extra("first", [text[0] for text in completions])
        return [0.0] * len(completions)

    question = Question("r", {"completions": ["ab", "cd"]}, 2, ("log_metric", "log_extra"))
    scores = pickle.loads(pickle.dumps(worker._answer(question, {"r": (logs, {})})))
    assert scores.metrics == {"words": [3.0]}
    assert scores.extras == {"first": {0: "a", 1: "c"}}
