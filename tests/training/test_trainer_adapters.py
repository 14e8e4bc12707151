import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from litgrpo.training.optimizers import check_small_numbers, optimizer_and_schedule
from litgrpo.training.trainer_adapters import (
    TrainerComm,
    TrainerStepper,
    is_attached,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


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
        return optimizer_and_schedule(
            self,
            lambda params: torch.optim.SGD(params, lr=0.5),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
        )


def fit(do):
    module = Line(do)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    runner = Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **quiet)
    runner.fit(module, DataLoader([0], batch_size=None))
    return module, runner


def test_a_step_takes_the_gradient_of_all_micro_batches_and_moves_the_schedule():
    seen = {}

    def do(module):
        stepper = TrainerStepper(module)
        stepper.zero_grad()
        for last in (False, True):
            stepper.backward(3 * module.slope, last=last)

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

    module, runner = fit(do)
    assert [id(p) for p in seen["trained"]] == [id(module.slope)]
    assert (seen["before"], seen["gradient"], seen["result"]) == (2.0, 6.0, "finished")
    assert module.slope.item() == 2.0 - 0.5 * 3.0
    assert seen["left"] is None
    assert (seen["lr"], seen["lr after"]) == (0.5, pytest.approx(0.05))
    assert TrainerComm.__module__ not in {type(each).__module__ for each in runner.callbacks}


def test_a_gradient_that_is_dropped_moves_nothing():
    def do(module):
        stepper = TrainerStepper(module)
        stepper.backward(module.slope * torch.nan, last=True)

        def drop(trained):
            for parameter in trained:
                parameter.grad = None

        stepper.step(drop)

    assert fit(do)[0].slope.item() == 2.0


def test_an_error_while_finishing_leaves_no_callback_behind():
    modules = []

    def do(module):
        modules.append(module)
        stepper = TrainerStepper(module)
        stepper.backward(module.slope, last=True)
        stepper.step(lambda trained: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        fit(do)
    left = {type(each).__module__ for each in modules[0].trainer.callbacks}
    assert TrainerComm.__module__ not in left


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


def test_without_a_schedule_there_is_the_optimizer_alone_over_what_is_trained():
    module = Line(None)
    made = optimizer_and_schedule(module, lambda params: torch.optim.SGD(params, lr=0.5), None)
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(module.slope)]


def test_an_optimizer_that_would_divide_by_zero_in_float16_is_refused():
    half = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16))]
    with pytest.raises(ValueError, match=r"eps is 1e-08, which is 0 in torch.float16"):
        check_small_numbers(torch.optim.AdamW(half))
    check_small_numbers(torch.optim.AdamW(half, eps=1e-4))
    check_small_numbers(torch.optim.SGD(half, lr=0.1))
    check_small_numbers(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
