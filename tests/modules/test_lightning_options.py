"""Each option that docs/reference/api.md names works with Lightning's Trainer, or is rejected."""

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from litgrpo.callbacks.progress import Progress
from litgrpo.callbacks.trainer_options import (
    COMPILED,
    REJECTED_CALLBACKS,
    REJECTED_OPTIONS,
    SAVES_BY_TIME,
    SHARD,
    SPAWN,
    check_strategy,
    check_trainer_options,
)
from litgrpo.data.modules import PromptData
from litgrpo.learning.update_config import UpdateConfig
from tests.support.raises import raises_for
from tests.support.training import letters, module

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "api.md"
# {names of a row: (works or rejected, note)}
ROWS = {
    names.replace("`", ""): (verdict, note)
    for names, verdict, note in re.findall(
        r"^\| (`.+?) \| (works|rejected) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
}
ERRORS = (ValueError, MisconfigurationException)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec", "ignore:.*smaller than the logging"
)


def fit(folder, max_iterations=2, ckpt_path=None, *, update=None, **options):
    """Fit with a plain trainer, two iterations per pass over the prompts."""
    options = {"max_epochs": -1, "enable_progress_bar": False, "logger": False} | options
    options = {"enable_checkpointing": False, "enable_model_summary": False} | options
    grpo = module(
        reward=letters,
        max_iterations=max_iterations,
        check_invariants=False,
        **({} if update is None else {"update": update}),
    )
    data = PromptData(["a", "b", "c", "d"], val=["e", "f", "g"], batch_size=2, eval_batch_size=1)
    trainer = Trainer(accelerator="cpu", default_root_dir=folder, **options)
    trainer.fit(grpo, data, ckpt_path=ckpt_path)
    return grpo


class MemoryLogger(Logger):
    """Keeps each call of `log_metrics` as a dictionary, with its step."""

    name = version = ""

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, params, *_) -> None:
        """Does nothing."""


class Validations(Callback):
    """Records (iteration, number of batches) of each validation."""

    def __init__(self):
        self.seen = []

    def on_validation_start(self, trainer, pl_module):
        self.seen.append([pl_module.iteration, 0])

    def on_validation_batch_end(self, *_):
        self.seen[-1][1] += 1


def rejects(option, value, remedy=None):
    """Expect an error that names the option; with a `remedy`, litgrpo's own and not Lightning's."""

    def check(folder):
        errors = ERRORS if remedy is None else ValueError
        with raises_for(option, remedy or "", error=errors):
            fit(folder, **{option: value})
        with pytest.raises(ValueError, match=option):
            check_trainer_options({option: value}, module())

    return check


def rejects_callbacks(*callbacks, **options):
    def check(folder):
        for callback in callbacks:
            with pytest.raises(ValueError, match=type(callback).__name__):
                fit(folder, callbacks=[callback], **options)

    return check


def works_with(*callbacks, **options):
    def check(folder):
        for callback in callbacks:
            assert fit(folder, callbacks=[callback()], **options).iteration == 2
        if not callbacks:
            assert fit(folder, **options).iteration == 2

    return check


def max_epochs(folder):
    assert fit(folder, None, max_epochs=2).iteration == 4


def max_steps(folder):
    # Two optimizer steps per iteration: the third step is in the second iteration.
    update = UpdateConfig(epochs_per_rollout=2)
    assert fit(folder, None, max_steps=3, update=update).iteration == 2


def min_epochs(folder):
    assert fit(folder, 1, min_steps=3).iteration == 3
    assert fit(folder, 1, min_epochs=2).iteration == 4


def max_time(folder):
    assert fit(folder, 1000, max_time={"milliseconds": 100}).iteration < 1000


def fast_dev_run(folder):
    seen = Validations()
    assert fit(folder, fast_dev_run=True, callbacks=[seen]).iteration == 1
    assert seen.seen == [[1, 1]]
    assert not list(folder.iterdir())


def limit_train_batches(folder):
    assert fit(folder, None, max_epochs=3, limit_train_batches=1).iteration == 3


def limit_val_batches(folder):
    seen = Validations()
    grpo = fit(folder, callbacks=[seen], limit_val_batches=2, num_sanity_val_steps=0)
    assert {batches for _, batches in seen.seen} == {2}
    data = PromptData(["a"], test=["e", "f"], prompts=["x", "y"], eval_batch_size=1)
    limits = {"limit_test_batches": 1, "limit_predict_batches": 1}
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **limits)
    assert len(trainer.predict(grpo, data)) == 1
    assert "test/greedy" in trainer.test(grpo, data, verbose=False)[0]


