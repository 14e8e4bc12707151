"""Kills a run at a chosen point. It is given by class_path, so the product knows nothing of it.

Each strikes once: a marker file says that it has, so the same command can be given again.
"""

import os
import signal
import threading
import time
from pathlib import Path

from lightning.pytorch import Callback

SIGKILL = int(signal.SIGKILL)  # jsonargparse cannot write an enumeration's member to a YAML
HOOKS = ("sanity", "start", "generate", "backward", "step", "end", "validation", "checkpoint")


class Strike:
    """Leaves a marker with what was known, then sends the signal.

    Args:
        marker: file that says it has been done.
        signum: the signal; 0 hangs instead.
    """

    def __init__(self, marker: str, signum: int) -> None:
        self.marker, self.signum = Path(marker), signum
        self.iteration = 0

    def __call__(self) -> None:
        if self.marker.exists():
            return
        self.marker.write_text(str(self.iteration))
        if self.signum == 0:
            time.sleep(600)
        os.kill(os.getpid(), self.signum)


class Kill(Callback):
    """Sends a signal to its own process.

    Args:
        at: which hook; `generate` is a moment after an iteration began, `checkpoint` is when the
            file that is being written has a certain size.
        count: at which occurrence, from 1.
        marker: see `Strike`.
        signum: the signal.
        delay_s: wait in a separate thread, while the training continues.
        size: bytes of an unfinished checkpoint.
        rank: the process that is hit, of several.
    """

    def __init__(
        self,
        at: str,
        count: int,
        marker: str,
        signum: int = SIGKILL,
        delay_s: float = 0.0,
        size: int = 0,
        rank: int = 0,
    ) -> None:
        assert at in HOOKS, at
        self.at, self.left, self.delay_s, self.size = at, count, delay_s, size
        self.strike, self.rank = Strike(marker, signum), rank

    def _hit(self, here: str, trainer, pl_module) -> None:
        self.strike.iteration = pl_module.iteration
        if here != self.at or trainer.global_rank != self.rank:
            return
        self.left -= 1
        if self.left == 0:
            if self.at == "checkpoint":
                threading.Thread(target=self._when_written, args=(trainer,), daemon=True).start()
            elif self.delay_s:
                threading.Timer(self.delay_s, self.strike).start()
            else:
                self.strike()

    def _when_written(self, trainer) -> None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        while True:
            for path in folder.glob(".iteration=*.tmp"):
                try:
                    if path.stat().st_size >= self.size:
                        self.strike()
                        return
                except FileNotFoundError:
                    continue
            time.sleep(0.0002)

    def on_train_start(self, trainer, pl_module) -> None:
        self._hit("checkpoint", trainer, pl_module)

    def on_validation_batch_start(self, trainer, pl_module, *_) -> None:
        self._hit("sanity" if trainer.sanity_checking else "validation", trainer, pl_module)

    def on_train_batch_start(self, trainer, pl_module, *_) -> None:
        self._hit("start", trainer, pl_module)
        self._hit("generate", trainer, pl_module)

    def on_before_backward(self, trainer, pl_module, *_) -> None:
        self._hit("backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, *_) -> None:
        self._hit("step", trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self._hit("end", trainer, pl_module)


class Armed(Callback):
    """Writes down which process trains, for a reward function that may run in another.

    Args:
        pid: file for it.
    """

    def __init__(self, pid: str) -> None:
        self.pid = Path(pid)

    def on_train_start(self, trainer, pl_module) -> None:
        self.pid.write_text(str(os.getpid()))


def reward(
    prompts: list[str],
    completions: list[str],
    trainer_state=None,
    at: int = -1,
    marker: str = "",
    pid: str = "",
    signum: int = SIGKILL,
    **columns,
) -> list[float]:
    """Length in words; ends the training in one iteration, in the middle of the scoring."""
    here = at >= 0 and trainer_state.global_step == at and Path(pid).exists()
    if here and not Path(marker).exists():
        Path(marker).write_text(str(at))
        os.kill(int(Path(pid).read_text()), signum)
        time.sleep(1.0)
    return [float(len(text.split())) for text in completions]
