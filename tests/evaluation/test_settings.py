import pytest

from litgrpo.evaluation.settings import Evaluation


def test_each_number_of_attempts_can_be_made_from_the_samples():
    assert Evaluation(samples=3, pass_at=[1, 3]).pass_at == [1, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "evaluation.samples is 0; it must be at least 1"),
        ({"samples": 2}, "evaluation.pass_at has 4; with 2 samples it can be 1 to 2"),
        ({"pass_at": [0]}, "evaluation.pass_at has 0; .* or take 0 out"),
    ],
)
def test_a_number_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**settings)
