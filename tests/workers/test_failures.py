"""One-line causes of failures."""

import pickle

from litgrpo.workers.failures import MAX_CAUSE, WorkerError, cause_of, to_picklable


def test_a_cause_is_one_line_with_file_and_line_of_the_user_code():
    try:
        raise ValueError("a\nb" + "x" * 1000)
    except ValueError as error:
        cause = cause_of(error)
        far = to_picklable(error)
    assert cause.startswith("ValueError: a bxx")
    assert "(test_failures.py, line" in cause
    assert len(cause) < MAX_CAUSE + 40
    again = pickle.loads(pickle.dumps(far))
    assert isinstance(again, WorkerError)
    assert again.cause == cause == cause_of(again)
    assert "Traceback" in str(again)
    assert to_picklable(again) is again
