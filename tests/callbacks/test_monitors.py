"""EarlyStopping and ModelCheckpoint act, or the run is rejected with what to set."""

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from litgrpo.callbacks.monitors import MonitorChecks
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*eval mode",
    "ignore:.*LeafSpec",
    "ignore:Using ModelCheckpoint with manual optimization",
)
REWARD = "reward/mean"


def train(folder, callback, iterations=4, **settings):
    module = StandIn(iterations)
    return fit(folder, MonitorChecks(), callback, module=module, **settings)


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (lambda folder: EarlyStopping(REWARD), "check_on_train_epoch_end: true"),
        (lambda folder: EarlyStopping("val/greedy"), "data.val"),
        (lambda folder: ModelCheckpoint(folder, monitor=REWARD), "every_n_train_steps"),
        (lambda folder: ModelCheckpoint(folder, monitor=REWARD, save_last=True), "data.val"),
    ],
)
def test_a_callback_that_would_never_act_is_rejected(callback, remedy, tmp_path):
    with raises_for("would never act", remedy):
        train(tmp_path, callback(tmp_path), limit_val_batches=0)


@pytest.mark.parametrize("options", [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}])
def test_a_checkpoint_that_needs_no_validation_is_written(options, tmp_path):
    callback = ModelCheckpoint(tmp_path / "own", monitor=REWARD, mode="max", **options)
    train(tmp_path, callback, limit_val_batches=0)
    assert list((tmp_path / "own").glob("*.ckpt"))


def test_early_stopping_at_the_end_of_passes_needs_no_validation(tmp_path):
    stop = EarlyStopping(REWARD, patience=0, min_delta=10.0, check_on_train_epoch_end=True)
    assert train(tmp_path, stop, iterations=50, limit_val_batches=0).iteration < 50


def test_with_a_validation_a_training_metric_may_be_monitored(tmp_path):
    stop = EarlyStopping(REWARD, patience=0, min_delta=10.0)
    assert train(tmp_path, stop, iterations=50, val_check_interval=1).iteration == 2


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_an_unknown_metric_is_named_after_the_first_iteration(kind, tmp_path):
    callback = kind(monitor="reward/maen")
    with raises_for("monitors 'reward/maen', which is not logged", "did you mean 'reward/mean'"):
        train(tmp_path, callback, val_check_interval=3)


def test_a_fast_dev_run_is_not_checked(tmp_path):
    assert train(tmp_path, EarlyStopping(REWARD), fast_dev_run=True).iteration == 1
