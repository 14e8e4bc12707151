"""float16 with a gradient scaler, which torch has for CPUs too: all that older GPUs can do."""

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision

from litgrpo.callbacks.guards import NonFinite
from litgrpo.learning.update_config import UpdateConfig
from tests.support.models import prompt_batch
from tests.support.training import loader, module

LIMIT = 0.5  # of the gradient's norm

pytestmark = pytest.mark.filterwarnings("ignore")


class Watch(Callback):
    """Notes reports, scales, and the gradient's norm in the optimizer's step."""

    def __init__(self):
        self.reports, self.scales, self.stepped, self.skipped = [], [], [], 0.0

    def on_fit_start(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms = [g.norm() for g in gradients if g is not None]
        self.stepped.append(float(torch.stack(norms).norm()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reports += outputs["iteration"].steps
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def train_with_scale(scale, iterations=3, **settings):
    """A run in float16 from this scale of the loss, what it did, and its start."""
    grpo = module(max_iterations=iterations, update=UpdateConfig(max_grad_norm=LIMIT), **settings)
    before = {name: p.detach().clone() for name, p in grpo.policy.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    watch, count = Watch(), NonFinite(stop_after=None)
    trainer = Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[watch, count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
    )
    trainer.fit(grpo, loader(prompt_batch("a", "b")))
    watch.skipped = count.skipped
    return grpo, watch, before


def has_moved(grpo, before):
    return any(not p.equal(before[name]) for name, p in grpo.policy.named_parameters())


def test_clipping_sees_unscaled_gradients_and_a_whole_fit_runs():
    grpo, watch, before = train_with_scale(2.0**10)
    assert grpo.iteration == 3
    assert has_moved(grpo, before)
    norms = [float(report.sums["optim/grad_norm"][0]) for report in watch.reports]
    _, other, _ = train_with_scale(2.0**4, iterations=1)
    # The norm does not know the scale; what the optimizer gets has the limit, not limit / scale.
    assert norms[0] == pytest.approx(float(other.reports[0].sums["optim/grad_norm"][0]), rel=0.02)
    assert min(norms) > LIMIT
    assert watch.stepped == pytest.approx([LIMIT] * 3, rel=0.01)


def test_a_step_that_the_scaler_drops_is_counted_as_skipped_and_changes_nothing():
    grpo, watch, before = train_with_scale(2.0**40, iterations=2, check_invariants=False)
    assert [report.skipped is None for report in watch.reports] == [False, False]
    assert watch.skipped == 2
    assert watch.scales == [2.0**39, 2.0**38]  # the scaler has noticed
    assert not has_moved(grpo, before)
    assert grpo.iteration == 2
