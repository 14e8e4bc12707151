"""Training rollouts as files: one run writes them, another trains on them.

A file holds the rollout of one iteration and rank as plain values and tensors, with a manifest of
digests as in checkpoints. It is read with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.pytorch import Callback, Trainer
from transformers import PreTrainedTokenizerBase

from litgrpo.arguments import require
from litgrpo.checkpointing.files import copy_to_host, read_file, write_file
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.rollout.groups import pack_rollout, unpack_rollout
from litgrpo.rollout.servers.served import MAX_LOGPROB
from litgrpo.run_folder import LOCK, ROLLOUTS, run_folder
from litgrpo.types import Rollout

NAME = re.compile(r"iteration-(\d{6,})-rank-(\d+)\.pt")
OPTION = "model.stored_rollouts"
PARTS = {"rollout", "settings"}


def rollout_file(folder: Path, iteration: int, rank: int) -> Path:
    """Path of the rollout of an iteration, counted from 1, and a rank."""
    return folder / f"iteration-{iteration:06d}-rank-{rank}.pt"


def find_rollout_files(folder: Path) -> dict[int, set[int]]:
    """{iteration: ranks} of the rollouts in a folder; files of other names are ignored."""
    found: dict[int, set[int]] = defaultdict(set)
    for path in folder.glob("*.pt"):
        if name := NAME.fullmatch(path.name):
            found[int(name[1])].add(int(name[2]))
    return dict(found)


def describe_settings(
    module: Any, tokenizer: PreTrainedTokenizerBase, world_size: int
) -> dict[str, Any]:
    """{option: value} of everything that a rollout depends on and training must agree with.

    Args:
        module: a `GRPO`.
        tokenizer: of its policy.
        world_size: number of ranks.
    """
    sampling = asdict(module.sampling).items()
    vocabulary = repr(sorted(tokenizer.get_vocab().items())).encode("utf-8", "replace")
    return {
        "tokenizer": hashlib.sha256(vocabulary).hexdigest()[:16],
        "model.group_size": module.group_size,
        "model.max_completion_length": module.max_completion_length,
        **{f"model.sampling.{name}": value for name, value in sampling},
        "model.environment": module.environment is not None,
        "processes": world_size,
    }


class SaveRollouts(Callback):
    """Writes each training rollout of each rank to `rollouts/` in the run folder.

    It is the rollout that the iteration trained on, after dynamic sampling. A file that cannot be
    written is skipped with a warning, and training continues.

    Example:
        `GRPO(..., save_rollouts=True)` adds it; `GRPO(..., stored_rollouts="runs/demo")` reads.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Remove rollouts of iterations that this run is about to repeat or replace."""
        self.settings = describe_settings(pl_module, pl_module.policy.tokenizer, trainer.world_size)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer) / ROLLOUTS
        for iteration, ranks in find_rollout_files(folder).items():
            if iteration > pl_module.iteration and trainer.global_rank in ranks:
                rollout_file(folder, iteration, trainer.global_rank).unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the rollout that `training_step` returned."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = run_folder(trainer) / ROLLOUTS
        with warn_once_on_failure(f"writing rollouts to {folder}"):
            content = {
                "rollout": copy_to_host(pack_rollout(outputs["rollout"])),
                "settings": self.settings,
            }
            write_file(content, rollout_file(folder, pl_module.iteration, trainer.global_rank))


@dataclass(frozen=True)
class StoredRollouts:
    """Rollouts that another run wrote, one per iteration and rank.

    Args:
        folder: with the files.
        settings: of this run, see `describe_settings`; those of each file must be equal.
        rank: rank of this process.
        last: last iteration with files of all ranks.

    Example::

        stored = StoredRollouts.find("runs/demo", settings, rank=0, world_size=1)
        rollout = stored.read(0, "cpu")  # of iteration-000001-rank-0.pt
    """

    folder: Path
    settings: dict[str, Any]
    rank: int
    last: int

    @staticmethod
    def find(given: str, settings: dict[str, Any], rank: int, world_size: int) -> StoredRollouts:
        """Find the rollouts of a folder, and compare the settings of the first with this run's.

        Args:
            given: a run folder, or its `rollouts`.
            settings: of this run.
            rank: rank of this process.
            world_size: number of ranks.

        Raises:
            ValueError: there are none, a training is writing to the folder, a file is damaged, or
                the settings differ.
        """
        folder = Path(given)
        if (folder / ROLLOUTS).is_dir():
            folder /= ROLLOUTS
        found = find_rollout_files(folder)
        texts = "samples/*.jsonl have texts, without token ids and log-probabilities"
        require(
            bool(found),
            f"{OPTION} is {given}, which has no rollouts (iteration-*-rank-*.pt). Write them in a "
            f"run with --model.save_rollouts true; {texts}.",
        )
        if rank == 0:
            check_not_in_use(folder.parent)
        complete = [number for number, ranks in found.items() if ranks >= {*range(world_size)}]
        stored = StoredRollouts(folder, settings, rank, max(complete, default=0))
        first = min(complete, default=min(found))
        stored._read_values(rollout_file(folder, first, rank if complete else min(found[first])))
        return stored

    def read(self, iteration: int, device: torch.device | str, vocab_size: int) -> Rollout:
        """Read the rollout of an iteration.

        Args:
            iteration: number of finished iterations.
            device: where the tensors are put.
            vocab_size: of the policy.

        Raises:
            ValueError: the file is missing or damaged, was written with other settings, or holds
                values that no policy of this vocabulary samples.
        """
        path = rollout_file(self.folder, iteration + 1, self.rank)
        require(
            path.exists(),
            f"{OPTION}: {path} is missing. Continue at an iteration that is there "
            "(--ckpt_path), or write the rollouts again with --model.save_rollouts true.",
        )
        try:
            rollout = unpack_rollout(self._read_values(path), device)
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{OPTION}: {path} was not written by this version ({error})."
            ) from error
        problem = find_impossible(rollout, vocab_size)
        require(not problem, f"{OPTION}: {path} cannot be trained on: {problem}.")
        return rollout

    def _read_values(self, path: Path) -> dict[str, Any]:
        content = read_file(path)
        is_rollout = all(isinstance(content.get(name), dict) for name in PARTS)
        require(is_rollout, f"{OPTION}: {path} is not a rollout.")
        theirs = content["settings"]
        for name, own in self.settings.items():
            require(
                theirs.get(name) == own,
                f"{OPTION}: {path} was written by a run with {name} {theirs.get(name)!r}, but "
                f"this run has {own!r}. Both need the same.",
            )
        return dict(content["rollout"])


def find_impossible(rollout: Rollout, vocab_size: int) -> str:
    """Return why no policy can have sampled a rollout; "" if one can.

    Digests find damage, not a file that somebody changed. Ids beyond the vocabulary would end the
    run in an error of the device, and log-probabilities above 0 would be trained on.

    Args:
        rollout: to check.
        vocab_size: of the policy.
    """
    dtypes = {
        "completion_ids": torch.int64,
        "completion_mask": torch.bool,
        "loss_mask": torch.bool,
        "truncated": torch.bool,
        "sampler_logprobs": torch.float32,
    }
    for name, dtype in dtypes.items():
        found = getattr(rollout, name).dtype
        if found != dtype:
            return f"{name} is {found}, expected {dtype}"
    prompts, mask = rollout.prompts, rollout.completion_mask
    ids = {"prompt_ids": prompts.prompt_ids, "completion_ids": rollout.completion_ids}
    if rollout.candidate_ids is not None:
        ids["candidate_ids"] = rollout.candidate_ids.clamp(min=0)  # -1 fills the tensor
    for name, each in ids.items():
        least, most = (int(bound) for bound in each.aminmax()) if each.numel() else (0, 0)
        if least < 0 or most >= vocab_size:
            return f"{name} are {least} to {most}, expected 0 to {vocab_size - 1}"
    if not bool(rollout.loss_mask.any()) or bool((rollout.loss_mask & ~mask).any()):
        return "its masks select no sampled token, or others than those of the completions"
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return "completion_mask has tokens after the end of a completion"
    sampled = rollout.sampler_logprobs[rollout.loss_mask]
    if bool((sampled > MAX_LOGPROB).any()):
        return f"log-probability {float(sampled.nan_to_num(0.0).max()):g}, expected at most 0"
    texts = [*prompts.prompts, *rollout.completions]
    return "" if all(isinstance(each, str) for each in texts) else "a completion is not a text"


def check_not_in_use(folder: Path) -> None:
    """Raise if a training is running in a run folder.

    Raises:
        ValueError: another process, or this one, holds its lock.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    if not (folder / LOCK).exists() or not os.access(folder / LOCK, os.W_OK):
        return  # of a read-only folder, to which nothing writes
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{OPTION}: a training is writing to {folder}. Wait for its end, and give this run "
            "another --run_dir."
        ) from error
    lock.release()
