"""Loading objects in a launcher, and one-line causes of failures."""

import pickle

import pytest

from litgrpo.workers.failures import MAX_CAUSE, WorkerError, cause_of, to_picklable
from litgrpo.workers.worker import load


class Control:
    """The launcher's end of its connection."""

    def __init__(self, functions):
        self.functions, self.sent = functions, []

    def recv(self):
        return self.functions

    def send(self, message):
        self.sent.append(message)


@pytest.mark.parametrize("text", [b"no pickle", pickle.dumps(len)[:-3]])
def test_loading_continues_after_an_object_that_fails(text):
    control = Control({"r": text, "fine": pickle.dumps((len, {}))})
    assert list(load(control)) == ["fine"]
    assert control.sent[:2] == ["r", "fine"]  # each name is sent before its object is loaded
    assert list(control.sent[2]) == ["r"]


def test_a_cause_is_one_line_with_file_and_line_of_the_user_code():
    try:
        raise ValueError("a\nb" + "x" * 1000)
    except ValueError as error:
        cause = cause_of(error)
        far = to_picklable(error)
    assert cause.startswith("ValueError: a bxx")
    assert "(test_worker.py, line" in cause
    assert len(cause) < MAX_CAUSE + 40
    again = pickle.loads(pickle.dumps(far))
    assert isinstance(again, WorkerError)
    assert again.cause == cause == cause_of(again)
    assert "Traceback" in str(again)
    assert to_picklable(again) is again
