"""Training rollouts as files: one run writes them, another trains on them.

A file holds the rollout of one iteration and rank as plain values and tensors. It is verified and
read like a checkpoint, with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require
from litgrpo.rollout.groups import unpack_rollout
from litgrpo.rollout.servers.client import MAX_LOGPROB
from litgrpo.rollout.sources.base import RolloutSource
from litgrpo.run_folder import LOCK, ROLLOUTS
from litgrpo.run_options import RunOptions
from litgrpo.tensor_files import read_file
from litgrpo.types import STORED, PromptBatch, Rollout

NAME = re.compile(r"iteration-(\d{6,})-rank-(\d+)\.pt")
OPTION = "model.source (StoredRollouts)"
PARTS = {"rollout", "settings"}


def rollout_file(folder: Path, iteration: int, rank: int) -> Path:
    """Path of the rollout of an iteration, counted from 1, and a rank."""
    return folder / f"iteration-{iteration:06d}-rank-{rank}.pt"


def find_rollout_files(folder: Path) -> dict[int, set[int]]:
    """{iteration: ranks} of the rollouts in a folder; files of other names are ignored."""
    ranks_of: dict[int, set[int]] = defaultdict(set)
    for path in folder.glob("*.pt"):
        if name := NAME.fullmatch(path.name):
            ranks_of[int(name[1])].add(int(name[2]))
    return dict(ranks_of)


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


@check_field_types
@dataclass
class StoredRollouts(RolloutSource):
    """Rollouts that another run wrote (callback `SaveRollouts`), iteration by iteration.

    Rewards are computed again, evaluation samples as always, and training ends after the last
    stored rollout. An importance correction is added to the objective.

    Args:
        run_dir: run folder of that run, or its `rollouts`.

    Example:
        `GRPO(..., source=StoredRollouts("runs/demo"))`
    """

    run_dir: str
    provenance = STORED
    fixed_shapes = False

    def check(self, run: RunOptions) -> None:
        """Check that no other option needs training rollouts that are sampled.

        Raises:
            ValueError: one does.
        """
        sampled: dict[str, object] = {
            "model.dynamic_sampling_attempts": run.dynamic_sampling_attempts
        }
        if run.environment is not None:  # stored prompts have the openings of their episodes
            name = f"{type(run.objective.advantages).__name__} with model.environment"
            sampled[name] = run.objective.advantages.needs_greedy
        for name, is_on in sampled.items():
            require(
                not is_on,
                f"{OPTION} reads the training rollouts of {self.run_dir}, so none are sampled, "
                f"which does not allow {name}. Leave out one of the two.",
            )

    def setup(self, module: Any) -> None:
        """Find the rollouts, and compare the settings of the first with this run's.

        Raises:
            ValueError: there are none, a training is writing to the folder, a file is damaged, or
                the settings differ.
        """
        trainer = module.trainer
        self.settings = describe_settings(module, module.fit_tokenizer(), trainer.world_size)
        self.rank = trainer.global_rank
        self.folder = Path(self.run_dir)
        if (self.folder / ROLLOUTS).is_dir():
            self.folder /= ROLLOUTS
        ranks_of = find_rollout_files(self.folder)
        require(
            bool(ranks_of),
            f"{OPTION} is {self.run_dir}, which has no rollouts (iteration-*-rank-*.pt). Write "
            "them in a run with --trainer.callbacks+ SaveRollouts; samples/*.jsonl have texts, "
            "without token ids and log-probabilities.",
        )
        if self.rank == 0:
            check_not_in_use(self.folder.parent)
        needed = {*range(trainer.world_size)}
        complete = [iteration for iteration, ranks in ranks_of.items() if ranks >= needed]
        self.last_iteration = max(complete, default=0)
        first = min(complete, default=min(ranks_of))
        rank = self.rank if complete else min(ranks_of[first])
        self._read_values(rollout_file(self.folder, first, rank))

    def take(self, prompts: PromptBatch, iteration: int) -> Rollout:
        """Read the rollout of an iteration, which has its own prompts.

        Raises:
            ValueError: the file is missing or damaged, was written with other settings, or holds
                values that no policy of this vocabulary samples.
        """
        path = rollout_file(self.folder, iteration + 1, self.rank)
        require(
            path.exists(),
            f"{OPTION}: {path} is missing. Continue at an iteration that is there "
            "(--ckpt_path), or write the rollouts again with --trainer.callbacks+ SaveRollouts.",
        )
        try:
            rollout = unpack_rollout(self._read_values(path), prompts.prompt_ids.device)
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{OPTION}: {path} was not written by this version ({error})."
            ) from error
        rollouter = self.parts.rollouter
        problem = find_impossible(rollout, rollouter.policy.vocab_size)
        require(not problem, f"{OPTION}: {path} cannot be trained on: {problem}.")
        rollouter.count_tokens(rollout)
        return replace(rollout, provenance=self.provenance)

    def prompts_of(self, rollout: Rollout, prompts: PromptBatch) -> PromptBatch:
        """Return the prompts of the file, which need not be those of the iteration."""
        return rollout.prompts

    def find_end(self, iteration: int) -> str:
        """Return that all stored rollouts have been used, after the last one."""
        if iteration < self.last_iteration:
            return ""
        return f"Trained on all {self.last_iteration} stored rollouts"

    def _read_values(self, path: Path) -> dict[str, Any]:
        content = read_file(path)
        is_rollout = all(isinstance(content.get(name), dict) for name in PARTS)
        require(is_rollout, f"{OPTION}: {path} is not a rollout.")
        written = content["settings"]
        for name, value in self.settings.items():
            require(
                written.get(name) == value,
                f"{OPTION}: {path} was written by a run with {name} {written.get(name)!r}, but "
                f"this run has {value!r}. Both need the same.",
            )
        return dict(content["rollout"])


def find_impossible(rollout: Rollout, vocab_size: int) -> str:
    """Return why no policy can have sampled a rollout; "" if one can.

    Checksums find damage, not a file that somebody changed. Ids beyond the vocabulary would end the
    run in an error of the device, and log-probabilities above 0 would be trained on.

    Args:
        rollout: to check.
        vocab_size: of the policy.
    """
    dtypes = {
        "completion_ids": torch.int64,
        "completion_mask": torch.bool,
        "truncated": torch.bool,
        "sampler_logprobs": torch.float32,
    }
    if rollout.turns is not None:
        dtypes["turns"] = torch.int16
    for name, dtype in dtypes.items():
        stored_dtype = getattr(rollout, name).dtype
        if stored_dtype != dtype:
            return f"{name} is {stored_dtype}, expected {dtype}"
    prompts, mask = rollout.prompts, rollout.completion_mask
    ids = {"prompt_ids": prompts.prompt_ids, "completion_ids": rollout.completion_ids}
    if rollout.candidate_ids is not None:
        ids["candidate_ids"] = rollout.candidate_ids.clamp(min=0)  # -1 fills the tensor
    for name, tokens in ids.items():
        low, high = (int(bound) for bound in tokens.aminmax()) if tokens.numel() else (0, 0)
        if low < 0 or high >= vocab_size:
            return f"{name} are {low} to {high}, expected 0 to {vocab_size - 1}"
    if not bool(rollout.loss_mask.any()) or bool((rollout.loss_mask & ~mask).any()):
        return "its masks select no sampled token, or others than those of the completions"
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return "completion_mask has tokens after the end of a completion"
    sampled = rollout.sampler_logprobs[rollout.loss_mask]
    if bool((sampled > MAX_LOGPROB).any()):
        return f"log-probability {float(sampled.nan_to_num(0.0).max()):g}, expected at most 0"
    texts = [*prompts.prompts, *rollout.completions]
    return "" if all(isinstance(text, str) for text in texts) else "a completion is not a text"


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
