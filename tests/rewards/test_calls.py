"""Messages between the training process and a worker."""

import pickle

from litgrpo.rewards.calls import MalformedResult, Message, Question, handle_message
from litgrpo.workers.failures import WorkerError
from tests.rewards import faulty

FUNCTIONS = {"r": (faulty.odd_values, {"value": 2.0}), "raises": (faulty.raises, {})}


def call_function(name, *texts):
    question = Question(name, {"completions": list(texts)}, len(texts))
    return send_question(question, FUNCTIONS)


def send_question(question, functions):
    """The scores, after the journeys there and back."""
    travelled = pickle.loads(pickle.dumps(Message([question], False, 1.0)))
    _, scores, _ = pickle.loads(pickle.dumps(handle_message(functions, travelled, None)))
    return scores


def test_a_question_is_answered_with_the_settings_that_were_sent_before():
    assert call_function("r", "a", "bad").values == [1.0, 2.0]


def test_an_exception_travels_as_the_text_of_its_traceback():
    scores = call_function("raises", "bad")
    assert scores.failures == {0: "KeyError"}
    assert isinstance(scores.error, WorkerError)
    assert 'raise KeyError("bad")' in str(scores.error)


def test_a_result_of_the_wrong_length_keeps_its_kind():
    question = Question("r", {"completions": ["a"]}, 2)
    scores = send_question(question, FUNCTIONS)
    assert scores.failures == {0: "wrong length", 1: "wrong length"}
    assert isinstance(scores.error, MalformedResult)


def test_what_a_function_logs_travels_with_its_scores():
    def logs(completions, log_metric, log_extra):
        log_metric("words", 3)
        log_extra("first", [text[0] for text in completions])
        return [0.0] * len(completions)

    question = Question("r", {"completions": ["ab", "cd"]}, 2, ("log_metric", "log_extra"))
    _, scores, _ = handle_message({"r": (logs, {})}, Message([question], False, 1.0), None)
    assert scores.metrics == {"words": [3.0]}
    assert scores.extras == {"first": {0: "a", 1: "c"}}