def val_check_interval(folder):
    seen = Validations()
    options = dict(val_check_interval=3, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    fit(folder, 6, callbacks=[seen], **options)
    assert [iteration for iteration, _ in seen.seen] == [3, 6]
    seen.seen.clear()
    fit(folder, 4, callbacks=[seen], check_val_every_n_epoch=2, num_sanity_val_steps=0)
    assert [iteration for iteration, _ in seen.seen] == [4]


def num_sanity_val_steps(folder):
    seen = Validations()
    fit(folder, callbacks=[seen], num_sanity_val_steps=-1)
    assert seen.seen[0] == [0, 3]


def log_every_n_steps(folder):
    logger = MemoryLogger()
    fit(folder, 5, logger=logger, log_every_n_steps=2, limit_val_batches=0)
    steps = [row["step"] for row in logger.rows if "reward/mean" in row]
    assert steps == [2, 4, 5]  # the last iteration is always logged


def precision(folder):
    assert fit(folder, precision="bf16-mixed").iteration == 2
    assert fit(folder, precision="32-true").iteration == 2


def ddp(folder):
    try:
        assert fit(folder, strategy="ddp", devices=1).iteration == 2
    finally:
        torch.distributed.destroy_process_group()


def barebones(folder):
    with pytest.raises(ValueError, match="barebones"):
        check_trainer_options({"barebones": True}, module())


def sharding(folder):
    for strategy in ("fsdp", "deepspeed_stage_2", ModelParallelStrategy()):
        with pytest.raises(ValueError, match="FSDP2Strategy"):
            check_strategy(strategy)


def spawn(folder):
    with pytest.raises(ValueError, match="ddp_spawn"):
        check_strategy("ddp_spawn")


def profiler(folder):
    fit(folder, profiler=SimpleProfiler(dirpath=folder, filename="times"))
    assert "GRPO.on_before_optimizer_step" in (folder / "fit-times.txt").read_text()


def logger(folder):
    fit(folder, logger=CSVLogger(folder, name="", version=""), log_every_n_steps=1)
    assert "reward/mean" in (folder / "metrics.csv").read_text()


def progress_bar(folder):
    grpo = fit(folder, enable_progress_bar=True)
    assert isinstance(grpo.trainer.progress_bar_callback, Progress)
    assert fit(folder).trainer.progress_bar_callback is None


def stock_bars(folder):
    for bar in (TQDMProgressBar(), RichProgressBar()):
        grpo = fit(folder, callbacks=[bar], enable_progress_bar=True)
        assert isinstance(grpo.trainer.progress_bar_callback, Progress)


def model_checkpoint(folder):
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(folder, callbacks=[checkpoint], enable_checkpointing=True)
    assert {path.name for path in folder.glob("*.ckpt")} == {"step=1.ckpt", "step=2.ckpt"}
    best = ModelCheckpoint(folder / "best", monitor="val/reward", mode="max")
    resumed = fit(
        folder,
        4,
        folder / "step=1.ckpt",
        callbacks=[best],
        enable_checkpointing=True,
    )
    assert resumed.iteration == 4
    assert Path(best.best_model_path).exists()


def early_stopping(folder):
    stop = EarlyStopping("val/reward", mode="max", patience=1, stopping_threshold=-1.0)
    assert fit(folder, 50, callbacks=[stop]).iteration == 2


def learning_rate_monitor(folder):
    rows = MemoryLogger()
    fit(folder, callbacks=[LearningRateMonitor("step")], logger=rows, log_every_n_steps=1)
    assert any(name.startswith("lr-") for row in rows.rows for name in row)


def device_stats(folder):
    rows = MemoryLogger()
    fit(folder, callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger=rows, log_every_n_steps=1)
    assert any("DeviceStatsMonitor" in name for row in rows.rows for name in row)


def timer(folder):
    assert fit(folder, 1000, callbacks=[Timer({"milliseconds": 100})]).iteration < 1000


class FailsAt(Callback):
    """Fails in the third call of a hook."""

    def __init__(self, hook):
        self.calls = 0
        setattr(self, hook, self.fail)

    def fail(self, *_):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a bug")


def on_exception(folder):
    options = dict(val_check_interval=1, max_epochs=2, num_sanity_val_steps=0)
    expected = MemoryLogger()
    complete = fit(folder, None, logger=expected, **options)
    for hook in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start"):
        path = folder / f"{hook}.ckpt"  # a fit with the callback resumes from its file by itself
        callbacks = [FailsAt(hook), OnExceptionCheckpoint(folder, hook)]
        with pytest.raises(RuntimeError, match="a bug"):
            fit(folder, None, callbacks=callbacks, enable_checkpointing=True, **options)
        logger = MemoryLogger()
        resumed = fit(folder, None, path, logger=logger, **options)
        assert resumed.iteration == complete.iteration == 4
        pairs = zip(resumed.parameters(), complete.parameters(), strict=True)
        assert all(map(torch.equal, *zip(*pairs, strict=True)))
        rewards = [row for row in logger.rows if "val/reward" in row]
        assert rewards == [row for row in expected.rows if "val/reward" in row][-len(rewards) :]


def reject_compiled(folder):
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=folder)
    with pytest.raises(ValueError, match="compile"):
        trainer.fit(torch.compile(module()), PromptData(["a"]))


