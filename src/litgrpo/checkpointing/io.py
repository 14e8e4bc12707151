"""Checkpoint files: written whole in the background, verified when they are read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from litgrpo.callbacks.run_folder import by_age
from litgrpo.checkpointing.manifest import (
    MANIFEST,
    Damaged,
    manifest_of,
    on_host,
)
from litgrpo.checkpointing.shards import read_any, sync_folder, whole_room, write_folder
from litgrpo.training.lightning_compat import WrappingCheckpointIO


@dataclass(frozen=True)
class Written:
    """What a save took.

    Args:
        size_mib: of the file.
        wait_s: how long training waited: for an earlier save and the copy to the host's memory.
        write_s: from the copy to the file under its name, beside the training.
    """

    size_mib: float
    wait_s: float
    write_s: float


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its manifest; the file gets its name when all of it is on the disk.

    A process that is killed on the way leaves a file whose name begins with a dot, and every older
    checkpoint as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    checkpoint = {**checkpoint, MANIFEST: manifest_of(checkpoint)}
    try:
        with unfinished.open("wb") as file:
            _save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch complains of where the file ends; what the disk said stands behind that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _nothing_else(_: Any) -> None:
    """What is done with a file beyond reading or writing it, unless somebody asks for more."""


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


class CheckedIO(WrappingCheckpointIO):
    """How Lightning reads and writes checkpoints in our runs.

    (A wrapper in Lightning's sense, because the strategy of some devices takes no other.)

    Args:
        inner: what the strategy used before; it removes files.

    Attributes:
        leaves_out: parts that are not written.
        falls_back: whether an older file is read where the given one is damaged.
        needs: parts that a file must have.
        shards_for: room for this process's share of a tensor; for all of it if none is divided.
        fits: raises a ValueError for the checkpoint of another run.
        loaded_from: the file that was read.
        written: what finished saves took, for whoever logs it; taken out when logged.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.leaves_out: tuple[str, ...] = ()
        self.falls_back = False
        self.needs: tuple[str, ...] = ()
        self.fits: Callable[[dict[str, Any]], None] = _nothing_else
        self.shards_for: Callable[[Tensor], Tensor] = whole_room
        self.loaded_from: Path | None = None
        self.written: list[Written] = []
        self._executor = _one_thread()
        self._writing: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Copy to the host's memory and write; in the background if there is something to do then.

        Args:
            checkpoint: plain values and tensors.
            path: the final name.
            storage_options: what to do when the file is complete, a function of its path; None
                waits for it instead.

        Raises:
            OSError: an earlier save failed and the disk still refuses.
        """
        if self.shards_for is not whole_room:
            self.save_shards(checkpoint, path, storage_options)
            return
        started = time.perf_counter()
        self.wait()
        kept = {name: part for name, part in checkpoint.items() if name not in self.leaves_out}
        copied = on_host(kept)
        waited = time.perf_counter() - started
        then = storage_options or _nothing_else
        self._writing = [self._executor.submit(self._write, copied, Path(path), then, waited)]
        if storage_options is None:
            self.wait()

    def _write(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        then: Callable[[Path], None],
        waited: float,
    ) -> None:
        started = time.perf_counter()
        write(checkpoint, path)
        size = path.stat().st_size / 2**20
        then(path)
        self.written.append(Written(size, waited, time.perf_counter() - started))

    def save_shards(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a folder of shards, while the training waits; every process must take part.

        A disk that refuses is told by `wait`, on all processes.

        Args:
            checkpoint: as for `save_checkpoint`, with tensors that are divided over processes.
            path: the final name.
            storage_options: what the first process does when the folder is complete.
        """
        self.wait()
        started, done = time.perf_counter(), Future[None]()
        self._writing = [done]
        kept = {name: part for name, part in checkpoint.items() if name not in self.leaves_out}
        try:
            size = write_folder(kept, Path(path), storage_options or _nothing_else)
        except OSError as error:
            done.set_exception(error)
        else:
            taken = time.perf_counter() - started
            self.written += [Written(each / 2**20, taken, taken) for each in size]
            done.set_result(None)
        if storage_options is None:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong in the meantime."""
        while self._writing:
            self._writing.pop().result()

    def teardown(self) -> None:
        """End the thread; whoever saved has waited already. Another save starts another."""
        self._executor.shutdown(wait=True)
        self._executor = _one_thread()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, or with `falls_back` the newest older one that is good.

        Args:
            path: the file.
            map_location: not used: everything comes to the host first.
            weights_only: not used: nothing else is ever loaded.

        Raises:
            Damaged: the file, or every candidate, is damaged or of another run.
        """
        problems = []
        for candidate in self._candidates(Path(path)):
            try:
                checkpoint = read_any(candidate, self.needs, self.fits, self.shards_for)
            except ValueError as problem:
                said = str(problem)
                said = said if str(candidate) in said else f"{candidate}: {said}"
                if not self.falls_back:
                    raise Damaged(said) from problem
                rank_zero_warn(f"not resumed from {said}")
                problems.append(said)
            else:
                self.loaded_from = candidate.resolve()
                return checkpoint
        raise Damaged(
            "no checkpoint of this run is good: " + "; ".join(problems) + ". Remove them, or give "
            "another --run_dir, to start anew."
        )

    def _candidates(self, path: Path) -> Iterator[Path]:
        yield path
        if self.falls_back:
            others = by_age(path.parent).values()
            yield from (other for other in others if other.resolve() != path.resolve())


def point(link: Path, target: Path) -> None:
    """Make `link` a link to `target` in the same folder, in one step."""
    unfinished = link.with_name(f".{link.name}.tmp")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target.name)
    unfinished.replace(link)
