"""Trackio: a page on this machine that shows runs while they train."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from litgrpo.arguments import require


class Trackio(Logger):
    """Logs to Trackio, whose files lie in `TRACKIO_DIR` or in the cache of Hugging Face.

    A run of the same project and name goes on in the same curves.

    Args:
        project: under which runs are listed.
        name: of the run; default: that of its folder.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, project: str = "litgrpo", name: str | None = None) -> None:
        super().__init__()
        require(
            find_spec("trackio") is not None,
            "trainer.logger is Trackio, whose package is missing: pip install 'litgrpo[trackio]'",
        )
        self.project = project
        self.given_name = name
        self.settings: dict[str, Any] = {}
        self._begun = False

    @property
    def name(self) -> str:
        """Of the project."""
        return self.project

    @property
    def version(self) -> str:
        """Of the run."""
        return self.given_name or ""

    @cached_property
    def run(self) -> Any:
        """Trackio's run; begun with the first number, when the settings are known."""
        import trackio

        self._begun = True
        return trackio.init(
            project=self.project,
            name=self.given_name,
            config=self.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Keep the recipe's settings for the run."""
        self.settings |= vars(params) if isinstance(params, Namespace) else dict(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of an iteration."""
        self.run.log({name: float(value) for name, value in metrics.items()}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        if self._begun:
            self.run.finish()