CASES = {
    "max_epochs": max_epochs,
    "max_steps": max_steps,
    "min_epochs, min_steps": min_epochs,
    "max_time": max_time,
    "fast_dev_run": fast_dev_run,
    "limit_train_batches": limit_train_batches,
    "limit_val_batches, limit_test_batches, limit_predict_batches": limit_val_batches,
    "overfit_batches": rejects("overfit_batches", 1),
    "val_check_interval, check_val_every_n_epoch": val_check_interval,
    "num_sanity_val_steps": num_sanity_val_steps,
    "log_every_n_steps": log_every_n_steps,
    "accumulate_grad_batches": rejects(
        "accumulate_grad_batches", 2, "model.update.micro_batch_tokens"
    ),
    "gradient_clip_val, gradient_clip_algorithm": rejects(
        "gradient_clip_val", 1.0, "model.update.max_grad_norm"
    ),
    "precision": precision,
    "strategy: auto, ddp": ddp,
    "strategy: fsdp, deepspeed, ModelParallelStrategy": sharding,
    "strategy: ddp_spawn": spawn,
    "profiler": profiler,
    "detect_anomaly": works_with(detect_anomaly=True),
    "deterministic": works_with(deterministic="warn"),
    "inference_mode": works_with(inference_mode=False),
    "logger": logger,
    "enable_progress_bar": progress_bar,
    "enable_checkpointing": works_with(enable_checkpointing=True),
    "enable_model_summary": works_with(enable_model_summary=True),
    "barebones": barebones,
    "ModelCheckpoint": model_checkpoint,
    "ModelCheckpoint(train_time_interval)": rejects_callbacks(
        ModelCheckpoint(train_time_interval=timedelta(hours=1)), enable_checkpointing=True
    ),
    "OnExceptionCheckpoint": on_exception,
    "EarlyStopping": early_stopping,
    "LearningRateMonitor": learning_rate_monitor,
    "DeviceStatsMonitor": device_stats,
    "Timer": timer,
    "ModelSummary, RichModelSummary": works_with(ModelSummary),
    "LambdaCallback": works_with(LambdaCallback),
    "TQDMProgressBar, RichProgressBar": stock_bars,
    "StochasticWeightAveraging, WeightAveraging": rejects_callbacks(
        StochasticWeightAveraging(0.1), WeightAveraging()
    ),
    "GradientAccumulationScheduler": rejects_callbacks(GradientAccumulationScheduler({0: 2})),
    "LearningRateFinder": rejects_callbacks(LearningRateFinder()),
    "BatchSizeFinder": rejects_callbacks(BatchSizeFinder()),
    "torch.compile(module)": reject_compiled,
}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method",
    "ignore:.*Checkpoint directory",
    "ignore:.*was called without a model|.*no last checkpoint available",
    "ignore:You're using the WeightAveraging callback",
    "ignore:.*anomaly",
    "ignore:Anomaly Detection",
    "ignore:Be aware that when using `ckpt_path`",
)
@pytest.mark.parametrize("name", CASES)
def test_an_option_works_or_is_rejected(name, tmp_path):
    CASES[name](tmp_path)


def test_every_option_is_on_the_page_and_rejected_ones_say_what_the_errors_say():
    assert ROWS.keys() <= CASES.keys()
    # The page names the others in a sentence, as options that work as usual.
    names = {f"`{name}`" for key in CASES.keys() - ROWS.keys() for name in key.split(", ")}
    assert not {name for name in names if name not in PAGE.read_text()}
    notes = {option: note for option, (_, note) in REJECTED_OPTIONS.items()}
    notes |= {callback.__name__: note for callback, note in REJECTED_CALLBACKS.items()}
    notes |= dict.fromkeys(("strategy: fsdp", "deepspeed", "ModelParallelStrategy"), SHARD)
    notes["ModelCheckpoint(train_time_interval)"] = SAVES_BY_TIME
    notes |= {"strategy: ddp_spawn": SPAWN, "torch.compile(module)": COMPILED}
    assert notes == {
        name: note
        for names, (verdict, note) in ROWS.items()
        if verdict == "rejected"
        for name in names.split(", ")
    }


def test_a_plain_fit_counts_iterations_and_prints_no_warning(tmp_path):
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "plain.py"
    script.write_text(code[1])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "arning" not in said, said
    assert "Epoch" not in said, said
    # Lightning passes the source line of a warning on: `utilities.py:73: ...`.
    assert not re.search(r"\.py:\d+:", said), said
