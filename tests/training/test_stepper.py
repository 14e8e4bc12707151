import pytest
import torch

from litgrpo.training.stepper import PlainStepper


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


def test_gradients_of_micro_batches_add_up_to_one_step(weight):
    stepper = PlainStepper(torch.optim.SGD([weight], lr=0.5))
    stepper.zero_grad()
    stepper.backward(weight.sum(), last=False)
    stepper.backward(3 * weight[0], last=True)
    seen = []
    assert stepper.step(lambda trained: seen.append(trained[0].grad.tolist()) or "result")
    assert seen == [[4.0, 1.0]]
    assert weight.tolist() == [-1.0, 1.5]
    assert weight.grad is None


def test_it_returns_what_finish_returned_and_steps_on_what_finish_left(weight):
    stepper = PlainStepper(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5))
    stepper.backward(weight.sum(), last=True)

    def drop(trained):
        for parameter in trained:
            parameter.grad = None
        return "dropped"

    assert stepper.step(drop) == "dropped"
    assert weight.tolist() == [1.0, 2.0]
    assert not stepper.optimizer.state


def test_the_learning_rate_is_that_of_the_next_step(weight):
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stepper = PlainStepper(optimizer, schedule)
    rates = []
    for _ in range(3):
        rates.append(stepper.lr)
        stepper.backward(weight.sum(), last=True)
        stepper.step(len)
    assert rates == [1.0, 1 / 2, 1 / 3]
