"""Loggers: a resumed run goes on in the same files, and a logger that fails stops no training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from litgrpo.callbacks.metrics_csv import MetricsCSV, loggers_of
from litgrpo.callbacks.run_folder import run_folder, writes_files
from litgrpo.training.lightning_compat import numbers_to_log

KEY = "loggers"
EVENTS = "events.out.tfevents.*"
CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")
_warned: set[str] = set()


@contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Go on when something that is not the training fails; warn once for each.

    Args:
        what: fails, for the warning.
    """
    try:
        yield
    except Exception as error:  # other people's code, a full disk, a lost connection
        if what not in _warned:
            _warned.add(what)
            said = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"{what} failed ({said}); training goes on without, said once")


def never_failing(logger: Logger) -> Logger:
    """The same logger, whose calls warn instead of raising."""

    def guarded(name: str) -> Callable[..., None]:
        call = getattr(logger, name)

        @wraps(call)
        def tolerant(*args: Any, **kwargs: Any) -> None:
            with tolerated(f"logger {type(logger).__name__}"):
                call(*args, **kwargs)

        return tolerant

    for name in CALLS:
        setattr(logger, name, guarded(name))
    return logger


class LoggerState(Callback):
    """Keeps in the checkpoint how far the loggers were, and takes them back there on resume.

    What a killed run logged after its last checkpoint is cut off, so that the resumed run logs it
    again: no iteration is there twice. Lightning logs an iteration after it is saved, so the
    checkpoint holds its numbers too: none is missing.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        """Look which event files are there; TensorBoard opens a new one for every process."""
        self.earlier = sorted(Path(folder).glob(EVENTS))
        self.seen = False  # an iteration that the loggers do not have yet
        self.stood: dict[str, Any] | None = None
        self.began = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Lightning logs it when all callbacks have seen it, and may have added numbers."""
        self.seen = True

    def _logged(self, *_: Any, **__: Any) -> None:
        """By now Lightning has handed them to the loggers."""
        self.seen = False

    on_train_batch_start = on_validation_start = on_train_end = _logged

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Measure the files, after everything is in them."""
        rows, sizes = 0, {}
        waiting = numbers_to_log(trainer) if self.seen else {}
        pending = {name: float(value) for name, value in waiting.items()}
        if writes_files(trainer):
            for board in loggers_of(trainer, TensorBoardLogger):
                with tolerated("logger TensorBoardLogger"):
                    board.experiment.flush()
            for table in loggers_of(trainer, MetricsCSV):
                rows = table.num_rows
            files = run_folder(trainer).glob(EVENTS)
            sizes = {path.name: path.stat().st_size for path in files}
        checkpoint[KEY] = {"rows": rows, "sizes": sizes, "pending": pending}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Hold it until the training starts."""
        self.stood = checkpoint.get(KEY)  # one of weights alone has none

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Take the loggers back to the checkpoint, and log what was pending there."""
        self.began = True
        stood, self.stood = self.stood, None
        if stood is None or not writes_files(trainer):
            return
        for path in filter(Path.exists, self.earlier):  # an overwritten run's are gone
            cut(path, stood["sizes"].get(path.name, 0))
        numbers = dict(stood["pending"])
        step = int(numbers.pop("step", pl_module.iteration))
        for table in loggers_of(trainer, MetricsCSV):
            table.rewind(stood["rows"])
        if numbers:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step)
                logger.save()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Of a start that never came to train leave no event file: each is a run in TensorBoard."""
        if self.began or not writes_files(trainer):
            return
        for board in loggers_of(trainer, TensorBoardLogger):
            with tolerated("logger TensorBoardLogger"):
                board.experiment.close()
        for path in set(run_folder(trainer).glob(EVENTS)) - set(self.earlier):
            path.unlink()


def cut(path: Path, size: int) -> None:
    """Shorten a file to a size that it had before; one that was not there yet goes away."""
    if size == 0:
        path.unlink()
    elif path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
