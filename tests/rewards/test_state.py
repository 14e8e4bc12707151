"""The state of reward objects, which checkpoints hold."""

import pytest

from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from tests.support.rewards_with_state import SavedNovelty


def score(scorer, *texts):
    table = scorer(["?"] * len(texts), list(texts), {}, group_size=len(texts))
    return table.total.flatten().tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_of_an_object_is_saved_and_restored(num_workers):
    first, second = (
        Scorer({"new": SavedNovelty()}, Scoring(num_workers=num_workers)) for _ in range(2)
    )
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
