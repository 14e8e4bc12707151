"""A logger that keeps its rows."""

from lightning.pytorch.loggers import Logger


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
