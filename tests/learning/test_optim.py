import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from litgrpo.learning.optim import DefaultAdamW, WarmupCosine, WarmupLinear


def parameters():
    return [torch.nn.Parameter(torch.ones(2))]


def rates(schedule, steps):
    """Return the learning rate of each of `number` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return seen


def sgd(lr=1.0):
    return torch.optim.SGD(parameters(), lr=lr)


def test_the_learning_rate_is_open_until_it_is_settled():
    optimizer = DefaultAdamW(parameters())
    assert optimizer.needs_lr
    optimizer.set_default_lr(1e-6)
    assert optimizer.param_groups[0]["lr"] == 1e-6


def test_a_given_learning_rate_stays():
    optimizer = DefaultAdamW(parameters(), lr=3e-4)
    optimizer.set_default_lr(1e-6)
    assert optimizer.param_groups[0]["lr"] == 3e-4


def test_it_steps_as_adamw_does():
    ours, theirs = parameters(), parameters()
    for optimizer, made in (
        (DefaultAdamW(ours, lr=0.1), ours),
        (torch.optim.AdamW(theirs, lr=0.1), theirs),
    ):
        for gradient in ([1.0, -2.0], [0.5, 3.0], [-4.0, 0.0]):
            made[0].grad = torch.tensor(gradient)
            optimizer.step()
    assert torch.equal(ours[0], theirs[0])


def test_a_linear_schedule_rises_and_falls_in_straight_lines():
    schedule = WarmupLinear(sgd(), warmup=2, total_steps=6)
    assert rates(schedule, 7) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_half_a_cosine_passes_through_the_middle_and_ends_at_its_share():
    schedule = WarmupCosine(sgd(), warmup=0.2, min_lr_ratio=0.1, total_steps=10)
    seen = rates(schedule, 11)
    assert seen[0] == pytest.approx(0.5)
    assert seen[6] == pytest.approx((1 + 0.1) / 2)
    assert seen[10] == pytest.approx(0.1)


def test_a_warm_up_of_one_is_one_step_and_not_the_whole_run():
    assert rates(WarmupLinear(sgd(), warmup=1, total_steps=5), 3) == [1.0, 1.0, 0.75]


@given(
    st.sampled_from([WarmupLinear, WarmupCosine]),
    st.floats(0, 0.99) | st.integers(1, 9),
    st.floats(0, 1),
    st.integers(10, 40),
)
def test_the_learning_rate_rises_to_the_peak_and_then_falls_to_its_fraction(
    kind, warmup, ratio, total
):
    schedule = kind(sgd(), warmup=warmup, min_lr_ratio=ratio, total_steps=total)
    factors = [schedule.factor(step) for step in range(total + 3)]
    peak = factors.index(max(factors))
    assert max(factors) <= 1 + 1e-12
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[total:] == pytest.approx([ratio] * 3)
    assert factors[0] > 0


def test_without_warm_up_the_first_step_has_the_whole_learning_rate():
    assert rates(WarmupLinear(sgd(), warmup=0, total_steps=4), 2) == [1.0, 0.75]


def test_the_length_comes_from_the_run():
    schedule = WarmupLinear(sgd(), warmup=0.5)
    schedule.set_total_steps(4)
    assert rates(schedule, 4) == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_a_checkpoint_holds_the_position_and_the_recipe_the_curve():
    first = WarmupLinear(sgd(), warmup=0, total_steps=4)
    rates(first, 2)
    resumed = WarmupLinear(sgd(lr=2.0), warmup=0, total_steps=8)
    resumed.load_state_dict(first.state_dict())
    assert rates(resumed, 2) == pytest.approx([2.0 * 6 / 8, 2.0 * 5 / 8])


def test_a_run_without_known_length_is_refused():
    with pytest.raises(ValueError, match=r"WarmupCosine decays .* model\.max_iterations"):
        WarmupCosine(sgd()).set_total_steps(None)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warms up for 10 optimizer steps, but the run has 4"):
        WarmupCosine(sgd(), warmup=10).set_total_steps(4)


@pytest.mark.parametrize("given", [{"warmup": -1}, {"min_lr_ratio": 2}, {"total_steps": 0}])
def test_sizes_that_make_no_curve_are_refused(given):
    with pytest.raises(ValueError, match=r"lr_scheduler\."):
        WarmupCosine(sgd(), **given)
