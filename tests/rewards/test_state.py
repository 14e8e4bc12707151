"""The state of reward objects: in checkpoints, in worker processes, announced if it is lost."""

import pytest

from litgrpo.rewards.process_runner import ProcessRunner, find_state
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.rewards.scorer import Scorer
from tests.support.rewards_with_state import Novelty, SavedNovelty

RUNNERS = {
    "workers": lambda: ProcessRunner(num_workers=2),
    "this process": InProcessRunner,
}


def score(scorer, *texts):
    table = scorer(["?"] * len(texts), list(texts), {}, group_size=len(texts))
    return table.total.flatten().tolist()


@pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
def test_the_state_of_an_object_is_saved_and_restored(runner):
    first, second = (Scorer({"new": SavedNovelty()}, runner=runner()) for _ in range(2))
    try:
        assert score(first, "a", "b") == [1.0, 1.0]
        assert score(first, "a", "c") == [0.0, 1.0]
        saved = first.state_dict()
        assert saved == {"new": {"a": 2, "b": 1, "c": 1}}
        second.load_state_dict(saved)
        assert second.state_dict() == saved
        assert score(second, "c", "d") == score(first, "c", "d") == [0.0, 1.0]
        assert second.state_dict() == first.state_dict()
    finally:
        first.close()
        second.close()


def test_a_worker_that_is_replaced_continues_with_the_state():
    scorer = Scorer({"new": SavedNovelty()}, runner=ProcessRunner(num_workers=2))
    try:
        score(scorer, "a")
        scorer.close()  # the next call starts other workers
        assert score(scorer, "a", "b") == [0.0, 1.0]
    finally:
        scorer.close()


def test_an_object_that_changes_itself_without_saving_is_announced():
    assert find_state(Novelty()) == ["seen"]
    assert find_state(Novelty().__call__) == ["seen"]
    assert find_state(SavedNovelty()) == []

    class Table:
        def __init__(self):
            self.words = ["a"]

        def __call__(self, completions):
            return [float(text in self.words) for text in completions]

    assert find_state(Table()) == []
