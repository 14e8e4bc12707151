"""Steps with a trainer and without one."""

import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from litgrpo.learning.steppers import PlainStepper, TrainerComm, TrainerStepper, is_attached

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


def test_gradients_of_micro_batches_add_up_to_one_step(weight):
    stepper = PlainStepper(torch.optim.SGD([weight], lr=0.5))
    stepper.zero_grad()
    stepper.backward(weight.sum(), is_last=False)
    stepper.backward(3 * weight[0], is_last=True)
    seen = []
    assert stepper.step(lambda trained: seen.append(trained[0].grad.tolist()) or "result")
    assert seen == [[4.0, 1.0]]
    assert weight.tolist() == [-1.0, 1.5]
    assert weight.grad is None


def test_it_returns_what_finish_returned_and_steps_on_what_finish_left(weight):
    stepper = PlainStepper(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5))
    stepper.backward(weight.sum(), is_last=True)

    def drop(trained):
        for parameter in trained:
            parameter.grad = None
        return "dropped"

    assert stepper.step(drop) == "dropped"
    assert weight.tolist() == [1.0, 2.0]
    assert not stepper.optimizer.state


def test_the_learning_rate_is_a_number_if_the_optimizer_keeps_a_tensor(weight):
    stepper = PlainStepper(torch.optim.SGD([weight], lr=torch.tensor(0.5)))
    assert isinstance(stepper.lr, float)
    assert stepper.lr == 0.5


def test_the_learning_rate_is_that_of_the_next_step(weight):
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stepper = PlainStepper(optimizer, schedule)
    rates = []
    for _ in range(3):
        rates.append(stepper.lr)
        stepper.backward(weight.sum(), is_last=True)
        stepper.step(len)
    assert rates == [1.0, 1 / 2, 1 / 3]


class Line(LightningModule):
    """One number; each training step does what it is given."""

    def __init__(self, do):
        super().__init__()
        self.automatic_optimization = False
        self.slope = torch.nn.Parameter(torch.tensor(2.0))
        self.frozen = torch.nn.Parameter(torch.tensor(0.0), requires_grad=False)
        self.do = do

    def training_step(self, batch, batch_idx):
        self.do(self)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.slope], lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_before_optimizer_step(self, optimizer):
        self.stepper.clip_before_step()


def fit(do):
    module = Line(do)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    runner = Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **quiet)
    runner.fit(module, DataLoader([0], batch_size=None))
    return module, runner


def test_a_step_takes_the_gradient_of_all_micro_batches_and_moves_the_schedule():
    seen = {}

    def do(module):
        stepper = module.stepper = TrainerStepper(module)
        stepper.zero_grad()
        for is_last in (False, True):
            stepper.backward(3 * module.slope, is_last=is_last)

        def finish(trained):
            seen["trained"] = trained
            seen["before"] = module.slope.item()
            (parameter,) = trained
            seen["gradient"] = float(parameter.grad)
            parameter.grad.mul_(0.5)  # as clipping does
            return "finished"

        seen["lr"] = stepper.lr
        seen["result"] = stepper.step(finish)
        seen["lr after"] = stepper.lr
        seen["left"] = module.slope.grad

    module, _ = fit(do)
    assert [id(p) for p in seen["trained"]] == [id(module.slope)]
    assert (seen["before"], seen["gradient"], seen["result"]) == (2.0, 6.0, "finished")
    assert module.slope.item() == 2.0 - 0.5 * 3.0
    assert seen["left"] is None
    assert (seen["lr"], seen["lr after"]) == (0.5, pytest.approx(0.05))


def test_a_gradient_that_is_dropped_moves_nothing():
    def do(module):
        stepper = module.stepper = TrainerStepper(module)
        stepper.backward(module.slope * torch.nan, is_last=True)

        def drop(trained):
            for parameter in trained:
                parameter.grad = None

        stepper.step(drop)

    assert fit(do)[0].slope.item() == 2.0


def test_a_module_without_a_trainer_is_one_process():
    module = Line(None)
    comm, value = TrainerComm(module), torch.arange(3.0)
    assert not is_attached(module)
    assert comm.world_size == 1
    for operation in (comm.sum, comm.max, comm.gather):
        assert operation(value) is value


def test_processes_reduce_on_their_device_and_gather_what_is_not_of_one_length():
    class Strategy:
        def reduce(self, value, reduce_op):
            return 2 * value if reduce_op == "sum" else value + 1  # another has one more

        def all_gather(self, value):
            return torch.stack([value, value])

    class Attached(TrainerComm):
        world_size = 2

    module = Line(None)
    module._trainer = type("Fake", (), {"strategy": Strategy(), "world_size": 2})()
    comm = Attached(module)
    assert float(comm.sum(torch.tensor(3.0))) == 6
    assert float(comm.max(torch.tensor(3.0))) == 4
    gathered = comm.gather(torch.tensor([1.0, 2.0]))
    assert gathered[[0, 1, 3, 4]].tolist() == [1, 2, 1, 2]
    assert gathered[[2, 5]].isnan().all()
