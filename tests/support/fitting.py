"""A trainer for the stand-in."""

from pathlib import Path

from lightning.pytorch import Callback, Trainer

from tests.support.standin import StandIn, StandInData

QUIET = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)


def fit(
    folder: Path,
    *callbacks: Callback,
    module: StandIn | None = None,
    resume: Path | None = None,
    **kw,
) -> StandIn:
    """Train the stand-in as `cli.py fit` would, with these callbacks only."""
    settings = QUIET | dict(max_epochs=-1, val_check_interval=100, check_val_every_n_epoch=None)
    settings |= dict(num_sanity_val_steps=-1, enable_checkpointing=False, log_every_n_steps=1)
    settings |= dict(accelerator="cpu") | kw
    if any("Checkpoint" in type(callback).__name__ for callback in callbacks):
        settings["enable_checkpointing"] = True
    module = module or StandIn()
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)
    trainer.fit(module, StandInData(), ckpt_path=resume)
    return module
