"""Lightning's CheckpointIO plugin of litgrpo: background writes, verified reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from litgrpo.checkpointing.shards import allocate_whole, read_checkpoint, write_folder
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.run_folder import LAST, sort_checkpoints
from litgrpo.tensor_files import (
    DamagedCheckpoint,
    copy_to_host,
    remove_checkpoint,
    write_file,
)


@dataclass(frozen=True)
class SaveStats:
    """Size and time of one save, logged as `checkpoint/<name>`."""

    size_mib: float
    wait_s: float  # that training waited: for an earlier save and the copy to the host's memory
    write_s: float  # from the copy to the complete file, in the background


class VerifiedCheckpointIO(AsyncCheckpointIO):
    """Writes checkpoints in the background, and verifies them when they are read.

    `cli.py` passes it to the trainer; in Python `IterationCheckpoint` installs it unless the
    trainer was built with one. (It derives from Lightning's asynchronous plugin because the XLA
    strategies accept no other third-party plugin than a subclass of a wrapping one.)

    Attributes:
        excluded: parts of a checkpoint that are not written.
        fall_back: read the newest older file if the given one cannot be read.
        required: parts that a file must have.
        shards_for: allocates this rank's shard of a tensor, or all of it if weights are not
            sharded.
        check_fits: raises a ValueError for the checkpoint of another run.
        loaded_from: the file that was read.
        stats: of finished saves, removed once they are logged.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(plugins=[VerifiedCheckpointIO()], accelerator="cpu", logger=False)
        >>> type(trainer.strategy.checkpoint_io).__name__
        'VerifiedCheckpointIO'
    """

    def __init__(self) -> None:
        super().__init__()
        self.excluded: tuple[str, ...] = ()
        self.fall_back = False
        self.required: tuple[str, ...] = ()
        self.shards_for: Callable[[Tensor], Tensor] = allocate_whole
        self.check_fits: Callable[[dict[str, Any]], None] | None = None
        self.loaded_from: Path | None = None
        self.stats: list[SaveStats] = []
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Copy to the host's memory, then write in the background.

        Args:
            checkpoint: plain values and tensors.
            path: the final name.
            storage_options: function of the path that is called once the file is complete; None
                waits for the write instead.

        Raises:
            OSError: an earlier save failed, or this one if it is waited for.
        """
        if "state_dict" not in checkpoint:
            # A launcher of processes hands the final weights to the process that started them.
            TorchCheckpointIO().save_checkpoint(checkpoint, path)
            return
        parts = {name: part for name, part in checkpoint.items() if name not in self.excluded}
        if self.shards_for is not allocate_whole:
            self._save_shards(parts, Path(path), storage_options)
            return
        started = time.perf_counter()
        self.wait()
        copied = copy_to_host(parts)
        wait_s = time.perf_counter() - started

        def write() -> None:
            started = time.perf_counter()
            write_file(copied, Path(path))
            size = Path(path).stat().st_size / 2**20
            if storage_options is not None:
                storage_options(Path(path))
            self.stats.append(SaveStats(size, wait_s, time.perf_counter() - started))

        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(write)
        if storage_options is None:
            self.wait()

    def _save_shards(self, checkpoint: dict[str, Any], path: Path, storage_options: Any) -> None:
        """Write a folder of shards while training waits; every rank must call this.

        `wait` raises the error of a full disk, on all ranks, as for a single file.
        """
        self.wait()
        started, done = time.perf_counter(), Future[None]()
        self._pending = done
        try:
            size = write_folder(checkpoint, path, storage_options)
        except OSError as error:
            done.set_exception(error)
        else:
            duration_s = time.perf_counter() - started
            if size is not None:
                self.stats.append(SaveStats(size / 2**20, duration_s, duration_s))
            done.set_result(None)
        if storage_options is None:
            self.wait()

    def wait(self) -> None:
        """Wait for a pending write.

        Raises:
            OSError: the write failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def teardown(self) -> None:
        """End the thread; a later save starts another."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
            self._writer = None

    def remove_checkpoint(self, path: str | Path) -> None:
        remove_checkpoint(Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read and verify a checkpoint, or with `fall_back` the newest older one that is sound.

        A checkpoint of another run is sound: it ends the search, since the others may be older
        than the mistake. Everything is read into the host's memory first, always with
        weights_only=True.

        Raises:
            DamagedCheckpoint: the file, or every candidate, cannot be read, or is of another run.
            FileNotFoundError: there is no such file; not with `fall_back`.
        """
        problems = []
        for candidate in self._candidates(Path(path)):
            try:
                checkpoint = read_checkpoint(
                    candidate, self.required, self.check_fits, self.shards_for
                )
            except (ValueError, FileNotFoundError) as problem:
                is_missing = isinstance(problem, FileNotFoundError)
                reason = "it does not exist" if is_missing else str(problem)
                if str(candidate) not in reason:
                    reason = f"{candidate}: {reason}"
                if not self.fall_back:
                    raise problem if is_missing else DamagedCheckpoint(reason) from problem
                rank_zero_warn(f"not resumed from {reason}")
                problems.append(reason)
                if not isinstance(problem, DamagedCheckpoint | FileNotFoundError):
                    break  # it is of another run
            else:
                self.loaded_from = candidate.resolve()
                return checkpoint
        raise DamagedCheckpoint(
            "no checkpoint of this run can be used: " + "; ".join(problems) + ". To start a new "
            "run, remove them or choose another --run_dir."
        )

    def _candidates(self, path: Path) -> Iterator[Path]:
        last = path.with_name(LAST)
        if self.fall_back and last != path and last.is_symlink() and not last.exists():
            yield last  # the newest checkpoint is gone, which is said
        yield path
        if self.fall_back:
            for other in sort_checkpoints(path.parent).values():
                # (`resolve` raises for a cycle of links.)
                if os.path.realpath(other) != os.path.realpath(path):
                    yield other


def use_verified_io(module: Any) -> None:
    """Let the trainer of a module write and verify files, unless it was built with a plugin.

    So a plain `Trainer` with `ModelCheckpoint` resumes without running code from a file.
    """
    strategy = module.trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO and not isinstance(
        strategy, FSDP2Strategy
    ):
        strategy.checkpoint_io = VerifiedCheckpointIO()


def update_link(link: Path, target: Path) -> None:
    """Make `link` point to `target`, a file in the same folder, in one atomic step.

    If that fails (no links on this file system, a full disk), there is no link: one to an older
    file would be wrong.
    """
    unfinished = link.with_name(f".{link.name}.tmp")
    if link.is_dir() and not link.is_symlink():  # a folder of shards, copied without its link
        remove_checkpoint(link)
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(target.name)
        unfinished.replace(link)
    except OSError:
        link.unlink(missing_ok=True)
